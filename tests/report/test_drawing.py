"""Pictures: every dot lies where its numbers say, text is escaped and stays text, colours are the page's."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dspark_train.report.drawing import SQUARE, WIDTH, save_png
from dspark_train.report.pictures import PALETTE, Axis, Bar, Bars, Lines, Picture, Series
from dspark_train.report.svg import as_svg
from dspark_train.report.text import plain_number

finite = st.floats(-1e9, 1e9, allow_subnormal=False)


def draw(picture: Picture) -> ElementTree.Element:
    return ElementTree.fromstring(as_svg(picture))


def lines(*series: Series, x: Axis | None = None, y: Axis | None = None) -> Lines:
    return Lines("t", "d", series, x or Axis("x"), y or Axis("y"))


def dots(drawing: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(dot.get("cx", "nan")), float(dot.get("cy", "nan"))) for dot in drawing.findall("circle")]


def ticks(drawing: ElementTree.Element, anchor: str) -> list[float]:
    """Numbers of an axis: those on the left end at it, those below are centred."""
    return [
        float(str(text.text).replace(",", "").replace("\N{MINUS SIGN}", "-"))
        for text in drawing.findall("text")
        if f"text-anchor:{anchor}" in text.get("style", "") and str(text.text) not in ("x", "y")
    ]


@settings(max_examples=15, deadline=None)
@example([(0.0, 67108864.0), (1.0, 67108864.0001)])
@given(st.lists(st.tuples(finite, finite), min_size=2, max_size=30))
def test_every_dot_lies_inside_the_frame(points: list[tuple[float, float]]) -> None:
    drawing = draw(lines(Series("s", points, markers=True)))
    _, _, width, height = map(float, str(drawing.get("viewBox")).split())
    found = dots(drawing)
    assert len(found) == len(points)
    assert all(0 <= x <= width and 0 <= y <= height for x, y in found)


@pytest.mark.parametrize("high", [0.037, 1.0, 24.0, 6312.0])
def test_ticks_cover_the_range_in_even_round_steps(high: float) -> None:
    drawing = draw(lines(Series("", [(0.0, 0.0), (high, high)])))
    for anchor in ("middle", "end"):
        found = ticks(drawing, anchor)
        assert found[0] <= 0
        assert found[-1] >= high
        steps = [b - a for a, b in itertools.pairwise(found)]
        assert max(steps) == pytest.approx(min(steps))
        leading = max(steps) / 10 ** math.floor(math.log10(max(steps)) + 1e-9)
        assert min(abs(leading - nice) for nice in (1, 2, 5)) < 1e-3


def test_values_that_are_not_numbers_interrupt_the_line() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 2.0), (4.0, 1.0)]
    drawing = draw(lines(Series("s", points, markers=True)))
    (path,) = [p for p in drawing.findall("path") if "var(--c0)" in p.get("style", "")]
    assert path.get("d", "").count("M") == 2
    assert len(dots(drawing)) == 4
    assert "nan" not in as_svg(lines(Series("s", points, markers=True)))


def test_larger_values_are_drawn_higher_and_further_right() -> None:
    small, large = dots(draw(lines(Series("s", [(1, 10), (64, 20)], markers=True), x=Axis("x", log=2))))
    assert small[0] < large[0]
    assert small[1] > large[1]


def test_a_logarithmic_axis_spaces_powers_evenly() -> None:
    points = [(float(2**i), 1.0) for i in range(10)]
    xs = [x for x, _ in dots(draw(lines(Series("s", points, markers=True), x=Axis("x", log=2))))]
    gaps = [b - a for a, b in itertools.pairwise(xs)]
    assert max(gaps) - min(gaps) < 0.25  # coordinates are rounded to 0.1


def test_text_is_escaped_everywhere_and_stays_text() -> None:
    nasty = '<script>"&$x_1$'
    pictures: list[Picture] = [
        Lines(nasty, nasty, [Series(nasty, [(0, 1), (1, 1)], markers=True)] * 2, Axis(nasty), Axis(nasty)),
        Bars(nasty, nasty, [Bar(nasty, 1.0), Bar(nasty, 2.0)]),
    ]
    for picture in pictures:
        svg = as_svg(picture)
        assert "<script" not in svg
        drawing = ElementTree.fromstring(svg)
        assert drawing.get("aria-label") == f"{nasty}. {nasty}"
        assert nasty in [text.text for text in drawing.findall("text")]


def test_bars_are_proportional() -> None:
    drawing = draw(Bars("t", "d", [Bar("a", 1.0), Bar("b", 2.0, low=1.5, high=2.5)]))
    paths = [p.get("d", "") for p in drawing.findall("path") if "fill:var(--c0)" in p.get("style", "")]
    one, two = ([float(n) for n in re.findall(r"-?[\d.]+", path)][::2] for path in paths)
    assert max(two) - min(two) == pytest.approx(2 * (max(one) - min(one)), abs=0.2)


def test_reliability_dots_sit_where_the_numbers_say() -> None:
    unit = Axis("", 0.0, 1.0)
    series = Series("s", [(0.0, 0.0), (1.0, 1.0)], markers=True, radii=[2.0, 4.0], notes=["few", "many"])
    drawing = draw(Lines("t", "d", [series], unit, unit, square=True))
    (diagonal,) = [p.get("d", "") for p in drawing.findall("path") if "dasharray" in p.get("style", "")]
    ends = [float(number) for number in re.findall(r"[\d.]+", diagonal)]
    low, high = drawing.findall("circle")
    assert ends == pytest.approx([v for dot in dots(drawing) for v in dot], abs=0.11)
    assert float(high.get("r", "nan")) == pytest.approx(4.0, abs=0.06)
    assert float(low.get("r", "nan")) == pytest.approx(2.0, abs=0.06)
    assert [dot.findtext("title") for dot in (low, high)] == ["few", "many"]


def test_a_drawing_has_the_colours_of_the_page_and_no_identifiers() -> None:
    series = [
        Series(f"line {i}", [(0, i), (1, i)], i, shade=i / 7 if i > 5 else None, markers=True)
        for i in range(8)
    ]
    svg = as_svg(lines(*series))
    assert not re.search(r"#[0-9a-f]{6}|font-family|\bid=|href|<style", svg)
    for index in range(len(PALETTE)):
        assert f"var(--c{index})" in svg
    assert "color-mix(" in svg


def test_dots_say_their_numbers() -> None:
    series = Series("draft", [(1, 0.5), (2, 0.25)], markers=True)
    drawing = draw(lines(series, y=Axis("y", text=lambda value: f"{100 * value:g} %")))
    said = [dot.findtext("title") for dot in drawing.findall("circle")]
    assert said == ["draft: 1 → 50 %", "draft: 2 → 25 %"]


def test_a_single_point_is_no_picture(tmp_path: Path) -> None:
    alone = lines(Series("a", [(1, 1)], markers=True), Series("b", [(1, 2), (2, math.nan)], markers=True))
    assert not alone.drawable
    assert not Bars("t", "d", [Bar("a", 1.0)]).drawable
    save_png(tmp_path / "alone.png", [alone])
    assert not (tmp_path / "alone.png").exists()
    assert lines(Series("a", [(1, 1)]), Series("b", [(1, 2), (2, 2)])).drawable


def test_legends_grow_in_rows_and_a_single_line_has_none() -> None:
    def labels(count: int) -> list[str]:
        named = [Series(f"a rather long name, number {i}", [(0, i), (1, i)], i) for i in range(count)]
        return [str(t.text) for t in draw(lines(*named)).findall("text") if "number" in str(t.text)]

    assert labels(1) == []
    assert sorted(labels(5)) == [f"a rather long name, number {i}" for i in range(5)]


def test_one_file_holds_several_pictures(tmp_path: Path) -> None:
    unit = Axis("", 0.0, 1.0)
    pictures: list[Picture] = [
        lines(Series("a", [(0, 0), (1, 1)]), Series("b", [(0, 1), (1, 0)], dashed=True)),
        Lines("square", "d", [Series("", [(0, 0), (1, 1)])], unit, unit, square=True),
        Bars("bars", "d", [Bar("a", 1.0), Bar("b", 2.0)]),
    ]
    save_png(tmp_path / "new" / "pictures.png", pictures, "Title", columns=2)
    content = (tmp_path / "new" / "pictures.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
    assert width == pytest.approx(2 * WIDTH * 150 / 72, abs=2)
    assert height > 2 * SQUARE * 150 / 72


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1200.4, "1,200"), (0.5, "0.5"), (0.003, "0.003"), (1e-5, "1e-05"), (-2, "-2")],
)
def test_plain_number(value: float, text: str) -> None:
    assert plain_number(value) == text
