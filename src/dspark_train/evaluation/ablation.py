"""What an ablation is: axes of choices, and studies that vary one or two of them around a base.

The YAML file::

    config: configs/quickstart.yaml          # recipe that every run starts from
    folder: checkpoints/ablation             # one run folder per cell, the table, the plots
    overrides: {trainer.max_steps: 300}      # for every run
    axes:                                    # name: {choice: {setting: value, …}, …}, or setting and values
      layers: {setting: draft.num_layers, values: [1, 2, 3]}
      head:
        none: {draft.head: none, draft.markov_rank: 0}
        vanilla: {draft.head: vanilla, draft.markov_rank: 128}
    base: {layers: 2, head: vanilla}         # the choice of every axis that a study does not vary
    studies:
      layers: {x: layers, lines: {head: [none, vanilla]}}    # all choices of an axis, or those listed

Every pair of choices of a study is a run; runs that studies share are trained once.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import jsonargparse
import yaml

from dspark_train.errors import UserError

Settings = dict[str, Any]
"""Dotted settings of the recipe and their values."""


@dataclass(frozen=True)
class Written:
    """The YAML file as it is written. What is a bare dict or list here is checked later, or by ``fit``."""

    config: Path
    """Recipe that every run starts from."""
    folder: Path
    """Where runs, table and plots go."""
    axes: dict
    """By name: :class:`Values`, or choices with their settings."""
    studies: dict
    """By name: :class:`WrittenStudy`."""
    overrides: dict = field(default_factory=dict)
    """Settings of every run."""
    base: dict = field(default_factory=dict)
    """The choice of every axis that a study does not vary; the first where none is named."""


@dataclass(frozen=True)
class Values:
    """An axis whose choices are the values of one setting."""

    setting: str
    values: list


@dataclass(frozen=True)
class WrittenStudy:
    """The axes that a study varies: all choices of an axis (its name), or those listed (``{name: [choice, …]}``)."""

    x: str | dict[str, list]
    lines: str | dict[str, list] | None = None


@dataclass(frozen=True)
class Study:
    """Runs that vary ``x`` and, with one line a choice, ``lines``."""

    name: str
    x: str
    x_choices: tuple[str, ...]
    lines: str | None = None
    line_choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    name: str
    """Of its folder: the choices that differ from the base."""
    choices: tuple[tuple[str, str], ...]
    """(axis, choice) of every axis."""
    settings: Settings

    def choice(self, axis: str) -> str:
        """Return the choice on one axis."""
        return dict(self.choices)[axis]


@dataclass(frozen=True)
class Ablation:
    """A whole ablation."""

    config: Path
    folder: Path
    overrides: Settings
    axes: Mapping[str, Mapping[str, Settings]]
    base: Mapping[str, str]
    studies: Sequence[Study]

    def cell(self, varied: Mapping[str, str]) -> Cell:
        """Return the run with ``varied`` choices, the base's elsewhere."""
        choices = tuple((axis, varied.get(axis, self.base[axis])) for axis in self.axes)
        different = [f"{axis}-{choice}" for axis, choice in choices if choice != self.base[axis]]
        settings = dict(self.overrides)
        for axis, choice in choices:
            settings |= self.axes[axis][choice]
        name = re.sub(r"[^\w.+-]+", "-", "_".join(different)) or "base"
        return Cell(name, choices, settings)

    def grid(self, study: Study) -> list[Cell]:
        """Return the runs of one study, line after line."""
        if study.lines is None:
            return [self.cell({study.x: x}) for x in study.x_choices]
        pairs = itertools.product(study.line_choices, study.x_choices)
        return [self.cell({study.x: x, study.lines: line}) for line, x in pairs]

    def cells(self) -> list[Cell]:
        """Return all runs, each once, the base first where a study holds it."""
        found = {cell.name: cell for study in self.studies for cell in self.grid(study)}
        return sorted(found.values(), key=lambda cell: cell.name != "base")


def read_ablation(path: Path) -> Ablation:
    """Read and check the file; all faults at once.

    Raises:
        UserError: names every fault, with its place.
    """
    if not path.is_file():
        raise UserError(f"ablation config {path} does not exist")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from error
    kinds = get_type_hints(Written)
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a mapping with {', '.join(kinds)}")
    faults = [_unknown(key, kinds) for key in content if key not in kinds]
    faults += [f"{key} is missing" for key in ("config", "folder", "axes", "studies") if not content.get(key)]
    given: dict[str, Any] = {}
    for key, kind in kinds.items():
        given[key] = _parsed(kind, content[key]) if content.get(key) else {}
        if given[key] is None:
            faults.append(f"{key} must be a {'path' if kind is Path else 'mapping of names'}")
            given[key] = {}
    axes = _axes(given["axes"], faults)
    base = {str(axis): str(choice) for axis, choice in given["base"].items()}
    faults += [f"base.{axis}: {_unknown(axis, axes)}" for axis in base if axis not in axes]
    for axis, choices in axes.items():
        chosen = base.setdefault(axis, next(iter(choices), ""))
        if choices and chosen not in choices:
            faults.append(f"base.{axis}: {_unknown(chosen, choices)}")
    studies = _studies(given["studies"], axes, faults)
    if faults:
        raise UserError(f"{path}: " + "; ".join(faults))
    return Ablation(given["config"], given["folder"], given["overrides"], axes, base, studies)


def _parsed(kind: Any, content: Any) -> Any:
    """``content`` as a value of a type; None where it is none."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--content", type=kind)
    try:
        return parser.instantiate(parser.parse_object({"content": content})).content
    except argparse.ArgumentError:
        return None


def _unknown(word: Any, known: Any) -> str:
    near = difflib.get_close_matches(str(word), [str(k) for k in known], n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else f"; known are {', '.join(map(str, known))}"
    return f"unknown {str(word)!r}{hint}"


def _axes(content: Mapping[Any, Any], faults: list[str]) -> dict[str, dict[str, Settings]]:
    axes: dict[str, dict[str, Settings]] = {}
    for name, written in content.items():
        axis = _parsed(Values | dict[str, dict], written)
        if isinstance(axis, Values):
            axes[str(name)] = {str(value): {axis.setting: value} for value in axis.values}
        else:
            axes[str(name)] = {str(choice): settings for choice, settings in (axis or {}).items()}
        if not axes[str(name)]:
            faults.append(f"axes.{name} must be {{setting, values}}, or choices with their settings")
    return axes


def _studies(content: Mapping[Any, Any], axes: Mapping[str, Any], faults: list[str]) -> list[Study]:
    studies = []
    for name, written in content.items():
        study = _parsed(WrittenStudy, written)
        if study is None:
            faults.append(f"studies.{name} must be {{x: axis, lines: axis}}, lines being optional")
            continue
        x, x_choices = _pick(f"studies.{name}.x", study.x, axes, faults)
        lines, line_choices = (
            (None, ()) if study.lines is None else _pick(f"studies.{name}.lines", study.lines, axes, faults)
        )
        studies.append(Study(str(name), x, x_choices, lines, line_choices))
    return studies


def _pick(
    place: str, written: str | dict[str, list], axes: Mapping[str, Mapping[str, Any]], faults: list[str]
) -> tuple[str, tuple[str, ...]]:
    """An axis and the choices of it that a study takes."""
    if isinstance(written, dict) and len(written) != 1:
        faults.append(f"{place} must name one axis, not {', '.join(written) or 'none'}")
        return "", ()
    axis, listed = next(iter(written.items())) if isinstance(written, dict) else (written, None)
    if axis not in axes:
        faults.append(f"{place}: {_unknown(axis, axes)}")
        return axis, ()
    choices = tuple(axes[axis]) if listed is None else tuple(str(choice) for choice in listed)
    faults += [
        f"{place}.{axis}: {_unknown(choice, axes[axis])}" for choice in choices if choice not in axes[axis]
    ]
    return axis, choices


def fit_arguments(ablation: Ablation, cell: Cell) -> list[str]:
    """Return the arguments of ``fit`` for one run."""
    flags = [f"--{key}={_flag(value)}" for key, value in cell.settings.items()]
    own = ["--run.trial=true", f"--run.folder={ablation.folder / cell.name}"]
    return ["fit", "--config", str(ablation.config), *flags, *own]


def _flag(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
