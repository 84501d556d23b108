"""Pictures as data: lines over an axis, and bars. :mod:`.drawing` draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dspark_train.report.text import plain_number

PAGE, INK, SOFT, HAIR = "#fcfcfb", "#1c1d20", "#5c6068", "#e3e3e0"
PALETTE = ("#2458c6", "#b4540a", "#177a5b", "#a3357f", "#6a4bc4", "#7b7f87")
RAMP = ("#a9c1f2", "#12306f")
"""Ends of the ramp for ordered lines."""
SHADES = 20
"""Steps of the ramp."""
GREY = 5
"""Colour of what is no result of a method."""

Point = tuple[float, float]


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
        return PALETTE[self.colour % len(PALETTE)] if self.shade is None else ramp(self.shade)


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


def ramp(share: float) -> str:
    """Colour at a share of the ramp, in one of its steps."""
    share = round(SHADES * share) / SHADES
    ends = [[int(end[i : i + 2], 16) for i in (1, 3, 5)] for end in RAMP]
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(*ends, strict=True))
