"""Fit temperatures, and a bias with temperatures, on one trace, and say on another what they are worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark_train.calibration.bias import fit_shift, shifted
from dspark_train.calibration.io import Calibration, Sampling, WithBias
from dspark_train.calibration.metrics import DEFAULT_BINS
from dspark_train.calibration.reliability import ThreeWays, compare_reliability, measure_reliability, plain
from dspark_train.calibration.selection import reached_slots, split_by_domain, verified_slots
from dspark_train.calibration.sts import Scalings, fit_sts
from dspark_train.errors import UserError
from dspark_train.structures import DecodingTrace


@dataclass(frozen=True)
class Fitted:
    """Scalings of one set of rounds."""

    alone: Scalings
    """Temperatures without a bias: sequential temperature scaling as in the paper."""
    with_bias: Scalings | None
    """A bias, and the temperatures that go with it; None where it gains nothing."""
    ece: float
    """Mean ECE that the best of them leaves on the rounds that they were fitted on."""

    @property
    def best(self) -> Scalings:
        """With the bias, where there is one."""
        return self.with_bias or self.alone


def fit_scalings(fit: DecodingTrace, bias: bool = True, *, bins: int = DEFAULT_BINS) -> Fitted:
    """Fit temperatures alone, and with a bias where that does better on these rounds.

    Args:
        fit: Rounds on prompts that training never saw, at least one.
        bias: Try one.
        bins: Equal-width bins of the ECE.
    """
    alone, as_trained = _fit(fit, 0.0, bins)
    shift = fit_shift(fit.confidence_logits, fit.prefix_accepted, reached_slots(fit)) if bias else 0.0
    if not shift:
        return Fitted(alone, None, as_trained)
    moved, left = _fit(fit, shift, bins)
    return Fitted(alone, moved, left) if left < as_trained else Fitted(alone, None, as_trained)


def _fit(trace: DecodingTrace, bias: float, bins: int) -> tuple[Scalings, float]:
    """Temperatures of these rounds with a bias, and the mean ECE that they leave on them."""
    logits, verified = shifted(trace, bias).confidence_logits, verified_slots(trace)
    found = Scalings(tuple(fit_sts(logits, trace.prefix_accepted, verified, bins=bins).tolist()), bias)
    return found, measure_reliability(trace, found, bins=bins).mean_ece


@dataclass(frozen=True)
class CalibrationResult:
    """Scalings of the confidences, and their worth on held-out rounds."""

    fitted: Fitted
    sampling: Sampling
    """Of the rounds: acceptance, and so calibration, depends on it."""
    fit_rounds: int
    fit_ece_before: float
    """Mean ECE on the fitting set, as trained."""
    heldout: ThreeWays
    domains: dict[str, ThreeWays] = field(default_factory=dict)
    """The held-out rounds by domain."""

    def calibration(self, dataset: str) -> Calibration:
        """What ``calibration.json`` holds; ECEs are means over positions on held-out rounds."""
        best = self.fitted.with_bias
        return Calibration(
            temperatures=self.fitted.alone.temperatures,
            dataset=dataset,
            num_samples=self.fit_rounds,
            ece_before=self.heldout.before.mean_ece,
            ece_after=self.heldout.sts.mean_ece,
            sampling=self.sampling,
            with_bias=None
            if best is None
            else WithBias(best.bias, best.temperatures, self.heldout.after.mean_ece),
        )

    def to_json(self) -> dict[str, Any]:
        """What ``calibration_report.json`` holds for this way of sampling."""
        return {
            "sampling": self.sampling.label,
            "sampling_temperature": self.sampling.temperature,
            "temperatures": list(self.fitted.best.temperatures),
            "temperatures_alone": list(self.fitted.alone.temperatures),
            "bias": self.fitted.best.bias,
            "fit_rounds": self.fit_rounds,
            "fit_mean_ece_before": plain(self.fit_ece_before),
            "fit_mean_ece_after": plain(self.fitted.ece),
            **self.heldout.to_json(),
            "domains": {name: part.to_json(with_bins=False) for name, part in self.domains.items()},
        }


def calibrate_traces(
    fit: DecodingTrace,
    heldout: DecodingTrace,
    sampling: Sampling | None = None,
    *,
    bias: bool = True,
    bins: int = DEFAULT_BINS,
) -> CalibrationResult:
    """Fit scalings on ``fit`` and report on ``heldout``.

    Both must come from the same draft and be sampled alike, on different prompts, and should verify whole blocks.

    Args:
        fit: Rounds that the scalings are fitted on.
        heldout: Rounds that they are judged on.
        sampling: How both were sampled; None takes their temperature for all there is to it.
        bias: Fit one too.
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
    fitted = fit_scalings(fit, bias, bins=bins)
    ways = (fitted.alone.temperatures, fitted.best)
    return CalibrationResult(
        fitted=fitted,
        sampling=sampling or Sampling(fit.temperature),
        fit_rounds=len(fit.request),
        fit_ece_before=measure_reliability(fit, bins=bins).mean_ece,
        heldout=compare_reliability(heldout, *ways, bins=bins),
        domains={
            name: compare_reliability(part, *ways, bins=bins)
            for name, part in split_by_domain(heldout).items()
        },
    )


def write_report(path: str | Path, results: Sequence[CalibrationResult]) -> None:
    """Write ``calibration_report.json``: the first result at the top level, the others under ``others``."""
    content = {**results[0].to_json(), "others": [result.to_json() for result in results[1:]]}
    Path(path).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
