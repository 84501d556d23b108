"""A threshold that follows a drifting load, beside one that stays, replayed on recorded rounds.

R  decoding rounds      γ  block size
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_train.calibration.selection import select_rounds
from dspark_train.calibration.sts import Sts, conditional
from dspark_train.decoding.acceptance import require_rounds
from dspark_train.decoding.policies import OnlineThreshold, Policy, Threshold
from dspark_train.structures import DecodingTrace
from dspark_train.studies.drift import STEP
from dspark_train.studies.rounds import THRESHOLDS, OfRounds, drifting_load


@dataclass(frozen=True)
class ThresholdDriftPoint:
    """One stretch of the traffic."""

    phase: str
    """Domain of its rounds."""
    rounds: int
    """Rounds since the start of the replay, at the stretch's end."""
    frozen: float | None
    """Accepted share of the draft tokens that the frozen threshold verified; None where it verified none."""
    online: float | None
    """The same of the online threshold."""
    frozen_verified: float
    """Draft tokens verified per round by the frozen threshold."""
    online_verified: float
    """The same of the online threshold."""
    threshold: float
    """The online threshold at the stretch's end."""


@dataclass(frozen=True, kw_only=True)
class ThresholdDriftStudy(OfRounds):
    """A frozen and an online threshold, both begun where the first domain's rounds accept the wanted share."""

    wanted: float
    """Share of the verified draft tokens that should be accepted."""
    start: float
    """The frozen threshold, at which the online one begins."""
    first: str
    """Domain that the traffic begins with: the one accepted most."""
    second: str
    """Domain that follows: the one accepted least."""
    points: list[ThresholdDriftPoint]


def threshold_drift(
    fit: DecodingTrace,
    heldout: DecodingTrace,
    wanted: float,
    sts: Sts | None = None,
    *,
    stretch: int = 400,
) -> ThresholdDriftStudy | None:
    """Let the easiest domain's held-out traffic give way to the hardest domain's, under both thresholds.

    Args:
        fit: Rounds that the starting threshold is chosen on; only those of the first domain are used.
        heldout: Rounds of the traffic.
        wanted: Share of the verified draft tokens that should be accepted, in (0, 1).
        sts: ``[γ]`` scalings of the confidences; None for raw ones.
        stretch: Rounds per point, at least; the last one of a domain may be longer.

    Returns:
        None where there are not two domains.

    Raises:
        UserError: an impossible ``wanted``, or rounds without confidences.
    """
    OnlineThreshold(wanted)  # an impossible share is refused, whatever the rounds
    require_rounds(heldout, confidences=True)
    phases = drifting_load(fit, heldout)
    if phases is None:
        return None
    (first, fitting, _), (second, _, _) = phases
    start = _threshold_for(wanted, fitting, sts)
    frozen, online = Threshold(start), OnlineThreshold(wanted, start)
    points: list[ThresholdDriftPoint] = []
    seen = 0
    for phase, _, traffic in phases:
        total = len(traffic.request)
        ends = [*range(stretch, total - stretch + 1, stretch), total]
        sums = torch.zeros(2, 2)  # frozen and online; verified and accepted
        begun = 0
        for place in range(0, total, STEP):
            part = select_rounds(traffic, torch.arange(place, min(place + STEP, total)))
            confidence = conditional(part.confidence_logits.to(torch.float64), sts)
            for row, policy in enumerate((frozen, online)):
                verified, accepted = _verify(policy, confidence, part)
                policy.update(verified, accepted)
                sums[row] += torch.stack([verified.sum(), accepted.sum()])
            done = place + len(part.request)
            if done >= ends[0]:
                ends.pop(0)
                (fixed, fixed_kept), (moved, moved_kept) = sums.tolist()
                points.append(
                    ThresholdDriftPoint(
                        phase=phase,
                        rounds=seen + done,
                        frozen=fixed_kept / fixed if fixed else None,
                        online=moved_kept / moved if moved else None,
                        frozen_verified=fixed / (done - begun),
                        online_verified=moved / (done - begun),
                        threshold=online.threshold,
                    )
                )
                sums, begun = torch.zeros(2, 2), done
        seen += total
    return ThresholdDriftStudy(wanted=wanted, start=start, first=first, second=second, points=points)


def _threshold_for(wanted: float, rounds: DecodingTrace, sts: Sts | None) -> float:
    """The smallest threshold that keeps the wanted share; the largest one where none does."""
    confidence = conditional(rounds.confidence_logits.to(torch.float64), sts)
    for threshold in THRESHOLDS[1:]:
        verified, accepted = (float(sums.sum()) for sums in _verify(Threshold(threshold), confidence, rounds))
        if verified and accepted / verified >= wanted:
            return threshold
    return THRESHOLDS[-1]


def _verify(policy: Policy, confidence: Tensor, rounds: DecodingTrace) -> tuple[Tensor, Tensor]:
    """Draft tokens ``[R]`` verified and accepted, had the recorded rounds been verified by a policy."""
    verified = policy.start()(confidence).minimum(rounds.verify_length)
    return verified, verified.minimum(rounds.accepted)
