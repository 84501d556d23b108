"""Anchors and blocks: laws over random masks, and cases checked by hand."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_train.data.blocks import build_blocks, draw_anchors, eligible_anchors, sample_weight, slot_weights
from dspark_train.structures import TokenBatch

masks = st.lists(st.booleans(), min_size=2, max_size=40)


def batch_of(masks_: list[list[bool]], sample_ids: list[int]) -> TokenBatch:
    longest = max(map(len, masks_))
    mask = torch.zeros(len(masks_), longest, dtype=torch.bool)
    for row, values in enumerate(masks_):
        mask[row, : len(values)] = torch.tensor(values)
    ids = torch.arange(mask.numel()).view(mask.shape) + 1
    return TokenBatch(ids, torch.tensor([len(m) for m in masks_]), mask, torch.tensor(sample_ids))


def build(tokens: TokenBatch, num_anchors: int, block_size: int, epoch: int = 0):
    return build_blocks(
        tokens, num_anchors=num_anchors, block_size=block_size, mask_token_id=0, seed=3, epoch=epoch
    )


@given(st.lists(masks, min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 5), st.integers(-1, 3))
@settings(max_examples=200, deadline=None)
def test_blocks_against_a_plain_loop(
    masks_: list[list[bool]], num_anchors: int, block_size: int, epoch: int
) -> None:
    tokens = batch_of(masks_, list(range(len(masks_))))
    blocks = build(tokens, num_anchors, block_size, epoch)
    expected = 0
    for row, mask in enumerate(masks_):
        anchors = blocks.anchor[blocks.sequence == row].tolist()
        eligible = [n for n in range(len(mask) - 1) if mask[n] and mask[n + 1]]
        assert anchors == sorted(set(anchors))
        assert set(anchors) <= set(eligible)
        assert len(anchors) == min(num_anchors, len(eligible))
        expected += len(anchors)
    assert blocks.anchor.numel() == expected
    for i in range(expected):
        row, n = int(blocks.sequence[i]), int(blocks.anchor[i])
        mask, alive = masks_[row], True
        for k in range(block_size):
            label = n + k + 1
            alive = alive and label < len(mask) and mask[label]
            assert bool(blocks.supervised[i, k]) == alive
            if alive:
                assert blocks.labels[i, k] == tokens.input_ids[row, label]
                assert blocks.previous[i, k] == tokens.input_ids[row, label - 1]
        assert blocks.slot_ids[i, 0] == tokens.input_ids[row, n]
        assert blocks.slot_ids[i, 1:].eq(0).all()


@given(masks, st.integers(1, 5), st.integers(1, 5), st.integers(-1, 5))
@settings(max_examples=100, deadline=None)
def test_weight_is_known_without_the_batch(
    mask: list[bool], num_anchors: int, block_size: int, epoch: int
) -> None:
    blocks = build(batch_of([mask], [7]), num_anchors, block_size, epoch)
    direct = (blocks.supervised * slot_weights(block_size, 4.0)).double().sum()
    alone = sample_weight(
        np.array(mask),
        num_anchors=num_anchors,
        block_size=block_size,
        decay=4.0,
        seed=3,
        epoch=epoch,
        sample_id=7,
    )
    assert abs(float(direct) - alone) < 1e-5


def test_anchors_do_not_depend_on_place_in_the_batch() -> None:
    mask = [False] * 3 + [True] * 30
    together = build(batch_of([[True] * 9, mask], [1, 5]), 4, 3)
    alone = build(batch_of([mask], [5]), 4, 3)
    assert torch.equal(together.anchor[together.sequence == 1], alone.anchor)


def test_anchors_change_with_epoch_and_seed_but_not_by_themselves() -> None:
    mask = np.array([True] * 200)
    draw = lambda **kw: draw_anchors(mask, **({"num_anchors": 8, "seed": 0, "epoch": 0, "sample_id": 0} | kw))  # noqa: E731
    assert np.array_equal(draw(), draw())
    for change in ({"seed": 1}, {"epoch": 1}, {"sample_id": 1}):
        assert not np.array_equal(draw(), draw(**change))


def test_anchors_are_uniform() -> None:
    mask = np.array([False, True, True, True, True, True])
    counts = np.zeros(6)
    for sample in range(4000):
        counts[draw_anchors(mask, num_anchors=1, seed=0, epoch=0, sample_id=sample)] += 1
    assert eligible_anchors(mask).tolist() == [1, 2, 3, 4]
    expected = 1000
    assert ((counts[1:5] - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees, p = 0.001


def test_one_token_answer_has_no_anchor() -> None:
    blocks = build(batch_of([[False, False, True]], [0]), 4, 3)
    assert blocks.anchor.numel() == 0
    assert blocks.slot_ids.shape == (0, 3)
