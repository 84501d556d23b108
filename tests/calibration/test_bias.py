import math

import pytest
import torch

from dspark_train.calibration.bias import fit_shift, shifted
from dspark_train.calibration.fit import calibrate_traces, fit_scalings
from dspark_train.calibration.reliability import measure_reliability
from dspark_train.calibration.selection import reached_slots


def found(trace):
    return fit_shift(trace.confidence_logits, trace.prefix_accepted, reached_slots(trace))


@pytest.mark.parametrize("shift", [-0.8, 0.0, 0.5])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_a_known_shift_is_found_beside_a_temperature(trace, shift, temperature):
    """The fixture's logits are ``honest · T + shift``, so honest ones are ``(logit − shift) / T``."""
    rounds = trace(40_000, [temperature] * 3, 1, shift=shift, centre=0.3)
    assert found(rounds) == pytest.approx(-shift, abs=0.05 * temperature)


def test_only_slots_that_were_reached_count(trace):
    """A rejected prefix says nothing about the slots behind it, however many there are."""
    rounds = trace(20_000, [1.0] * 5, 2, centre=-1.0)
    assert found(rounds) == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize("accepted", [0, 3])
def test_one_sided_rounds_give_a_finite_shift(trace, accepted):
    rounds = trace(50, [1.0] * 3, 3)
    rounds.accepted.fill_(accepted)
    assert math.isfinite(found(rounds))


def test_nothing_reached_no_shift():
    nothing = torch.zeros(4, 3)
    assert fit_shift(nothing, nothing.bool(), nothing.bool()) == 0.0


def test_a_shift_mends_what_temperatures_cannot(trace):
    """Confidences around one half, all too high: no temperature lowers them together."""
    options = {"shift": 0.4, "centre": -0.2}
    fit, heldout = (trace(8000, [1.0] * 3, seed, **options) for seed in (1, 2))
    without, mended = calibrate_traces(fit, heldout, bias=False), calibrate_traces(fit, heldout)
    assert mended.fitted.best.bias == pytest.approx(-0.4, abs=0.1)
    assert without.fitted.with_bias is None
    assert mended.heldout.before.mean_ece == without.heldout.before.mean_ece
    # what temperatures gain alone is told apart from what the bias adds
    assert mended.heldout.sts.mean_ece == without.heldout.after.mean_ece == without.heldout.sts.mean_ece
    assert mended.heldout.after.mean_ece < 0.6 * mended.heldout.sts.mean_ece


def test_the_bias_of_one_sampling_is_no_help_under_another(trace):
    """Honest at temperature 1, over-confident in greedy decoding: the greedy bias would spoil temperature 1."""
    greedy = [trace(8000, [1.0] * 3, seed, shift=0.4, centre=-0.2, sampling=0.0) for seed in (1, 2)]
    sampled = [trace(8000, [1.0] * 3, seed, centre=-0.2) for seed in (3, 4)]
    for_greedy, for_sampled = calibrate_traces(*greedy), calibrate_traces(*sampled)
    right = measure_reliability(sampled[1], for_sampled.fitted.best).mean_ece
    assert right < 0.015
    assert measure_reliability(sampled[1], for_greedy.fitted.best).mean_ece > 2 * right


def test_honest_confidences_are_left_alone_or_nearly(trace):
    fit = trace(8000, [1.0] * 3, 4)
    assert abs(fit_scalings(fit).best.bias) < 0.08


def test_shifted_rounds_differ_in_their_logits_only(trace):
    rounds = trace(5, [1.0] * 3, 1)
    moved = shifted(rounds, 0.25)
    torch.testing.assert_close(moved.confidence_logits, rounds.confidence_logits + 0.25)
    assert moved.accepted is rounds.accepted
