"""Pictures as data, and matplotlib's drawing of them: a PNG file, or SVG inside a page.

The SVG names the page's colours as CSS variables, so that one drawing serves light pages, dark ones and
print, and its words are text in the page's own font.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as Scale
    from matplotlib.figure import Figure, SubFigure

PAGE, INK, SOFT, HAIR = "#fcfcfb", "#1c1d20", "#5c6068", "#e3e3e0"
PALETTE = ("#2458c6", "#b4540a", "#177a5b", "#a3357f", "#6a4bc4", "#7b7f87")
RAMP = ("#a9c1f2", "#12306f")
"""Ends of the ramp for ordered lines."""
SHADES = 20
"""Steps of the ramp."""
GREY = 5
"""Colour of what is no result of a method."""

WIDTH, HEIGHT, SQUARE, ROW = 420, 240, 208, 26
"""Units of a drawing, about pixels on a phone: lines, a square's side, a row of bars."""
DPI = 72
"""Units per inch of matplotlib."""
LEGEND_ROW = 18
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

Point = tuple[float, float]


def plain_number(value: float) -> str:
    """Write a number with as few characters as keep it honest: 1200 → 1,200, 0.5 → 0.5, 1e-5 → 1e-05."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.0e}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    """Write a share of one as a percentage."""
    return f"{100 * value:.4g} %"


@dataclass(frozen=True)
class Axis:
    """One axis: its label with the unit; optionally bounds, given ticks, or a logarithmic scale."""

    label: str
    low: float | None = None
    high: float | None = None
    log: int = 0
    """Base of a logarithmic scale, 2 or 10; 0 is linear."""
    ticks: Sequence[float] = ()
    text: Callable[[float], str] = plain_number


@dataclass(frozen=True)
class Series:
    """One line of a picture."""

    label: str
    """In the legend; empty leaves it out."""
    points: Sequence[Point]
    """A y that is not finite interrupts the line."""
    colour: int = 0
    """Index into the palette."""
    shade: float | None = None
    """Place on the ramp, from 0 to 1, instead of a colour."""
    dashed: bool = False
    faint: bool = False
    line: bool = True
    """Whether its points are joined."""
    markers: bool = False
    errors: Sequence[Point] = ()
    """(low, high) of each point."""
    radii: Sequence[float] = ()
    """Of the dots, in units of the drawing; one size where left out."""
    hollow: Sequence[bool] = ()
    """Dots that are drawn as rings."""
    notes: Sequence[str] = ()
    """What each dot says when it is pointed at; its coordinates where left out."""

    @property
    def ink(self) -> str:
        """Its colour."""
        return PALETTE[self.colour % len(PALETTE)] if self.shade is None else _shade(self.shade)


@dataclass(frozen=True)
class Lines:
    """Lines over a numeric axis."""

    title: str
    description: str
    """What it is over, for those who cannot see it."""
    series: Sequence[Series]
    x: Axis
    y: Axis
    square: bool = False
    """A small square with the line y = x."""
    turn: tuple[float, str, str] | None = None
    """A place on the x axis, and what lies left and right of it."""

    @property
    def drawable(self) -> bool:
        """Whether some line has two points: one alone is a number, no picture."""
        return any(sum(math.isfinite(y) for _, y in line.points) > 1 for line in self.series if line.line)


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart, optionally with an interval."""

    label: str
    value: float
    colour: int = 0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Bars:
    """Labelled horizontal bars from 0, with the value at the end of each row."""

    title: str
    description: str
    bars: Sequence[Bar]
    text: Callable[[float], str] = plain_number

    @property
    def drawable(self) -> bool:
        """Whether there are two bars to compare."""
        return len(self.bars) > 1


Picture = Lines | Bars


def only_drawable(pictures: Iterable[Picture]) -> list[Picture]:
    """Leave out pictures that would show a single point."""
    return [picture for picture in pictures if picture.drawable]


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
    sizes = [_size(picture) for picture in pictures]
    width, height = max(w for w, _ in sizes) * columns, (max(h for _, h in sizes) + 26) * rows
    with rc_context(THEME):
        whole = Figure(figsize=(width / DPI, (height + 26 * bool(title)) / DPI), layout="constrained")
        if title:
            whole.suptitle(title, x=0.01, ha="left", color=INK, weight="bold")
        parts = whole.subfigures(rows, columns, squeeze=False).ravel()
        for part, picture in zip(parts, pictures, strict=False):
            _draw(part, picture, picture.title)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        whole.savefig(path, dpi=150, facecolor="white")


def as_svg(picture: Picture) -> Markup:
    """Draw a picture as one ``<svg>`` for a page; the page gives it the title."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    width, height = _size(picture)
    with rc_context(THEME):
        figure = Figure(figsize=(width / DPI, height / DPI), layout="constrained")
        notes = _draw(figure, picture)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(file.getvalue(), picture, notes)


# -- drawing ------------------------------------------------------------------------------------------------


def _size(picture: Picture) -> tuple[int, int]:
    if isinstance(picture, Bars):
        return WIDTH, ROW * len(picture.bars) + 8
    if picture.square:
        return SQUARE, SQUARE
    return WIDTH, HEIGHT + LEGEND_ROW * len(_legend_rows(picture))


def _draw(figure: Figure | SubFigure, picture: Picture, title: str = "") -> dict[str, Sequence[str]]:
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
    _set_scale(axes.xaxis, picture.x, [x for x, _ in points], axes.set_xlim)
    _set_scale(axes.yaxis, picture.y, [y for _, y in points] + bounds, axes.set_ylim)
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


def _set_scale(scale: Scale, axis: Axis, values: Sequence[float], set_limits: Callable[..., Any]) -> None:
    """Scale, ticks and limits of an axis: those given, else such that they hold the values."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if axis.log:
        scale._set_axes_scale("log", base=axis.log)  # type: ignore[attr-defined]
        subs = (1.0, 2.0, 5.0) if axis.log == 10 else (1.0,)
        scale.set_major_locator(LogLocator(base=axis.log, subs=subs, numticks=7))
    elif axis.ticks:
        scale.set_major_locator(FixedLocator(list(axis.ticks)))
    else:
        scale.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    scale.set_minor_locator(NullLocator())
    scale.set_major_formatter(FuncFormatter(lambda value, _: axis.text(value)))
    values = [value for value in values if math.isfinite(value)]
    if axis.low is not None and axis.high is not None:
        set_limits(axis.low, axis.high)
    elif axis.log and values:
        set_limits(min(values) / 1.15, max(values) * 1.15)
    elif axis.low is not None and values:
        rounded = scale.get_major_locator().view_limits(axis.low, max(values))
        set_limits(axis.low, rounded[1])


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


# -- from matplotlib's SVG to the page's --------------------------------------------------------------------


def _shade(share: float) -> str:
    """Colour at a share of the ramp, in one of its steps."""
    share = round(SHADES * share) / SHADES
    ends = [[int(end[i : i + 2], 16) for i in (1, 3, 5)] for end in RAMP]
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(*ends, strict=True))


def _variables() -> dict[str, str]:
    """What the page calls each colour."""
    names = {PAGE: "var(--page)", INK: "var(--ink)", SOFT: "var(--soft)", HAIR: "var(--hair)"}
    names |= {colour: f"var(--c{i})" for i, colour in enumerate(PALETTE)}
    for step in range(SHADES + 1):
        mix = f"color-mix(in oklab, var(--ramp-to) {100 * step // SHADES}%, var(--ramp-from))"
        names[_shade(step / SHADES)] = mix
    return names


def _for_page(text: str, picture: Picture, notes: dict[str, Sequence[str]]) -> Markup:
    """Keep of matplotlib's SVG what is seen: no identifiers, fonts or metadata; dots as circles that speak."""
    root = ElementTree.fromstring(text)
    for element in root.iter():
        element.tag = element.tag.split("}")[-1]
    marks = {f"#{path.get('id')}": path for path in root.iter("path") if path.get("id")}
    kind = "bars" if isinstance(picture, Bars) else "square" if picture.square else "lines"
    attributes = {
        "class": f"chart {kind}",
        "viewBox": str(root.get("viewBox")),
        "role": "img",
        "aria-label": f"{picture.title}. {picture.description}",
    }
    drawing = ElementTree.Element("svg", attributes)
    _copy(root, drawing, marks, notes)
    names = _variables()
    written = ElementTree.tostring(drawing, encoding="unicode")
    return Markup(re.sub(r"#[0-9a-f]{6}", lambda found: names.get(found[0], found[0]), written))


def _copy(
    source: ElementTree.Element,
    into: ElementTree.Element,
    marks: dict[str, ElementTree.Element],
    notes: dict[str, Sequence[str]],
) -> None:
    """Copy what is drawn below ``source`` into a flat drawing."""
    if (said := notes.get(source.get("id", ""))) is not None:
        dots = [part for part in source.iter() if part.tag in ("use", "path") and not part.get("id")]
        for dot, note in zip(dots, said, strict=True):
            circle = ElementTree.SubElement(into, "circle", _circle(dot, marks) | {"style": _style(dot)})
            ElementTree.SubElement(circle, "title").text = note
        return
    for part in source:
        style = _style(part)
        if part.tag in ("svg", "g"):
            _copy(part, into, marks, notes)
        elif part.tag == "text":
            place = {name: _round(part.get(name, "")) for name in ("x", "y", "transform") if part.get(name)}
            if "rotate(-0" in place.get("transform", ""):
                del place["transform"]
            ElementTree.SubElement(into, "text", place | {"style": style}).text = part.text
        elif part.tag == "path" and style != "fill:none":
            ElementTree.SubElement(into, "path", {"d": _round(part.get("d", "")), "style": style})


def _circle(dot: ElementTree.Element, marks: dict[str, ElementTree.Element]) -> dict[str, str]:
    """Centre and radius of a dot, which matplotlib draws as a path or as the use of one."""
    name = next((value for key, value in dot.attrib.items() if key.endswith("href")), "")
    path = marks[name] if name else dot
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", path.get("d", ""))]
    x, y = numbers[::2], numbers[1::2]
    middle = (max(x) + min(x)) / 2 + float(dot.get("x", 0)), (max(y) + min(y)) / 2 + float(dot.get("y", 0))
    return {"cx": f"{middle[0]:.1f}", "cy": f"{middle[1]:.1f}", "r": f"{(max(y) - min(y)) / 2:.1f}"}


def _style(part: ElementTree.Element) -> str:
    """Its style, without what the page decides: fonts, and the joints of lines."""
    style = re.sub(r"(font-family|stroke-linejoin):[^;]*;?", "", part.get("style", ""))
    return re.sub(r"\s*([:;,])\s+", r"\1", style).strip(" ;")


def _round(numbers: str) -> str:
    """Coordinates with one decimal."""
    text = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), numbers)
    return re.sub(r"\s+", " ", text).strip()
