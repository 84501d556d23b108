"""Fit a shift and scalings on one trace, and say on another what they are worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark_train.calibration.bias import fit_shift, shifted
from dspark_train.calibration.io import Calibration
from dspark_train.calibration.metrics import DEFAULT_BINS
from dspark_train.calibration.reliability import BeforeAfter, compare_reliability, measure_reliability, plain
from dspark_train.calibration.selection import reached_slots, split_by_domain, verified_slots
from dspark_train.calibration.sts import fit_sts
from dspark_train.errors import UserError
from dspark_train.run import sampling_label
from dspark_train.structures import DecodingTrace


def choose_shift(fit: DecodingTrace, *, bins: int = DEFAULT_BINS) -> float:
    """What to add to the bias of the confidence head; 0 where scalings do as well on these rounds without.

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
    """Scalings of these rounds, and the mean ECE that they leave on them."""
    verified = verified_slots(trace)
    found = fit_sts(trace.confidence_logits, trace.prefix_accepted, verified, bins=bins).tolist()
    return tuple(found), measure_reliability(trace, found, bins=bins).mean_ece


@dataclass(frozen=True)
class CalibrationResult:
    """Scalings of the confidences, and their worth on held-out rounds."""

    sts: tuple[float, ...]
    """``T_1..T_γ``, applied as ``σ(logit_k / T_k)``."""
    shift: float
    """Added to the bias of the confidence head, so to every logit, before the scalings."""
    sampling: str
    """How the rounds were sampled (``sampling_label``): acceptance, and so calibration, depends on it."""
    sampling_temperature: float
    fit_rounds: int
    fit_ece_before: float
    """Mean ECE on the fitting set, as trained."""
    fit_ece_after: float
    """And with shift and scalings."""
    heldout: BeforeAfter
    domains: dict[str, BeforeAfter] = field(default_factory=dict)
    """The held-out rounds by domain."""

    def calibration(self, dataset: str) -> Calibration:
        """What ``calibration.json`` holds; ECEs are means over positions on held-out rounds."""
        return Calibration(
            temperatures=self.sts,
            dataset=dataset,
            num_samples=self.fit_rounds,
            ece_before=self.heldout.before.mean_ece,
            ece_after=self.heldout.after.mean_ece,
        )

    def to_json(self) -> dict[str, Any]:
        """What ``calibration_report.json`` holds for this way of sampling."""
        return {
            "sampling": self.sampling,
            "sampling_temperature": self.sampling_temperature,
            "temperatures": list(self.sts),
            "confidence_shift": self.shift,
            "fit_rounds": self.fit_rounds,
            "fit_mean_ece_before": plain(self.fit_ece_before),
            "fit_mean_ece_after": plain(self.fit_ece_after),
            **self.heldout.to_json(),
            "domains": {name: part.to_json(with_bins=False) for name, part in self.domains.items()},
        }


def calibrate_traces(
    fit: DecodingTrace,
    heldout: DecodingTrace,
    shift: float = 0.0,
    sampling: str | None = None,
    *,
    bins: int = DEFAULT_BINS,
) -> CalibrationResult:
    """Fit scalings on ``fit`` and report on ``heldout``.

    Both must come from the same draft and be sampled alike, on different prompts, and should verify whole blocks.

    Args:
        fit: Rounds that the scalings are fitted on.
        heldout: Rounds that they are judged on.
        shift: Added to all logits first (:func:`choose_shift`).
        sampling: How both were sampled; None takes their temperature for all there is to it.
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
        sts=chosen,
        shift=shift,
        sampling=sampling or sampling_label(fit.temperature),
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


def write_report(path: str | Path, results: Sequence[CalibrationResult]) -> None:
    """Write ``calibration_report.json``: the first result at the top level, the others under ``others``."""
    content = {**results[0].to_json(), "others": [result.to_json() for result in results[1:]]}
    Path(path).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
