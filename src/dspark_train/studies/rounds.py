"""Studies of recorded rounds: what a threshold would have verified, and how calibration follows a drift.

    R  decoding rounds      γ  block size      G  thresholds

They read a trace that verified whole blocks and decode nothing. Each result is a dataclass that is stored in
the run's ``studies`` folder, read back and drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from dspark_train.calibration.fit import fit_scalings
from dspark_train.calibration.online import OnlineSts
from dspark_train.calibration.selection import split_by_domain
from dspark_train.calibration.sts import Sts, conditional
from dspark_train.decoding.acceptance import PositionAcceptance, groups, require_rounds
from dspark_train.decoding.policies import threshold_lengths
from dspark_train.errors import UserError
from dspark_train.files import renamed
from dspark_train.structures import DecodingTrace
from dspark_train.studies.drift import DriftPoint, replay_drift

THRESHOLDS = (*(step / 20 for step in range(20)), 0.98, 0.99)
"""Thresholds of the sweep; 0 is fixed-length verification."""


@dataclass(frozen=True, kw_only=True)
class OfRounds:
    """What rounds a result is of. Empty where its file does not say."""

    split: str = ""
    """Whose prompts."""
    sampling_temperature: float | None = None
    """Of the rounds; 0 is greedy."""
    rounds: int = 0
    temperatures: list[float] | None = None
    """``[γ]`` of the confidences; None where they are raw."""
    bias: float = 0.0
    """Added to the confidence logits."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceStudy(OfRounds):
    """Acceptance by position."""

    groups: dict[str, PositionAcceptance]
    """All rounds first, then each domain."""


@dataclass(frozen=True)
class ThresholdPoint:
    """Verification of recorded rounds with one static threshold."""

    threshold: float
    acceptance_rate_with_bonus: Annotated[float, renamed("acceptance_rate_with_bonus", "tokens_per_row")]
    """Tokens over verified rows, the target's own token and the anchor's row included (paper, Figure 5): at
    threshold 0, τ / (γ + 1)."""
    draft_acceptance_rate: Annotated[float, renamed("draft_acceptance_rate", "acceptance_rate")]
    """Accepted share of the verified draft tokens, the target's own left out."""
    tokens_per_round: float
    """τ: tokens that reach the output, the target's own included."""
    verified_per_round: float
    """Draft tokens; the verification budget (paper, Figure 8) is one more, the anchor."""
    rejected_per_round: float
    """Draft tokens."""


@dataclass(frozen=True, kw_only=True)
class ThresholdStudy(OfRounds):
    """A static threshold, varied."""

    groups: dict[str, list[ThresholdPoint]]
    """All rounds first, then each domain; thresholds that verify nothing are left out."""


def threshold_sweep(
    trace: DecodingTrace,
    sts: Sts | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
) -> dict[str, list[ThresholdPoint]]:
    """Verify recorded rounds while ``c_k ≥ θ``, for many θ.

    Args:
        trace: Rounds that verified whole blocks (fewer only at a request's end).
        sts: ``[γ]`` scalings of the confidences; None for raw ones.
        thresholds: In [0, 1].

    Returns:
        Points in the order of the thresholds, of all rounds first, then of each domain. Thresholds that verify
        nothing are left out.

    Raises:
        UserError: no rounds, no confidences, or a threshold outside [0, 1].
    """
    require_rounds(trace, confidences=True)
    if wrong := [value for value in thresholds if not 0 <= value <= 1]:
        raise UserError(f"threshold sweep: thresholds must lie in 0..1, got {wrong}")
    return {name: _sweep(part, sts, thresholds) for name, part in groups(trace).items()}


def _sweep(trace: DecodingTrace, sts: Sts | None, thresholds: Sequence[float]) -> list[ThresholdPoint]:
    confidence = conditional(trace.confidence_logits.to(torch.float64), sts)
    lengths = torch.stack([threshold_lengths(confidence, threshold) for threshold in thresholds])
    verified = lengths.minimum(trace.verify_length)  # [G, R]
    accepted = verified.minimum(trace.accepted)
    tokens = (accepted + 1).minimum(trace.committed)  # an accepted end token is the last
    rounds = len(trace.request)
    sums = zip(*(values.sum(1).tolist() for values in (accepted, verified, tokens)), strict=True)
    return [
        ThresholdPoint(
            threshold=threshold,
            acceptance_rate_with_bonus=made / (checked + rounds),
            draft_acceptance_rate=kept / checked,
            tokens_per_round=made / rounds,
            verified_per_round=checked / rounds,
            rejected_per_round=(checked - kept) / rounds,
        )
        for threshold, (kept, checked, made) in zip(thresholds, sums, strict=True)
        if checked
    ]


@dataclass(frozen=True, kw_only=True)
class DriftStudy(OfRounds):
    """Temperatures fitted on one domain's traffic, under another's."""

    first: str
    """Domain that the frozen temperatures were fitted on: the one accepted most."""
    second: str
    """Domain that follows: the one accepted least."""
    points: list[DriftPoint]


def drifting_load(
    fit: DecodingTrace, heldout: DecodingTrace
) -> list[tuple[str, DecodingTrace, DecodingTrace]] | None:
    """A load that drifts from the domain that is accepted most to the one accepted least.

    Returns:
        Of each of the two: its name, its rounds in ``fit``, its rounds in ``heldout``; None where both traces do not
        share two domains.
    """
    fitting, traffic = split_by_domain(fit), split_by_domain(heldout)
    shared = sorted(fitting.keys() & traffic.keys(), key=lambda name: traffic[name].accepted_length)
    if len(shared) < 2:
        return None
    return [(name, fitting[name], traffic[name]) for name in (shared[-1], shared[0])]


def drift_study(fit: DecodingTrace, heldout: DecodingTrace) -> DriftStudy | None:
    """Fit temperatures on the easiest domain, then let its held-out traffic give way to the hardest domain's.

    Args:
        fit: Rounds to fit on; only those of the first domain are used.
        heldout: Rounds of the traffic.

    Returns:
        ECE of frozen and of following temperatures along the traffic; None where there are not two domains.
    """
    load = drifting_load(fit, heldout)
    if load is None:
        return None
    (first, fitting, _), (second, _, _) = load
    start = fit_scalings(fitting).best
    phases = [(name, rounds) for name, _, rounds in load]
    return DriftStudy(first=first, second=second, points=replay_drift(phases, OnlineSts(start)))
