"""Rows of any source, as conversations.

Sources are JSONL and Parquet files, folders of them, data sets that ``datasets`` saved, and Hugging Face hub
ids. A row is read in one of these formats:

    messages        a list of {role, content} objects
    conversations   a list of ShareGPT's {from, value} objects
    pairs           a prompt and a response, with or without a system prompt
    prompts         a prompt alone
    text            one preformatted text, taken apart by the markers of a named template
    tokens          input_ids with a loss_mask
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dspark_train.data.conversations import (
    BadConversation,
    Conversation,
    check_ids,
    check_messages,
    check_tools,
    content_hash,
    conversation_from_row,
    reading,
    row_of,
    split_named,
)
from dspark_train.errors import UserError
from dspark_train.files import count_lines, open_text, read_lines, text_suffix

Format = Literal["auto", "messages", "conversations", "pairs", "prompts", "text", "tokens"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NAMES: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation", "chat"),
    "prompt": ("prompt", "instruction", "question", "query", "input"),
    "response": ("response", "output", "answer", "completion"),
    "system": ("system", "system_prompt"),
    "text": ("text",),
    "input_ids": ("input_ids",),
    "loss_mask": ("loss_mask",),
    "tools": ("tools",),
    "domain": ("domain", "source", "category"),
    "id": (),
    "split": (),
}
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True)
class Source:
    """Where conversations come from."""

    path: str
    """A file (.jsonl, .json, .parquet), a folder, or a Hugging Face hub id."""
    format: Format = "auto"
    """How a row is read; ``auto`` looks at its columns."""
    columns: dict[str, str | list[str]] = field(default_factory=dict)
    """Column names, where they are not the usual ones: keys messages, prompt, response, system, text, input_ids,
    loss_mask, tools, domain, id, split. Several columns are joined by an empty line."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a hub data set."""
    revision: str | None = None
    """Commit or tag of a hub data set; give one, so that the recipe stays what it is."""
    domain: str | None = None
    """Domain of all its conversations; else the domain column, else the name of the source."""
    domains: dict[str, str] = field(default_factory=dict)
    """Maps values of the domain column to domains."""
    weight: float | None = None
    """Share of this source in the mixture, relative to the other weights."""
    limit: int | None = None
    """Read at most this many rows."""
    template: str | None = None
    """For format ``text``: chatml, llama3, gemma, zephyr, alpaca or vicuna."""
    license: str = ""
    """License of the source, for the record."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.columns) - set(_NAMES))
        if unknown:
            raise UserError(f"source {self.path}: unknown column keys {unknown}; known: {', '.join(_NAMES)}")
        if self.weight is not None and self.weight <= 0:
            raise UserError(f"source {self.path}: weight is {self.weight}; it must be above 0")
        if self.template is not None and self.template not in TEXT_TEMPLATES:
            raise UserError(
                f"source {self.path}: unknown template {self.template!r}; known: {', '.join(TEXT_TEMPLATES)}"
            )
        if self.format == "text" and self.template is None:
            raise UserError(f"source {self.path}: format text needs a template: {', '.join(TEXT_TEMPLATES)}")

    @property
    def name(self) -> str:
        """Short name of the source."""
        return Path(self.path).stem if "." in Path(self.path).name else Path(self.path).name


@dataclass(frozen=True)
class TextTemplate:
    """How a preformatted text marks its turns."""

    header: str
    """Pattern of a turn's header; its group 1 is the role."""
    end: str
    """What ends a turn; empty where the next header does."""
    roles: Mapping[str, str]
    """Roles by the header's name of them."""


_USUAL = {"user": "user", "assistant": "assistant", "system": "system", "tool": "tool"}
TEXT_TEMPLATES: dict[str, TextTemplate] = {
    "chatml": TextTemplate(r"<\|im_start\|>(\w+)\n", "<|im_end|>", _USUAL),
    "llama3": TextTemplate(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n", "<|eot_id|>", _USUAL),
    "gemma": TextTemplate(r"<start_of_turn>(\w+)\n", "<end_of_turn>", {"user": "user", "model": "assistant"}),
    "zephyr": TextTemplate(r"<\|(user|assistant|system)\|>\n", "</s>", _USUAL),
    "alpaca": TextTemplate(
        r"(?:^|\n\n)### (Instruction|Input|Response):\n",
        "",
        {"Instruction": "user", "Input": "user", "Response": "assistant"},
    ),
    "vicuna": TextTemplate(
        r"(?:^|\s|</s>)(USER|ASSISTANT): ", "</s>", {"USER": "user", "ASSISTANT": "assistant"}
    ),
}


def read_source(source: Source) -> Iterator[tuple[str, Any]]:
    """Yield ``(where, row)`` for every row; a row that cannot be decoded is a BadConversation.

    Raises:
        UserError: no such source.
    """
    rows = _rows(source)
    for index, item in enumerate(rows):
        if source.limit is not None and index >= source.limit:
            return
        yield item


def count_rows(source: Source) -> int | None:
    """Count the rows of a source without reading them; None where that is not known beforehand."""
    counts = [_count_file(file) for file in files_of(source)]
    if not counts or None in counts:
        return None
    count = sum(number or 0 for number in counts)
    return count if source.limit is None else min(count, source.limit)


def files_of(source: Source) -> list[Path]:
    """The files whose rows a source gives; none for hub ids and saved data sets."""
    path = Path(source.path)
    if path.is_file():
        return [path]
    return _row_files(path) if path.is_dir() and not _is_saved(path) else []


def _is_saved(folder: Path) -> bool:
    """Whether ``datasets`` saved this folder."""
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def _count_file(path: Path) -> int | None:
    """Lines of a JSONL file, rows of a Parquet file."""
    if text_suffix(path) == ".jsonl":
        return count_lines(path)
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return int(pyarrow.parquet.read_metadata(path).num_rows)
        except (OSError, pyarrow.ArrowInvalid):  # reading it will say what is wrong
            return None
    return None


def _rows(source: Source) -> Iterator[tuple[str, Any]]:
    path = Path(source.path)
    if path.is_file():
        yield from _file_rows(path)
    elif path.is_dir():
        yield from _folder_rows(path, source)
    elif _HUB_ID.fullmatch(source.path) and not path.suffix:
        yield from _hub_rows(source)
    else:
        raise UserError(f"source {source.path}: no such file or folder, and no hub id (owner/name)")


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        number = 0
        try:
            table = pyarrow.parquet.ParquetFile(path)
            fields = pyarrow.struct(list(table.schema_arrow))
            for batch in table.iter_batches(256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path.name}:{number}", own_keys(row, fields)
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise UserError(f"source {path} is no sound Parquet file ({error}): fetch it again") from error
    elif text_suffix(path) == ".jsonl":
        for line in read_lines(path):
            try:
                row = row_of(line)
            except BadConversation as error:
                row = error
            yield line.where, row
    elif text_suffix(path) == ".json":
        try:
            with open_text(path) as file:
                rows = json.loads(file.read().decode("utf-8-sig"))
        except ValueError as error:
            raise UserError(
                f"source {path} is not JSON ({error}); lines of JSON belong in a .jsonl file"
            ) from error
        if not isinstance(rows, list):
            raise UserError(f"source {path}: expected a list of rows, found {type(rows).__name__}")
        yield from ((f"{path.name}:{number}", row) for number, row in enumerate(rows, 1))
    else:
        raise UserError(
            f"source {path}: unknown kind of file {path.suffix!r}; known: .jsonl, .json (also .gz and .zst), .parquet"
        )


def _folder_rows(path: Path, source: Source) -> Iterator[tuple[str, Any]]:
    import datasets

    if _is_saved(path):
        loaded = datasets.load_from_disk(str(path))
        if isinstance(loaded, datasets.DatasetDict):
            if source.split not in loaded:
                raise UserError(f"source {path}: no split {source.split!r}; it has {', '.join(loaded)}")
            loaded = loaded[source.split]
        fields = _fields(loaded)
        yield from ((f"{path.name}:{number}", own_keys(row, fields)) for number, row in enumerate(loaded, 1))
        return
    files = _row_files(path)
    if not files:
        raise UserError(
            f"source {path}: no .jsonl or .parquet file in this folder (a .jsonl may be packed: .gz, .zst)"
        )
    for file in files:
        yield from _file_rows(file)


def _row_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if text_suffix(file) in (".jsonl", ".parquet"))


def _hub_rows(source: Source) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        loaded: Iterable[Any] = datasets.load_dataset(
            source.path, source.subset, split=source.split, revision=source.revision, streaming=True
        )
        fields = _fields(loaded)
        yield from (
            (f"{source.path}:{number}", own_keys(row, fields)) for number, row in enumerate(loaded, 1)
        )
    except (OSError, ValueError, ConnectionError) as error:
        raise UserError(f"source {source.path}: cannot be read from the hub ({error})") from error


def _fields(loaded: Any) -> Any:
    """Arrow type of a data set's rows; None where it is not known before they are read."""
    import pyarrow

    features = getattr(loaded, "features", None)
    return None if features is None else pyarrow.struct(list(features.arrow_schema))


def own_keys(value: Any, kind: Any) -> Any:
    """A value of a table without the keys that only other rows have.

    Arrow gives every object of a column the keys of all of them, null where an object has none. A key that is null
    in all rows was written as null by someone: it stays in objects that hold something.

    Args:
        value: as Arrow gives it.
        kind: its Arrow type; None leaves the value as it is.
    """
    import pyarrow.types as types

    if kind is None or value is None:
        return value
    if types.is_struct(kind) and isinstance(value, Mapping):
        holds = any(inner is not None for inner in value.values())
        return {
            part.name: own_keys(value.get(part.name), part.type)
            for part in kind
            if value.get(part.name) is not None or (holds and types.is_null(part.type))
        }
    if (types.is_list(kind) or types.is_large_list(kind)) and isinstance(value, list):
        return [own_keys(item, kind.value_type) for item in value]
    return value


def conversation_of(row: Any, source: Source, where: str) -> Conversation:
    """Read one row of a source.

    Raises:
        BadConversation: the row is not a conversation.
    """
    if isinstance(row, BadConversation):
        raise row
    with reading(where):
        return _conversation_of(row, source, where)


def _conversation_of(row: Any, source: Source, where: str) -> Conversation:
    if not isinstance(row, Mapping):
        raise BadConversation("row is not an object", type(row).__name__)
    if source.format == "auto" and not source.columns and ("prompt_ids" in row or "turns" in row):
        return conversation_from_row(row, where)  # what an earlier run of this project wrote
    kind = _format_of(row, source)
    domain = source.domain or _text(row, source, "domain") or source.name
    common: dict[str, Any] = {"domain": source.domains.get(domain, domain), "tools": _tools(row, source)}
    identity = _text(row, source, "id")
    if kind == "tokens":
        ids, mask = (_value(row, source, name) for name in ("input_ids", "loss_mask"))
        if ids is None or mask is None or len(ids) != len(mask):
            raise BadConversation(
                "input_ids and loss_mask do not fit", f"{ids and len(ids)}, {mask and len(mask)}"
            )
        ids, mask = check_ids(ids, "input_ids"), [int(bit) for bit in check_ids(mask, "loss_mask")]
        identity = identity or content_hash([{"ids": ids}])
        common |= {"input_ids": ids, "loss_mask": mask}
    else:
        common["messages"] = check_messages(_messages(row, source, kind))
        identity = identity or content_hash(common["messages"], common["tools"])
    named = row.get(_column(source, "split") or "split")
    split = split_named(named, identity) if isinstance(named, str) else None
    if isinstance(named, str) and split is None:
        raise BadConversation("unknown split", repr(named))
    return Conversation(id=identity, split=split, **common)


def _format_of(row: Mapping[str, Any], source: Source) -> Format:
    if source.format != "auto":
        return source.format
    if _value(row, source, "input_ids") is not None:
        return "tokens"
    turns = _value(row, source, "messages")
    if isinstance(turns, list) and turns and isinstance(turns[0], Mapping):
        return "messages" if "role" in turns[0] else "conversations"
    if source.template is not None and _value(row, source, "text") is not None:
        return "text"
    if _value(row, source, "prompt") is not None:
        return "pairs" if _value(row, source, "response") is not None else "prompts"
    raise BadConversation("no conversation in this row", f"columns: {', '.join(map(str, row))}")


def _messages(row: Mapping[str, Any], source: Source, kind: Format) -> Any:
    system = _text(row, source, "system")
    if kind in ("messages", "conversations"):
        turns = _decoded(_value(row, source, "messages"), "messages")
        if kind == "conversations":
            turns = [_sharegpt(turn) for turn in turns or []]
        if system and isinstance(turns, list) and turns and turns[0].get("role") != "system":
            return [{"role": "system", "content": system}, *turns]  # a column of its own, beside the turns
        return turns
    if kind == "text":
        return _take_apart(_text(row, source, "text") or "", TEXT_TEMPLATES[source.template or ""])
    prompt = _text(row, source, "prompt")
    if not prompt:
        raise BadConversation("empty prompt")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    if kind == "pairs":
        messages.append({"role": "assistant", "content": _text(row, source, "response")})
    return messages


def _sharegpt(turn: Any) -> dict[str, Any]:
    role = turn.get("from") if isinstance(turn, Mapping) else None
    if not isinstance(role, str) or role not in _SHAREGPT_ROLES:
        raise BadConversation("unknown role", repr(role))
    return {"role": _SHAREGPT_ROLES[role], "content": turn.get("value")}


def _take_apart(text: str, template: TextTemplate) -> list[dict[str, str]]:
    headers = list(re.finditer(template.header, text))
    if not headers:
        raise BadConversation("no turn of the template in the text", repr(text[:60]))
    messages: list[dict[str, str]] = []
    for header, following in zip(headers, [*headers[1:], None], strict=True):
        body = text[header.end() : following.start() if following else len(text)]
        content = body.split(template.end, 1)[0] if template.end else body
        role = template.roles.get(header[1])
        if role is None:
            raise BadConversation("unknown role", repr(header[1]))
        if messages and messages[-1]["role"] == role == "user":
            messages[-1]["content"] += "\n\n" + content.strip()
        else:
            messages.append({"role": role, "content": content.strip() if not template.end else content})
    if messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()  # a generation prompt
    return messages


def _decoded(value: Any, name: str) -> Any:
    """Lists that a table keeps as JSON text."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise BadConversation(f"{name} are not a list", value[:60]) from error
    return value


def _tools(row: Mapping[str, Any], source: Source) -> Any:
    return check_tools(_decoded(_value(row, source, "tools") or None, "tools"))


def _column(source: Source, name: str) -> str | None:
    column = source.columns.get(name)
    return column if isinstance(column, str) else None


def _value(row: Mapping[str, Any], source: Source, name: str) -> Any:
    column = source.columns.get(name)
    if isinstance(column, str):
        return row.get(column)
    for usual in column or _NAMES[name]:
        if row.get(usual) is not None:
            return row[usual]
    return None


def _text(row: Mapping[str, Any], source: Source, name: str) -> str | None:
    columns = source.columns.get(name)
    if isinstance(columns, list):
        parts = [str(row[column]) for column in columns if row.get(column)]
        return "\n\n".join(parts) or None
    value = _value(row, source, name)
    return None if value is None else str(value)
