"""Reliability diagrams, and the look that every plot of the package shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dspark_train.calibration.metrics import ReliabilityBins
    from dspark_train.calibration.reliability import BeforeAfter

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours: told apart with any kind of colour vision."""


def finish(axis: Axes) -> None:
    """Leave only what is read: no box, a light horizontal grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="0.9", lw=0.6)
    axis.set_axisbelow(True)
    axis.title.set_fontsize("medium")


def plot_reliability(
    path: str | Path, temperatures: Sequence[float], rounds: BeforeAfter, sampling_temperature: float
) -> None:
    """Draw one reliability diagram per position, as trained and as calibrated.

    A dot is a bin of the predicted survival probability, its area the number of rounds in it.
    """
    from matplotlib.figure import Figure

    block_size = len(temperatures)
    columns = min(4, block_size)
    lines = -(-block_size // columns)
    figure = Figure(figsize=(2.7 * columns, 2.9 * lines + 0.7), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
    sides = (
        ("trained", rounds.before, PALETTE[1], "s"),
        ("calibrated", rounds.after, PALETTE[0], "o"),
    )
    for position, axis in enumerate(axes):
        if position >= block_size:
            axis.set_visible(False)
            continue
        axis.plot([0, 1], [0, 1], color="0.6", lw=0.8, ls="--")
        for label, side, colour, marker in sides:
            _dots(
                axis, side.bins, position, colour, marker, f"{label} (ECE {100 * side.ece[position]:.1f} %)"
            )
        axis.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
        axis.set_title(f"position {position + 1},  T = {temperatures[position]:.2f}")
        axis.legend(frameon=False, fontsize="x-small", loc="upper left", handletextpad=0.2)
        finish(axis)
    sampling = "greedy" if sampling_temperature == 0 else f"temperature {sampling_temperature:g}"
    figure.suptitle(f"Survival of the draft's prefix, {rounds.rounds} rounds, {sampling}")
    figure.supxlabel("predicted probability that the prefix is accepted", fontsize="medium")
    figure.supylabel("share accepted", fontsize="medium")
    figure.savefig(path, dpi=150)


def _dots(axis: Axes, bins: ReliabilityBins, position: int, colour: str, marker: str, label: str) -> None:
    count = bins.count[position]
    held = count > 0
    x = (bins.predicted[position] / count)[held]
    y = (bins.accepted[position] / count)[held]
    area = 60 * (count / count.max())[held] + 4
    axis.plot(x, y, color=colour, lw=1)
    axis.scatter(x, y, s=area, color=colour, alpha=0.75, lw=0, marker=marker, label=label)
