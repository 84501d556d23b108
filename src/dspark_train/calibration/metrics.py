"""Reliability of probabilities, position by position: calibration error, Brier score, ROC-AUC.

    R  decoding rounds      γ  positions (columns)      K  bins

Functions for a whole trace at once, and torchmetrics classes with fixed-size sums for validation loops: they
add up over batches and ranks, and need no memory per sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric

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
    areas = []
    for position in range(probabilities.shape[1]):
        rows = slice(None) if observed is None else observed[:, position]
        scores, truth = probabilities[rows, position], outcomes[rows, position].bool()
        _, group, size = torch.unique(scores, return_inverse=True, return_counts=True)
        rank = size.cumsum(0).to(torch.float64) - (size - 1) / 2  # mean rank of each group of ties, from 1
        positive, negative = int(truth.sum()), int((~truth).sum())
        total = float(rank[group[truth]].sum()) - positive * (positive + 1) / 2
        areas.append(total / (positive * negative) if positive and negative else torch.nan)
    return torch.tensor(areas, dtype=torch.float64)


class PositionMetric(Metric):
    """Base of the metrics below: ``update`` takes ``[R, γ]`` probabilities, ``compute`` gives ``[γ]``."""

    full_state_update = False

    def update(self, probabilities: Tensor, outcomes: Tensor, observed: Tensor | None = None) -> None:
        """Count a batch.

        Args:
            probabilities: ``[R, γ]`` in [0, 1].
            outcomes: ``[R, γ]`` bool.
            observed: ``[R, γ]`` bool: entries that count; None for all.
        """
        raise NotImplementedError

    def _add_sums(self, shape: tuple[int, ...], *names: str) -> None:
        for name in names:
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")


class CalibrationError(PositionMetric):
    """Expected calibration error per position; state: three sums per position and bin."""

    higher_is_better = False
    count: Tensor
    predicted: Tensor
    accepted: Tensor

    def __init__(self, block_size: int, bins: int = DEFAULT_BINS) -> None:
        super().__init__()
        self.bins = bins
        self._add_sums((block_size, bins), "count", "predicted", "accepted")

    def update(self, probabilities: Tensor, outcomes: Tensor, observed: Tensor | None = None) -> None:
        """Count a batch; soft outcomes in [0, 1] are allowed."""
        batch = reliability_bins(probabilities, outcomes, observed, bins=self.bins)
        self.count += batch.count
        self.predicted += batch.predicted
        self.accepted += batch.accepted

    def compute(self) -> Tensor:
        """``[γ]``; NaN where nothing was observed."""
        return self.reliability().calibration_error

    def reliability(self) -> ReliabilityBins:
        """The bins counted so far, for a reliability diagram."""
        return ReliabilityBins(self.count, self.predicted, self.accepted)


class BrierScore(PositionMetric):
    """Mean squared error of the probability, per position; soft outcomes in [0, 1] are allowed."""

    higher_is_better = False
    error: Tensor
    count: Tensor

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._add_sums((block_size,), "error", "count")

    def update(self, probabilities: Tensor, outcomes: Tensor, observed: Tensor | None = None) -> None:
        """Count a batch."""
        weight = (
            torch.ones_like(probabilities, dtype=torch.float64) if observed is None else observed.double()
        )
        error = (probabilities.to(torch.float64) - outcomes.to(torch.float64)).square()
        self.error += torch.where(weight > 0, error, 0.0).sum(0)
        self.count += weight.sum(0)

    def compute(self) -> Tensor:
        """``[γ]``; NaN where nothing was observed."""
        return self.error / self.count


class RocAuc(PositionMetric):
    """Area under the ROC curve per position, from a histogram of ``resolution`` bins.

    Pairs within one bin count one half, so the error is at most half the share of such pairs; :func:`roc_auc`
    is exact but keeps every sample.
    """

    higher_is_better = True
    positives: Tensor
    negatives: Tensor

    def __init__(self, block_size: int, resolution: int = 4096) -> None:
        super().__init__()
        self.resolution = resolution
        self._add_sums((block_size, resolution), "positives", "negatives")

    def update(self, probabilities: Tensor, outcomes: Tensor, observed: Tensor | None = None) -> None:
        """Count a batch."""
        batch = reliability_bins(probabilities, outcomes, observed, bins=self.resolution)
        self.positives += batch.accepted
        self.negatives += batch.count - batch.accepted

    def compute(self) -> Tensor:
        """``[γ]``; NaN where one of the two outcomes never occurred."""
        below = self.negatives.cumsum(-1) - self.negatives / 2
        return (self.positives * below).sum(-1) / (self.positives.sum(-1) * self.negatives.sum(-1))
