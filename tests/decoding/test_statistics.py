"""Bootstrap: against closed forms, and the laws of pairing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_train.decoding.statistics import Estimate, Sampled, bootstrap_weights, ratio


@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 5))
@settings(max_examples=30)
def test_every_resample_draws_as_many_prompts_as_there_are(prompts: int, resamples: int, seed: int) -> None:
    weights = bootstrap_weights(prompts, resamples, seed)
    assert weights.shape == (resamples, prompts)
    assert (weights.sum(1) == prompts).all()
    assert (weights == bootstrap_weights(prompts, resamples, seed)).all()


def test_value_is_the_ratio_of_sums_not_the_mean_of_ratios() -> None:
    one = ratio([1, 90], [1, 30], bootstrap_weights(2, 100, 0))
    assert one.value == pytest.approx(91 / 31)
    # the resamples are (1,1), (2,0) or (0,2) prompts: exactly three values can occur
    assert {round(v, 9) for v in one.samples} == {1.0, 3.0, round(91 / 31, 9)}


def test_width_of_the_interval_matches_the_normal_theory() -> None:
    values = np.random.default_rng(0).normal(3.0, 0.5, size=400)
    mean = ratio(values.tolist(), [1.0] * 400, bootstrap_weights(400, 4000, 1))
    bounds = mean.interval(0.95)
    assert bounds is not None
    half = 1.96 * values.std() / math.sqrt(400)
    assert bounds[0] == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert bounds[1] == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_difference_of_paired_measurements_is_sharper_than_of_independent_ones() -> None:
    base = np.random.default_rng(0).normal(3.0, 1.0, size=50)
    shared = bootstrap_weights(50, 1000, 0)
    ones = [1.0] * 50
    paired = ratio((base + 0.1).tolist(), ones, shared) - ratio(base.tolist(), ones, shared)
    unpaired = ratio((base + 0.1).tolist(), ones, shared) - ratio(
        base.tolist(), ones, bootstrap_weights(50, 1000, 1)
    )
    assert paired.samples == pytest.approx(np.full(1000, 0.1))
    assert unpaired.samples.std() > 0.1


def test_mean_weighs_parts_alike_and_division_is_by_resample() -> None:
    one, two = Sampled(1.0, np.array([1.0, 2.0])), Sampled(3.0, np.array([3.0, 4.0]))
    mean = Sampled.mean([one, two])
    assert mean.value == 2.0
    assert mean.samples.tolist() == [2.0, 3.0]
    assert (two / one).samples.tolist() == [3.0, 2.0]
    with pytest.raises(ValueError, match="at least one"):
        Sampled.mean([])


def test_undefined_statistics_are_null_not_numbers() -> None:
    nothing = ratio([0, 0], [0, 0], bootstrap_weights(2, 50, 0))
    assert nothing.interval(0.95) is None
    assert nothing.estimate(0.95) == Estimate(None, None, None)
    with pytest.raises(ValueError, match="at least one prompt"):
        bootstrap_weights(0, 10, 0)
