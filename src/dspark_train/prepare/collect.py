"""The first stage: sources to one file of conversations. Filters, removes duplicates, mixes, and splits.

The choice of rows and their order depend on the recipe's seed and on what the rows say, not on their place in a
source. An interrupted run continues after the last source that was read to its end.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dspark_train.data.conversations import BadConversation, Conversation, SplitShares, read_conversations
from dspark_train.errors import UserError
from dspark_train.files import Shard, Shards, file_digest, locked, read_json, read_lines
from dspark_train.prepare.sources import Source, conversation_of, files_of, read_source


@dataclass(frozen=True)
class Filters:
    """Conversations that are left out, and parts of them."""

    prompts_only: bool = False
    """Drop every assistant turn: the target will write its own."""
    require_answer: bool = False
    """Leave out conversations without an assistant turn."""
    max_turns: int | None = None
    """Cut after this many user turns (and the answer to the last of them)."""
    min_prompt_chars: int = 1
    """Leave out conversations whose first user turn is shorter."""
    max_chars: int | None = None
    """Leave out conversations with more characters in all turns together."""
    keep_system: bool = True
    """Keep system turns."""

    def apply(self, conversation: Conversation) -> Conversation | str:
        """Return what is left of a conversation, or the reason why nothing is."""
        if conversation.exact:
            return conversation
        messages = [m for m in conversation.messages if self.keep_system or m["role"] != "system"]
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        if not users:
            return "no user turn"
        if len(str(messages[users[0]]["content"])) < self.min_prompt_chars:
            return "prompt too short"
        if self.max_turns is not None and len(users) > self.max_turns:
            messages = messages[: users[self.max_turns]]
        if self.prompts_only:
            messages = [message for message in messages if message["role"] != "assistant"]
        elif self.require_answer and not any(message["role"] == "assistant" for message in messages):
            return "no assistant turn"
        if (
            self.max_chars is not None
            and sum(len(str(m["content"] or "")) for m in messages) > self.max_chars
        ):
            return "too long"
        return replace(conversation, messages=messages)


@dataclass(frozen=True)
class Deduplicate:
    """Which conversations count as the same: what the user says decides."""

    exact: bool = True
    """Remove those whose user turns are equal but for case and white space."""
    near: float | None = None
    """Remove those whose user turns share at least this share of their word triples (MinHash estimate)."""

    def __post_init__(self) -> None:
        if self.near is not None and not 0 < self.near <= 1:
            raise UserError(f"deduplicate.near is {self.near}: it must be above 0 and at most 1")


@dataclass(frozen=True)
class CollectOptions:
    """What the stage depends on."""

    sources: Sequence[Source]
    filters: Filters = Filters()
    deduplicate: Deduplicate = Deduplicate()
    shares: SplitShares = field(default_factory=SplitShares)
    size: int | None = None
    """Conversations in all; None takes as many as the weights allow, or everything where there are none."""
    seed: int = 0
    max_error_share: float = 0.05
    """The run stops where more than this share of a source's rows cannot be read."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("the recipe names no sources")
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            bare = [source.path for source in self.sources if source.weight is None]
            raise UserError(
                f"some sources have a weight, others none: {', '.join(bare)}. Give all of them one"
            )


class Deduplicator:
    """Recognises conversations whose user turns were there before."""

    BANDS, ROWS = 16, 8

    def __init__(self, options: Deduplicate) -> None:
        self._options = options
        self._seen: set[int] = set()
        self._kept: list[Any] = []
        if options.near is not None:
            from rensa import RMinHashLSH

            self._index = RMinHashLSH(options.near, self.BANDS * self.ROWS, self.BANDS)

    def add(self, conversation: Conversation) -> str | None:
        """Remember a conversation; return why it is a duplicate, or None where it is new."""
        said = " ".join(_said(conversation).lower().split())
        key = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "big")
        if self._options.exact and key in self._seen:
            return "duplicate"
        self._seen.add(key)
        if self._options.near is None:
            return None
        from rensa import RMinHash

        words = said.split()
        triples = [" ".join(words[i : i + 3]) for i in range(max(1, len(words) - 2))]
        sketch = RMinHash(self.BANDS * self.ROWS, 42)
        sketch.update(triples)
        for candidate in self._index.query(sketch):
            if self._kept[candidate].jaccard(sketch) >= self._options.near:
                return "near duplicate"
        self._index.insert(len(self._kept), sketch)
        self._kept.append(sketch)
        return None


def _said(conversation: Conversation) -> str:
    if not conversation.messages:
        return json.dumps(
            [list(conversation.input_ids or []), [list(turn.prompt_ids) for turn in conversation.turns]]
        )
    return "\n".join(
        str(message["content"]) for message in conversation.messages if message["role"] == "user"
    )


def collect(options: CollectOptions, folder: Path, progress: Callable[[int], None] | None = None) -> Path:
    """Write ``folder/collected.jsonl``, and what was left out to ``collected.bad.jsonl`` and
    ``collected.json``.

    Args:
        options: the recipe's.
        folder: output folder of the recipe.
        progress: told how many more rows have been read.

    Raises:
        UserError: a source that is not there, too many unreadable rows, or a mixture that the sources cannot
            give.
    """
    out = folder / "collected.jsonl"
    files = {str(file): file_digest(file) for source in options.sources for file in files_of(source)}
    state = {"options": json.loads(json.dumps(asdict(options), default=str)), "files": files}
    if _is_collected(out, state):
        return out
    shards = Shards(
        folder / "collect",
        len(options.sources),
        state,
        claim="options.json",
        name="{:03d}",
        foreign="parts of another recipe, or of files that have changed since",
    )
    tell = progress or (lambda rows: None)
    with locked(shards.lock):  # one process: what counts as a duplicate depends on the sources before
        if _is_collected(out, state):
            return out
        duplicates = Deduplicator(options.deduplicate)
        for index, source in enumerate(options.sources):
            if shards.finished(index):
                for conversation in read_conversations(_part(shards.folder, index)):
                    duplicates.add(conversation)
                tell(shards.record(index).get("rows", 0))
            for shard in shards.missing([index]):
                _collect_source(source, options, duplicates, shard, tell)
        parts = [_part(shards.folder, index) for index in range(shards.count)]
        chosen = _mix(parts, options)
        _write_mixture(parts, chosen, out)
        with (folder / "collected.bad.jsonl").open("wb") as bad:
            for part in parts:
                bad.write(part.with_suffix(".bad").read_bytes())
        counts = {
            f"{index}:{source.name}": shards.record(index) for index, source in enumerate(options.sources)
        }
        shards.finish(folder / "collected.json", state | {"sources": counts, "conversations": len(chosen)})
        os.replace(f"{out}.tmp", out)
    return out


def _is_collected(out: Path, state: dict[str, Any]) -> bool:
    """Whether the stage has ended; raises UserError where it did so with another recipe or other files."""
    if not out.exists():
        return False
    found = {"files": state["files"]} | read_json(out.with_suffix(".json"))
    if state.items() <= found.items():
        return True
    raise UserError(
        f"{out} was collected by another recipe, or from files that have changed since: choose another "
        "output folder, or remove this one"
    )


def _part(folder: Path, index: int) -> Path:
    """What was kept of a source; what was not lies beside it."""
    return folder / f"{index:03d}.jsonl"


def _collect_source(
    source: Source,
    options: CollectOptions,
    duplicates: Deduplicator,
    shard: Shard,
    tell: Callable[[int], None],
) -> None:
    tally: Counter[str] = Counter()
    bad_path = shard.folder / f"{shard.name}.bad"
    kept_path = shard.aside(_part(shard.folder, shard.index).name)
    with kept_path.open("w", encoding="utf-8") as out, bad_path.open("w") as bad:
        for where, row in read_source(source):
            tally["rows"] += 1
            tell(1)
            try:
                conversation = conversation_of(row, source, where)
                _line(conversation)
            except BadConversation as error:
                tally["bad"] += 1
                tally[f"bad: {error.reason}"] += 1
                bad.write(json.dumps({"where": where, "reason": error.reason, "detail": error.detail}) + "\n")
                continue
            kept = options.filters.apply(conversation)
            reason = kept if isinstance(kept, str) else duplicates.add(kept)
            if isinstance(kept, str) or reason is not None:
                tally[f"left out: {reason}"] += 1
                continue
            split = kept.split or options.shares.split_of(" ".join(_said(kept).lower().split()))
            out.write(_line(replace(kept, split=split)))
            tally["kept"] += 1
    if tally["bad"] > options.max_error_share * tally["rows"]:
        reasons = ", ".join(
            f"{name[5:]}: {count}" for name, count in tally.items() if name.startswith("bad: ")
        )
        raise UserError(
            f"source {source.path}: {tally['bad']} of {tally['rows']} rows cannot be read, more than max_error_share "
            f"{options.max_error_share:g} allows ({reasons}); see {bad_path}"
        )
    shard.finish(tally)


def _line(conversation: Conversation) -> str:
    """Return the line of a conversation; raise BadConversation where it cannot be written as one."""
    try:
        line = json.dumps(conversation.to_row(), ensure_ascii=False) + "\n"
        if not line.isascii():
            line.encode()
    except (TypeError, ValueError) as error:  # what a table may hold, and half of a surrogate pair
        raise BadConversation("row cannot be written as JSON", str(error)) from error
    return line


def _mix(files: Sequence[Path], options: CollectOptions) -> list[tuple[int, int]]:
    """Choose rows by weight and put them in order: ``(file, byte offset)`` of each."""
    rows = []
    seed = options.seed.to_bytes(8, "big", signed=True)
    for index, file in enumerate(files):
        drawn: list[int] = []
        offsets: list[int] = []
        for line in read_lines(file):
            digest = hashlib.blake2b(seed + line.text, digest_size=8).digest()
            drawn.append(int.from_bytes(digest, "big"))
            offsets.append(line.offset)
        keys = np.array(drawn, dtype=np.uint64)
        order = np.argsort(keys, kind="stable")
        rows.append((keys[order], np.array(offsets, dtype=np.int64)[order], index))
    quotas = _quotas([len(keys) for keys, _, _ in rows], options)
    ranks = np.concatenate([keys[:quota] for (keys, _, _), quota in zip(rows, quotas, strict=True)])
    places = [
        (index, offset)
        for (_, sorted_offsets, index), quota in zip(rows, quotas, strict=True)
        for offset in sorted_offsets[:quota].tolist()
    ]
    return [places[index] for index in np.argsort(ranks, kind="stable")]


def _quotas(available: Sequence[int], options: CollectOptions) -> list[int]:
    if not sum(available):
        raise UserError("nothing is left of the sources: see collect/*.json for what was left out, by reason")
    weights = [source.weight for source in options.sources]
    if weights[0] is None:
        shares = np.array(available) / sum(available)
        size = min(options.size or sum(available), sum(available))
    else:
        shares = np.array(weights, dtype=float) / sum(weight or 0 for weight in weights)
        possible = int(min(count / share for count, share in zip(available, shares, strict=True)) + 1e-9)
        size = options.size or possible
        if size > possible:
            short = int(np.argmin(np.array(available) / shares))
            raise UserError(
                f"size {size} with these weights needs {round(size * shares[short])} conversations of "
                f"{options.sources[short].path}, which gives {available[short]}: at most size {possible} is possible"
            )
    ends = np.floor(np.cumsum(shares) * size + 0.5).astype(int)
    return [min(int(n), cap) for n, cap in zip(np.diff(ends, prepend=0), available, strict=True)]


def _write_mixture(files: Sequence[Path], chosen: Sequence[tuple[int, int]], out: Path) -> None:
    handles = [file.open("rb") for file in files]
    try:
        with open(f"{out}.tmp", "wb") as mixture:
            for index, offset in chosen:
                handles[index].seek(offset)
                mixture.write(handles[index].readline())
    finally:
        for handle in handles:
            handle.close()
