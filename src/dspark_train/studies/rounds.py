"""Studies of recorded rounds: what a threshold would have verified, and acceptance by position.

    R  decoding rounds      γ  block size      G  thresholds

They read a trace that verified whole blocks and decode nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dspark_train.calibration.fit import calibrate_traces
from dspark_train.calibration.online import OnlineSts
from dspark_train.calibration.selection import reached_slots, split_by_domain, verified_slots
from dspark_train.calibration.sts import conditional
from dspark_train.decoding.policies import threshold_lengths
from dspark_train.errors import UserError
from dspark_train.structures import DecodingTrace
from dspark_train.studies.drift import DriftPoint, replay_drift

THRESHOLDS = (*(step / 20 for step in range(20)), 0.98, 0.99)
"""Thresholds of the sweep; 0 is fixed-length verification."""
ALL = "all"
"""Name of the group of all rounds."""


@dataclass(frozen=True)
class Sweep:
    """A static threshold, varied, over one group of rounds."""

    group: str
    """A domain, or ``all``."""
    rounds: int
    thresholds: list[float]
    acceptance_rate: list[float | None]
    """Accepted share of the verified draft tokens; None where nothing was verified."""
    tokens_per_round: list[float]
    """τ: accepted draft tokens and the target's own."""
    verified_per_round: list[float]
    rejected_per_round: list[float]
    tokens_per_row: list[float]
    """Tokens per verified row, the anchor's row included."""

    def to_json(self) -> list[dict[str, float | None]]:
        """One entry per threshold that still verifies something."""
        names = [name for name, value in vars(self).items() if isinstance(value, list)]
        rows = zip(*(getattr(self, name) for name in names), strict=True)
        points = [dict(zip(names, row, strict=True)) for row in rows]
        return [{"threshold": p.pop("thresholds"), **p} for p in points if p["acceptance_rate"] is not None]


def threshold_sweep(
    trace: DecodingTrace,
    sts: Sequence[float] | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
) -> list[Sweep]:
    """Verify recorded rounds while ``c_k ≥ θ``, for many θ; all rounds first, then each domain.

    Args:
        trace: Rounds that verified whole blocks (fewer only at a request's end).
        sts: ``[γ]`` scalings of the confidences; None for raw ones.
        thresholds: In [0, 1].

    Raises:
        UserError: no rounds, no confidences, or a threshold outside [0, 1].
    """
    require_rounds(trace, confidences=True)
    if wrong := [value for value in thresholds if not 0 <= value <= 1]:
        raise UserError(f"threshold sweep: thresholds must lie in 0..1, got {wrong}")
    return [_sweep(name, part, sts, thresholds) for name, part in groups(trace).items()]


def _sweep(
    group: str, trace: DecodingTrace, sts: Sequence[float] | None, thresholds: Sequence[float]
) -> Sweep:
    confidence = conditional(trace.confidence_logits.to(torch.float64), sts)
    lengths = torch.stack([threshold_lengths(confidence, threshold) for threshold in thresholds])
    verified = lengths.minimum(trace.verify_length)  # [G, R]
    accepted = verified.minimum(trace.accepted)
    rounds = len(trace.request)
    kept, checked = accepted.sum(1).tolist(), verified.sum(1).tolist()
    return Sweep(
        group=group,
        rounds=rounds,
        thresholds=list(thresholds),
        acceptance_rate=[a / v if v else None for a, v in zip(kept, checked, strict=True)],
        tokens_per_round=[a / rounds + 1 for a in kept],
        verified_per_round=[v / rounds for v in checked],
        rejected_per_round=[(v - a) / rounds for a, v in zip(kept, checked, strict=True)],
        tokens_per_row=[(a + rounds) / (v + rounds) for a, v in zip(kept, checked, strict=True)],
    )


@dataclass(frozen=True)
class Acceptance:
    """Acceptance by position in one group of rounds (lists of γ)."""

    group: str
    rounds: int
    tau: float
    """Tokens per round: accepted draft tokens and the target's own."""
    conditional: list[float | None]
    """Share of slot ``k``'s tokens accepted, of those whose earlier ones all were; None where none were."""
    low: list[float | None]
    """Lower end of its 95 % interval (Wilson)."""
    high: list[float | None]
    reached: list[int]
    """Rounds behind each share."""
    cumulative: list[float | None]
    """Share of rounds whose prefix up to slot ``k`` was accepted."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self))


def acceptance_by_position(trace: DecodingTrace) -> list[Acceptance]:
    """Acceptance per position, conditional and cumulative; all rounds first, then each domain."""
    require_rounds(trace, confidences=False)
    return [_acceptance(name, part) for name, part in groups(trace).items()]


def _acceptance(group: str, trace: DecodingTrace) -> Acceptance:
    verified, accepted = verified_slots(trace), trace.prefix_accepted
    reached = reached_slots(trace).sum(0).tolist()
    kept = accepted.sum(0).tolist()
    seen = verified.sum(0).tolist()
    bounds = [wilson(hits, count) for hits, count in zip(kept, reached, strict=True)]
    return Acceptance(
        group=group,
        rounds=len(trace.request),
        tau=float(trace.accepted.double().mean()) + 1,
        conditional=[hits / count if count else None for hits, count in zip(kept, reached, strict=True)],
        low=[bound[0] if bound else None for bound in bounds],
        high=[bound[1] if bound else None for bound in bounds],
        reached=reached,
        cumulative=[hits / count if count else None for hits, count in zip(kept, seen, strict=True)],
    )


@dataclass(frozen=True)
class Drift:
    """Temperatures fitted on one domain's traffic, under another's."""

    first: str
    """Domain that the frozen temperatures were fitted on: the one accepted most."""
    second: str
    """Domain that follows: the one accepted least."""
    points: list[DriftPoint]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"first": self.first, "second": self.second, "points": [vars(point) for point in self.points]}


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


def drift_study(fit: DecodingTrace, heldout: DecodingTrace) -> Drift | None:
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
    (first, fitting, traffic), (second, _, _) = load
    start = calibrate_traces(fitting, traffic).sts
    phases = [(name, rounds) for name, _, rounds in load]
    return Drift(first, second, replay_drift(phases, OnlineSts(start)))


def wilson(hits: int, count: int) -> tuple[float, float] | None:
    """95 % interval of a share (Wilson's score interval); None for a count of 0."""
    if count == 0:
        return None
    from scipy.stats import binomtest

    interval = binomtest(hits, count).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)


def groups(trace: DecodingTrace) -> dict[str, DecodingTrace]:
    """All rounds, and those of each domain where there are several."""
    domains = split_by_domain(trace)
    return {ALL: trace, **(domains if len(domains) > 1 else {})}


def require_rounds(trace: DecodingTrace, *, confidences: bool) -> None:
    """Refuse a trace that a study cannot use.

    Raises:
        UserError: no speculative rounds, or no confidences where they are needed.
    """
    if not len(trace.request) or not trace.block_size:
        raise UserError("the trace holds no speculative rounds; decode some prompts with a draft first")
    if confidences and bool(trace.confidence_logits.isnan().any()):
        raise UserError(
            "the trace holds no confidences (NaN): the draft has no confidence head, or drew less than its "
            "whole block; decode with a draft that has one, and whole blocks"
        )
