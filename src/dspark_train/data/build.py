"""Makes a prepared set from a JSONL file of conversations: in shards, on several processes, resumable."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import dspark_train
from dspark_train.data.conversations import (
    SAMPLING,
    BadConversation,
    Conversation,
    DroppedConversation,
    SplitShares,
    conversation_of_line,
)
from dspark_train.data.dataset import MANIFEST, Manifest, PreparedSet, ShardWriter, add_counts
from dspark_train.data.tokenize import TOKENIZE_VERSION, ConversationEncoder, tokenizer_fingerprint
from dspark_train.errors import UserError
from dspark_train.files import (
    Line,
    Shard,
    Shards,
    file_digest,
    locked,
    read_json,
    read_lines,
    unpacked,
)

Progress = Callable[[int, int], None]
"""Called with (conversations done since the last call, conversations in all)."""

SHARD_LINES = 2000
"""Least conversations of a shard; a large file is cut into 64."""

CHUNK = 64
"""Conversations that are tokenized in one call."""


@dataclass(frozen=True)
class BuildOptions:
    """What a set depends on, beside its source and its tokenizer."""

    max_length: int = 4096
    """Most tokens of an example; longer ones are cut."""
    template: Mapping[str, Any] | None = None
    """Extra chat-template arguments for every conversation, such as ``enable_thinking: false``."""
    shares: SplitShares = field(default_factory=SplitShares)
    max_error_share: float = 0.05
    """The run stops where more than this share of the conversations is faulty."""


@dataclass(frozen=True)
class _Part:
    """Lines of the source that one shard is made of."""

    source: Path
    offset: int
    """Bytes before them."""
    first_line: int
    """From 1."""
    count: int

    def lines(self) -> Iterator[Line]:
        end = self.first_line + self.count
        return takewhile(
            lambda line: line.number < end, read_lines(self.source, self.offset, self.first_line)
        )


def build_set(
    source: Path,
    folder: Path,
    tokenizer: Any,
    options: BuildOptions,
    *,
    workers: int = 1,
    progress: Progress | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> PreparedSet:
    """Tokenize a file of conversations into ``folder``; shards that an earlier run finished are kept.

    Several processes may make the same set at once: they share the work.

    Args:
        source: JSONL of conversations; a JSON file of the same name may say under ``sampling`` how the answers
            were drawn.
        folder: of the set; another set there (other source, tokenizer or options) is refused.
        tokenizer: the target's.
        options: see :class:`BuildOptions`.
        workers: processes.
        progress: told after every shard and chunk.
        recipe: kept in the manifest and part of the fingerprint.

    Raises:
        UserError: no such file, too many faulty conversations, or nothing to train on.
    """
    if not source.is_file():
        raise UserError(f"no such conversations file: {source}. Make it with `prepare`, or correct the path")
    with unpacked(source, folder) as plain:
        return _build(source, plain, folder, tokenizer, options, workers, progress, recipe)


def _build(
    source: Path,
    plain: Path,
    folder: Path,
    tokenizer: Any,
    options: BuildOptions,
    workers: int,
    progress: Progress | None,
    recipe: Mapping[str, Any] | None,
) -> PreparedSet:
    """:func:`build_set` of a source whose lines are in ``plain``."""
    digest, parts = _cut(plain)
    digest = digest if plain == source else file_digest(source)
    manifest = new_manifest(source, digest, tokenizer, options, recipe)
    manifest.answers = read_json(source.with_suffix(".json")).get(SAMPLING, {})
    if (folder / MANIFEST).exists():
        return _same_set(folder, manifest)
    shards = Shards(
        folder,
        len(parts),
        manifest.fingerprint,
        claim="unfinished",
        foreign="an unfinished set of another recipe, source or target",
    )
    clock = _clock(shards, tokenizer)
    total = sum(part.count for part in parts)
    tell = (lambda done: progress(done, total)) if progress else (lambda done: None)
    todo = []
    for index, part in enumerate(parts):
        if shards.finished(index):
            tell(part.count)
        else:
            todo.append(index)
    if workers > 1 and len(todo) > 1:
        _make_parallel(shards, parts, todo, tokenizer, options, workers, clock, tell)
    else:
        encoder = _encoder(tokenizer, options, clock)
        for shard in shards.missing():
            _make(shard, parts[shard.index], encoder, options, tell)
    with locked(shards.lock):
        if (folder / MANIFEST).exists():
            return _same_set(folder, manifest)
        add_counts(manifest, shards)
        manifest.clock = clock
        _join_bad(folder, len(parts))
        _check(source, folder, manifest, options)
        shards.finish(folder / MANIFEST, asdict(manifest))
    return PreparedSet(folder)


def _clock(shards: Shards, tokenizer: Any) -> str:
    """The time that a template with a clock shows in all of a set; empty where the template has none."""
    if "strftime_now" not in json.dumps(tokenizer.chat_template):
        return ""
    path = shards.folder / "clock"
    with locked(shards.lock):
        if not path.is_file():
            path.write_text(datetime.now().isoformat(timespec="seconds"), encoding="utf-8")
        return path.read_text(encoding="utf-8")


def _encoder(tokenizer: Any, options: BuildOptions, clock: str) -> ConversationEncoder:
    return ConversationEncoder(
        tokenizer,
        max_length=options.max_length,
        arguments=options.template,
        clock=datetime.fromisoformat(clock) if clock else None,
    )


def _same_set(folder: Path, manifest: Manifest) -> PreparedSet:
    finished = PreparedSet(folder)
    if finished.manifest.fingerprint == manifest.fingerprint:
        return finished
    raise UserError(
        f"{folder} already holds another set ({finished.manifest.fingerprint}, wanted {manifest.fingerprint}): "
        "choose another folder or remove it"
    )


def new_manifest(
    source: Path, digest: str, tokenizer: Any, options: BuildOptions, recipe: Mapping[str, Any] | None
) -> Manifest:
    """Describe a set before it is made; its fingerprint names everything that it depends on."""
    shares = options.shares
    parts: dict[str, Any] = {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "source": digest,
        "max_length": options.max_length,
        "template": dict(options.template or {}),
        "shares": [shares.calibration, shares.heldout, shares.seed],
        "recipe": dict(recipe or {}),
        "code": TOKENIZE_VERSION,
    }
    fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return Manifest(
        fingerprint=fingerprint,
        tokenizer=parts["tokenizer"],
        tokenizer_name=Path(str(tokenizer.name_or_path)).name,
        max_length=options.max_length,
        template=dict(options.template or {}),
        source={"file": source.name, "sha256": digest, "shares": parts["shares"], "recipe": parts["recipe"]},
        version=dspark_train.__version__,
    )


def _cut(source: Path) -> tuple[str, list[_Part]]:
    """Digest of the source, and its parts."""
    digest, lines = hashlib.sha256(), 0
    with source.open("rb") as file:
        for line in file:
            digest.update(line)
            lines += 1
    if lines == 0:
        raise UserError(f"{source} is empty: there is no conversation to train on")
    per_part = max(SHARD_LINES, -(-lines // 64))
    parts: list[_Part] = []
    offset = 0
    with source.open("rb") as file:
        for number, line in enumerate(file):
            if number % per_part == 0:
                parts.append(_Part(source, offset, number + 1, min(per_part, lines - number)))
            offset += len(line)
    return digest.hexdigest(), parts


_worker: tuple[ConversationEncoder, BuildOptions] | None = None


def _start_worker(tokenizer: Any, options: BuildOptions, clock: str) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (_encoder(tokenizer, options, clock), options)


def _work(shards: Shards, index: int, part: _Part) -> int:
    assert _worker is not None, "worker process was not initialised"
    for shard in shards.missing([index]):
        _make(shard, part, *_worker, tell=lambda done: None)
    return part.count


def _make_parallel(
    shards: Shards,
    parts: list[_Part],
    todo: list[int],
    tokenizer: Any,
    options: BuildOptions,
    workers: int,
    clock: str,
    tell: Callable[[int], None],
) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(workers, len(todo)), context, _start_worker, (tokenizer, options, clock)
    ) as pool:
        pending: set[Future[int]] = {pool.submit(_work, shards, index, parts[index]) for index in todo}
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    tell(future.result())
        finally:
            pool.shutdown(cancel_futures=True)


def _make(
    shard: Shard,
    part: _Part,
    encoder: ConversationEncoder,
    options: BuildOptions,
    tell: Callable[[int], None],
) -> None:
    writer, before, count = ShardWriter(shard), encoder.counts, 0
    with _bad_file(shard.folder, shard.index).open("w", encoding="utf-8") as bad:

        def refuse(where: str, identity: str | None, error: BadConversation) -> None:
            tally = writer.dropped if isinstance(error, DroppedConversation) else writer.errors
            tally[error.reason] += 1
            row = {"where": where, "id": identity, "reason": error.reason, "detail": error.detail}
            bad.write(json.dumps(row) + "\n")

        def encode(chunk: list[tuple[str, Conversation]]) -> None:
            results = encoder.encode_many([conversation for _, conversation in chunk])
            for (where, conversation), result in zip(chunk, results, strict=True):
                if isinstance(result, BadConversation):
                    refuse(where, conversation.id, result)
                    continue
                for example in result:
                    writer.add(example)
                writer.templates[rendered_with(conversation, options.template)] += len(result)
            tell(len(chunk))

        chunk: list[tuple[str, Conversation]] = []
        for line in part.lines():
            count += 1
            try:
                conversation = conversation_of_line(line)
            except BadConversation as error:
                refuse(line.where, None, error)
                continue
            split = conversation.split or options.shares.split_of(conversation.id)
            chunk.append((line.where, replace(conversation, split=split)))
            if len(chunk) == CHUNK:
                encode(chunk)
                chunk = []
        if chunk:
            encode(chunk)
    writer.close(encoder.counts - before, count)


def rendered_with(conversation: Conversation, template: Mapping[str, Any] | None) -> str:
    """Chat-template arguments of a conversation, as JSON: its own go over those for all."""
    return json.dumps({**(template or {}), **conversation.template}, sort_keys=True, default=str)


def _bad_file(folder: Path, index: int) -> Path:
    return folder / f"bad-{index:05d}.jsonl"


def _join_bad(folder: Path, shards: int) -> None:
    with (folder / "bad.jsonl").open("wb") as out:
        for index in range(shards):
            path = _bad_file(folder, index)
            if path.exists():
                out.write(path.read_bytes())


def _check(source: Path, folder: Path, manifest: Manifest, options: BuildOptions) -> None:
    reasons = ", ".join(
        f"{reason}: {count}" for reason, count in {**manifest.errors, **manifest.dropped}.items()
    )
    if not manifest.splits:
        raise UserError(
            f"no supervised token in the data: none of the {manifest.conversations} conversations of {source} "
            f"gives an example ({reasons})"
        )
    faulty = sum(manifest.errors.values())
    if faulty > options.max_error_share * manifest.conversations:
        raise UserError(
            f"{faulty} of {manifest.conversations} conversations of {source} are faulty, more than "
            f"max_error_share {options.max_error_share:g} allows ({reasons}); see {folder / 'bad.jsonl'}"
        )
