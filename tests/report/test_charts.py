"""Charts: ticks cover the data, every point lands inside the frame, text is escaped."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dspark_train.report.charts import (
    HEIGHT,
    WIDTH,
    Axis,
    Bar,
    ReliabilityBin,
    Series,
    bar_chart,
    line_chart,
    nice_ticks,
    plain_number,
    reliability_chart,
)

finite = st.floats(-1e9, 1e9, allow_subnormal=False)


@example(67108864.0, 1e-4)
@given(finite, st.floats(0, 1e9, allow_subnormal=False))
def test_ticks_cover_the_range_in_even_round_steps(low: float, width: float) -> None:
    high = low + width
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 12
    slack = 1e-6 * (ticks[1] - ticks[0])
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert max(steps) - min(steps) <= 1e-6 * max(steps) + 1e-6
    leading = max(steps) / 10 ** math.floor(math.log10(max(steps)) + 1e-9)
    assert min(abs(leading - nice) for nice in (1, 2, 5, 10)) < 1e-3


def test_ticks_refuse_bounds_out_of_order() -> None:
    with pytest.raises(ValueError, match="in order"):
        nice_ticks(2.0, 1.0)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=30))
def test_every_point_lies_inside_the_frame(points: list[tuple[float, float]]) -> None:
    drawing = line_chart("t", "d", [Series("s", points, markers=True)], Axis("x"), Axis("y"))
    root = ElementTree.fromstring(drawing)
    circles = root.findall("circle")
    assert len(circles) == len(points)
    for circle in circles:
        assert 0 <= float(circle.get("cx", "nan")) <= WIDTH
        assert 0 <= float(circle.get("cy", "nan")) <= HEIGHT


def test_points_that_are_not_numbers_interrupt_the_line() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 2.0), (4.0, 1.0)]
    drawing = line_chart("t", "d", [Series("s", points)], Axis("x"), Axis("y"))
    assert len(ElementTree.fromstring(drawing).findall("path")) == 2
    assert "nan" not in drawing


def test_larger_values_are_drawn_higher_and_further_right() -> None:
    drawing = line_chart(
        "t", "d", [Series("s", [(1, 10), (64, 20)], markers=True)], Axis("x", log=True), Axis("y")
    )
    small, large = ElementTree.fromstring(drawing).findall("circle")
    assert float(small.get("cx", "nan")) < float(large.get("cx", "nan"))
    assert float(small.get("cy", "nan")) > float(large.get("cy", "nan"))


def test_a_logarithmic_axis_spaces_powers_evenly() -> None:
    points = [(float(2**i), 1.0) for i in range(10)]
    drawing = line_chart("t", "d", [Series("s", points, markers=True)], Axis("x", log=True), Axis("y"))
    xs = [float(c.get("cx", "nan")) for c in ElementTree.fromstring(drawing).findall("circle")]
    gaps = [b - a for a, b in itertools.pairwise(xs)]
    assert max(gaps) - min(gaps) < 0.2  # coordinates are rounded to 0.1


def test_text_is_escaped_everywhere() -> None:
    nasty = '<script>"&'
    drawings = [
        line_chart(nasty, nasty, [Series(nasty, [(0, 1)], markers=True)], Axis(nasty), Axis(nasty)),
        bar_chart(nasty, nasty, [Bar(nasty, 1.0)]),
        reliability_chart(nasty, nasty, [ReliabilityBin(0.5, 0.5, 3)], []),
    ]
    for drawing in drawings:
        assert "<script" not in drawing
        assert ElementTree.fromstring(drawing).get("aria-label") == f"{nasty}. {nasty}"


def test_bars_are_proportional() -> None:
    drawing = bar_chart("t", "d", [Bar("a", 1.0), Bar("b", 2.0, low=1.5, high=2.5)])
    one, two = (float(r.get("width", "nan")) for r in ElementTree.fromstring(drawing).findall("rect"))
    assert two == pytest.approx(2 * one, abs=0.2)


def test_reliability_dots_sit_where_the_numbers_say() -> None:
    drawing = reliability_chart("t", "d", [], [ReliabilityBin(0.0, 0.0, 1), ReliabilityBin(1.0, 1.0, 3)])
    low, high = ElementTree.fromstring(drawing).findall("circle")
    diagonal = re.search(r'class="ideal" x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"', drawing)
    assert diagonal is not None
    assert [float(v) for v in diagonal.groups()] == [
        float(circle.get(axis, "nan")) for circle in (low, high) for axis in ("cx", "cy")
    ]
    assert float(high.get("r", "nan")) > float(low.get("r", "nan"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1200.4, "1,200"), (0.5, "0.5"), (0.003, "0.003"), (1e-5, "1e-05"), (-2, "-2")],
)
def test_plain_number(value: float, text: str) -> None:
    assert plain_number(value) == text
