import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_train.calibration.metrics import expected_calibration_error
from dspark_train.calibration.sts import GRID, conditional, fit_sts, survival
from dspark_train.errors import UserError

KNOWN = [2.5, 2.0, 1.7, 1.4, 2.2]


def test_survival_by_hand():
    logits = torch.tensor([[0.0, 2.0, -4.0]], dtype=torch.float64)
    parts = [torch.tensor(value, dtype=torch.float64).sigmoid() for value in (0.0, 1.0, -8.0)]
    expected = torch.stack([parts[0], parts[0] * parts[1], parts[0] * parts[1] * parts[2]])[None]
    torch.testing.assert_close(survival(logits, [1.0, 2.0, 0.5]), expected)
    torch.testing.assert_close(conditional(logits, [1.0, 2.0, 0.5]), torch.stack(parts)[None])
    torch.testing.assert_close(survival(logits), survival(logits, [1.0] * 3))


def test_grid_holds_no_scaling():
    assert (GRID == 1).any()


def test_known_temperatures_are_found(trace):
    rounds = trace(25_000, KNOWN, seed=0)
    found = fit_sts(rounds.confidence_logits, rounds.prefix_accepted, rounds.observed)
    # the later a slot, the fewer rounds reach it: a few per cent is the statistical error of 25 000 rounds
    torch.testing.assert_close(found, torch.tensor(KNOWN, dtype=torch.float64), rtol=0.15, atol=0)


def test_held_out_error_falls_to_what_the_true_temperatures_leave(trace):
    fit, test = trace(8000, KNOWN, seed=1), trace(30_000, KNOWN, seed=2)
    found = fit_sts(fit.confidence_logits, fit.prefix_accepted, fit.observed)

    def error(sts):
        return expected_calibration_error(survival(test.confidence_logits, sts), test.prefix_accepted).mean()

    assert error(None) > 0.08
    assert error(found) < error(KNOWN) + 0.004
    assert error(found) < 0.012


def test_calibrated_confidences_stay_nearly_as_they_are(trace):
    rounds = trace(10_000, [1.0] * 4, seed=3)
    found = fit_sts(rounds.confidence_logits, rounds.prefix_accepted, rounds.observed)
    assert ((found > 0.85) & (found < 1.18)).all()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 60),
    st.integers(1, 5),
    st.sampled_from(["random", "always", "never", "huge"]),
)
def test_never_worse_than_no_scaling_on_its_own_rounds(seed, rounds, positions, kind):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rounds, positions, generator=generator) * (30 if kind == "huge" else 1)
    share = {"random": 0.6, "huge": 0.6, "always": 1.1, "never": -0.1}[kind]
    accepted = (torch.rand(rounds, positions, generator=generator) < share).long().cumprod(1).bool()
    observed = torch.ones_like(accepted)
    found = fit_sts(logits, accepted, observed)
    assert (found > 0).all()
    before = expected_calibration_error(survival(logits.double()), accepted).mean()
    after = expected_calibration_error(survival(logits.double(), found), accepted).mean()
    assert after <= before + 1e-12


def test_unobserved_slots_do_not_matter(trace):
    rounds = trace(3000, KNOWN, seed=4)
    observed = torch.ones_like(rounds.prefix_accepted)
    observed[::3, 2:] = False
    lied = rounds.prefix_accepted.clone()
    lied[::3, 2:] = False
    found = fit_sts(rounds.confidence_logits, lied, observed)
    torch.testing.assert_close(found, fit_sts(rounds.confidence_logits, rounds.prefix_accepted, observed))
    assert not torch.equal(found, fit_sts(rounds.confidence_logits, lied, torch.ones_like(observed)))


def test_a_draft_without_confidence_head_is_refused(trace):
    rounds = trace(10, KNOWN, seed=5)
    with pytest.raises(UserError, match="no confidence head"):
        fit_sts(rounds.confidence_logits * torch.nan, rounds.prefix_accepted, rounds.observed)


def test_a_position_never_verified_is_refused(trace):
    rounds = trace(10, KNOWN, seed=6)
    observed = rounds.observed.clone()
    observed[:, 3:] = False
    with pytest.raises(UserError, match=r"\[4, 5\]"):
        fit_sts(rounds.confidence_logits, rounds.prefix_accepted, observed)
