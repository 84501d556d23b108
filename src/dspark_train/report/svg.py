"""Pictures as SVG inside a page.

Colours are the page's CSS variables, so that one drawing serves light pages, dark ones and print, and words
are text in the page's own font.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from xml.etree import ElementTree

from markupsafe import Markup

from dspark_train.report.drawing import DPI, THEME, draw, size
from dspark_train.report.pictures import HAIR, INK, PAGE, PALETTE, SHADES, SOFT, Bars, Picture, ramp


def as_svg(picture: Picture) -> Markup:
    """Draw a picture as one ``<svg>`` for a page; the page gives it the title."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    width, height = size(picture)
    with rc_context(THEME):
        figure = Figure(figsize=(width / DPI, height / DPI), layout="constrained")
        notes = draw(figure, picture)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(file.getvalue(), picture, notes)


def _variables() -> dict[str, str]:
    """What the page calls each colour."""
    names = {PAGE: "var(--page)", INK: "var(--ink)", SOFT: "var(--soft)", HAIR: "var(--hair)"}
    names |= {colour: f"var(--c{i})" for i, colour in enumerate(PALETTE)}
    for step in range(SHADES + 1):
        mix = f"color-mix(in oklab, var(--ramp-to) {100 * step // SHADES}%, var(--ramp-from))"
        names[ramp(step / SHADES)] = mix
    return names


VARIABLES = _variables()


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
    return Markup(ElementTree.tostring(drawing, encoding="unicode"))


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
    """Its style in the page's colours, without what the page decides: fonts, and the joints of lines."""
    style = re.sub(r"(font-family|stroke-linejoin):[^;]*;?", "", part.get("style", ""))
    style = re.sub(r"#[0-9a-f]{6}", lambda found: VARIABLES.get(found[0], found[0]), style)
    return re.sub(r"\s*([:;,])\s+", r"\1", style).strip(" ;")


def _round(numbers: str) -> str:
    """Coordinates with one decimal."""
    text = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), numbers)
    return re.sub(r"\s+", " ", text).strip()
