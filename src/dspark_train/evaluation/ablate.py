"""Trains the grid of an ablation, each run in a process of its own; what its runs came to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dspark_train.evaluation.ablation import Ablation, Cell, Study, fit_arguments
from dspark_train.run import Run


@dataclass(frozen=True)
class CellResult:
    """What one run came to; None where its files do not say."""

    name: str
    choices: dict[str, str]
    expected: float | None = None
    """Expected τ at temperature 1, teacher-forced over the answers of the validation split, last validation: no
    decoding, so little noise."""
    tau: float | None = None
    """Greedy, validation prompts."""
    tau_sampled: float | None = None
    """At temperature 1."""
    speedup: float | None = None
    """Greedy."""
    conditional: list[float | None] = field(default_factory=list)
    """Greedy, per position."""
    round_milliseconds: float | None = None
    """Wall time of a greedy round."""
    head_milliseconds: float | None = None
    """Of these, the walk of the sequential head."""
    parameters: int = 0
    fit_seconds: float | None = None


@dataclass(frozen=True)
class AblationResult:
    """What a whole ablation came to: ``ablation.json``."""

    base: dict[str, str]
    """Choice of every axis that a study does not vary."""
    studies: list[Study]
    results: list[CellResult]
    """Of the finished runs, the base first."""
    failures: dict[str, str] = field(default_factory=dict)
    """Last line of what each failed run said."""


@dataclass(frozen=True)
class StudyLine:
    """One line of a study: (place on the x axis, result), in order."""

    label: str
    points: list[tuple[float, CellResult]]


def train_cells(
    ablation: Ablation,
    progress: Callable[[int, int, Cell, str], None],
    command: Sequence[str] = (sys.executable, "-m", "dspark_train"),
) -> dict[str, str]:
    """Train what is not finished yet; a run that was interrupted goes on where it was.

    Args:
        ablation: the grid.
        progress: called with (number, all, run, state) before and after each.
        command: how the command line is started.

    Returns:
        The last line of what each failed run said, by name. A failed run stops no other.
    """
    cells, failures = ablation.cells(), {}
    logs = ablation.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for number, cell in enumerate(cells, start=1):
        if Run(ablation.folder / cell.name).finished:
            progress(number, len(cells), cell, "finished before")
            continue
        progress(number, len(cells), cell, "training")
        log = logs / f"{cell.name}.log"
        with log.open("w", encoding="utf-8") as file:
            ended = subprocess.run(
                [*command, *fit_arguments(ablation, cell)], stdout=file, stderr=subprocess.STDOUT, check=False
            )
        if ended.returncode:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            failures[cell.name] = lines[-1] if lines else f"exit status {ended.returncode}"
        progress(number, len(cells), cell, "failed" if ended.returncode else "done")
    return failures


def study_places(study: Study) -> dict[str, float]:
    """Place on the x axis of each choice of a study: its number where all choices are numbers, else its index."""
    numeric = all(_is_number(choice) for choice in study.x_choices)
    return {choice: float(choice) if numeric else float(i) for i, choice in enumerate(study.x_choices)}


def study_lines(ablation: Ablation, study: Study, results: Mapping[str, CellResult]) -> list[StudyLine]:
    """Return the lines of a study, of those runs that have results."""
    places = study_places(study)
    lines: dict[str, list[tuple[float, CellResult]]] = {}
    for cell in ablation.grid(study):
        if cell.name in results:
            label = f"{study.lines} {cell.choice(study.lines)}" if study.lines else ""
            lines.setdefault(label, []).append((places[cell.choice(study.x)], results[cell.name]))
    return [StudyLine(label, sorted(points, key=lambda p: p[0])) for label, points in lines.items()]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
