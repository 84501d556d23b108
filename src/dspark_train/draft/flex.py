"""Attention of draft blocks on GPUs: FlexAttention with an index-based mask, built once per batch.

All keys lie in one row: the contexts of the B sequences, T each, then the γ slots of each of the N blocks. A query
of block n sees context position t of its own sequence where ``t < anchor``, and the slots of block n. Tiles of keys
that no query of a tile may see are skipped, so the cost follows the blocks, not the padding.

H is the number of query heads, K of key-value heads, h the head size (others: :mod:`dspark_train.structures`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dspark_train.structures import Blocks


@dataclass(frozen=True, eq=False)
class FlexLayout:
    """The mask of a batch, used by every layer."""

    mask: BlockMask
    """Over ``N·γ`` queries and ``B·T + N·γ`` keys."""

    @classmethod
    def of(cls, blocks: Blocks, num_sequences: int, context_length: int) -> FlexLayout:
        """Make the mask of ``blocks`` over ``num_sequences`` rows of ``context_length`` tokens."""
        count, slots = blocks.slot_ids.shape
        sequence, anchor, contexts = blocks.sequence, blocks.anchor, num_sequences * context_length

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block = query // slots
            in_context = (key // context_length == sequence[block]) & (key % context_length < anchor[block])
            return torch.where(key < contexts, in_context, (key - contexts) // slots == block)

        mask = create_block_mask(
            visible, None, None, count * slots, contexts + count * slots, device=str(anchor.device)
        )
        return cls(mask)


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
    )
    return mixed[0].transpose(0, 1).unflatten(0, query.shape[:2])


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
