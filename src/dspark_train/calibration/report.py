"""Fit temperatures on one trace, and say on another what they are worth."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark_train.calibration.bias import fit_shift
from dspark_train.calibration.io import Calibration
from dspark_train.calibration.metrics import (
    DEFAULT_BINS,
    ReliabilityBins,
    brier_score,
    reliability_bins,
    roc_auc,
)
from dspark_train.calibration.temperature import fit_temperatures, survival
from dspark_train.errors import UserError
from dspark_train.structures import DecodingTrace


def verified_slots(trace: DecodingTrace) -> Tensor:
    """``[R, γ]`` bool: slots that the target really verified; what calibration counts.

    Narrower than ``trace.observed``, which also knows the fate of unverified slots behind a rejection. Where
    a policy cut the block, counting those would see the rejections of unverified slots and never their
    acceptances; whether a slot is verified depends on confidences alone, so counting verified slots is fair.
    """
    slots = torch.arange(1, trace.block_size + 1, device=trace.verify_length.device)
    return slots <= trace.verify_length[:, None]


def reached_slots(trace: DecodingTrace) -> Tensor:
    """``[R, γ]`` bool: verified slots whose whole prefix was accepted; what conditional acceptance counts."""
    slots = torch.arange(trace.block_size, device=trace.accepted.device)
    return verified_slots(trace) & (trace.accepted[:, None] >= slots)


def trace_label(temperature: float) -> str:
    """Name of a sampling temperature in file names: ``greedy``, or ``t1.0``."""
    return "greedy" if temperature == 0 else f"t{float(temperature)}"


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
    trace: DecodingTrace, temperatures: Sequence[float] | None = None, *, bins: int = DEFAULT_BINS
) -> Reliability:
    """Compare survival probabilities with what was accepted.

    Args:
        trace: Decoding rounds with confidences.
        temperatures: ``[γ]``; None for the raw confidences.
        bins: Equal-width bins of the ECE.
    """
    predicted = survival(trace.confidence_logits.to(torch.float64), temperatures)
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
class BeforeAfter:
    """Reliability as trained and as calibrated, on the same held-out rounds."""

    rounds: int
    before: Reliability
    after: Reliability

    def to_json(self, with_bins: bool = True) -> dict[str, Any]:
        """Plain lists by position; NaN becomes null."""
        content: dict[str, Any] = {"rounds": self.rounds}
        for name, side in (("before", self.before), ("after", self.after)):
            content[f"mean_ece_{name}"] = _plain(side.mean_ece)
            for key in ("ece", "brier", "bias"):
                content[f"{key}_{name}"] = _plain(getattr(side, key))
        content["mean_noise"] = _plain(self.after.mean_noise)
        content["auc"] = _plain(self.after.auc)
        content["auc_before"] = _plain(self.before.auc)
        if with_bins:
            content["bins_before"], content["bins_after"] = _bins(self.before.bins), _bins(self.after.bins)
        return content


def compare_reliability(
    trace: DecodingTrace, temperatures: Sequence[float], shift: float = 0.0, *, bins: int = DEFAULT_BINS
) -> BeforeAfter:
    """Measure the reliability of rounds as they are, and with a shift and temperatures."""
    before = measure_reliability(trace, bins=bins)
    after = measure_reliability(shifted(trace, shift), temperatures, bins=bins)
    return BeforeAfter(len(trace.request), before, after)


def shifted(trace: DecodingTrace, shift: float) -> DecodingTrace:
    """The rounds of a draft whose confidence head has ``shift`` added to its bias."""
    return dataclasses.replace(trace, confidence_logits=trace.confidence_logits + shift)


def choose_shift(fit: DecodingTrace, *, bins: int = DEFAULT_BINS) -> float:
    """What to add to the bias of the confidence head; 0 where temperatures do as well on these rounds without.

    Args:
        fit: Rounds on prompts that training never saw.
        bins: Equal-width bins of the ECE.
    """
    if not len(fit.request):
        return 0.0
    _, as_trained = _fit(fit, bins)
    shift = fit_shift(fit.confidence_logits, fit.prefix_accepted, reached_slots(fit))
    _, moved = _fit(shifted(fit, shift), bins)
    return shift if moved < as_trained else 0.0


def _fit(trace: DecodingTrace, bins: int) -> tuple[tuple[float, ...], float]:
    """Temperatures of these rounds, and the mean ECE that they leave on them."""
    verified = verified_slots(trace)
    found = fit_temperatures(trace.confidence_logits, trace.prefix_accepted, verified, bins=bins).tolist()
    return tuple(found), measure_reliability(trace, found, bins=bins).mean_ece


@dataclass(frozen=True)
class CalibrationResult:
    """Temperatures, and their worth on held-out rounds."""

    temperatures: tuple[float, ...]
    """``T_1..T_γ``, applied as ``σ(logit_k / T_k)``."""
    shift: float
    """Added to the bias of the confidence head, so to every logit, before the temperatures."""
    sampling_temperature: float
    """Of the rounds: acceptance, and so calibration, depends on it."""
    fit_rounds: int
    fit_ece_before: float
    """Mean ECE on the fitting set, as trained."""
    fit_ece_after: float
    """And with shift and temperatures."""
    heldout: BeforeAfter
    domains: dict[str, BeforeAfter] = field(default_factory=dict)
    """The held-out rounds by domain."""

    def calibration(self, dataset: str) -> Calibration:
        """What ``calibration.json`` holds; ECEs are means over positions on held-out rounds."""
        return Calibration(
            temperatures=self.temperatures,
            dataset=dataset,
            num_samples=self.fit_rounds,
            ece_before=self.heldout.before.mean_ece,
            ece_after=self.heldout.after.mean_ece,
        )

    def to_json(self) -> dict[str, Any]:
        """What ``calibration_report.json`` holds for this sampling temperature."""
        return {
            "sampling_temperature": self.sampling_temperature,
            "temperatures": list(self.temperatures),
            "confidence_shift": self.shift,
            "fit_rounds": self.fit_rounds,
            "fit_mean_ece_before": _plain(self.fit_ece_before),
            "fit_mean_ece_after": _plain(self.fit_ece_after),
            **self.heldout.to_json(),
            "domains": {name: part.to_json(with_bins=False) for name, part in self.domains.items()},
        }


def calibrate_traces(
    fit: DecodingTrace, heldout: DecodingTrace, shift: float = 0.0, *, bins: int = DEFAULT_BINS
) -> CalibrationResult:
    """Fit temperatures on ``fit`` and report on ``heldout``.

    Both must come from the same draft at the same sampling temperature, on different prompts, and should
    verify whole blocks.

    Args:
        fit: Rounds that the temperatures are fitted on.
        heldout: Rounds that they are judged on.
        shift: Added to all logits first (:func:`choose_shift`).
        bins: Equal-width bins of the ECE.

    Raises:
        UserError: the traces do not belong together, are empty, or hold no confidences.
    """
    if fit.temperature != heldout.temperature or fit.block_size != heldout.block_size:
        raise UserError(
            f"calibration: fitting rounds have sampling temperature {fit.temperature} and block size "
            f"{fit.block_size}, held-out rounds {heldout.temperature} and {heldout.block_size}; "
            "they must come from one draft at one temperature"
        )
    for name, trace in (("fitting", fit), ("held-out", heldout)):
        if not len(trace.request):
            raise UserError(
                f"calibration: there are no {name} rounds; decode at least one prompt of that split"
            )
    chosen, left = _fit(shifted(fit, shift), bins)
    return CalibrationResult(
        temperatures=chosen,
        shift=shift,
        sampling_temperature=fit.temperature,
        fit_rounds=len(fit.request),
        fit_ece_before=measure_reliability(fit, bins=bins).mean_ece,
        fit_ece_after=left,
        heldout=compare_reliability(heldout, chosen, shift, bins=bins),
        domains={
            name: compare_reliability(part, chosen, shift, bins=bins)
            for name, part in split_by_domain(heldout).items()
        },
    )


def split_by_domain(trace: DecodingTrace) -> dict[str, DecodingTrace]:
    """Rounds of each named domain, in order of the names; empty where the trace names none."""
    names = sorted(set(trace.domains) - {""})
    return {
        name: select_rounds(trace, torch.tensor([domain == name for domain in trace.domains])[trace.request])
        for name in names
    }


def select_rounds(trace: DecodingTrace, rounds: Tensor) -> DecodingTrace:
    """The rounds chosen by a mask or by indices ``[R]``; requests keep their numbers."""
    names = ("request", "anchor", "proposed", "confidence_logits", "verify_length", "accepted", "committed")
    chosen = {name: getattr(trace, name)[rounds] for name in names}
    return DecodingTrace(temperature=trace.temperature, domains=trace.domains, **chosen)


def write_report(path: str | Path, results: Sequence[CalibrationResult]) -> None:
    """Write ``calibration_report.json``: the first result at the top level, the others under ``others``."""
    content = {**results[0].to_json(), "others": [result.to_json() for result in results[1:]]}
    Path(path).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
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
