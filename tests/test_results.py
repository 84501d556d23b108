"""Result files: written and read by one pair of functions, with a version; what is broken is named."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dspark_train.errors import UserError
from dspark_train.files import read_result, write_result


@dataclass(frozen=True)
class Point:
    x: float
    y: float | None


@dataclass(frozen=True)
class Base:
    split: str = ""


@dataclass(frozen=True)
class Example(Base):
    groups: dict[str, list[Point]] = field(default_factory=dict)


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    result = Example("heldout", {"all": [Point(0.1, None), Point(1, 2)], "τ": []})
    write_result(tmp_path / "result.json", result)
    assert read_result(tmp_path / "result.json", Example) == result
    content = json.loads((tmp_path / "result.json").read_text())
    assert list(content) == ["version", "split", "groups"]
    assert "τ" in (tmp_path / "result.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_what_is_not_a_number_becomes_null(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", Point(1.0, math.nan))
    assert read_result(tmp_path / "result.json", Point) == Point(1.0, None)


def test_files_without_a_version_are_older_and_unknown_keys_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"x": 1, "y": 2, "z": 3}')
    assert read_result(tmp_path / "old.json", Point) == Point(1.0, 2.0)
    assert read_result(tmp_path / "absent.json", Point) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON .*fix it or make it again"),
        ("[1]", "holds a list; expected a JSON object"),
        ('{"x": 1}', r"not laid out as this version writes it \(y: .*make it again"),
        ('{"x": [], "y": 1}', r"\(x: "),
        ('{"version": 2, "x": 1, "y": 1}', "has layout 2, this version reads up to 1"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "broken.json").write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        read_result(tmp_path / "broken.json", Point)
    assert "broken.json" in str(caught.value)
