"""Sequential temperature scaling (STS): confidences whose running product means what it says.

    R  decoding rounds      γ  block size      G  temperatures of the grid

The scheduler needs the *size* of the survival probability ``a_k = Π_{i≤k} c_i``, not only its order. Position
by position, with the temperatures of earlier ones fixed, STS picks the ``T_k`` that minimises the expected
calibration error of the running product at ``k``. Temperature scaling keeps the order within a position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_train.calibration.metrics import DEFAULT_BINS, brier_score, expected_calibration_error
from dspark_train.errors import UserError

GRID = torch.logspace(-4, 4, 129, base=2, dtype=torch.float64)
"""Temperatures tried: 1/16 to 16, 4.4 % apart; the middle one is exactly 1."""

SLACK = 0.1
"""Two ECEs of n rounds that differ by less than ``SLACK / √n`` are taken as equal: a tenth of their noise."""


@dataclass(frozen=True)
class Scalings:
    """What makes confidences mean what they say under one way of sampling: ``σ((logit_k + bias) / T_k)``."""

    temperatures: tuple[float, ...]
    """``T_1..T_γ``, each > 0."""
    bias: float = 0.0
    """Added to every raw logit."""

    def __len__(self) -> int:
        """γ."""
        return len(self.temperatures)

    @classmethod
    def of(cls, sts: Sts) -> Scalings:
        """Scalings as they are, or of temperatures alone."""
        return sts if isinstance(sts, Scalings) else cls(tuple(sts))


Sts = Scalings | Sequence[float]
"""Scalings, or ``[γ]`` temperatures without a bias."""


def survival(confidence_logits: Tensor, sts: Tensor | Sts | None = None) -> Tensor:
    """Survival probabilities ``a_k = Π_{i≤k} c_i`` (:func:`conditional`).

    Args:
        confidence_logits: ``[..., γ]`` raw logits.
        sts: ``[γ]`` scalings; None for raw confidences.

    Returns:
        ``[..., γ]``, never rising along the last dimension, in the logits' dtype.
    """
    return conditional(confidence_logits, sts).cumprod(-1)


def conditional(confidence_logits: Tensor, sts: Tensor | Sts | None = None) -> Tensor:
    """Confidences ``c_k = σ((logit_k + bias) / T_k)``: accepted, given that all earlier draft tokens were.

    Args:
        confidence_logits: ``[..., γ]`` raw logits.
        sts: ``[γ]`` scalings, or temperatures alone; None for raw confidences.

    Returns:
        ``[..., γ]`` in the logits' dtype.
    """
    if sts is None:
        return confidence_logits.sigmoid()
    if isinstance(sts, Scalings):
        confidence_logits, sts = confidence_logits + sts.bias, sts.temperatures
    scale = torch.as_tensor(sts, dtype=confidence_logits.dtype, device=confidence_logits.device)
    return (confidence_logits / scale).sigmoid()


def fit_sts(
    confidence_logits: Tensor,
    prefix_accepted: Tensor,
    observed: Tensor,
    *,
    bins: int = DEFAULT_BINS,
    grid: Tensor = GRID,
) -> Tensor:
    """Fit one temperature per position by sequential temperature scaling.

    A binned error is a rough function with many near-minima, so of the temperatures whose ECE cannot be
    told from the smallest (within ``SLACK / √n``) the one with the best Brier score is taken.

    On the data it is given, the result is never worse than no scaling, in ECE averaged over positions: a
    position whose earlier temperatures were fitted may lose what they gained, so of the γ + 1 candidates
    "fitted up to ``j``, then 1" the best is returned, and ``j = 0`` is no scaling at all.

    Args:
        confidence_logits: ``[R, γ]`` raw logits.
        prefix_accepted: ``[R, γ]`` bool: the prefix up to and including slot ``k`` was accepted.
        observed: ``[R, γ]`` bool: which of these are known.
        bins: Equal-width bins of the ECE.
        grid: ``[G]`` temperatures to try; must hold 1.

    Returns:
        ``[γ]`` float64.

    Raises:
        UserError: a logit is NaN (the draft has no confidence head), or nothing was observed at a position.
    """
    if confidence_logits.isnan().any():
        raise UserError(
            "calibration needs confidence logits, and these rounds have none (NaN): "
            "the draft has no confidence head; train one with enable_confidence_head"
        )
    if not bool(observed.any(0).all()):
        empty = [position + 1 for position, seen in enumerate(observed.any(0).tolist()) if not seen]
        raise UserError(
            f"calibration needs verified draft tokens at every position, and there are none at {empty}; "
            "collect rounds with a fixed verify length (the whole block)"
        )
    logits, accepted = confidence_logits.to(torch.float64), prefix_accepted.to(torch.float64)
    fitted = torch.ones(logits.shape[1], dtype=torch.float64)
    running = torch.ones(logits.shape[0], dtype=torch.float64)
    for position in range(logits.shape[1]):
        rows = observed[:, position]
        tried = running[rows, None] * (logits[rows, position, None] / grid).sigmoid()  # [R', G]
        outcome = accepted[rows, position, None].expand_as(tried)
        error = expected_calibration_error(tried, outcome, bins=bins)
        near = error <= error.min() + SLACK / math.sqrt(len(outcome))
        brier = brier_score(tried, outcome)
        fitted[position] = grid[torch.where(near, brier, torch.inf).argmin()]
        running = running * (logits[:, position] / fitted[position]).sigmoid()
    return _best_prefix(fitted, logits, accepted, observed, bins)


def _best_prefix(fitted: Tensor, logits: Tensor, accepted: Tensor, observed: Tensor, bins: int) -> Tensor:
    """Of "fitted up to j, then 1" for j = γ..0, return the candidate with the smallest mean ECE."""
    block_size = len(fitted)
    best, best_error = fitted, torch.tensor(torch.inf)
    for count in range(block_size, -1, -1):
        candidate = torch.where(torch.arange(block_size) < count, fitted, 1.0)
        error = expected_calibration_error(survival(logits, candidate), accepted, observed, bins=bins).mean()
        if error < best_error:
            best, best_error = candidate, error
    return best
