"""Makes a prepared set from a JSONL file of conversations: in shards, on several processes, resumable."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dspark_train
from dspark_train.data.conversations import (
    BadConversation,
    Conversation,
    DroppedConversation,
    assign_split,
    conversation_from_row,
)
from dspark_train.data.dataset import MANIFEST, Manifest, PreparedSet, ShardWriter, gather_manifest
from dspark_train.data.options import SplitShares
from dspark_train.data.tokenize import TOKENIZE_VERSION, ConversationEncoder, tokenizer_fingerprint
from dspark_train.errors import UserError
from dspark_train.files import locked

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
class _Shard:
    source: Path
    folder: Path
    index: int
    offset: int
    first_line: int
    lines: int


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

    Args:
        source: JSONL of conversations.
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
    encoder = ConversationEncoder(tokenizer, max_length=options.max_length, arguments=options.template)
    digest, shards = _plan_shards(source, folder)
    manifest = new_manifest(source, digest, tokenizer, options, recipe)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        if (folder / MANIFEST).exists():
            finished = PreparedSet(folder)
            if finished.manifest.fingerprint == manifest.fingerprint:
                return finished
            raise UserError(
                f"{folder} already holds another set ({finished.manifest.fingerprint}, wanted "
                f"{manifest.fingerprint}): "
                "choose another folder or remove it"
            )
        _claim(folder, manifest.fingerprint)
        total = sum(shard.lines for shard in shards)
        todo = []
        for shard in shards:
            if (folder / f"shard-{shard.index:05d}.json").exists():
                if progress:
                    progress(shard.lines, total)
            else:
                todo.append(shard)
        if workers > 1 and len(todo) > 1:
            _run_parallel(todo, tokenizer, options, workers, progress, total)
        else:
            for shard in todo:
                _run_shard(
                    shard, encoder, options, (lambda done: progress(done, total)) if progress else None
                )
        gather_manifest(folder, manifest, len(shards))
        _join_bad(folder, len(shards))
        _check(source, folder, manifest, options)
        manifest.write(folder)
    return PreparedSet(folder)


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


def _plan_shards(source: Path, folder: Path) -> tuple[str, list[_Shard]]:
    digest, lines = hashlib.sha256(), 0
    with source.open("rb") as file:
        for line in file:
            digest.update(line)
            lines += 1
    if lines == 0:
        raise UserError(f"{source} is empty: there is no conversation to train on")
    per_shard = max(SHARD_LINES, -(-lines // 64))
    shards: list[_Shard] = []
    offset = 0
    with source.open("rb") as file:
        for number, line in enumerate(file):
            if number % per_shard == 0:
                shards.append(
                    _Shard(source, folder, len(shards), offset, number + 1, min(per_shard, lines - number))
                )
            offset += len(line)
    return digest.hexdigest(), shards


def _claim(folder: Path, fingerprint: str) -> None:
    """Mark an unfinished folder as this set's; the leftovers of another one are refused."""
    claim = folder / "unfinished"
    if claim.exists() and claim.read_text() != fingerprint:
        raise UserError(
            f"{folder} holds an unfinished set of another recipe, source or target: choose another folder "
            "or remove it"
        )
    claim.write_text(fingerprint)


_worker: tuple[ConversationEncoder, BuildOptions] | None = None


def _start_worker(tokenizer: Any, options: BuildOptions) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (
        ConversationEncoder(tokenizer, max_length=options.max_length, arguments=options.template),
        options,
    )


def _work(shard: _Shard) -> int:
    if _worker is None:
        raise RuntimeError("worker process was not initialised")
    _run_shard(shard, *_worker, progress=None)
    return shard.lines


def _run_parallel(
    shards: list[_Shard],
    tokenizer: Any,
    options: BuildOptions,
    workers: int,
    progress: Progress | None,
    total: int,
) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(shards)), context, _start_worker, (tokenizer, options)) as pool:
        pending: set[Future[int]] = {pool.submit(_work, shard) for shard in shards}
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    lines = future.result()
                    if progress:
                        progress(lines, total)
        finally:
            pool.shutdown(cancel_futures=True)


def _read_shard(shard: _Shard) -> Iterator[tuple[str, Conversation | BadConversation]]:
    with shard.source.open("rb") as file:
        file.seek(shard.offset)
        for number in range(shard.first_line, shard.first_line + shard.lines):
            line = file.readline()
            if not line.strip():
                continue
            where = f"{shard.source.name}:{number}"
            try:
                yield where, conversation_from_row(json.loads(line), where)
            except BadConversation as error:
                yield where, error
            except (ValueError, RecursionError) as error:
                yield where, BadConversation("line is not JSON", str(error))


def _run_shard(
    shard: _Shard, encoder: ConversationEncoder, options: BuildOptions, progress: Callable[[int], None] | None
) -> None:
    writer, before, count = ShardWriter(shard.folder, shard.index), encoder.counts, 0
    bad_path = shard.folder / f"bad-{shard.index:05d}.jsonl"
    with bad_path.open("w", encoding="utf-8") as bad:

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

        chunk: list[tuple[str, Conversation]] = []
        for where, item in _read_shard(shard):
            count += 1
            if isinstance(item, BadConversation):
                refuse(where, None, item)
                continue
            shares = options.shares
            split = item.split or assign_split(
                item.id, seed=shares.seed, calibration=shares.calibration, heldout=shares.heldout
            )
            chunk.append((where, replace(item, split=split)))
            if len(chunk) == CHUNK:
                encode(chunk)
                if progress:
                    progress(len(chunk))
                chunk = []
        if chunk:
            encode(chunk)
            if progress:
                progress(len(chunk))
    writer.close(encoder.counts - before, count)


def _join_bad(folder: Path, shards: int) -> None:
    with (folder / "bad.jsonl").open("wb") as out:
        for index in range(shards):
            path = folder / f"bad-{index:05d}.jsonl"
            if path.exists():
                out.write(path.read_bytes())


def _check(source: Path, folder: Path, manifest: Manifest, options: BuildOptions) -> None:
    reasons = ", ".join(
        f"{reason}: {count}" for reason, count in {**manifest.errors, **manifest.dropped}.items()
    )
    if not manifest.splits:
        raise UserError(
            f"no supervised token in the data: none of the {manifest.conversations} conversations of "
            f"{source} gives "
            f"an example ({reasons})"
        )
    faulty = sum(manifest.errors.values())
    if faulty > options.max_error_share * manifest.conversations:
        raise UserError(
            f"{faulty} of {manifest.conversations} conversations of {source} are faulty, more than "
            "max_error_share "
            f"{options.max_error_share:g} allows ({reasons}); see {folder / 'bad.jsonl'}"
        )
