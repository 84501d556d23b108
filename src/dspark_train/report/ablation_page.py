"""The results of an ablation: read from its runs, written as a table, plots and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dspark_train.errors import UserError
from dspark_train.evaluation.ablate import AblationResult, CellResult, study_lines, study_places
from dspark_train.evaluation.ablation import Ablation, Cell, Study
from dspark_train.files import write_result
from dspark_train.report import figures
from dspark_train.report.comparison_page import comparison_page
from dspark_train.report.drawing import save_png
from dspark_train.report.page import Figure, Section, Table, write
from dspark_train.report.pictures import Lines
from dspark_train.report.results import decoded_modes
from dspark_train.report.tables import markdown_table
from dspark_train.report.text import factor, fixed, maybe, one_decimal, quantity
from dspark_train.run import Run


def read_cell(folder: Path, cell: Cell) -> CellResult:
    """Read what a run came to."""
    run = Run.existing(folder)
    modes = {mode.temperature: mode for mode in decoded_modes(run)}
    greedy, sampled = modes.get(0.0), modes.get(1.0)
    speculative = greedy.speculative if greedy else None
    return CellResult(
        name=cell.name,
        choices=dict(cell.choices),
        expected=run.metrics["val/tau"][-1][1] if run.metrics.get("val/tau") else None,
        tau=greedy.tau if greedy else None,
        tau_sampled=sampled.tau if sampled else None,
        speedup=greedy.speedup.value if greedy and greedy.speedup else None,
        conditional=list(greedy.acceptance.conditional) if greedy else [],
        round_milliseconds=speculative.round_milliseconds if speculative else None,
        head_milliseconds=speculative.milliseconds.get("head") if speculative else None,
        parameters=run.trained_parameters,
        fit_seconds=run.fit_seconds,
    )


def collect(ablation: Ablation) -> dict[str, CellResult]:
    """Read the finished runs of the grid, by name."""
    return {
        cell.name: read_cell(ablation.folder / cell.name, cell)
        for cell in ablation.cells()
        if Run(ablation.folder / cell.name).finished
    }


def study_pictures(ablation: Ablation, study: Study, results: Mapping[str, CellResult]) -> list[Lines]:
    """Return what is drawn of one study."""
    lines = study_lines(ablation, study, results)
    return figures.ablation(study.x, study_places(study), lines) if lines else []


def study_section(ablation: Ablation, study: Study, results: Mapping[str, CellResult]) -> Section | None:
    """Return the chapter of one study; None where no run of it is finished."""
    shown = [results[cell.name] for cell in ablation.grid(study) if cell.name in results]
    if not shown:
        return None
    pictures = [Figure(picture) for picture in study_pictures(ablation, study, results)]
    table = Table("Runs", result_header(ablation), result_rows(ablation, shown))
    base = ", ".join(f"{a} {c}" for a, c in ablation.base.items() if a not in (study.x, study.lines))
    lead = f"Everything else as in the base: {base}." if base else ""
    return Section(f"study-{study.name}", f"Study: {study.name}", lead, study.name, pictures, [table])


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


def result_rows(ablation: Ablation, results: Sequence[CellResult]) -> list[list[str]]:
    """Return the rows of the table of runs."""
    rows = []
    for r in results:
        head = None
        if r.head_milliseconds is not None and r.round_milliseconds:
            head = f"{100 * r.head_milliseconds / r.round_milliseconds:.1f} %"
        numbers = [
            maybe(r.expected, fixed),
            maybe(r.tau, fixed),
            maybe(r.tau_sampled, fixed),
            maybe(r.speedup, factor),
            maybe(r.round_milliseconds, one_decimal),
        ]
        parameters = quantity(r.parameters) if r.parameters else "–"
        rows.append([r.name, *(r.choices[a] for a in ablation.axes), *numbers, head or "–", parameters])
    return rows


def write_results(ablation: Ablation, failures: dict[str, str]) -> str:
    """Write ``ablation.json``, ``ablation.md``, ``ablation.html`` and the plots; returns the Markdown table.

    Raises:
        UserError: no run is finished.
    """
    results = collect(ablation)
    if not results:
        reason = "; ".join(f"{name}: {text}" for name, text in failures.items()) or "none was trained"
        raise UserError(f"ablation: no run in {ablation.folder} is finished ({reason})")
    folder = ablation.folder
    whole = AblationResult(dict(ablation.base), list(ablation.studies), list(results.values()), failures)
    write_result(folder / "ablation.json", whole)
    text = markdown_table(result_header(ablation), result_rows(ablation, whole.results)) + "\n"
    (folder / "ablation.md").write_text(text, encoding="utf-8")
    for study in ablation.studies:
        pictures = study_pictures(ablation, study, results)
        save_png(folder / "plots" / f"{study.name}.png", pictures, f"Study: {study.name}", columns=5)
    if len(results) > 1:
        sections = [study_section(ablation, study, results) for study in ablation.studies]
        runs = [Run.existing(folder / name) for name in results]
        kept = [section for section in sections if section is not None]
        title = "Ablation" if folder.name == "ablation" else f"Ablation {folder.name}"
        write(comparison_page(runs, kept, title=title), folder / "ablation.html")
    return text
