"""Plots of the studies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspark_train.report.calibration_plots import PALETTE, finish
from dspark_train.studies.rounds import ALL, Acceptance, Drift, Sweep
from dspark_train.studies.simulate import LoadPoint

MARKERS = "osD^vPX"
STYLES = ("-", "--", "-.", ":", "-", "--", "-.")


def plot_sweep(path: Path, sweeps: Sequence[Sweep]) -> None:
    """Draw acceptance rate, tokens per round and rejected tokens against the threshold, one line per group."""
    figure = Figure(figsize=(11.5, 3.5), layout="constrained")
    panels = (
        ("acceptance_rate", "accepted share of verified tokens (%)", 100),
        ("tokens_per_round", "tokens per round", 1),
        ("rejected_per_round", "rejected draft tokens per round", 1),
    )
    for axis, (name, label, scale) in zip(figure.subplots(1, 3), panels, strict=True):
        for index, sweep in enumerate(sweeps):
            points = [
                (threshold, scale * value)
                for threshold, value in zip(sweep.thresholds, getattr(sweep, name), strict=True)
                if value is not None
            ]
            _line(axis, index, [x for x, _ in points], [y for _, y in points], label=sweep.group)
        axis.set(xlabel="confidence threshold", ylabel=label, xlim=(0, 1))
        if name != "tokens_per_round":
            axis.set_ylim(bottom=0)
        finish(axis)
    figure.axes[0].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def plot_acceptance(path: Path, acceptances: Sequence[Acceptance]) -> None:
    """Draw conditional (with 95 % intervals) and cumulative acceptance against the position."""
    figure = Figure(figsize=(8.4, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for index, group in enumerate(acceptances):
        seen = [k for k, value in enumerate(group.conditional) if value is not None]
        x, y = [k + 1 for k in seen], [100 * (group.conditional[k] or 0.0) for k in seen]
        _line(left, index, x, y, label=f"{group.group} (τ {group.tau:.2f})")
        if group.group == ALL:
            low, high = ([100 * (side[k] or 0.0) for k in seen] for side in (group.low, group.high))
            left.fill_between(x, low, high, color=PALETTE[index], alpha=0.15, lw=0)
        kept = [(k + 1, 100 * value) for k, value in enumerate(group.cumulative) if value is not None]
        _line(right, index, [x for x, _ in kept], [y for _, y in kept], label=group.group)
    left.set(xlabel="position in the block", ylabel="accepted (%)", ylim=(0, 100))
    left.set_title("given that all earlier ones were")
    right.set(xlabel="position in the block")
    right.set_title("whole prefix")
    left.legend(frameon=False, fontsize="small")
    for axis in (left, right):
        axis.set_xticks(range(1, len(acceptances[0].conditional) + 1))
        finish(axis)
    figure.savefig(path, dpi=150)


def plot_drift(path: Path, drift: Drift) -> None:
    """Draw the calibration error of frozen and of following temperatures along a drifting load."""
    figure = Figure(figsize=(5.6, 3.5), layout="constrained")
    axis = figure.subplots()
    x = [point.rounds for point in drift.points]
    for index, name in enumerate(("frozen", "online")):
        _line(axis, index, x, [100 * getattr(point, name) for point in drift.points], label=name)
    axis.plot(
        x, [100 * point.noise for point in drift.points], color="0.5", lw=1, ls=":", label="noise of counting"
    )
    change = max(point.rounds for point in drift.points if point.phase == drift.first)
    axis.axvline(change, color="0.6", lw=0.8)
    axis.text(change, 0.02, f" {drift.second} →", transform=axis.get_xaxis_transform(), size=9)
    axis.text(change, 0.02, f"← {drift.first} ", ha="right", transform=axis.get_xaxis_transform(), size=9)
    axis.set(xlabel="decoding rounds", ylabel="mean ECE of the survival probability (%)")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize="small")
    finish(axis)
    figure.savefig(path, dpi=150)


def plot_load(path: Path, points: Sequence[LoadPoint]) -> None:
    """Draw throughput against per-user speed, and the verification budget against concurrency.

    Hollow marks are extrapolated: some pass had more rows than were measured.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, name in enumerate(dict.fromkeys(point.policy for point in points)):
        mine = [point for point in points if point.policy == name]
        for axis, x, y in (
            (left, [p.per_user for p in mine], [p.throughput for p in mine]),
            (right, [p.requests for p in mine], [p.verified_per_request for p in mine]),
        ):
            _line(axis, index, x, y, label=name)
            hollow = [(a, b) for a, b, p in zip(x, y, mine, strict=True) if p.extrapolated]
            if hollow:
                axis.scatter(*zip(*hollow, strict=True), s=10, color="white", zorder=3, marker=MARKERS[index])
    left.set(
        xlabel="tokens per second, one user",
        ylabel="tokens per second, all users",
        xscale="log",
        yscale="log",
    )
    left.set_title("Throughput against speed, a point per concurrency")
    if any(point.extrapolated for point in points):
        left.text(
            0.98,
            0.97,
            "hollow: beyond the measured rows",
            ha="right",
            va="top",
            transform=left.transAxes,
            size=8,
        )
    right.set(
        xlabel="concurrent requests", ylabel="draft tokens verified per request and round", ylim=(0, None)
    )
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter("{x:g}")
    right.set_title("Verification budget")
    for axis in (left, right):
        finish(axis)
    for scale in (left.xaxis, left.yaxis):
        scale.set_major_formatter("{x:g}")
        scale.set_minor_formatter(lambda value, _: f"{value:g}" if str(value)[0] in "25" else "")
    left.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def _line(axis: Axes, index: int, x: Sequence[float], y: Sequence[float], label: str) -> None:
    style = {"color": PALETTE[index % 7], "marker": MARKERS[index % 7], "ls": STYLES[index % 7]}
    axis.plot(x, y, ms=4, lw=1.4, label=label, **style)  # type: ignore[arg-type]
