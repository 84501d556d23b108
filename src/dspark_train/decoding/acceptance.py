"""Acceptance by position in recorded rounds, with intervals.

R  decoding rounds      γ  block size
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark_train.calibration.selection import reached_slots, split_by_domain, verified_slots
from dspark_train.errors import UserError
from dspark_train.structures import DecodingTrace

ALL = "all"
"""Name of the group of all rounds."""


@dataclass(frozen=True)
class PositionAcceptance:
    """Acceptance by position in one group of rounds (lists of γ)."""

    group: str
    """A domain, or ``all``."""
    rounds: int
    tau: float
    """Tokens per round that reached the output, the target's own included."""
    conditional: list[float | None]
    """Share of slot ``k``'s tokens accepted, of those whose earlier ones all were; None where none were."""
    low: list[float | None]
    """Lower end of its 95 % interval (Wilson)."""
    high: list[float | None]
    reached: list[int]
    """Rounds behind each share."""
    cumulative: list[float | None]
    """Share of rounds whose prefix up to slot ``k`` was accepted."""


def acceptance_by_position(trace: DecodingTrace) -> list[PositionAcceptance]:
    """Acceptance per position, conditional and cumulative; all rounds first, then each domain."""
    require_rounds(trace, confidences=False)
    return [_acceptance(name, part) for name, part in groups(trace).items()]


def _acceptance(group: str, trace: DecodingTrace) -> PositionAcceptance:
    verified, accepted = verified_slots(trace), trace.prefix_accepted
    reached = reached_slots(trace).sum(0).tolist()
    kept = accepted.sum(0).tolist()
    seen = verified.sum(0).tolist()
    bounds = [wilson(hits, count) for hits, count in zip(kept, reached, strict=True)]
    return PositionAcceptance(
        group=group,
        rounds=len(trace.request),
        tau=trace.accepted_length,
        conditional=[hits / count if count else None for hits, count in zip(kept, reached, strict=True)],
        low=[bound[0] if bound else None for bound in bounds],
        high=[bound[1] if bound else None for bound in bounds],
        reached=reached,
        cumulative=[hits / count if count else None for hits, count in zip(kept, seen, strict=True)],
    )


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
