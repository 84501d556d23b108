"""Reliability of confidences as it is stored: of a study, and of what ``calibrate`` found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dspark_train.calibration.reliability import ThreeWays
from dspark_train.studies.rounds import OfRounds


@dataclass(frozen=True)
class ReliabilityBin:
    """One bin of a reliability diagram."""

    confidence: float
    """Mean prediction."""
    accepted: float
    """Share accepted."""
    count: float
    """Rounds."""


@dataclass(frozen=True, kw_only=True)
class ReliabilityStudy(OfRounds):
    """Reliability of the survival probability: as trained, with temperatures alone, and as calibrated.

    Lists of γ; None where no round tells.
    """

    mean_ece_before: float | None
    ece_before: list[float | None]
    brier_before: list[float | None]
    bias_before: list[float | None]
    mean_ece_sts: float | None = None
    """With temperatures alone; files of earlier versions do not say."""
    ece_sts: list[float | None] = field(default_factory=list)
    brier_sts: list[float | None] = field(default_factory=list)
    bias_sts: list[float | None] = field(default_factory=list)
    mean_ece_after: float | None
    ece_after: list[float | None]
    brier_after: list[float | None]
    bias_after: list[float | None]
    mean_noise: float | None
    """Mean ECE that honest probabilities would show on so few rounds."""
    noise_before: list[float | None] = field(default_factory=list)
    """The same at each position, of confidences as trained; empty in files of earlier versions."""
    noise_sts: list[float | None] = field(default_factory=list)
    noise_after: list[float | None] = field(default_factory=list)
    auc: list[float | None]
    auc_before: list[float | None]
    bins_before: list[list[ReliabilityBin]]
    """Per position, the bins that hold anything."""
    bins_after: list[list[ReliabilityBin]]

    @classmethod
    def of(cls, compared: ThreeWays, **rounds: Any) -> ReliabilityStudy:
        """Of a comparison; ``rounds`` are the fields of :class:`OfRounds`."""
        content = {**rounds, **compared.to_json()}
        for name in ("bins_before", "bins_after"):
            content[name] = [[ReliabilityBin(**entry) for entry in bins] for bins in content[name]]
        return cls(**content)


@dataclass(frozen=True, kw_only=True)
class DomainReliability:
    """Mean calibration error in one domain."""

    mean_ece_before: float | None
    mean_ece_sts: float | None = None
    mean_ece_after: float | None
    mean_noise: float | None = None


@dataclass(frozen=True, kw_only=True)
class CalibrationReport(ReliabilityStudy):
    """What ``calibrate`` found at one sampling temperature."""

    split: str = "heldout"
    sampling: str = ""
    """Its label; empty in files of earlier versions."""
    temperatures_alone: list[float] | None = None
    """``[γ]`` without the bias."""
    domains: dict[str, DomainReliability] = field(default_factory=dict)
    others: list[CalibrationReport] = field(default_factory=list)
    """Of further sampling temperatures."""
