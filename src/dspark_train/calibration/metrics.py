"""Reliability of probabilities, position by position: calibration error, Brier score, ROC-AUC.

R  decoding rounds      γ  positions (columns)      K  bins
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DEFAULT_BINS = 20
"""Equal-width bins of the ECE."""


@dataclass(frozen=True)
class ReliabilityBins:
    """Sums per position and equal-width bin of the predicted probability; bin ``b`` is [b/K, (b+1)/K)."""

    count: Tensor
    """``[γ, K]`` float64: observations."""
    predicted: Tensor
    """``[γ, K]`` float64: sum of the predicted probabilities."""
    accepted: Tensor
    """``[γ, K]`` float64: sum of the outcomes."""

    @property
    def calibration_error(self) -> Tensor:
        """``[γ]``: Σ_b (n_b/n)·|mean predicted_b − mean outcome_b|; NaN where nothing was observed."""
        return (self.predicted - self.accepted).abs().sum(-1) / self.count.sum(-1)

    @property
    def bias(self) -> Tensor:
        """``[γ]``: mean predicted − mean outcome; positive is over-confident."""
        return (self.predicted - self.accepted).sum(-1) / self.count.sum(-1)

    @property
    def noise(self) -> Tensor:
        """``[γ]``: ECE to expect of honest probabilities that fell into these bins: what counting alone makes.

        A bin of n outcomes with mean p misses p by ``√(2/π)·√(p(1−p)/n)`` on average.
        """
        mean = self.predicted / self.count.clamp_min(1)
        spread = (2 / torch.pi * mean * (1 - mean) * self.count).clamp_min(0).sqrt()
        return spread.sum(-1) / self.count.sum(-1)


def reliability_bins(
    probabilities: Tensor, outcomes: Tensor, observed: Tensor | None = None, *, bins: int = DEFAULT_BINS
) -> ReliabilityBins:
    """Sort predictions into bins.

    Args:
        probabilities: ``[R, γ]`` in [0, 1].
        outcomes: ``[R, γ]`` bool, or soft outcomes in [0, 1].
        observed: ``[R, γ]`` bool: entries that count; None for all.
        bins: Number of equal-width bins; a probability of 1 falls into the last one.
    """
    probabilities, outcomes = probabilities.to(torch.float64), outcomes.to(torch.float64)
    columns = probabilities.shape[1]
    weight = torch.ones_like(probabilities) if observed is None else observed.to(torch.float64)
    index = (probabilities * bins).long().clamp(0, bins - 1)
    index = index + bins * torch.arange(columns, device=index.device)

    def total(values: Tensor) -> Tensor:
        kept = torch.where(weight > 0, values, 0.0).flatten()
        return torch.bincount(index.flatten(), kept, minlength=columns * bins).view(columns, bins)

    return ReliabilityBins(total(weight), total(probabilities), total(outcomes))


def expected_calibration_error(
    probabilities: Tensor, outcomes: Tensor, observed: Tensor | None = None, *, bins: int = DEFAULT_BINS
) -> Tensor:
    """ECE per position, weighted by count: arguments of :func:`reliability_bins` → ``[γ]`` float64."""
    return reliability_bins(probabilities, outcomes, observed, bins=bins).calibration_error


def brier_score(probabilities: Tensor, outcomes: Tensor, observed: Tensor | None = None) -> Tensor:
    """Mean squared difference per position: ``[R, γ]`` → ``[γ]`` float64; NaN where nothing was observed."""
    error = (probabilities.to(torch.float64) - outcomes.to(torch.float64)).square()
    weight = torch.ones_like(error) if observed is None else observed.to(torch.float64)
    return torch.where(weight > 0, error, 0.0).sum(0) / weight.sum(0)


def roc_auc(probabilities: Tensor, outcomes: Tensor, observed: Tensor | None = None) -> Tensor:
    """Area under the ROC curve per position, exact: P(accepted ranks above rejected), ties counting one half.

    Args:
        probabilities: ``[R, γ]``.
        outcomes: ``[R, γ]`` bool.
        observed: ``[R, γ]`` bool; None for all.

    Returns:
        ``[γ]`` float64; NaN where one of the two outcomes never occurs.
    """
    from scipy.stats import rankdata

    areas = []
    for position in range(probabilities.shape[1]):
        rows = slice(None) if observed is None else observed[:, position]
        scores, truth = probabilities[rows, position], outcomes[rows, position].bool()
        positive, negative = int(truth.sum()), int((~truth).sum())
        ranks = torch.from_numpy(rankdata(scores.cpu().numpy()))
        total = float(ranks[truth.cpu()].sum()) - positive * (positive + 1) / 2
        areas.append(total / (positive * negative) if positive and negative else torch.nan)
    return torch.tensor(areas, dtype=torch.float64)
