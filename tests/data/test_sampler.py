from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_train.data.blocks import FIXED_EPOCH
from dspark_train.data.sampler import (
    GlobalBatchSampler,
    MicroBatch,
    ValidationSampler,
    accumulation,
    cut,
    global_batches,
)
from dspark_train.errors import UserError

LENGTHS = np.random.default_rng(0).integers(5, 400, size=203)


def epoch_of(samplers: list[GlobalBatchSampler]) -> list[list[MicroBatch]]:
    return [list(sampler) for sampler in samplers]


def samplers(world_size: int, micro: int, size: int = 24, **options: int) -> list[GlobalBatchSampler]:
    return [
        GlobalBatchSampler(
            LENGTHS,
            global_batch_size=size,
            micro_batch_size=micro,
            seed=3,
            rank=rank,
            world_size=world_size,
            **options,
        )
        for rank in range(world_size)
    ]


def steps_of(ranks: list[list[MicroBatch]]) -> list[list[int]]:
    """Samples of each optimiser step, over all ranks, without fillers."""
    steps: dict[int, list[int]] = {}
    for rank in ranks:
        for micro in rank:
            steps.setdefault(micro.step, []).extend(() if micro.filler else micro.samples)
    return [sorted(steps[step]) for step in sorted(steps)]


@pytest.mark.parametrize(("world_size", "micro"), [(1, 24), (1, 1), (2, 4), (3, 8), (4, 2), (8, 3), (24, 1)])
def test_global_batches_do_not_depend_on_the_cut(world_size: int, micro: int) -> None:
    reference = steps_of(epoch_of(samplers(1, 24)))
    ranks = epoch_of(samplers(world_size, micro))
    assert steps_of(ranks) == reference
    assert sorted(chain(*reference)) == list(range(len(LENGTHS)))
    for rank in ranks:
        assert len(rank) == len(samplers(world_size, micro)[0])
        for micro_batch in rank:
            assert list(micro_batch.global_samples) == reference[micro_batch.step]


@given(st.integers(1, 80), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_every_sample_once_and_every_rank_the_same_number(
    samples: int, micro: int, world_size: int, accumulated: int, epoch: int
) -> None:
    lengths = np.random.default_rng(samples).integers(1, 50, size=samples)
    ranks = []
    for rank in range(world_size):
        sampler = GlobalBatchSampler(
            lengths,
            global_batch_size=micro * world_size * accumulated,
            micro_batch_size=micro,
            seed=0,
            rank=rank,
            world_size=world_size,
        )
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
        assert len(ranks[-1]) == len(sampler) == sampler.steps * accumulated
        assert all(1 <= len(item.samples) <= micro for item in ranks[-1])
    assert sorted(chain(*steps_of(ranks))) == list(range(samples))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return np.concatenate(global_batches(LENGTHS, global_batch_size=8, seed=seed, epoch=epoch)).tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_lengths_are_grouped() -> None:
    def padding(batches: list[np.ndarray]) -> float:
        padded = sum(len(batch) * LENGTHS[batch].max() for batch in batches)
        return 1 - LENGTHS.sum() / padded

    grouped = global_batches(LENGTHS, global_batch_size=8, seed=0, epoch=0)
    shuffled = np.array_split(np.random.default_rng(0).permutation(len(LENGTHS)), len(grouped))
    assert padding(grouped) < 0.25 * padding(shuffled)


def test_sizes_that_do_not_divide_are_named() -> None:
    assert accumulation(512, 4, 8) == 16
    with pytest.raises(UserError, match=r"global_batch_size 10 .* 4 × 2 = 8"):
        accumulation(10, 4, 2)
    with pytest.raises(UserError, match="micro_batch_size is 0"):
        accumulation(10, 0, 2)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 8))
def test_token_budget_cut_is_the_best_contiguous_one(lengths: list[int], parts: int) -> None:
    sizes = np.sort(np.array(lengths))[::-1]
    batch = np.arange(len(sizes))
    pieces = cut(batch, sizes, parts, token_budget=10**9)
    assert len(pieces) == parts
    assert np.concatenate(pieces).tolist() == batch.tolist()
    padded = max(len(piece) * sizes[piece[0]] for piece in pieces if len(piece))
    # dynamic programme over contiguous cuts
    best = [[float("inf")] * (len(sizes) + 1) for _ in range(parts + 1)]
    best[0][0] = 0
    for part in range(1, parts + 1):
        for end in range(len(sizes) + 1):
            best[part][end] = min(
                max(best[part - 1][start], (end - start) * (sizes[start] if start < end else 0))
                for start in range(end + 1)
            )
    if len(batch) > parts:
        assert padded == best[parts][len(sizes)]


def test_token_budget_that_cannot_hold_is_refused() -> None:
    sampler = samplers(1, 4, token_budget=300)[0]
    with pytest.raises(UserError, match="token_budget 300 is too small"):
        list(sampler)


@pytest.mark.parametrize("consumed", [0, 1, 5, 6, 17, 53])
def test_position_is_restored(consumed: int) -> None:
    sampler, fresh = samplers(2, 2)[1], samplers(2, 2)[1]
    sampler.set_epoch(2)
    whole = list(sampler)
    fresh.load_state_dict(sampler.state_dict(consumed))
    fresh.set_epoch(2)  # Lightning tells the epoch again
    assert list(fresh) == whole[consumed:]
    assert len(fresh) == len(whole)


def test_position_holds_for_another_number_of_ranks() -> None:
    two = samplers(2, 2)
    state = two[0].state_dict(yielded=3 * two[0].accumulation)
    one = samplers(1, 3)[0]
    one.load_state_dict(state)
    assert steps_of([list(one)]) == steps_of(epoch_of(two))[3:]
    with pytest.raises(UserError, match="inside an optimiser step"):
        one.load_state_dict(two[0].state_dict(yielded=4))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_validation_covers_each_sample_once_in_fixed_order(world_size: int) -> None:
    ranks = [
        list(ValidationSampler(LENGTHS, micro_batch_size=6, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    seen = [sample for rank in ranks for micro in rank if not micro.filler for sample in micro.samples]
    assert sorted(seen) == list(range(len(LENGTHS)))
    assert {micro.epoch for rank in ranks for micro in rank} == {FIXED_EPOCH}
