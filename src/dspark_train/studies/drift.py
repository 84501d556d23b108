"""A drifting load, replayed: frozen temperatures against those that follow it.

R  decoding rounds      γ  block size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark_train.calibration.metrics import DEFAULT_BINS, ReliabilityBins, reliability_bins
from dspark_train.calibration.online import OnlineSts
from dspark_train.calibration.selection import select_rounds, verified_slots
from dspark_train.calibration.sts import survival
from dspark_train.structures import DecodingTrace

STEP = 16
"""Rounds that are decoded between two looks at the temperatures: a batch of requests."""


@dataclass(frozen=True)
class DriftPoint:
    """One stretch of the traffic."""

    phase: str
    """Name of the traffic that it belongs to."""
    rounds: int
    """Rounds since the start of the replay, at the stretch's end."""
    frozen: float
    """ECE with the starting temperatures: mean over positions."""
    online: float
    """ECE with the temperatures in force when each round was decoded."""
    noise: float
    """ECE that honest probabilities would show on so many rounds."""


def replay_drift(
    phases: Sequence[tuple[str, DecodingTrace]],
    online: OnlineSts,
    *,
    stretch: int = 400,
    bins: int = DEFAULT_BINS,
) -> list[DriftPoint]:
    """Replay one kind of traffic after another and measure both corrections, stretch by stretch.

    Each round is judged before the correction sees it.

    Args:
        phases: Name and rounds of each kind of traffic, in order; one draft, one sampling temperature.
        online: The correction; its starting temperatures are the frozen ones. It is changed.
        stretch: Rounds per point; the last stretch of a phase may be longer, never shorter.
        bins: Equal-width bins of the ECE.
    """
    points, seen = [], 0
    frozen = online.sts
    for phase, trace in phases:
        total = len(trace.request)
        ends = [*range(stretch, total - stretch + 1, stretch), total]
        counted: dict[str, list[ReliabilityBins]] = {"frozen": [], "online": []}
        for start in range(0, total, STEP):
            part = select_rounds(trace, torch.arange(start, min(start + STEP, total)))
            logits = part.confidence_logits.to(torch.float64)
            for name, sts in (("frozen", frozen), ("online", online.sts)):
                predicted = survival(logits, sts)
                counted[name].append(
                    reliability_bins(predicted, part.prefix_accepted, verified_slots(part), bins=bins)
                )
            online.update(part.confidence_logits, part.verify_length, part.accepted)
            seen += len(part.request)
            if start + len(part.request) >= ends[0]:
                ends.pop(0)
                sums = {name: _total(parts) for name, parts in counted.items()}
                frozen_ece, online_ece = (float(s.calibration_error.nanmean()) for s in sums.values())
                points.append(
                    DriftPoint(phase, seen, frozen_ece, online_ece, float(sums["online"].noise.nanmean()))
                )
                counted = {"frozen": [], "online": []}
    return points


def _total(parts: Sequence[ReliabilityBins]) -> ReliabilityBins:
    names = ("count", "predicted", "accepted")
    return ReliabilityBins(*(torch.stack([getattr(part, name) for part in parts]).sum(0) for name in names))
