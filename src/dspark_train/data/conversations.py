"""Conversations as the rest of the package sees them, and the JSONL file that carries them between stages.

One row of the file is one conversation::

    {"id": "…", "domain": "math", "split": "train", "messages": [{"role": "user", "content": "…"}, …],
     "tools": […], "template": {"enable_thinking": false}, "finished": true,
     "prompt_ids": […], "answer_ids": […],            # the exact tokens of a single generated turn, or
     "turns": [{"prompt_ids": […], "answer_ids": […], "finished": true}, …],     # … of several, or
     "input_ids": […], "loss_mask": […]}                                        # … a pre-tokenized example

Only ``messages`` (or ``input_ids`` with ``loss_mask``) is required.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from dspark_train.errors import UserError
from dspark_train.files import BadLine, Line, read_lines

Split = Literal["train", "calibration", "validation", "test"]
"""What selects (callbacks, checkpoints, trials) reads validation; what is reported reads test."""
SPLITS: tuple[Split, ...] = get_args(Split)
"""Conversations are divided into these once, before anything else is made of them."""
HELD_OUT: Final = "heldout"
"""Validation and test together, as earlier versions called the split that they had for both (:func:`half_of`)."""

SAMPLING = "sampling"
"""Key of the JSON file beside a file of conversations: how the answers were drawn."""

ROLES = ("system", "developer", "user", "assistant", "tool")


class BadConversation(ValueError):  # noqa: N818 - names what it holds
    """One conversation cannot be used; the run goes on without it.

    Attributes:
        reason: short, and the same for all conversations with this fault, so that it can be counted.
        detail: what exactly, and where.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail = reason, detail


class DroppedConversation(BadConversation):
    """A sound conversation that gives nothing to train on; counted, but no fault of the data."""


@dataclass(frozen=True)
class Turn:
    """The exact tokens of one generated turn."""

    prompt_ids: Sequence[int]
    """All tokens that the target read before it answered."""
    answer_ids: Sequence[int]
    """What it generated, end token included where it finished."""
    finished: bool = True


@dataclass(frozen=True)
class Conversation:
    """A conversation, with exact tokens where they are known (see the module's docstring)."""

    id: str
    messages: Sequence[Mapping[str, Any]] = ()
    domain: str = "unknown"
    split: Split | None = None
    """None until one is assigned."""
    tools: Sequence[Mapping[str, Any]] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, such as ``enable_thinking``."""
    finished: bool = True
    """False where the last assistant turn was cut by a limit: it has no end token."""
    turns: Sequence[Turn] = ()
    input_ids: Sequence[int] | None = None
    loss_mask: Sequence[int] | None = None

    @property
    def exact(self) -> bool:
        """Whether the row brings its own tokens, so that no template is applied."""
        return bool(self.turns) or self.input_ids is not None

    def to_row(self) -> dict[str, Any]:
        """Return the JSON object of the conversation; fields at their default are left out."""
        row: dict[str, Any] = {"id": self.id, "domain": self.domain}
        if self.split is not None:
            row["split"] = self.split
        if self.messages:
            row["messages"] = [dict(message) for message in self.messages]
        for name in ("tools", "template"):
            if getattr(self, name):
                row[name] = getattr(self, name)
        if not self.finished:
            row["finished"] = False
        if self.turns:
            row["turns"] = [
                {
                    "prompt_ids": list(turn.prompt_ids),
                    "answer_ids": list(turn.answer_ids),
                    "finished": turn.finished,
                }
                for turn in self.turns
            ]
        if self.input_ids is not None and self.loss_mask is not None:
            row |= {"input_ids": list(self.input_ids), "loss_mask": [int(bit) for bit in self.loss_mask]}
        return row


@dataclass(frozen=True)
class Prompt:
    """What decoding starts from: the tokens before the first generated one."""

    id: str
    domain: str
    ids: tuple[int, ...]


def content_hash(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """Return 16 hexadecimal digits that name the content of a conversation."""
    content = json.dumps([list(messages), list(tools or [])], ensure_ascii=True, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def half_of(key: str) -> Split:
    """Whether a conversation that is held out belongs to validation or to test: by a hash of its key."""
    return "test" if hashlib.sha256(f"half:{key}".encode()).digest()[0] % 2 else "validation"


def split_named(name: str, key: str) -> Split | None:
    """A split by its name in a row; None where there is none of this name.

    Args:
        name: one of :data:`SPLITS`, or :data:`HELD_OUT`, whose halves they are.
        key: the conversation's id.
    """
    if name == HELD_OUT:
        return half_of(key)
    return next((split for split in SPLITS if split == name), None)


@dataclass(frozen=True)
class SplitShares:
    """How conversations without a split of their own are divided."""

    calibration: float = 0.05
    """Share of conversations in the calibration split."""
    heldout: float = 0.05
    """Share of conversations held out: one half of them for validation, the other for the test."""
    seed: int = 0
    """Another seed gives another division."""

    def __post_init__(self) -> None:
        if min(self.calibration, self.heldout) < 0 or self.calibration + self.heldout >= 1:
            raise UserError(
                f"split shares calibration={self.calibration} and heldout={self.heldout}: each must be at least 0 and "
                "their sum below 1"
            )

    def split_of(self, key: str) -> Split:
        """Place a conversation by a hash of its key: the same place in every run, whatever else is in the set."""
        digest = hashlib.sha256(f"{self.seed}:{key}".encode()).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64
        if place < self.heldout:
            return half_of(key)
        return "calibration" if place < self.heldout + self.calibration else "train"


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages as plain dictionaries; raise BadConversation where they are not a conversation."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadConversation("no messages")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise BadConversation("message without a role", f"message {index}: {str(message)[:80]!r}")
        if message["role"] not in ROLES:
            raise BadConversation(
                "unknown role", f"message {index}: {message['role']!r}; known: {', '.join(ROLES)}"
            )
        plain = {name: value for name, value in message.items() if value is not None or name == "content"}
        content = plain.setdefault("content", None)
        if content is None:
            if not plain.get("tool_calls"):
                raise BadConversation("null content", f"message {index} ({plain['role']})")
        elif isinstance(content, str):
            if not content.isascii():
                try:
                    content.encode()
                except UnicodeEncodeError as error:
                    raise BadConversation(
                        "content is not valid Unicode", f"message {index}: {error}"
                    ) from error
        elif not isinstance(content, list):
            raise BadConversation("content is not text", f"message {index}: {type(content).__name__}")
        if plain.get("tool_calls"):
            plain["tool_calls"] = [_with_objects(call, index) for call in plain["tool_calls"]]
        checked.append(plain)
    return checked


def _with_objects(call: Any, index: int) -> Any:
    """A tool call with its arguments as an object, which engines make of JSON text before they render it."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"].strip() or "{}")
    except ValueError as error:
        raise BadConversation("tool-call arguments are not JSON", f"message {index}: {error}") from error
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def check_ids(values: Any, name: str) -> list[int]:
    """Return token ids, or bits of a mask, as a list; raise BadConversation where they are none."""
    if not isinstance(values, Sequence) or not all(isinstance(value, int) for value in values):
        raise BadConversation(f"{name} is not a list of whole numbers", repr(values)[:60])
    if values and not -(2**31) <= min(values) <= max(values) < 2**31:
        raise BadConversation(f"{name} is not a list of whole numbers", "beyond 32 bits")
    return list(values)


def check_tools(tools: Any) -> list[Mapping[str, Any]] | None:
    """Return the tools of a conversation, None for no tools; raise BadConversation where they are no list
    of objects.
    """
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadConversation("tools are not a list of objects", repr(tools)[:60])
    return tools


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Whatever goes wrong while a row is read is the row's fault: raise it as a BadConversation."""
    try:
        yield
    except BadConversation:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise BadConversation("row cannot be read", f"{where}: {error!r}") from error


def conversation_from_row(row: Any, where: str) -> Conversation:
    """Read one row of the JSONL file.

    Args:
        row: the decoded JSON object.
        where: ``file:line``, for messages and for the id of rows that have neither id nor messages.

    Raises:
        BadConversation: the row is not a conversation.
    """
    with reading(where):
        return _conversation_from_row(row, where)


def _conversation_from_row(row: Any, where: str) -> Conversation:
    if not isinstance(row, Mapping):
        raise BadConversation("row is not an object", f"{where}: {type(row).__name__}")
    turns = row.get("turns") or []
    if row.get("prompt_ids") is not None and row.get("answer_ids") is not None:
        turns = [
            {name: row.get(name) for name in ("prompt_ids", "answer_ids")} | {"finished": row.get("finished")}
        ]
    input_ids, loss_mask = row.get("input_ids"), row.get("loss_mask")
    if (input_ids is None) != (loss_mask is None):
        raise BadConversation("input_ids and loss_mask must come together", where)
    if input_ids is not None:
        input_ids, loss_mask = check_ids(input_ids, "input_ids"), check_ids(loss_mask, "loss_mask")
    if input_ids is not None and len(input_ids) != len(loss_mask or ()):
        raise BadConversation(
            "loss_mask has another length than input_ids",
            f"{where}: {len(loss_mask or ())} against {len(input_ids)}",
        )
    exact = bool(turns) or input_ids is not None
    messages = check_messages(row["messages"]) if row.get("messages") or not exact else []
    identity = row.get("id")
    if identity is None:
        identity = content_hash(messages, row.get("tools")) if messages else where
    split = None
    if (named := row.get("split")) is not None and (split := split_named(named, str(identity))) is None:
        raise BadConversation("unknown split", f"{where}: {named!r}; expected one of {', '.join(SPLITS)}")
    template = row.get("template") or {}
    if not isinstance(template, Mapping):
        raise BadConversation("template is not an object", f"{where}: {str(template)[:60]!r}")
    return Conversation(
        id=str(identity),
        messages=messages,
        domain=str(row.get("domain") or "unknown"),
        split=split,
        tools=check_tools(row.get("tools")),
        template=template,
        finished=row.get("finished") is not False,
        turns=tuple(
            Turn(
                check_ids(turn["prompt_ids"], "prompt_ids"),
                check_ids(turn["answer_ids"], "answer_ids"),
                turn.get("finished") is not False,
            )
            for turn in turns
        ),
        input_ids=input_ids,
        loss_mask=loss_mask,
    )


def row_of(line: Line) -> Any:
    """Decode a line of a JSONL file; raise BadConversation where it is no JSON."""
    try:
        return line.value()
    except BadLine as error:
        raise BadConversation("line is not JSON", str(error)) from error


def conversation_of_line(line: Line) -> Conversation:
    """Read a line of the JSONL file; raise BadConversation where it is no conversation."""
    row = row_of(line)
    conversation = conversation_from_row(row, line.where)
    try:
        line.text.decode()
        if b"\\ud" in line.text or b"\\uD" in line.text:  # escaped surrogates, which may be halves of a pair
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise BadConversation("row is not valid Unicode", f"{line.where}: {error}") from error
    return conversation


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Yield the conversations of a file that a stage of `prepare` wrote.

    Raises:
        UserError: there is no such file, or a line of it is no conversation.
    """
    for line in read_lines(path):
        try:
            conversation = conversation_of_line(line)
        except BadConversation as error:
            raise UserError(
                f"{path} is damaged in line {line.number} ({error}): remove it and run the stage that made it again"
            ) from error
        yield conversation
