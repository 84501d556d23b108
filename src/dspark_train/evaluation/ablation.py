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

import difflib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dspark_train.errors import UserError

KEYS = ("config", "folder", "overrides", "axes", "base", "studies")

Settings = dict[str, Any]
"""Dotted settings of the recipe and their values."""


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
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a mapping with {', '.join(KEYS)}")
    faults = [_unknown(key, KEYS) for key in content if key not in KEYS]
    faults += [f"{key} is missing" for key in ("config", "folder", "axes", "studies") if not content.get(key)]
    axes = _axes(content.get("axes") or {}, faults)
    base = {str(axis): str(choice) for axis, choice in (content.get("base") or {}).items()}
    faults += [f"base.{axis}: {_unknown(axis, axes)}" for axis in base if axis not in axes]
    for axis, choices in axes.items():
        chosen = base.setdefault(axis, next(iter(choices), ""))
        if choices and chosen not in choices:
            faults.append(f"base.{axis}: {_unknown(chosen, choices)}")
    studies = _studies(content.get("studies") or {}, axes, faults)
    if faults:
        raise UserError(f"{path}: " + "; ".join(faults))
    return Ablation(
        config=Path(content["config"]),
        folder=Path(content["folder"]),
        overrides=dict(content.get("overrides") or {}),
        axes=axes,
        base=base,
        studies=studies,
    )


def _unknown(word: Any, known: Any) -> str:
    near = difflib.get_close_matches(str(word), [str(k) for k in known], n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else f"; known are {', '.join(map(str, known))}"
    return f"unknown {str(word)!r}{hint}"


def _axes(content: Any, faults: list[str]) -> dict[str, dict[str, Settings]]:
    axes: dict[str, dict[str, Settings]] = {}
    if not isinstance(content, dict):
        faults.append("axes must be a mapping of names")
        return axes
    for name, axis in content.items():
        if isinstance(axis, dict) and set(axis) == {"setting", "values"} and isinstance(axis["values"], list):
            axes[str(name)] = {str(value): {str(axis["setting"]): value} for value in axis["values"]}
        elif isinstance(axis, dict) and axis and all(isinstance(choice, dict) for choice in axis.values()):
            axes[str(name)] = {str(choice): dict(settings) for choice, settings in axis.items()}
        else:
            faults.append(f"axes.{name} must be {{setting, values}}, or choices with their settings")
            axes[str(name)] = {}
    return axes


def _studies(content: Any, axes: Mapping[str, Any], faults: list[str]) -> list[Study]:
    studies = []
    if not isinstance(content, dict):
        faults.append("studies must be a mapping of names")
        return []
    for name, study in content.items():
        if not isinstance(study, dict) or "x" not in study or set(study) - {"x", "lines"}:
            faults.append(f"studies.{name} must be {{x: axis, lines: axis}}, lines being optional")
            continue
        picked = [
            _pick(f"studies.{name}.{key}", study[key], axes, faults) for key in ("x", "lines") if key in study
        ]
        if all(choices for _, choices in picked):
            (x, x_choices), (lines, line_choices) = (*picked, (None, ()))[:2]
            studies.append(Study(str(name), str(x), x_choices, lines, line_choices))
    return studies


def _pick(
    place: str, content: Any, axes: Mapping[str, Mapping[str, Any]], faults: list[str]
) -> tuple[str, tuple[str, ...]]:
    """Read an axis with all its choices (its name), or with some (``{name: [choice, …]}``)."""
    if isinstance(content, dict) and len(content) == 1:
        axis, listed = next(iter(content.items()))
    else:
        axis, listed = content, None
    if not isinstance(axis, str) or axis not in axes:
        faults.append(f"{place}: {_unknown(axis, axes)}")
        return str(axis), ()
    choices = tuple(axes[axis]) if listed is None else tuple(str(choice) for choice in listed)
    wrong = [choice for choice in choices if choice not in axes[axis]]
    faults += [f"{place}.{axis}: {_unknown(choice, axes[axis])}" for choice in wrong]
    return axis, () if wrong else choices


def fit_arguments(ablation: Ablation, cell: Cell) -> list[str]:
    """Return the arguments of ``fit`` for one run."""
    flags = [f"--{key}={_flag(value)}" for key, value in cell.settings.items()]
    return ["fit", "--config", str(ablation.config), *flags, f"--run.folder={ablation.folder / cell.name}"]


def _flag(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
