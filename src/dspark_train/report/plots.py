"""Plots of an ablation as PNG, after the paper's Figures 3 (layers) and 4 (block size)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_train.evaluation.ablation import Study
from dspark_train.report.charts import Axis

if TYPE_CHECKING:
    from dspark_train.evaluation.ablate import StudyLine

PANELS = (
    ("expected", "Expected τ, temperature 1", "tokens per round"),
    ("tau", "Accepted length τ, greedy", "tokens per round"),
    ("speedup", "Speedup, greedy", "times plain decoding"),
    ("round_milliseconds", "Time of a round", "milliseconds"),
)
"""Panels of a study's plot, left to right: attribute of a result, title, unit."""


def draw_study(study: Study, lines: Sequence[StudyLine], axis: Axis, path: Path) -> Path:
    """Draw one study: accepted length, speedup and round time against its x axis, one line a choice.

    Args:
        study: names the axes.
        lines: results along x.
        axis: places and names of the choices on x.
        path: PNG file to write.
    """
    from matplotlib.figure import Figure

    from dspark_train.report.calibration_plots import PALETTE, finish

    panels = [panel for panel in PANELS if any(_values(line, panel[0]) for line in lines)]
    figure = Figure(figsize=(3.6 * max(1, len(panels)), 3.0), layout="constrained")
    for number, (attribute, title, unit) in enumerate(panels, start=1):
        plot = figure.add_subplot(1, len(panels), number)
        for colour, line in enumerate(lines):
            points = _values(line, attribute)
            if points:
                xs, ys = zip(*points, strict=True)
                plot.plot(
                    xs, ys, marker="o", ms=4, lw=1.6, color=PALETTE[colour % len(PALETTE)], label=line.label
                )
        plot.set_title(title)
        plot.set_xlabel(study.x)
        plot.set_ylabel(unit)
        plot.set_xticks(list(axis.ticks), [axis.text(tick) for tick in axis.ticks])
        finish(plot)
        if number == 1 and study.lines:
            plot.legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _values(line: StudyLine, attribute: str) -> list[tuple[float, float]]:
    return [(x, value) for x, result in line.points if (value := getattr(result, attribute)) is not None]
