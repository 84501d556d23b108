import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

from dspark_train.calibration.metrics import (
    brier_score,
    expected_calibration_error,
    reliability_bins,
    roc_auc,
)

# Four predictions, two bins: [0, .5) holds 0.1 and 0.4 (one accepted), [.5, 1] 0.8 and 1.0 (both accepted).
P = torch.tensor([[0.1], [0.4], [0.8], [1.0]])
Y = torch.tensor([[False], [True], [True], [True]])


def test_ece_by_hand():
    # |0.25 − 0.5|·2/4 + |0.9 − 1|·2/4
    assert expected_calibration_error(P, Y, bins=2).item() == pytest.approx(0.175, abs=1e-7)


def test_bins_by_hand():
    bins = reliability_bins(P, Y, bins=2)
    assert bins.count.tolist() == [[2, 2]]
    assert bins.accepted.tolist() == [[1, 2]]
    torch.testing.assert_close(bins.predicted, torch.tensor([[0.5, 1.8]], dtype=torch.float64))
    assert bins.bias.item() == pytest.approx((2.3 - 3) / 4)


def test_brier_by_hand():
    assert brier_score(P, Y).item() == pytest.approx((0.01 + 0.36 + 0.04 + 0) / 4)


def test_auc_by_hand_counts_ties_half():
    scores = torch.tensor([[0.2], [0.5], [0.5], [0.9]])
    truth = torch.tensor([[False], [True], [False], [True]])
    # pairs (accepted, rejected): (.5,.2) yes, (.5,.5) tie, (.9,.2) yes, (.9,.5) yes
    assert roc_auc(scores, truth).item() == pytest.approx(3.5 / 4)


def test_unobserved_entries_do_not_count():
    observed = torch.tensor([[True], [True], [False], [False]])
    for metric in (expected_calibration_error, brier_score, roc_auc):
        assert metric(P, Y, observed).item() == pytest.approx(metric(P[:2], Y[:2]).item())


def test_nothing_observed_is_nan_and_not_zero():
    nothing = torch.zeros(4, 1, dtype=torch.bool)
    for metric in (expected_calibration_error, brier_score, roc_auc):
        assert metric(P, Y, nothing).isnan().all()


def test_auc_needs_both_outcomes():
    assert roc_auc(P, torch.ones_like(Y)).isnan().all()


def random_rounds(seed, rounds=400, positions=3):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(rounds, positions, generator=generator)
    y = torch.rand(rounds, positions, generator=generator) < p.square()
    seen = torch.rand(rounds, positions, generator=generator) < 0.7
    return p, y, seen


def test_agrees_with_torchmetrics():
    p, y, seen = random_rounds(0)
    for column in range(3):
        rows = seen[:, column]
        args = p[rows, column], y[rows, column].long()
        ece = expected_calibration_error(p, y, seen)[column]
        torch.testing.assert_close(ece.float(), binary_calibration_error(*args, n_bins=20), atol=1e-6, rtol=0)
        torch.testing.assert_close(
            roc_auc(p, y, seen)[column].float(), binary_auroc(*args), atol=1e-6, rtol=0
        )


def test_soft_outcomes():
    p = torch.full((10, 1), 0.3)
    assert expected_calibration_error(p, torch.full((10, 1), 0.3)).item() == pytest.approx(0, abs=1e-7)
    assert brier_score(p, torch.full((10, 1), 0.5)).item() == pytest.approx(0.04)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40), st.integers(1, 30))
def test_ece_is_a_mean_of_absolute_gaps(pairs, bins):
    """Between |mean gap| (all gaps may cancel) and mean |gap| (none may), whatever the bins."""
    p = torch.tensor([[p] for p, _ in pairs], dtype=torch.float64)
    y = torch.tensor([[y] for _, y in pairs])
    gap = p - y.double()
    error = expected_calibration_error(p, y, bins=bins)
    assert gap.mean().abs() - 1e-9 <= error <= gap.abs().mean() + 1e-9


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=25))
def test_auc_is_the_share_of_ordered_pairs(pairs):
    accepted, rejected = [p for p, y in pairs if y], [p for p, y in pairs if not y]
    area = roc_auc(
        torch.tensor([[p] for p, _ in pairs], dtype=torch.float64), torch.tensor([[y] for _, y in pairs])
    ).item()
    if not accepted or not rejected:
        assert area != area
        return
    wins = sum((a > r) + 0.5 * (a == r) for a in accepted for r in rejected)
    assert area == pytest.approx(wins / (len(accepted) * len(rejected)))
