"""What survival probabilities are worth on a set of rounds, before and after calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dspark_train.calibration.metrics import (
    DEFAULT_BINS,
    ReliabilityBins,
    brier_score,
    reliability_bins,
    roc_auc,
)
from dspark_train.calibration.selection import verified_slots
from dspark_train.calibration.sts import Scalings, Sts, survival
from dspark_train.structures import DecodingTrace


@dataclass(frozen=True)
class Reliability:
    """Reliability of survival probabilities on one set of rounds, per position (lists of γ)."""

    ece: list[float]
    """Expected calibration error; NaN where nothing was verified."""
    brier: list[float]
    auc: list[float]
    """Area under the ROC curve; NaN where only one outcome occurs."""
    bias: list[float]
    """Mean predicted minus mean accepted: positive is over-confident."""
    noise: list[float]
    """ECE that honest probabilities would show on so many rounds."""
    bins: ReliabilityBins
    """What the diagrams draw."""

    @property
    def mean_ece(self) -> float:
        """Mean of the ECE over positions that were verified at all."""
        return _mean(self.ece)

    @property
    def mean_noise(self) -> float:
        """Mean of the noise over positions: an ECE near it is as good as can be shown."""
        return _mean(self.noise)


def measure_reliability(
    trace: DecodingTrace, sts: Sts | None = None, *, bins: int = DEFAULT_BINS
) -> Reliability:
    """Compare survival probabilities with what was accepted.

    Args:
        trace: Decoding rounds with confidences.
        sts: ``[γ]`` scalings; None for the raw confidences.
        bins: Equal-width bins of the ECE.
    """
    predicted = survival(trace.confidence_logits.to(torch.float64), sts)
    accepted, verified = trace.prefix_accepted, verified_slots(trace)
    counted = reliability_bins(predicted, accepted, verified, bins=bins)
    return Reliability(
        ece=counted.calibration_error.tolist(),
        brier=brier_score(predicted, accepted, verified).tolist(),
        auc=roc_auc(predicted, accepted, verified).tolist(),
        bias=counted.bias.tolist(),
        noise=counted.noise.tolist(),
        bins=counted,
    )


@dataclass(frozen=True)
class ThreeWays:
    """Reliability as trained, with temperatures alone, and with bias and temperatures, on the same held-out rounds."""

    rounds: int
    before: Reliability
    """As trained."""
    sts: Reliability
    """With sequential temperature scaling alone, as in the paper."""
    after: Reliability
    """With bias and temperatures: as decoded. The same as ``sts`` where no bias was fitted."""

    def to_json(self, with_bins: bool = True) -> dict[str, Any]:
        """Plain lists by position; NaN becomes null."""
        content: dict[str, Any] = {"rounds": self.rounds}
        for name, side in (("before", self.before), ("sts", self.sts), ("after", self.after)):
            content[f"mean_ece_{name}"] = plain(side.mean_ece)
            for key in ("ece", "brier", "bias", "noise"):
                content[f"{key}_{name}"] = plain(getattr(side, key))
        content["mean_noise"] = plain(self.after.mean_noise)
        content["auc"] = plain(self.after.auc)
        content["auc_before"] = plain(self.before.auc)
        if with_bins:
            content["bins_before"], content["bins_after"] = _bins(self.before.bins), _bins(self.after.bins)
        return content


def compare_reliability(
    trace: DecodingTrace, alone: Sequence[float] | None, best: Scalings | None, *, bins: int = DEFAULT_BINS
) -> ThreeWays:
    """Measure the reliability of rounds as they are, with temperatures ``alone``, and with the ``best`` scalings."""
    before, sts, after = (measure_reliability(trace, how, bins=bins) for how in (None, alone, best))
    return ThreeWays(len(trace.request), before, sts, after)


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def plain(value: Any) -> Any:
    """A number or a list of numbers for JSON: NaN becomes None."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    return None if math.isnan(value) else value


def _bins(bins: ReliabilityBins) -> list[list[dict[str, float]]]:
    """Per position, the bins that hold anything: mean prediction, share accepted, observations."""
    return [
        [
            {"confidence": predicted / count, "accepted": accepted / count, "count": count}
            for count, predicted, accepted in zip(*columns, strict=True)
            if count
        ]
        for columns in zip(bins.count.tolist(), bins.predicted.tolist(), bins.accepted.tolist(), strict=True)
    ]
