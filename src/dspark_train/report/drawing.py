"""Draws pictures with matplotlib: as a PNG file, or onto any figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dspark_train.report.pictures import (
    HAIR,
    INK,
    PAGE,
    PALETTE,
    SOFT,
    Axis,
    Bars,
    Lines,
    Picture,
    Series,
    only_drawable,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.ticker import Locator

WIDTH, HEIGHT, SQUARE, ROW = 420, 240, 208, 26
"""Units of a drawing, about pixels on a phone: lines, a square's side, a row of bars."""
DPI = 72
"""Units per inch of matplotlib."""
LEGEND_ROW = 18
"""Height of a row of the legend, in units of the drawing."""
THEME: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dspark",
    "font.size": 13,
    "axes.titlesize": 13,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid.axis": "y",
    "axes.grid": True,
    "axes.xmargin": 0.0,
    "axes.ymargin": 0.0,
    "axes.autolimit_mode": "round_numbers",
    "grid.color": HAIR,
    "grid.linewidth": 1.0,
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "text.color": SOFT,
    "text.parse_math": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "xtick.major.pad": 6.0,
    "ytick.major.pad": 6.0,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "legend.frameon": False,
    "legend.labelcolor": SOFT,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.2,
    "legend.borderaxespad": 0.2,
    "legend.borderpad": 0.3,
    "figure.constrained_layout.w_pad": 0.03,
    "figure.constrained_layout.h_pad": 0.03,
}


def save_png(path: str | Path, pictures: Sequence[Picture], title: str = "", columns: int = 4) -> None:
    """Draw pictures side by side into one PNG file; without any that can be drawn, no file is written.

    Args:
        path: of the file; its folder is made.
        pictures: row by row.
        title: over all of them.
        columns: pictures in a row.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    pictures = only_drawable(pictures)
    if not pictures:
        return
    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    sizes = [size(picture) for picture in pictures]
    width, height = max(w for w, _ in sizes) * columns, (max(h for _, h in sizes) + 26) * rows
    with rc_context(THEME):
        whole = Figure(figsize=(width / DPI, (height + 26 * bool(title)) / DPI), layout="constrained")
        if title:
            whole.suptitle(title, x=0.01, ha="left", color=INK, weight="bold")
        parts = whole.subfigures(rows, columns, squeeze=False).ravel()
        for part, picture in zip(parts, pictures, strict=False):
            draw(part, picture, picture.title)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        whole.savefig(path, dpi=150, facecolor="white")


def size(picture: Picture) -> tuple[int, int]:
    """Width and height of a drawing, in units of it."""
    if isinstance(picture, Bars):
        return WIDTH, ROW * len(picture.bars) + 8
    if picture.square:
        return SQUARE, SQUARE
    return WIDTH, HEIGHT + LEGEND_ROW * len(_legend_rows(picture))


def draw(figure: Figure | SubFigure, picture: Picture, title: str = "") -> dict[str, Sequence[str]]:
    """Draw onto an empty figure; returns what the dots of each group say, by the group's name in the SVG."""
    axes = figure.subplots()
    rows = [] if isinstance(picture, Bars) else _legend_rows(picture)
    if title and not rows:
        figure.suptitle(title, x=0.02, ha="left", color=INK, fontsize=13)
    if isinstance(picture, Bars):
        _draw_bars(axes, picture)
        return {}
    notes: dict[str, Sequence[str]] = {}
    if picture.square:
        axes.plot([0, 1], [0, 1], color=SOFT, lw=1, ls=(0, (2, 4)), clip_on=False)
        axes.set_aspect("equal")
    for number, line in enumerate(picture.series):
        notes |= _draw_line(axes, line, picture, f"dots{number}")
    points = [point for line in picture.series for point in line.points]
    bounds = [bound for line in picture.series for pair in line.errors for bound in pair]
    _set_scale(axes, "x", picture.x, [x for x, _ in points])
    _set_scale(axes, "y", picture.y, [y for _, y in points] + bounds)
    axes.set(xlabel=picture.x.label, ylabel=picture.y.label)
    if picture.turn is not None:
        place, before, after = picture.turn
        axes.axvline(place, color=SOFT, lw=1, ls=(0, (2, 3)))
        for text, side, offset in ((f"← {before}", "right", -6), (f"{after} →", "left", 6)):
            axes.annotate(
                text,
                (place, 0.02),
                (offset, 0),
                xycoords=axes.get_xaxis_transform(),
                textcoords="offset points",
                ha=side,
                fontsize=12,
            )
    if rows:
        handles = {line.get_label(): line for line in axes.get_lines()}
        columns = max(map(len, rows))
        labels = [label for row in rows for label in row]
        ordered = [label for column in range(columns) for label in labels[column::columns]]
        legend = figure.legend(
            [handles[label] for label in ordered],
            ordered,
            loc="outside upper left",
            ncols=columns,
            fontsize=12.5,
            title=title or None,
            alignment="left",
        )
        legend.get_title().set(color=INK, fontsize=13)
    return notes


def _draw_line(axes: Axes, line: Series, picture: Lines, name: str) -> dict[str, Sequence[str]]:
    look: dict[str, Any] = {
        "color": line.ink,
        "alpha": 0.45 if line.faint else None,
        "lw": 1.25 if line.faint else 2.0,
        "clip_on": False,
    }
    x, y = [x for x, _ in line.points], [y for _, y in line.points]
    if line.line:
        axes.plot(x, y, ls=(0, (2.5, 2)) if line.dashed else "-", label=line.label or "_", **look)
    if line.errors:
        across = [value for place in x for value in (place, place, math.nan)]
        upright = [value for low, high in line.errors for value in (low, high, math.nan)]
        axes.plot(across, upright, color=line.ink, lw=1.25, alpha=0.8, clip_on=False)
    if not line.markers:
        return {}
    kept = [i for i, value in enumerate(y) if math.isfinite(value)]
    hollow = line.hollow or [False] * len(x)
    radii = line.radii or [3.2] * len(x)
    axes.scatter(
        [x[i] for i in kept],
        [y[i] for i in kept],
        s=[(2 * radii[i]) ** 2 for i in kept],
        facecolors=[PAGE if hollow[i] else line.ink for i in kept],
        edgecolors=[line.ink if hollow[i] else PAGE for i in kept],
        linewidths=[1.5 if hollow[i] else 0.75 for i in kept],
        alpha=0.65 if line.faint else None,
        clip_on=False,
        zorder=3,
        gid=name,
    )
    prefix = f"{line.label}: " if line.label else ""
    said = line.notes or [f"{prefix}{picture.x.text(a)} → {picture.y.text(b)}" for a, b in line.points]
    return {name: [said[i] for i in kept]}


def _set_scale(axes: Axes, name: Literal["x", "y"], axis: Axis, values: Sequence[float]) -> None:
    """Scale, ticks and limits of an axis: those given, else such that they hold the values."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    set_limits: Callable[[float, float], object] = axes.set_xlim if name == "x" else axes.set_ylim
    locator: Locator
    if axis.log:
        (axes.set_xscale if name == "x" else axes.set_yscale)("log", base=axis.log)
        subs = (1.0, 2.0, 5.0) if axis.log == 10 else (1.0,)
        locator = LogLocator(base=axis.log, subs=subs, numticks=7)
    elif axis.ticks:
        locator = FixedLocator(list(axis.ticks))
    else:
        locator = MaxNLocator(nbins=5, steps=[1, 2, 5, 10])
    scale = axes.xaxis if name == "x" else axes.yaxis
    scale.set_major_locator(locator)
    scale.set_minor_locator(NullLocator())
    scale.set_major_formatter(FuncFormatter(lambda value, _: axis.text(value)))
    values = [value for value in values if math.isfinite(value)]
    if axis.low is not None and axis.high is not None:
        set_limits(axis.low, axis.high)
    elif axis.log and values:
        set_limits(min(values) / 1.15, max(values) * 1.15)
    elif axis.low is not None and values:
        set_limits(axis.low, locator.view_limits(axis.low, max(values))[1])


def _draw_bars(axes: Axes, picture: Bars) -> None:
    from matplotlib.ticker import NullLocator

    places = range(len(picture.bars))
    inks = [PALETTE[bar.colour % len(PALETTE)] for bar in picture.bars]
    axes.barh(places, [bar.value for bar in picture.bars], height=0.55, color=inks)
    for place, bar in zip(places, picture.bars, strict=True):
        if bar.low is not None and bar.high is not None:
            axes.plot([bar.low, bar.high], [place, place], color=INK, lw=1.5, clip_on=False)
        values: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "color": INK}
        axes.text(1.02, place, picture.text(bar.value), ha="left", **values)
    labels = [bar.label if len(bar.label) <= 24 else bar.label[:23] + "…" for bar in picture.bars]
    axes.set_yticks(places, labels, color=INK)
    axes.xaxis.set_major_locator(NullLocator())
    axes.set_xlim(0, max([bar.value if bar.high is None else bar.high for bar in picture.bars]) or 1.0)
    axes.set_ylim(len(picture.bars) - 0.5, -0.5)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)


def _legend_rows(picture: Lines) -> list[list[str]]:
    """Labels in rows of equal columns that fit the width; none for a single one, or in a small square."""
    labels = [line.label for line in picture.series if line.label]
    if len(labels) < 2 or picture.square:
        return []
    for columns in range(len(labels), 0, -1):
        widths = [max(40 + 7.2 * len(label) for label in labels[c::columns]) for c in range(columns)]
        if sum(widths) <= WIDTH or columns == 1:
            return [labels[i : i + columns] for i in range(0, len(labels), columns)]
    return []
