"""Attention of draft blocks on GPUs: FlexAttention over tiles that follow from the anchors.

All keys lie in one row: the contexts of the B sequences, T each, then the γ slots of each of the N blocks. A query sees
two spans of them: context of its own sequence before its anchor, and slots of its own block. Which tiles of keys a tile
of queries meets follows from the ends of these spans, so that nothing of size queries × keys is ever made, and tiles
that no query of a tile sees are skipped.

H is the number of query heads, K of key-value heads, h the head size (others: :mod:`dspark_train.structures`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dspark_train.draft.config import EVERYTHING, Sight
from dspark_train.structures import Blocks

TILE = 128
"""Queries and keys of a tile, as FlexAttention's kernels take them by default."""
RECOMPILATIONS = 64
"""Programs of FlexAttention that are kept. Past its limit, Dynamo runs the eager form, which holds all scores."""


@dataclass(frozen=True, eq=False)
class FlexLayout:
    """The mask of a batch, used by every layer of the same sight."""

    mask: BlockMask
    """Over ``N·γ`` queries and ``B·T + N·γ`` keys."""

    @classmethod
    def of(
        cls, blocks: Blocks, num_sequences: int, context_length: int, sight: Sight = EVERYTHING
    ) -> FlexLayout:
        """Make the mask of ``blocks`` over ``num_sequences`` rows of ``context_length`` tokens.

        Nothing waits for the device. Memory: some 80 bytes per pair of tiles, a two-hundredth of a byte per query and
        key (7 MiB for eight sequences of 1,024 tokens with 512 blocks of seven slots each).
        """
        count, slots = blocks.slot_ids.shape
        contexts = num_sequences * context_length
        queries, keys = count * slots, contexts + count * slots
        row = torch.arange(queries, device=blocks.anchor.device)
        block, slot = row // slots, row % slots
        first, anchor = blocks.sequence[block] * context_length, blocks.anchor[block]
        hidden = 0 if sight.window is None else (anchor + slot + 1 - sight.window).clamp_min(0)
        own = contexts + block * slots
        spans = [(first + hidden, first + anchor), (own, own + (slot + 1 if sight.causal else slots))]
        (context_start, context_end), (own_start, own_end) = (
            (start.to(torch.int32), end.to(torch.int32)) for start, end in spans
        )

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            in_context = (key >= context_start[query]) & (key < context_end[query])
            return in_context | ((key >= own_start[query]) & (key < own_end[query]))

        shape = -(-queries // TILE), -(-keys // TILE)
        found = [_tiles(start, end, *shape) for start, end in spans]
        some, whole = (torch.stack(tiles).any(0) for tiles in zip(*found, strict=True))
        mask = BlockMask.from_kv_blocks(
            *_ordered(some & ~whole),
            *_ordered(whole),
            BLOCK_SIZE=TILE,
            mask_mod=visible,
            seq_lengths=(queries, keys),
        )
        return cls(mask)


def _tiles(start: Tensor, end: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Tiles of which some query sees some key, and of which every query sees every key: ``[rows, columns]`` bool.

    Args:
        start: ``[Q]`` first key that each query sees.
        end: ``[Q]`` one after the last; nothing is seen where it is not larger.
        rows: tiles of queries; the last one may be partly empty.
        columns: tiles of keys.
    """
    padding = rows * TILE - start.numel()
    start, end = F.pad(start, (0, padding)), F.pad(end, (0, padding))
    row = torch.arange(rows * TILE, device=start.device) // TILE
    seen = (end > start).to(torch.int32)
    steps = torch.zeros(rows, columns + 1, dtype=torch.int32, device=start.device)
    steps.index_put_((row, start // TILE), seen, accumulate=True)
    steps.index_put_((row, (end + TILE - 1) // TILE), -seen, accumulate=True)
    some = steps.cumsum(-1, dtype=torch.int32)[:, :-1] > 0
    column = torch.arange(columns, device=start.device)
    latest, earliest = (
        start.view(rows, TILE).amax(-1, keepdim=True),
        end.view(rows, TILE).amin(-1, keepdim=True),
    )
    return some, (column * TILE >= latest) & ((column + 1) * TILE <= earliest)


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Count of the tiles in each row, ``[1, 1, rows]``, and their columns first, ``[1, 1, rows, columns]``; int32."""
    columns = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[None, None], columns.to(torch.int32)[None, None]


def flex_block_attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    layout: FlexLayout,
    scale: float,
) -> Tensor:
    """The same function as :func:`dspark_train.draft.attention.block_attention`.

    Args:
        query: ``[N, γ, H, h]``.
        context_key: ``[B, T, K, h]``.
        context_value: ``[B, T, K, h]``.
        block_key: ``[N, γ, K, h]``.
        block_value: ``[N, γ, K, h]``.
        layout: of the batch's blocks.
        scale: factor of the scores.

    Returns:
        ``[N, γ, H, h]``.
    """

    def row(context: Tensor, block: Tensor) -> Tensor:
        joined = torch.cat([context.flatten(0, 1), block.flatten(0, 1)])
        return joined.transpose(0, 1)[None]

    attend = _compiled() if query.is_cuda else flex_attention
    mixed: Any = attend(
        query.flatten(0, 1).transpose(0, 1)[None],
        row(context_key, block_key),
        row(context_value, block_value),
        block_mask=layout.mask,
        scale=scale,
        enable_gqa=query.shape[2] != block_key.shape[2],
        # below 128 queries Inductor would take the decoding kernel, which has no valid form for such masks
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    return mixed[0].transpose(0, 1).unflatten(0, query.shape[:2])


@cache
def _compiled() -> Any:
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILATIONS)
    return torch.compile(flex_attention, dynamic=True)
