"""Bootstrap over prompts: intervals for ratios of sums, their averages over suites, and paired differences.

    P  prompts of a suite      S  bootstrap resamples

Prompts are the unit that is drawn again, because rounds and tokens of one prompt hang together. One set of
weights serves all methods of a suite, so that differences between methods are paired prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A statistic as a table shows it; undefined numbers are None."""

    value: float | None
    low: float | None = None
    """Lower end of its interval."""
    high: float | None = None


@dataclass(frozen=True)
class Sampled:
    """A statistic: its value on the data, and on every resample."""

    value: float
    samples: Array
    """``[S]``; NaN where a resample does not define it (a denominator of 0)."""

    def __sub__(self, other: Sampled) -> Sampled:
        """Return the difference, resample by resample: paired where both come from the same weights."""
        return Sampled(self.value - other.value, self.samples - other.samples)

    def __truediv__(self, other: Sampled) -> Sampled:
        """Return the ratio, resample by resample."""
        with np.errstate(divide="ignore", invalid="ignore"):
            value = self.value / other.value if other.value else float("nan")
            return Sampled(value, self.samples / other.samples)

    @staticmethod
    def mean(parts: Sequence[Sampled]) -> Sampled:
        """Return the unweighted average: suites count alike, however many prompts they have."""
        if not parts:
            raise ValueError("an average needs at least one part")
        return Sampled(
            sum(part.value for part in parts) / len(parts), np.mean([part.samples for part in parts], axis=0)
        )

    def interval(self, confidence: float) -> tuple[float, float] | None:
        """Return the percentile interval; None where fewer than 90 % of resamples define the statistic."""
        defined = self.samples[np.isfinite(self.samples)]
        if len(defined) < 0.9 * len(self.samples):
            return None
        tail = (1 - confidence) / 2
        low, high = np.quantile(defined, [tail, 1 - tail])
        return float(low), float(high)

    def estimate(self, confidence: float) -> Estimate:
        """Return the value and its percentile interval."""
        low, high = self.interval(confidence) or (None, None)
        return Estimate(self.value if np.isfinite(self.value) else None, low, high)


def bootstrap_weights(prompts: int, resamples: int, seed: int) -> Array:
    """Return how often every prompt occurs in every resample: ``[S, P]``, each row summing to P.

    Args:
        prompts: P, at least 1.
        resamples: S.
        seed: of the draws.
    """
    if prompts < 1:
        raise ValueError("a bootstrap needs at least one prompt")
    generator = np.random.default_rng(seed)
    return generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples).astype(np.float64)


def ratio(numerators: Sequence[float], denominators: Sequence[float], weights: Array) -> Sampled:
    """Return Σ numerators / Σ denominators, on the data and on every resample.

    Args:
        numerators: ``[P]``.
        denominators: ``[P]``.
        weights: ``[S, P]`` of :func:`bootstrap_weights`.
    """
    top, bottom = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(top.sum() / bottom.sum()) if bottom.sum() else float("nan")
        return Sampled(value, (weights @ top) / (weights @ bottom))
