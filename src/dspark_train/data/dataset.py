"""Prepared sets: examples in memory-mapped Arrow files, with a manifest that says what they were made from.

A set is a folder::

    manifest.json               written last: without it the set is unfinished
    train-00000.arrow …         one file per split and shard; sample id = index in the order of the shards
    shard-00000.json            counts of a finished shard (:class:`~dspark_train.files.Shards`)
    bad.jsonl                   conversations that could not be used, with the reason

Rows are read from the mapped files when a batch needs them.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dspark_train.data.conversations import HELD_OUT, SPLITS, half_of
from dspark_train.data.tokenize import Example
from dspark_train.errors import UserError
from dspark_train.files import Shard, Shards, read_json

if TYPE_CHECKING:
    import datasets

MANIFEST = "manifest.json"
TEMPLATES = 20
"""Different chat-template arguments that a shard counts at most."""
SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "length": pa.int32(),
        "supervised": pa.int32(),
        "anchors": pa.int32(),
        "domain": pa.string(),
        "split": pa.string(),
        "conversation": pa.string(),
    }
)


@dataclass
class SplitCounts:
    """What one split holds."""

    examples: int = 0
    tokens: int = 0
    supervised: int = 0
    """Supervised tokens."""
    anchors: int = 0
    """Eligible anchors."""

    def add(self, other: SplitCounts) -> None:
        """Add another count to this one."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Manifest:
    """Says what a set holds and what it was made from."""

    fingerprint: str
    """Of tokenizer, template, recipe, source and code version together."""
    tokenizer: str
    """Of tokenizer and chat template (:func:`~dspark_train.data.tokenize.tokenizer_fingerprint`)."""
    tokenizer_name: str
    max_length: int
    template: dict[str, Any]
    """Chat-template arguments for every conversation; a row's own go over them."""
    source: dict[str, Any]
    version: str
    conversations: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    """Conversations that are faulty, by reason."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Sound conversations that give nothing to train on, by reason."""
    notes: dict[str, int] = field(default_factory=dict)
    """What had to be worked around, by name."""
    splits: dict[str, SplitCounts] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)
    templates: dict[str, int] = field(default_factory=dict)
    """Examples by the chat-template arguments that they were rendered with, as JSON; empty in sets that an earlier
    version made. The most common of each shard."""
    answers: dict[str, Any] = field(default_factory=dict)
    """How the answers were drawn (``temperature``, ``top_p``, …), where the stage before says so."""
    clock: str = ""
    """Time that the chat template showed, where it shows one."""

    def losses(self) -> str:
        """How many conversations gave nothing to train on, and why; empty where all did."""
        reasons = Counter(self.errors) + Counter(self.dropped)
        if not reasons:
            return ""
        told = ", ".join(f"{reason}: {count:,}" for reason, count in reasons.most_common())
        return f"{sum(reasons.values()):,} of {self.conversations:,} conversations are left out ({told})"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a finished set; raise UserError for anything else."""
        path = folder / MANIFEST
        if not path.is_file():
            raise UserError(
                f"{folder} is not a finished prepared set: it has no {MANIFEST}. Run `prepare` again"
            )
        try:
            fields = read_json(path)
            fields["splits"] = {name: SplitCounts(**counts) for name, counts in fields["splits"].items()}
            return cls(**fields)
        except (UserError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} cannot be read ({error}): remove the folder and run `prepare` again"
            ) from error


class ExampleStore:
    """The examples of one split, memory-mapped; the index of an example is its sample id.

    Args:
        dataset: that holds them.
        rows: which of its rows they are; None for all.
    """

    def __init__(self, dataset: datasets.Dataset, rows: NDArray[np.int64] | None = None) -> None:
        self.dataset, self._rows = dataset, rows

    def __len__(self) -> int:
        return len(self.dataset) if self._rows is None else len(self._rows)

    def _slice(self, index: int) -> pa.Table:
        return self.dataset.data.fast_slice(index if self._rows is None else int(self._rows[index]), 1)

    def __getitem__(self, index: int) -> Example:
        row = self._slice(index)
        return Example(
            input_ids=_flat(row, "input_ids"),
            loss_mask=_flat(row, "loss_mask"),
            domain=row.column("domain")[0].as_py(),
            conversation=row.column("conversation")[0].as_py(),
        )

    def loss_mask(self, index: int) -> NDArray[np.bool_]:
        """``[T]`` mask of one example, without its tokens."""
        return _flat(self._slice(index), "loss_mask")

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each example."""
        return self.column("length")

    def column(self, name: str) -> NDArray[Any]:
        """A whole scalar column (``length``, ``supervised``, ``anchors``, ``domain``, ``conversation``)."""
        table = self.dataset.data
        index = table.column_names.index(name)
        column: NDArray[Any] = table.column(index).to_numpy()
        return column if self._rows is None else column[self._rows]

    @property
    def counts(self) -> SplitCounts:
        """What it holds."""
        sums = (int(self.column(name).sum()) for name in ("length", "supervised", "anchors"))
        return SplitCounts(len(self), *sums)


def _flat(row: pa.Table, name: str) -> NDArray[Any]:
    chunk = row.column(name).chunk(0)
    values: NDArray[Any] = chunk.flatten().to_numpy(zero_copy_only=False)
    return values


class PreparedSet:
    """A finished prepared set.

    Args:
        folder: where it lies.

    Raises:
        UserError: no set there, or an unfinished or damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, Manifest.read(folder)

    def split(self, name: str) -> ExampleStore:
        """Map one split; raise UserError where it is empty or its files are damaged.

        Validation and test of a set that an earlier version made are the halves of its held-out split
        (:func:`~dspark_train.data.conversations.half_of` the conversation's id).
        """
        if name not in SPLITS:
            raise UserError(f"unknown split {name!r}: expected one of {', '.join(SPLITS)}")
        store = self._store(name)
        if store is None or not len(store):
            held = ", ".join(f"{split} {counts.examples}" for split, counts in self.manifest.splits.items())
            raise UserError(f"the split {name!r} of {self.folder} is empty (examples: {held or 'none'})")
        return store

    def _store(self, name: str) -> ExampleStore | None:
        parts = self._parts(name)
        halved = self._parts(HELD_OUT) if name in ("validation", "test") else []
        if not parts and not halved:
            return None
        import datasets

        store = ExampleStore(datasets.concatenate_datasets([*parts, *halved]))
        if not halved:
            return store
        keys, own = store.column("conversation"), sum(map(len, parts))
        mine = np.array([row < own or half_of(key) == name for row, key in enumerate(keys)])
        return ExampleStore(store.dataset, mine.nonzero()[0])

    def _parts(self, name: str) -> list[datasets.Dataset]:
        """The files of a split as the manifest names it."""
        import datasets

        parts = []
        for file in self.manifest.files.get(name, []):
            try:
                parts.append(datasets.Dataset.from_file(str(self.folder / file)))
            except (OSError, pa.ArrowInvalid) as error:
                raise UserError(f"{self.folder / file} is damaged ({error}): run `prepare` again") from error
        found, expected = sum(map(len, parts)), self.manifest.splits.get(name, SplitCounts()).examples
        if found != expected:
            raise UserError(
                f"{self.folder}: split {name!r} holds {found} examples, its manifest says {expected}: "
                "run `prepare` again"
            )
        return parts

    @cached_property
    def splits(self) -> dict[str, SplitCounts]:
        """What each split holds that is not empty."""
        if HELD_OUT not in self.manifest.splits:
            return self.manifest.splits
        stores = {name: self._store(name) for name in SPLITS}
        return {name: store.counts for name, store in stores.items() if store is not None and len(store)}

    @property
    def templates(self) -> list[tuple[dict[str, Any], float]]:
        """Chat-template arguments that conversations were rendered with, and the share of each, most common first."""
        counts = Counter(self.manifest.templates)
        if not counts:
            return [(self.manifest.template, 1.0)]
        return [(json.loads(text), count / counts.total()) for text, count in counts.most_common()]

    @property
    def template(self) -> dict[str, Any]:
        """The most common of them: what other prompts are to be rendered with."""
        return self.templates[0][0]

    def check_tokenizer(self, fingerprint: str, name: str) -> None:
        """Refuse a set that was made for another target.

        Args:
            fingerprint: of the target's tokenizer.
            name: of the target, for the message.
        """
        if fingerprint != self.manifest.tokenizer:
            raise UserError(
                f"{self.folder} was made for another target: tokenizer and template of "
                f"{self.manifest.tokenizer_name!r} ({self.manifest.tokenizer}), not of {name!r} "
                f"({fingerprint}). Run `prepare` for this target"
            )


class ShardWriter:
    """Writes the examples of one shard, one file per split.

    Args:
        shard: where they go.
        batch: examples per Arrow record batch.
    """

    def __init__(self, shard: Shard, batch: int = 512) -> None:
        self._shard, self._batch = shard, batch
        self._waiting: dict[str, list[Example]] = {}
        self._streams: dict[str, pa.RecordBatchStreamWriter] = {}
        self.counts: dict[str, SplitCounts] = {}
        self.errors: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.templates: Counter[str] = Counter()
        """Examples by the chat-template arguments that they were rendered with, as JSON."""

    def add(self, example: Example) -> None:
        """Add one example, to the split that it names."""
        if example.split is None:
            raise ValueError(f"example of conversation {example.conversation} has no split")
        waiting = self._waiting.setdefault(example.split, [])
        waiting.append(example)
        if len(waiting) >= self._batch:
            self._flush(example.split)

    def _flush(self, split: str) -> None:
        examples, self._waiting[split] = self._waiting[split], []
        if not examples:
            return
        if split not in self._streams:
            path = self._shard.aside(_file_of(split, self._shard.index))
            self._streams[split] = pa.ipc.new_stream(str(path), SCHEMA)
        lengths = [len(example.input_ids) for example in examples]
        supervised = [int(np.count_nonzero(example.loss_mask)) for example in examples]
        anchors = [example.eligible_anchors for example in examples]
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), type=pa.int32())
        columns = [
            pa.ListArray.from_arrays(
                offsets, pa.array(np.concatenate([example.input_ids for example in examples]))
            ),
            pa.ListArray.from_arrays(
                offsets, pa.array(np.concatenate([example.loss_mask for example in examples]))
            ),
            *(pa.array(values, type=pa.int32()) for values in (lengths, supervised, anchors)),
            pa.array([example.domain for example in examples]),
            pa.array([split] * len(examples)),
            pa.array([example.conversation for example in examples]),
        ]
        self._streams[split].write_batch(pa.record_batch(columns, schema=SCHEMA))
        counts = self.counts.setdefault(split, SplitCounts())
        counts.add(SplitCounts(len(examples), sum(lengths), sum(supervised), sum(anchors)))

    def close(self, notes: Counter[str], conversations: int) -> None:
        """Finish the shard.

        Args:
            notes: what had to be worked around, by name.
            conversations: how many were read.
        """
        for split in list(self._waiting):
            self._flush(split)
        for stream in self._streams.values():
            stream.close()
        self._shard.finish(
            {
                "conversations": conversations,
                "errors": dict(self.errors),
                "dropped": dict(self.dropped),
                "notes": dict(notes),
                "splits": {split: asdict(counts) for split, counts in self.counts.items()},
                "templates": dict(self.templates.most_common(TEMPLATES)),
            }
        )


def _file_of(split: str, index: int) -> str:
    return f"{split}-{index:05d}.arrow"


def add_counts(manifest: Manifest, shards: Shards) -> None:
    """Add the counts of all shards to a manifest, in their order."""
    for index in range(shards.count):
        shard = shards.record(index)
        manifest.conversations += shard["conversations"]
        for name in ("errors", "dropped", "notes", "templates"):
            setattr(manifest, name, dict(Counter(getattr(manifest, name)) + Counter(shard.get(name, {}))))
        for split in (*SPLITS, HELD_OUT):  # the last one in shards that an earlier version made
            if split in shard["splits"]:
                manifest.splits.setdefault(split, SplitCounts()).add(SplitCounts(**shard["splits"][split]))
                manifest.files.setdefault(split, []).append(_file_of(split, index))
