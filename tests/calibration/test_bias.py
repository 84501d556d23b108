import math

import pytest
import torch

from dspark_train.calibration.bias import fit_shift, shifted
from dspark_train.calibration.fit import calibrate_traces, choose_shift
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


def test_no_rounds_no_shift(trace):
    assert choose_shift(trace(0, [1.0], 1)) == 0.0
    nothing = torch.zeros(4, 3)
    assert fit_shift(nothing, nothing.bool(), nothing.bool()) == 0.0


def test_a_shift_mends_what_temperatures_cannot(trace):
    """Confidences around one half, all too high: no temperature lowers them together."""
    options = {"shift": 0.4, "centre": -0.2}
    fit, heldout = (trace(8000, [1.0] * 3, seed, **options) for seed in (1, 2))
    shift = choose_shift(fit)
    assert shift == pytest.approx(-0.4, abs=0.1)
    without, mended = calibrate_traces(fit, heldout), calibrate_traces(fit, heldout, shift)
    assert mended.heldout.before.mean_ece == without.heldout.before.mean_ece
    assert mended.heldout.after.mean_ece < 0.6 * without.heldout.after.mean_ece


def test_honest_confidences_are_left_alone_or_nearly(trace):
    fit = trace(8000, [1.0] * 3, 4)
    assert abs(choose_shift(fit)) < 0.08


def test_shifted_rounds_differ_in_their_logits_only(trace):
    rounds = trace(5, [1.0] * 3, 1)
    moved = shifted(rounds, 0.25)
    torch.testing.assert_close(moved.confidence_logits, rounds.confidence_logits + 0.25)
    assert moved.accepted is rounds.accepted
