"""Attention of draft blocks in training (shape legend: :mod:`dspark_train.structures`).

A block's queries see the context of their own sequence strictly before the anchor, and every slot of their own
block in both directions; nothing else. Blocks are packed: N of them, of any sequences, no dummies.

H below is the number of query heads, K of key-value heads, h the head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_train.structures import Blocks


@dataclass(frozen=True)
class AttentionLayout:
    """Where the blocks of a batch lie, computed once and used by every layer."""

    table: Tensor
    """``[B, M]`` int64: index of the j-th block of each sequence; 0 where there is none."""
    slot: Tensor
    """``[N]`` int64: place of each block in the flattened table."""
    hidden_context: Tensor
    """``[B, M, T]`` bool: context position is at or after the anchor (or the place is empty)."""

    @classmethod
    def of(cls, blocks: Blocks, num_sequences: int, context_length: int) -> AttentionLayout:
        """Lay out ``blocks`` (sorted by sequence) over ``num_sequences`` rows of ``context_length`` tokens."""
        device, count = blocks.sequence.device, blocks.sequence.numel()
        per_sequence = torch.bincount(blocks.sequence, minlength=num_sequences)
        starts = per_sequence.cumsum(0) - per_sequence
        order = torch.arange(count, device=device)
        place = order - starts[blocks.sequence]
        width = max(1, int(per_sequence.max())) if count else 1
        slot = blocks.sequence * width + place
        table = torch.zeros(num_sequences * width, dtype=torch.int64, device=device)
        anchors = torch.zeros_like(table)
        table[slot], anchors[slot] = order, blocks.anchor
        positions = torch.arange(context_length, device=device)
        hidden = positions >= anchors.view(num_sequences, width, 1)
        return cls(table.view(num_sequences, width), slot, hidden)


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

    The scores against the context and against the block are computed apart and share one softmax, so no slot ever
    pays for another block's keys.

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
    count, slots, heads, size = query.shape
    batch, length, kv_heads, _ = context_key.shape
    groups, width = heads // kv_heads, layout.table.shape[1]

    grouped = (query * scale).view(count, slots, kv_heads, groups, size)
    padded = grouped[layout.table.flatten()].view(batch, width * slots, kv_heads, groups, size)
    padded = padded.permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, groups * width * slots, size)
    scores = padded @ context_key.permute(0, 2, 3, 1)
    scores = scores.view(batch, kv_heads, groups, width, slots, length).float()
    scores = scores.masked_fill(layout.hidden_context[:, None, None, :, None, :], float("-inf"))

    own = grouped.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, groups * slots, size)
    own_scores = (own @ block_key.permute(0, 2, 3, 1)).float()
    own_scores = own_scores[layout.table.flatten()].view(batch, width, kv_heads, groups, slots, slots)
    own_scores = own_scores.permute(0, 2, 3, 1, 4, 5)

    weights = torch.cat([scores, own_scores], dim=-1).softmax(dim=-1).to(query.dtype)
    context_weights, own_weights = weights.split([length, slots], dim=-1)

    context_weights = context_weights.reshape(batch, kv_heads, groups * width * slots, length)
    mixed = context_weights @ context_value.permute(0, 2, 1, 3)
    mixed = mixed.view(batch, kv_heads, groups, width, slots, size).permute(0, 3, 4, 1, 2, 5)
    mixed = mixed.reshape(batch * width, slots, heads, size)[layout.slot]

    own_weights = own_weights.permute(0, 3, 1, 2, 4, 5).reshape(
        batch * width, kv_heads, groups * slots, slots
    )
    own_mixed = own_weights[layout.slot] @ block_value.permute(0, 2, 1, 3)
    own_mixed = own_mixed.view(count, kv_heads, groups, slots, size).permute(0, 3, 1, 2, 4)
    return mixed + own_mixed.reshape(count, slots, heads, size)
