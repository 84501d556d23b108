"""The parts of a report page and their rendering: one HTML file that needs nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dspark_train.report.pictures import Lines, Picture
from dspark_train.report.svg import as_svg


@dataclass(frozen=True)
class Fact:
    """One figure of the summary: what it is, its value, and a line that qualifies it."""

    label: str
    value: str
    note: str = ""
    good: bool | None = None
    """True and False add a mark (✓, ✗) in front of the value; None adds nothing."""


@dataclass(frozen=True)
class Table:
    """A table; the first column names the row, every other one holds numbers (right-aligned)."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | tuple[str, str]]]
    """Cells; a pair is a value and a smaller note beside it (its interval)."""
    folded: bool = False
    """Hidden behind a "Numbers" switch (the table beside a chart)."""
    text_columns: Sequence[int] = ()
    """Further columns that hold text."""


@dataclass(frozen=True)
class Figure:
    """A picture with its caption and the numbers behind it."""

    picture: Picture
    caption: str = ""
    table: Table | None = None

    @property
    def drawing(self) -> Markup:
        """The picture as SVG."""
        return as_svg(self.picture)

    @property
    def small(self) -> bool:
        """Whether it is one of many small ones in a row."""
        return isinstance(self.picture, Lines) and self.picture.square


@dataclass(frozen=True)
class Token:
    """One piece of a generation: its text, and whether the ``draft`` or the ``target`` wrote it."""

    text: str
    origin: str


@dataclass(frozen=True)
class Example:
    """A generation, token by token."""

    prompt: str
    domain: str
    tokens: Sequence[Token]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A chapter of the page. Never built without content.

    A figure whose picture would show a single point is left out; its numbers become a table.
    """

    key: str
    title: str
    lead: str = ""
    short: str = ""
    """Name in the navigation, where shorter than the title."""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    examples: Sequence[Example] = ()
    settings: Sequence[tuple[str, str]] = ()
    listing: str = ""
    listing_title: str = ""
    source: str = ""
    """Files of the run that its numbers come from."""

    @property
    def drawn(self) -> list[Figure]:
        """Its figures that show anything."""
        return [figure for figure in self.figures if figure.picture.drawable]

    @property
    def listed(self) -> list[Table]:
        """Its tables, and those of figures that are left out."""
        lost = [f.table for f in self.figures if f.table is not None and not f.picture.drawable]
        return [*self.tables, *(dataclasses.replace(table, folded=False) for table in lost)]


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    kicker: str
    summary: str
    facts: Sequence[Fact] = ()
    sections: Sequence[Section] = field(default=())
    footer: str = ""


def render(page: Page) -> str:
    """Render a page to one HTML document; every text in it is escaped, and it loads nothing."""
    environment = Environment(
        loader=PackageLoader("dspark_train.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (
        resources.files("dspark_train.report").joinpath("templates/report.css").read_text(encoding="utf-8")
    )
    return environment.get_template("report.html.j2").render(page=page, style=Markup(style))


def write(page: Page, path: Path) -> Path:
    """Render a page into a file, written aside and moved into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".part")
    aside.write_text(render(page), encoding="utf-8")
    aside.replace(path)
    return path
