"""Typed views of the result files of a run: what the report shows, independent of how a file spells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dspark_train.report.charts import ReliabilityBin


@dataclass(frozen=True)
class ModeView:
    """Plain against speculative decoding at one sampling temperature."""

    name: str
    temperature: float
    tau: float
    conditional: Sequence[float | None] = ()
    """``[γ]``: acceptance of slot k given that all earlier ones were accepted."""
    cumulative: Sequence[float | None] = ()
    """``[γ]``: share of rounds whose prefix up to slot k was accepted."""
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    spread: str = ""
    """What the two bounds are, in words."""
    plain_rate: float | None = None
    """Tokens per second of plain decoding."""
    rate: float | None = None
    """Tokens per second of speculative decoding."""
    prompts: int | None = None
    identical: int | None = None
    """Prompts whose output equals plain decoding's token for token (greedy only)."""
    divergences: int | None = None
    """Differences that exceed rounding."""
    domain_tau: dict[str, float] = field(default_factory=dict)
    policy: str = ""
    """How much of a block is verified."""
    round_milliseconds: float | None = None
    """Wall time of a round, prompts' passes left out."""
    step_milliseconds: float | None = None
    """Wall time of a step of plain decoding."""
    parts: dict[str, float] = field(default_factory=dict)
    """Milliseconds of a round by part."""
    rows_per_round: float | None = None
    """Token rows that the target verifies per round, anchors included."""

    @property
    def head_milliseconds(self) -> float | None:
        """Of a round: the walk of the sequential head."""
        return self.parts.get("head")


@dataclass(frozen=True)
class CalibrationView:
    """Reliability of the survival probability per position, as trained and as calibrated.

    Lists of γ; None where no round tells.
    """

    temperature: float
    """Sampling temperature of the rounds; 0 is greedy."""
    temperatures: Sequence[float]
    ece_before: Sequence[float | None]
    ece_after: Sequence[float | None]
    mean_before: float | None
    mean_after: float | None
    auc: Sequence[float | None]
    brier_before: Sequence[float | None]
    brier_after: Sequence[float | None]
    bins_before: Sequence[Sequence[ReliabilityBin]]
    bins_after: Sequence[Sequence[ReliabilityBin]]
    rounds: int
    mean_noise: float | None = None
    """Mean ECE that perfectly calibrated confidences would show on so few rounds."""
    domains: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    """Mean ECE before and after, by domain."""


@dataclass(frozen=True)
class AcceptanceView:
    """Acceptance by position in one group of rounds, with 95 % intervals (lists of γ; None where unknown)."""

    group: str
    conditional: Sequence[float | None]
    low: Sequence[float | None]
    high: Sequence[float | None]
    rounds: int


@dataclass(frozen=True)
class SweepView:
    """A static confidence threshold, varied, over one group of requests."""

    group: str
    thresholds: Sequence[float]
    acceptance_rate: Sequence[float | None]
    """Accepted share of the verified draft tokens."""
    tokens_per_round: Sequence[float]
    verified_per_round: Sequence[float] = ()


@dataclass(frozen=True)
class DriftView:
    """Mean ECE along a load that changes from one domain to another."""

    first: str
    second: str
    rounds: Sequence[float]
    """Since the start, at the end of each stretch."""
    frozen: Sequence[float]
    online: Sequence[float]
    noise: Sequence[float]
    """What honest probabilities would show."""


@dataclass(frozen=True)
class LoadView:
    """One verification policy under growing load."""

    policy: str
    requests: Sequence[float]
    throughput: Sequence[float]
    """Tokens per second of all requests together."""
    per_user: Sequence[float]
    """Tokens per second of one request."""
    verified: Sequence[float] = ()
    """Draft tokens verified per request and round."""
