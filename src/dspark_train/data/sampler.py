"""Which samples make up which batch.

The order of an epoch is a list of *global batches*, one per optimiser step. It depends on the lengths of the
samples, on the seed and on the epoch, and on nothing else: not on the number of ranks, of workers, or of
accumulated micro-batches. Only afterwards is a global batch cut into micro-batches:

    global batch k  →  sorted by length  →  ranks × accumulation contiguous parts  →  part j·ranks + r is the
    j-th micro-batch of rank r

so that the micro-batches that the ranks process at the same time have similar lengths.

Samples are grouped by length: an epoch's permutation is taken in pools of several global batches, each pool
is sorted by length and cut, and the global batches of the epoch are then put in random order.

Tails. The last global batch of an epoch is smaller where the number of samples is not a multiple of the
batch size. No sample is dropped and none repeated: its samples are spread evenly over the same number of
micro-batches. Where there are fewer samples than micro-batches, the rest are *fillers*: one short sample
with an empty loss mask, which gives no draft block and adds nothing to any sum. So every rank has the same
number of micro-batches in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from dspark_train.data.blocks import FIXED_EPOCH
from dspark_train.errors import UserError

POOL = 16
"""Global batches whose samples are sorted by length together."""


@dataclass(frozen=True)
class MicroBatch:
    """What the data set is asked for: the samples of one micro-batch, and those of its global batch."""

    samples: tuple[int, ...]
    """Sample ids; a filler has a single one, whose loss mask is to be emptied."""
    global_samples: tuple[int, ...]
    """Sample ids of the whole global batch, ascending."""
    epoch: int
    """Anchors are drawn for this epoch (:data:`~dspark_train.data.blocks.FIXED_EPOCH` in validation)."""
    step: int
    """Index of the global batch in its epoch."""
    filler: bool = False


def accumulation(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Micro-batches that each rank accumulates per optimiser step.

    Raises:
        UserError: the sizes do not divide.
    """
    for name, value in (("global_batch_size", global_batch_size), ("micro_batch_size", micro_batch_size)):
        if value < 1:
            raise UserError(f"{name} is {value}: it must be at least 1 sequence")
    per_pass = micro_batch_size * world_size
    if global_batch_size % per_pass:
        raise UserError(
            f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size × ranks = "
            f"{micro_batch_size} × {world_size} = {per_pass}: change one of them"
        )
    return global_batch_size // per_pass


def global_batches(
    lengths: NDArray[np.integer[Any]], *, global_batch_size: int, seed: int, epoch: int
) -> list[NDArray[np.int64]]:
    """Divide the samples of one epoch into global batches.

    Args:
        lengths: tokens of each sample.
        global_batch_size: sequences per optimiser step, over all ranks.
        seed: the run's seed.
        epoch: 0-based.

    Returns:
        One array of sample ids per optimiser step, each sorted by length (ties by id), longest first; a
        smaller one, where there is one, comes last.
    """
    generator = np.random.default_rng([seed, epoch, 0x0DA7A])
    order = generator.permutation(len(lengths))
    full = len(order) // global_batch_size * global_batch_size
    batches: list[NDArray[np.int64]] = []
    for start in range(0, full, POOL * global_batch_size):
        pool = _longest_first(order[start : min(start + POOL * global_batch_size, full)], lengths)
        batches.extend(pool.reshape(-1, global_batch_size))
    shuffled = [batches[index] for index in generator.permutation(len(batches))]
    if full < len(order):
        shuffled.append(_longest_first(order[full:], lengths))
    return shuffled


def _longest_first(samples: NDArray[np.int64], lengths: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    return samples[np.lexsort((samples, -lengths[samples].astype(np.int64)))]


def cut(
    batch: NDArray[np.int64], lengths: NDArray[np.integer[Any]], parts: int, token_budget: int | None = None
) -> list[NDArray[np.int64]]:
    """Cut a global batch, sorted by length, into contiguous parts.

    Args:
        batch: sample ids, longest first.
        lengths: tokens of each sample.
        parts: how many.
        token_budget: the most padded tokens (sequences × longest) of a part. None gives parts of equal
            numbers of sequences; a budget gives parts whose largest padded size is as small as can be.

    Returns:
        Exactly ``parts`` arrays; the last ones are empty where there are fewer samples than parts.

    Raises:
        UserError: even the best cut exceeds the budget.
    """
    if token_budget is None or len(batch) <= parts:
        return np.array_split(batch, parts)
    sizes = lengths[batch].tolist()

    def starts(limit: int) -> list[int] | None:
        """Greedy parts under a limit, or None where it takes more than ``parts``."""
        found, first = [0], 0
        for index in range(len(sizes)):
            if (index - first + 1) * sizes[first] > limit:
                found.append(index)
                first = index
                if len(found) > parts:
                    return None
        return found

    low, high = sizes[0], sizes[0] * len(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if starts(middle) is not None else (middle + 1, high)
    if low > token_budget:
        raise UserError(
            f"token_budget {token_budget} is too small: a global batch of {len(batch)} sequences in {parts} "
            f"micro-batches needs {low} padded tokens in one of them; raise it, or lower micro_batch_size "
            "or max_length"
        )
    found = starts(low) or [0]
    pieces = np.split(batch, found[1:])
    while len(pieces) < parts:  # the greedy cut may need fewer: halve the largest, which exceeds no limit
        largest = max(range(len(pieces)), key=lambda index: len(pieces[index]))
        pieces[largest : largest + 1] = np.array_split(pieces[largest], 2)
    return pieces


class GlobalBatchSampler(Sampler[MicroBatch]):
    """Yields the micro-batches of one rank, in the order of the module's docstring.

    Its length is that of a whole epoch, also where it continues in the middle of one.

    Args:
        lengths: tokens of each sample.
        global_batch_size: sequences per optimiser step, over all ranks.
        micro_batch_size: sequences per forward pass of one rank.
        seed: the run's seed.
        rank: of this process.
        world_size: number of ranks.
        token_budget: see :func:`cut`.
    """

    def __init__(
        self,
        lengths: NDArray[np.integer[Any]],
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        token_budget: int | None = None,
    ) -> None:
        self.accumulation = accumulation(global_batch_size, micro_batch_size, world_size)
        self._lengths, self._seed, self._token_budget = np.asarray(lengths), seed, token_budget
        self._global_batch_size, self._rank, self._world_size = global_batch_size, rank, world_size
        self.epoch = 0
        self.start = 0
        """Micro-batches of this rank to skip in the next iteration (reset by :meth:`set_epoch`)."""

    @property
    def sampler(self) -> GlobalBatchSampler:
        """Itself: Lightning tells the epoch to ``batch_sampler.sampler``."""
        return self

    @property
    def steps(self) -> int:
        """Optimiser steps of an epoch."""
        return -(-len(self._lengths) // self._global_batch_size)

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; another epoch than before starts at its beginning."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __iter__(self) -> Iterator[MicroBatch]:
        lengths, start = self._lengths, self.start
        batches = global_batches(
            lengths, global_batch_size=self._global_batch_size, seed=self._seed, epoch=self.epoch
        )
        for step, batch in enumerate(batches):
            if (step + 1) * self.accumulation <= start:
                continue
            parts = cut(batch, lengths, self.accumulation * self._world_size, self._token_budget)
            members = tuple(sorted(batch.tolist()))
            for index in range(self.accumulation):
                if step * self.accumulation + index < start:
                    continue
                part = parts[index * self._world_size + self._rank]
                filler = len(part) == 0
                samples = (int(batch[-1]),) if filler else tuple(part.tolist())
                yield MicroBatch(samples, members, self.epoch, step, filler)

    def state_dict(self, yielded: int) -> dict[str, int]:
        """Return the position after ``yielded`` micro-batches of this epoch, in terms that hold for any
        cut.
        """
        step, part = divmod(yielded, self.accumulation)
        return {"epoch": self.epoch, "step": step, "part": part, "accumulation": self.accumulation}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a saved position, also with another number of ranks or micro-batches.

        Raises:
            UserError: the position lies inside a global batch that was cut differently.
        """
        if state["part"] and state["accumulation"] != self.accumulation:
            raise UserError(
                f"the checkpoint lies inside an optimiser step that was cut into {state['accumulation']} "
                "micro-batches "
                f"per rank; it cannot continue with {self.accumulation}: use the former sizes, or another "
                "checkpoint"
            )
        self.epoch = state["epoch"]
        self.start = state["step"] * self.accumulation + state["part"]


class ValidationSampler(Sampler[MicroBatch]):
    """Yields the validation micro-batches of one rank: each sample once, longest first, the same ones every
    time.

    Its anchors are fixed, and each batch is its own denominator.

    Args:
        lengths: tokens of each sample.
        micro_batch_size: sequences per forward pass.
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(
        self, lengths: NDArray[np.integer[Any]], *, micro_batch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        order = _longest_first(np.arange(len(lengths)), np.asarray(lengths))
        parts = [order[start : start + micro_batch_size] for start in range(0, len(order), micro_batch_size)]
        parts += [order[:0]] * (-len(parts) % world_size)
        self._batches = []
        for step, part in enumerate(parts[rank::world_size]):
            samples = tuple(part.tolist()) or (int(order[-1]),)
            self._batches.append(
                MicroBatch(samples, tuple(sorted(part.tolist())), FIXED_EPOCH, step, not len(part))
            )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self._batches)
