"""Small SVG charts for the report: plain text in, one self-contained ``<svg>`` out.

Colours and fonts are classes that the report's style sheet resolves, so that one drawing serves a light page,
a dark one and print. The view box is about as wide as a phone, so that text keeps its size; the page
lays several charts side by side where there is room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 40

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
    """One axis: its label (with the unit); optionally bounds, a logarithmic scale, or given ticks."""

    label: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    ticks: tuple[float, ...] = ()
    text: Callable[[float], str] = plain_number


def by_position(values: Sequence[float | None], offset: float = 0.0) -> list[Point]:
    """Return (1, value), (2, value), …, moved sideways by ``offset``; what is unknown becomes a gap."""
    return [(i + offset, math.nan if value is None else value) for i, value in enumerate(values, start=1)]


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    ``colour`` is an index into the page's palette (0-based), ``shade`` (0..1) replaces it by a step of the
    sequential ramp. ``errors`` are (low, high) per point. Points whose y is not finite interrupt the line.
    """

    label: str
    points: Sequence[Point]
    colour: int = 0
    shade: float | None = None
    dashed: bool = False
    faint: bool = False
    markers: bool = False
    line: bool = True
    errors: Sequence[Point] = field(default=())

    @property
    def classes(self) -> str:
        """CSS classes of every mark of this series."""
        names = ["ramp" if self.shade is not None else f"c{self.colour % 6}"]
        names += [name for name, on in (("dashed", self.dashed), ("faint", self.faint)) if on]
        return " ".join(names)

    @property
    def style(self) -> str:
        """Inline style: the position on the sequential ramp."""
        return "" if self.shade is None else f' style="--shade:{100 * self.shade:.0f}%"'


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round steps (1, 2 or 5 times a power of ten) that cover ``[low, high]``, about ``count`` of them."""
    if not (math.isfinite(low) and math.isfinite(high)) or high < low:
        raise ValueError(f"ticks need finite bounds in order, got [{low}, {high}]")
    # flat: labels could not tell steps of a narrower range apart, and floats could not make them even
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-12):
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of two between the bounds where those are few, powers of ten otherwise."""
    base = 2.0 if high / low <= 4096 else 10.0
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    ticks = [base**i for i in range(first, max(last, first + 1) + 1)]
    return ticks if len(ticks) <= 7 else ticks[:: math.ceil(len(ticks) / 7)]


class _Scale:
    """Maps data to pixels along one axis."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        finite = [v for v in values if math.isfinite(v) and (not axis.log or v > 0)]
        low = axis.low if axis.low is not None else min(finite, default=0.0)
        high = axis.high if axis.high is not None else max(finite, default=1.0)
        high = max(high, low)
        self.axis, self.start, self.end = axis, start, end
        ticks = list(axis.ticks) or (_log_ticks(low, high) if axis.log else nice_ticks(low, high))
        self.low = low if axis.low is not None else min(low, ticks[0])
        self.high = high if axis.high is not None else max(high, ticks[-1])
        if self.high <= self.low:
            self.high = self.low * 2 if axis.log else self.low + 1
        margin = 1e-9 * (abs(self.low) + abs(self.high))
        self.ticks = [t for t in ticks if self.low - margin <= t <= self.high + margin]

    def __call__(self, value: float) -> float:
        if self.axis.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(1.02, max(-0.02, share))

    def takes(self, value: float) -> bool:
        """Whether the value can be drawn at all."""
        return math.isfinite(value) and (not self.axis.log or value > 0)


def _runs(points: Sequence[Point], x: _Scale, y: _Scale) -> list[list[Point]]:
    """Pixel coordinates of the line's unbroken stretches."""
    runs: list[list[Point]] = [[]]
    for px, py in points:
        if x.takes(px) and y.takes(py):
            runs[-1].append((x(px), y(py)))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _axes(x: _Scale, y: _Scale) -> list[str]:
    parts = []
    for tick in y.ticks:
        level = y(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{LEFT - 7}" y="{level + 4:.1f}" text-anchor="end">'
            f"{escape(y.axis.text(tick))}</text>"
        )
    floor = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>')
    for tick in x.ticks:
        parts.append(
            f'<text class="tick" x="{x(tick):.1f}" y="{floor + 16}" text-anchor="middle">'
            f"{escape(x.axis.text(tick))}</text>"
        )
    parts.append(
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 5}" text-anchor="middle">'
        f"{escape(x.axis.label)}</text>"
    )
    return parts


def _marks(series: Series, x: _Scale, y: _Scale, x_axis: Axis, y_axis: Axis) -> list[str]:
    parts = []
    if series.line:
        for run in _runs(series.points, x, y):
            path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in run)
            parts.append(f'<path class="line {series.classes}"{series.style} d="{path}"/>')
    for (px, _), (low, high) in zip(series.points, series.errors, strict=False):
        if x.takes(px) and y.takes(low) and y.takes(high):
            parts.append(
                f'<line class="error {series.classes}"{series.style} x1="{x(px):.1f}" x2="{x(px):.1f}" '
                f'y1="{y(low):.1f}" y2="{y(high):.1f}"/>'
            )
    if series.markers:
        for px, py in series.points:
            if x.takes(px) and y.takes(py):
                text = f"{series.label}: {x_axis.text(px)} → {y_axis.text(py)}".removeprefix(": ")
                parts.append(
                    f'<circle class="dot {series.classes}"{series.style} '
                    f'cx="{x(px):.1f}" cy="{y(py):.1f}" r="3.2">'
                    f"<title>{escape(text)}</title></circle>"
                )
    return parts


def _frame(body: list[str], title: str, description: str) -> Markup:
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}. {escape(description)}">' + "".join(body) + "</svg>"
    )


def line_chart(
    title: str,
    description: str,
    series: Sequence[Series],
    x_axis: Axis,
    y_axis: Axis,
    *,
    diagonal: bool = False,
) -> Markup:
    """Draw lines, dots or both over a numeric x axis.

    Args:
        title: What a screen reader says first.
        description: What it says next: the finding in words.
        series: The lines, drawn in order.
        x_axis: Horizontal axis.
        y_axis: Vertical axis.
        diagonal: Also draw the line y = x (perfect calibration).
    """
    xs = [px for line in series for px, _ in line.points]
    ys = [py for line in series for _, py in line.points] + [
        v for line in series for pair in line.errors for v in pair
    ]
    x = _Scale(x_axis, xs, LEFT, WIDTH - RIGHT)
    y = _Scale(y_axis, ys, HEIGHT - BOTTOM, TOP)
    body = _axes(x, y)
    if diagonal:
        low, high = max(x.low, y.low), min(x.high, y.high)
        body.append(
            f'<line class="ideal" x1="{x(low):.1f}" y1="{y(low):.1f}" x2="{x(high):.1f}" y2="{y(high):.1f}"/>'
        )
    for line in series:
        body += _marks(line, x, y, x_axis, y_axis)
    return _frame(body, title, description)


@dataclass(frozen=True)
class Bar:
    """One row of a horizontal bar chart; ``low``/``high`` draw an interval, ``note`` replaces the value."""

    label: str
    value: float
    colour: int = 0
    low: float | None = None
    high: float | None = None
    note: str = ""


def bar_chart(
    title: str,
    description: str,
    bars: Sequence[Bar],
    *,
    text: Callable[[float], str] = plain_number,
    start: float = 0.0,
) -> Markup:
    """Draw labelled horizontal bars from ``start``, one row each, with the value at the end of the row."""
    row, label_width, value_width = 26, 132, 62
    height = row * len(bars) + 8
    left, right = label_width, WIDTH - value_width
    top = max([bar.high if bar.high is not None else bar.value for bar in bars] + [start]) - start or 1.0

    def place(value: float) -> float:
        return left + (right - left) * min(1.0, max(0.0, (value - start) / top))

    parts = []
    for index, bar in enumerate(bars):
        middle = row * index + row / 2 + 4
        label = bar.label if len(bar.label) <= 21 else bar.label[:20] + "…"
        parts.append(
            f'<text class="name" x="{left - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(label)}'
            f"<title>{escape(bar.label)}</title></text>"
        )
        parts.append(
            f'<rect class="bar c{bar.colour % 6}" x="{left}" y="{middle - 7:.1f}" height="14" '
            f'width="{max(1.0, place(bar.value) - left):.1f}" rx="2"/>'
        )
        if bar.low is not None and bar.high is not None:
            parts.append(
                f'<line class="whisker" x1="{place(bar.low):.1f}" x2="{place(bar.high):.1f}" '
                f'y1="{middle:.1f}" y2="{middle:.1f}"/>'
            )
        parts.append(
            f'<text class="value" x="{WIDTH}" y="{middle + 4:.1f}" text-anchor="end">'
            f"{escape(bar.note or text(bar.value))}</text>"
        )
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}. {escape(description)}">' + "".join(parts) + "</svg>"
    )


@dataclass(frozen=True)
class ReliabilityBin:
    """One bin of a reliability diagram: mean confidence, share accepted, rounds counted."""

    confidence: float
    accepted: float
    count: float


def reliability_chart(
    title: str, description: str, before: Sequence[ReliabilityBin], after: Sequence[ReliabilityBin]
) -> Markup:
    """Draw predicted against observed acceptance: dots sized by their rounds, the diagonal dotted.

    Bins with less than 0.5 % of the rounds are dots beside the line, not part of it.
    """
    size, left, bottom, top = 200, 34, 34, 8
    span = size - left - 8
    floor = top + span

    def place(bin_: ReliabilityBin) -> tuple[float, float]:
        return left + span * bin_.confidence, floor - span * bin_.accepted

    parts = []
    for tick in (0.0, 0.5, 1.0):
        level, across = floor - span * tick, left + span * tick
        parts.append(f'<line class="grid" x1="{left}" x2="{left + span}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{left - 6}" y="{level + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
        anchor = "end" if tick == 1 else "middle"
        parts.append(
            f'<text class="tick" x="{across:.1f}" y="{floor + 15}" text-anchor="{anchor}">{tick:g}</text>'
        )
    parts.append(f'<line class="ideal" x1="{left}" y1="{floor}" x2="{left + span}" y2="{top}"/>')
    for name, bins, classes in (("before", before, "c5 faint"), ("after", after, "c0")):
        total = sum(bin_.count for bin_ in bins) or 1.0
        drawn = [bin_ for bin_ in bins if bin_.count > 0]
        solid = [bin_ for bin_ in drawn if bin_.count >= 0.005 * total]
        if len(solid) > 1:
            path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in map(place, solid))
            parts.append(f'<path class="line {classes}" d="{path}"/>')
        for bin_ in drawn:
            px, py = place(bin_)
            radius = 1.6 + 5.0 * math.sqrt(bin_.count / total)
            said, kept = percent(bin_.confidence), percent(bin_.accepted)
            text = f"{name}: predicted {said}, accepted {kept}, {bin_.count:g} rounds"
            parts.append(
                f'<circle class="dot {classes}" cx="{px:.1f}" cy="{py:.1f}" r="{radius:.1f}">'
                f"<title>{escape(text)}</title></circle>"
            )
    height = floor + bottom - 8
    return Markup(
        f'<svg class="chart square" viewBox="0 0 {size} {height}" role="img" '
        f'aria-label="{escape(title)}. {escape(description)}">' + "".join(parts) + "</svg>"
    )
