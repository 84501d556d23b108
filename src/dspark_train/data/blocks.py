"""Anchors and draft blocks: which positions a batch trains on (shape legend: :mod:`dspark_train.structures`).

Everything here runs on the CPU, from integers alone, and depends on ``(seed, epoch, sample)`` only: never on the
rank, the worker, or the place of a sequence in its batch. So any process can tell the supervised weight of any
sample before a single forward pass, and a global batch has one denominator however it is cut.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark_train.structures import Blocks, TokenBatch

FIXED_EPOCH = -1
"""Epoch number of validation: its anchors never change, so that two validations compare."""


def slot_weights(block_size: int, decay: float) -> Tensor:
    """Weights ``w_k = exp(-k / decay)`` of the slots, ``[γ]`` float32, for 0-based ``k``."""
    return torch.exp(-torch.arange(block_size, dtype=torch.float32) / decay)


def eligible_anchors(loss_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Positions ``n`` such that both ``n`` and ``n + 1`` are supervised, ascending, from a ``[T]`` mask."""
    mask = np.asarray(loss_mask, dtype=bool)
    return np.flatnonzero(mask[:-1] & mask[1:]).astype(np.int64)


def draw_anchors(
    loss_mask: NDArray[np.bool_], *, num_anchors: int, seed: int, epoch: int, sample_id: int
) -> NDArray[np.int64]:
    """Draw up to ``num_anchors`` eligible anchors of one sequence, uniformly and without replacement.

    Args:
        loss_mask: ``[T]`` supervised tokens of the sequence, without padding.
        num_anchors: the most anchors to draw (A).
        seed: the run's seed.
        epoch: epoch number, or :data:`FIXED_EPOCH` in validation.
        sample_id: index of the sequence in its data set.

    Returns:
        Ascending anchor positions, ``[min(A, eligible)]``.
    """
    eligible = eligible_anchors(loss_mask)
    if len(eligible) <= num_anchors:
        return eligible
    generator = np.random.default_rng([seed, epoch + 1, sample_id])
    return np.sort(generator.choice(eligible, size=num_anchors, replace=False, shuffle=False))


def supervised_slots(
    loss_mask: NDArray[np.bool_], anchors: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    """Count the supervised slots of each block: the run of supervised labels that starts at ``n + 1``.

    Args:
        loss_mask: ``[T]`` supervised tokens of the sequence, without padding.
        anchors: ``[n]`` anchor positions.
        block_size: γ.

    Returns:
        ``[n]`` numbers in 1..γ.
    """
    mask = np.asarray(loss_mask, dtype=bool)
    ends = np.flatnonzero(~np.append(mask, False))
    run_end = ends[np.searchsorted(ends, anchors + 1)]
    return np.minimum(run_end - (anchors + 1), block_size)


def sample_weight(
    loss_mask: NDArray[np.bool_],
    *,
    num_anchors: int,
    block_size: int,
    decay: float,
    seed: int,
    epoch: int,
    sample_id: int,
) -> float:
    """Σ w over the supervised slots that one sequence contributes in one epoch (0.0 with no eligible anchor)."""
    anchors = draw_anchors(loss_mask, num_anchors=num_anchors, seed=seed, epoch=epoch, sample_id=sample_id)
    counts = supervised_slots(loss_mask, anchors, block_size)
    cumulative = np.concatenate([[0.0], np.cumsum(slot_weights(block_size, decay).double().numpy())])
    return float(cumulative[counts].sum())


def build_blocks(
    tokens: TokenBatch, *, num_anchors: int, block_size: int, mask_token_id: int, seed: int, epoch: int
) -> Blocks:
    """Draw the anchors of a batch and pack its draft blocks.

    Args:
        tokens: the batch, on the CPU.
        num_anchors: the most anchors per sequence (A).
        block_size: γ.
        mask_token_id: id fed to every slot but the first.
        seed: the run's seed.
        epoch: epoch number, or :data:`FIXED_EPOCH`.

    Returns:
        Only real blocks, sorted by sequence and anchor; N = 0 where no sequence has an eligible anchor.
    """
    masks, lengths = tokens.loss_mask.numpy(), tokens.lengths.tolist()
    rows, anchors, counts = [], [], []
    for row, (length, sample_id) in enumerate(zip(lengths, tokens.sample_ids.tolist(), strict=True)):
        mask = masks[row, :length]
        drawn = draw_anchors(mask, num_anchors=num_anchors, seed=seed, epoch=epoch, sample_id=sample_id)
        rows.append(np.full(len(drawn), row, dtype=np.int64))
        anchors.append(drawn)
        counts.append(supervised_slots(mask, drawn, block_size))
    return pack_blocks(
        tokens.input_ids,
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.concatenate(anchors)),
        torch.from_numpy(np.concatenate(counts)),
        block_size=block_size,
        mask_token_id=mask_token_id,
    )


def pack_blocks(
    input_ids: Tensor,
    sequence: Tensor,
    anchor: Tensor,
    counts: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Fill in the tokens of given blocks.

    Args:
        input_ids: ``[B, T]``.
        sequence: ``[N]`` row of each block.
        anchor: ``[N]`` anchor position of each block.
        counts: ``[N]`` supervised slots of each block.
        block_size: γ.
        mask_token_id: id fed to every slot but the first.
    """
    slots = torch.arange(block_size)
    supervised = slots < counts[:, None]
    label_positions = (anchor[:, None] + 1 + slots).clamp(max=input_ids.shape[1] - 1)
    labels = input_ids[sequence[:, None], label_positions].masked_fill(~supervised, 0)
    anchor_token = input_ids[sequence, anchor]
    slot_ids = torch.full_like(labels, mask_token_id)
    slot_ids[:, 0] = anchor_token
    previous = torch.cat([anchor_token[:, None], labels[:, :-1]], dim=1)
    return Blocks(sequence, anchor, slot_ids, labels, previous, supervised)
