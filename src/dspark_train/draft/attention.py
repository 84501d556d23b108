"""Attention of draft blocks in training (shape legend: :mod:`dspark_train.structures`).

A block's queries see the context of their own sequence strictly before the anchor, and every slot of their own
block in both directions; nothing else. In a layer with a window they see less of the context, and may see their block
up to themselves only (:class:`~dspark_train.draft.config.Sight`). Blocks are packed: N of them, of any sequences, no
dummies.

H below is the number of query heads, K of key-value heads, h the head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_train.draft.config import EVERYTHING, Sight
from dspark_train.structures import Blocks


@dataclass(frozen=True)
class AttentionLayout:
    """Where the blocks of a batch lie, computed once and used by every layer of the same sight."""

    table: Tensor | None
    """``[B·M]`` int64: index of the j-th block of each sequence, 0 where there is none; None where every sequence
    has M blocks, and nothing needs to be gathered."""
    slot: Tensor
    """``[N]`` int64: place of each block in the table."""
    mask: Tensor
    """``[B, 1, M·γ, T + M·γ]`` float32: 0 for the keys that a slot sees, of its sequence's context and of all its
    blocks, −∞ for others. Fused attention would make this of booleans again in every layer, and keep it."""

    @classmethod
    def of(
        cls, blocks: Blocks, num_sequences: int, context_length: int, sight: Sight = EVERYTHING
    ) -> AttentionLayout:
        """Lay out ``blocks`` (sorted by sequence) over ``num_sequences`` rows of ``context_length`` tokens."""
        device, (count, slots) = blocks.sequence.device, blocks.slot_ids.shape
        per_sequence = torch.bincount(blocks.sequence, minlength=num_sequences)
        starts = per_sequence.cumsum(0) - per_sequence
        order = torch.arange(count, device=device)
        place = order - starts[blocks.sequence]
        width = max(1, int(per_sequence.max())) if count else 1
        slot = blocks.sequence * width + place
        table = torch.zeros(num_sequences * width, dtype=torch.int64, device=device)
        anchors = torch.zeros_like(table)
        table[slot], anchors[slot] = order, blocks.anchor
        anchors, positions = (
            anchors.view(num_sequences, width, 1, 1),
            torch.arange(context_length, device=device),
        )
        context = (positions < anchors).expand(-1, -1, slots, -1)  # [B, M, γ, T]
        if sight.window is not None:
            own = anchors + torch.arange(slots, device=device)[:, None]
            context = context & (positions > own - sight.window)
        within = torch.ones(slots, slots, dtype=torch.bool, device=device)
        within = within.tril() if sight.causal else within
        same = torch.eye(width, dtype=torch.bool, device=device)
        block = (same[:, None, :, None] & within[:, None, :]).view(width * slots, width * slots)
        visible = torch.cat([context.flatten(1, 2), block.expand(num_sequences, -1, -1)], dim=-1)[:, None]
        mask = torch.zeros(visible.shape, device=device).masked_fill_(visible.logical_not_(), float("-inf"))
        full = count == num_sequences * width
        return cls(None if full else table, slot, mask)


def block_attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    layout: AttentionLayout,
    scale: float,
) -> Tensor:
    """Attend from every slot to its sequence's context before the anchor and to its own block.

    One fused attention per sequence: a row's keys are the context and the slots of all blocks of the sequence, most
    of which the mask hides. That is more arithmetic than the rows need, and still less time than scores of their own.
    In float32 whatever the operands, since the backward pass of CPUs' fused attention is slower in bfloat16.

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
    _, slots, heads, size = query.shape
    batch, _, kv_heads, _ = context_key.shape

    def by_sequence(packed: Tensor) -> Tensor:
        if layout.table is not None:
            packed = packed.index_select(0, layout.table)
        return packed.view(batch, -1, *packed.shape[2:])

    def wide(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).to(accurate)

    accurate = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        mixed = F.scaled_dot_product_attention(
            wide(by_sequence(query)),
            wide(torch.cat([context_key, by_sequence(block_key)], dim=1)),
            wide(torch.cat([context_value, by_sequence(block_value)], dim=1)),
            attn_mask=layout.mask.to(accurate),
            scale=scale,
            enable_gqa=heads != kv_heads,
        )
    mixed = mixed.to(query.dtype).transpose(1, 2).reshape(-1, slots, heads, size)
    return mixed if layout.table is None else mixed.index_select(0, layout.slot)
