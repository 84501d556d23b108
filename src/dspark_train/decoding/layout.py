"""Which rows of a pass belong where: ragged as they come, or padded to fixed shapes.

R  requests      S  rows (tokens) of a pass, of all requests, flattened      W  most rows of a request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

TILE = 64
"""Positions by which the part of the cache that rows read grows; what lies beyond their own is masked."""


@dataclass(frozen=True)
class RowLayout:
    """Rows of one pass: ``counts[i]`` consecutive positions from ``starts[i]`` in slot ``i``, slot after slot.

    Every row sees the positions of its own slot up to and including its own (causal), or, where ``block`` is
    set, up to the last row of its slot (a draft block sees itself in both directions).
    """

    counts: Sequence[int]
    starts: Sequence[int]
    device: torch.device
    block: bool = False
    first_slot: int = 0
    """Slot of ``counts[0]``."""

    @property
    def requests(self) -> int:
        """R."""
        return len(self.counts)

    @property
    def single(self) -> bool:
        """Whether one slot owns all rows, so that they can be sliced instead of gathered."""
        return len(self.counts) == 1

    @cached_property
    def slot(self) -> Tensor:
        """``[S]`` int64: slot of each row."""
        counts = torch.tensor(self.counts, device=self.device)
        slots = torch.arange(self.first_slot, self.first_slot + len(self.counts), device=self.device)
        return slots.repeat_interleave(counts, output_size=sum(self.counts))

    @cached_property
    def offset(self) -> Tensor:
        """``[S]`` int64: place of each row among its slot's."""
        return torch.cat([torch.arange(count, device=self.device) for count in self.counts])

    @cached_property
    def position(self) -> Tensor:
        """``[S]`` int64: position of each row."""
        if self.single:
            return torch.arange(self.starts[0], self.starts[0] + self.counts[0], device=self.device)
        return torch.tensor(self.starts, device=self.device)[self.slot - self.first_slot] + self.offset

    @cached_property
    def grid(self) -> Tensor:
        """``[R, max count]`` int64: row of each place, 0 where a slot has fewer rows."""
        width = max(self.counts)
        firsts, total = [], 0
        for count in self.counts:
            firsts.append(total)
            total += count
        places = torch.arange(width, device=self.device)
        rows = torch.tensor(firsts, device=self.device)[:, None] + places
        return torch.where(places < torch.tensor(self.counts, device=self.device)[:, None], rows, 0)

    @cached_property
    def cell(self) -> Tensor:
        """``[S]`` int64: place of each row in the flattened grid."""
        return (self.slot - self.first_slot) * max(self.counts) + self.offset

    @property
    def reach(self) -> int:
        """Positions that rows read, from 0: all that any of them can see, and the rest of the last tile."""
        most = max(start + count for start, count in zip(self.starts, self.counts, strict=True))
        return most if self.block else whole_tiles(most)

    def mask(self, window: int | None, dtype: torch.dtype, causal: bool = False) -> Tensor | None:
        """Additive mask ``[R, max count, reach]``; None where every row sees all of it.

        Args:
            window: a row sees this many positions, its own included; None is all.
            dtype: of the queries.
            causal: rows see the rows of their slot up to themselves, in a block too.
        """
        block = self.block and not causal
        if window is not None and window >= self.reach:
            window = None
        if self.single and window is None and block:
            return None
        starts = torch.tensor(self.starts, device=self.device)[:, None]
        counts = torch.tensor(self.counts, device=self.device)[:, None]
        return additive_mask(starts, counts, max(self.counts), self.reach, window, dtype, block)


class FixedLayout:
    """What :class:`RowLayout` says, in buffers of fixed shapes and addresses."""

    single = False
    first_slot = 0

    def __init__(
        self,
        rows: int,
        requests: int,
        width: int,
        reach: int,
        scratch: int,
        device: torch.device,
        block: bool,
    ) -> None:
        """Make the buffers.

        Args:
            rows: S, padding included.
            requests: R, padding included.
            width: W.
            reach: positions that rows read.
            scratch: slot that rows of padding write to.
            device: of the buffers.
            block: as in RowLayout.
        """
        self.rows, self.requests, self.width, self.reach = rows, requests, width, reach
        self.scratch, self.device, self.block = scratch, device, block
        sizes = [rows] * 3 + [requests] * 2 + [requests * width]
        self._all = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.slot, self.position, self.cell, self.starts, self.counts, grid = self._all.split(sizes)
        self.grid = grid.view(requests, width)

    def load(self, layout: RowLayout) -> None:
        """Take over the rows of ``layout``, in one copy to the device."""
        slot: list[int] = []
        position: list[int] = []
        cell: list[int] = []
        grid: list[int] = []
        for request, (count, start) in enumerate(zip(layout.counts, layout.starts, strict=True)):
            grid += [len(slot) + min(place, count - 1) for place in range(self.width)]
            slot += [request] * count
            position += range(start, start + count)
            cell += range(request * self.width, request * self.width + count)
        rows, requests = self.rows - len(slot), self.requests - len(layout.counts)
        flat = [
            *slot, *[self.scratch] * rows,
            *position, *[0] * rows,
            *cell, *[0] * rows,
            *layout.starts, *[0] * requests,
            *layout.counts, *[0] * requests,
            *grid, *[0] * (requests * self.width),
        ]  # fmt: skip
        staged = torch.tensor(flat)
        if self.device.type == "cuda":
            staged = staged.pin_memory()
        self._all.copy_(staged, non_blocking=True)

    def mask(self, window: int | None, dtype: torch.dtype, causal: bool = False) -> Tensor | None:
        """As in RowLayout, computed from the buffers; never None, since shapes must not depend on the rows."""
        block = self.block and not causal
        return additive_mask(
            self.starts[:, None], self.counts[:, None], self.width, self.reach, window, dtype, block
        )


def whole_tiles(length: int) -> int:
    """``length``, rounded up to whole tiles."""
    return -(-length // TILE) * TILE


def additive_mask(
    starts: Tensor,
    counts: Tensor,
    width: int,
    reach: int,
    window: int | None,
    dtype: torch.dtype,
    block: bool,
) -> Tensor:
    """Mask ``[R, width, reach]``: 0 where a row sees a position, −∞ where not.

    Args:
        starts: ``[R, 1]`` first position of each request's rows.
        counts: ``[R, 1]`` its rows; places beyond them see what the last one sees, and position 0 always.
        width: places.
        reach: positions.
        window: a row sees this many positions, its own included; None is all.
        dtype: of the queries.
        block: rows see all rows of their request instead of those up to themselves.
    """
    place = torch.arange(width, device=starts.device)
    own = starts + place.minimum(counts - 1).clamp_min(0)
    end = (starts + counts).expand_as(own) if block else own + 1
    keys = torch.arange(reach, device=starts.device)
    hidden = keys >= end.clamp_min(1)[..., None]
    if window is not None:
        hidden |= keys <= own[..., None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=starts.device).masked_fill_(hidden, float("-inf"))
