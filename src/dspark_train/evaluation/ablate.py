"""Trains the grid of an ablation, each run in a process of its own; makes its table, plots and page."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dspark_train.errors import UserError
from dspark_train.evaluation.ablation import Ablation, Cell, Study, fit_arguments
from dspark_train.report import readers
from dspark_train.report.charts import Axis, Series, line_chart
from dspark_train.report.comparison import comparison_page
from dspark_train.report.page import Figure, Legend, Section, Table, write
from dspark_train.report.run_folder import RunFolder
from dspark_train.report.tables import markdown_table
from dspark_train.report.text import factor, fixed, quantity
from dspark_train.report.views import ModeView
from dspark_train.run import Run


@dataclass(frozen=True)
class Result:
    """What one run came to; None where its files do not say."""

    name: str
    choices: dict[str, str]
    expected: float | None = None
    """Expected τ at temperature 1, held-out conversations, last validation: no decoding, so little noise."""
    tau: float | None = None
    """Greedy, held-out prompts."""
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


def read_result(folder: Path, cell: Cell) -> Result:
    """Read what a run came to."""
    run = RunFolder.load(folder)
    modes = readers.modes(run.decode)
    greedy, sampled = _mode(modes, 0.0), _mode(modes, 1.0)
    return Result(
        name=cell.name,
        choices=dict(cell.choices),
        expected=run.curves["val/tau"][-1][1] if run.curves.get("val/tau") else None,
        tau=greedy.tau if greedy else None,
        tau_sampled=sampled.tau if sampled else None,
        speedup=greedy.speedup if greedy else None,
        conditional=list(greedy.conditional) if greedy else [],
        round_milliseconds=greedy.round_milliseconds if greedy else None,
        head_milliseconds=greedy.head_milliseconds if greedy else None,
        parameters=run.trained_parameters,
        fit_seconds=readers.fit_seconds(run.run),
    )


def _mode(modes: Sequence[ModeView], temperature: float) -> ModeView | None:
    return next((mode for mode in modes if mode.temperature == temperature), None)


def collect(ablation: Ablation) -> dict[str, Result]:
    """Read the finished runs of the grid, by name."""
    return {
        cell.name: read_result(ablation.folder / cell.name, cell)
        for cell in ablation.cells()
        if Run(ablation.folder / cell.name).finished
    }


@dataclass(frozen=True)
class StudyLine:
    """One line of a study: (place on the x axis, result), in order."""

    label: str
    points: list[tuple[float, Result]]


def study_lines(ablation: Ablation, study: Study, results: dict[str, Result]) -> tuple[list[StudyLine], Axis]:
    """Return the lines of a study and its x axis: numbers where all choices are, else places by name."""
    choices = list(study.x_choices)
    numeric = all(_is_number(choice) for choice in choices)
    places = {choice: float(choice) if numeric else float(i) for i, choice in enumerate(choices)}
    names = {place: choice for choice, place in places.items()}
    span = max(places.values()) - min(places.values()) or 1.0
    axis = Axis(
        study.x,
        low=min(places.values()) - 0.06 * span,
        high=max(places.values()) + 0.06 * span,
        ticks=tuple(sorted(places.values())),
        text=lambda place: names.get(place, ""),
    )
    lines: dict[str, list[tuple[float, Result]]] = {}
    for cell in ablation.grid(study):
        if cell.name in results:
            label = f"{study.lines} {cell.choice(study.lines)}" if study.lines else ""
            lines.setdefault(label, []).append((places[cell.choice(study.x)], results[cell.name]))
    return [StudyLine(label, sorted(points, key=lambda p: p[0])) for label, points in lines.items()], axis


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


MEASURES: tuple[tuple[str, str], ...] = (
    ("expected", "Expected τ, temperature 1, held-out conversations"),
    ("tau", "Accepted length τ, greedy"),
    ("tau_sampled", "Accepted length τ, temperature 1"),
    ("speedup", "Speedup, greedy"),
    ("round_milliseconds", "Milliseconds per round"),
)
"""What is drawn of every study: attribute of a result, title."""


def study_section(ablation: Ablation, study: Study, results: dict[str, Result]) -> Section | None:
    """Return the chapter of one study; None where no run of it is finished."""
    lines, axis = study_lines(ablation, study, results)
    figures = []
    for attribute, title in MEASURES:
        series = [
            Series(line.label, points, colour, markers=True)
            for colour, line in enumerate(lines)
            if (points := [(x, v) for x, r in line.points if (v := getattr(r, attribute)) is not None])
        ]
        if series:
            drawing = line_chart(title, f"Against {study.x}", series, axis, Axis(title))
            figures.append(Figure(title, drawing, Legend.of(series)))
    if not figures:
        return None
    shown = [results[cell.name] for cell in ablation.grid(study) if cell.name in results]
    table = Table("Runs", result_header(ablation), result_rows(ablation, shown))
    base = ", ".join(f"{a} {c}" for a, c in ablation.base.items() if a not in (study.x, study.lines))
    lead = f"Everything else as in the base: {base}." if base else ""
    return Section(f"study-{study.name}", f"Study: {study.name}", lead, study.name, figures, [table])


def result_header(ablation: Ablation) -> list[str]:
    """Return the columns of the table of runs."""
    numbers = [
        "expected τ",
        "τ greedy",
        "τ temperature 1",
        "speedup",
        "ms per round",
        "head's share",
        "parameters",
    ]
    return ["Run", *ablation.axes, *numbers]


def result_rows(ablation: Ablation, results: Sequence[Result]) -> list[list[str]]:
    """Return the rows of the table of runs."""
    rows = []
    for r in results:
        head = None
        if r.head_milliseconds is not None and r.round_milliseconds:
            head = f"{100 * r.head_milliseconds / r.round_milliseconds:.1f} %"
        numbers = [
            "–" if value is None else text(value)
            for value, text in (
                (r.expected, fixed),
                (r.tau, fixed),
                (r.tau_sampled, fixed),
                (r.speedup, factor),
                (r.round_milliseconds, lambda v: fixed(v, 1)),
            )
        ]
        parameters = quantity(r.parameters) if r.parameters else "–"
        rows.append([r.name, *(r.choices[a] for a in ablation.axes), *numbers, head or "–", parameters])
    return rows


def write_results(ablation: Ablation, failures: dict[str, str]) -> str:
    """Write ``ablation.json``, ``ablation.md``, ``ablation.html`` and the plots; returns the Markdown table.

    Raises:
        UserError: no run is finished.
    """
    from dspark_train.report.plots import draw_study

    results = collect(ablation)
    if not results:
        reason = "; ".join(f"{name}: {text}" for name, text in failures.items()) or "none was trained"
        raise UserError(f"ablation: no run in {ablation.folder} is finished ({reason})")
    content: dict[str, Any] = {
        "base": dict(ablation.base),
        "studies": [asdict(study) for study in ablation.studies],
        "results": [asdict(result) for result in results.values()],
        "failures": failures,
    }
    folder = ablation.folder
    (folder / "ablation.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    text = markdown_table(result_header(ablation), result_rows(ablation, list(results.values()))) + "\n"
    (folder / "ablation.md").write_text(text, encoding="utf-8")
    for study in ablation.studies:
        lines, axis = study_lines(ablation, study, results)
        if lines:
            draw_study(study, lines, axis, folder / "plots" / f"{study.name}.png")
    if len(results) > 1:
        sections = [study_section(ablation, study, results) for study in ablation.studies]
        runs = [RunFolder.load(folder / name) for name in results]
        kept = [section for section in sections if section is not None]
        title = "Ablation" if folder.name == "ablation" else f"Ablation {folder.name}"
        write(comparison_page(runs, kept, title=title), folder / "ablation.html")
    return text
