"""What commands print: results as tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from dspark_train.calibration.fit import CalibrationResult
    from dspark_train.decoding.cost import CostTable
    from dspark_train.decoding.measure import ModeResult
    from dspark_train.studies.online_threshold import ThresholdDriftStudy
    from dspark_train.studies.rounds import AcceptanceStudy, DriftStudy, ThresholdPoint, ThresholdStudy
    from dspark_train.studies.simulate import LoadStudy


def _empty(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _print(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = _empty(title, columns)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def print_acceptance(study: AcceptanceStudy) -> None:
    """Print the acceptance per position, a row for each group of rounds."""
    parts = list(study.groups.values())
    _print(
        "Acceptance in %, given that all earlier ones were accepted",
        ["rounds of", "rounds", "τ", *(str(k + 1) for k in range(len(parts[0].conditional)))],
        [
            [part.group, str(part.rounds), f"{part.tau:.2f}", *(_share(value) for value in part.conditional)]
            for part in parts
        ],
    )


def print_thresholds(study: ThresholdStudy) -> None:
    """Print every other threshold of the sweep, a column for each group of rounds."""
    from dspark_train.studies.rounds import THRESHOLDS

    columns = [{point.threshold: point for point in points} for points in study.groups.values()]

    def cell(point: ThresholdPoint | None) -> str:
        if point is None:  # nothing was verified, and a round gives the target's own token
            return "– (1.00)"
        return f"{_share(point.acceptance_rate_with_bonus)} ({point.tokens_per_round:.2f})"

    _print(
        "Threshold sweep: acceptance rate in %, the target's own token included (tokens per round)",
        ["threshold", *study.groups],
        [
            [f"{threshold:.2f}", *(cell(column.get(threshold)) for column in columns)]
            for threshold in (*THRESHOLDS[:-1:2], THRESHOLDS[-1])
        ],
    )


def print_drift(drift: DriftStudy) -> None:
    """Print the calibration error under each traffic."""
    _print(
        f"Load drifting from {drift.first} to {drift.second}: mean ECE in %",
        ["traffic", "rounds", "frozen", "online", "noise"],
        [
            [p.phase, str(p.rounds), *(f"{100 * value:.1f}" for value in (p.frozen, p.online, p.noise))]
            for p in drift.points
        ],
    )


def print_threshold_drift(drift: ThresholdDriftStudy) -> None:
    """Print what a frozen and an online threshold keep accepted under each traffic."""
    _print(
        f"Load drifting from {drift.first} to {drift.second}: accepted share of verified tokens in % "
        f"(verified per round), {100 * drift.wanted:g} % wanted",
        ["traffic", "rounds", f"threshold {drift.start:g}", "online", "threshold"],
        [
            [
                p.phase,
                str(p.rounds),
                f"{_share(p.frozen)} ({p.frozen_verified:.2f})",
                f"{_share(p.online)} ({p.online_verified:.2f})",
                f"{p.threshold:.2f}",
            ]
            for p in drift.points
        ],
    )


def print_load(study: LoadStudy) -> None:
    """Print a load study's tables."""
    from dspark_train.report.study_sections import load_tables

    for table in load_tables(study):
        _print(table.caption, table.header, [[str(cell) for cell in row] for row in table.rows])


def print_mode(label: str, mode: ModeResult) -> None:
    """Print one way of sampling as a table."""
    columns = ("", "tokens/s", "rounds", "rows", "ms", "draft", "head", "verify")
    table = _empty(f"{label}: {mode.prompts} prompts", columns)
    for name, side in (("plain", mode.plain), ("speculative", mode.speculative)):
        assert side is not None
        parts = side.milliseconds
        shown = (parts["draft"], parts["head"], parts["verify"] + parts["target_head"])
        table.add_row(
            name,
            f"{side.tokens_per_second:.1f}",
            f"{side.rounds:,}",
            f"{side.rows / max(1, side.rounds):.1f}",
            f"{side.round_milliseconds:.1f}",
            *(f"{value:.1f}" for value in shown),
        )
    table.caption = "rows and milliseconds of a round, and of its parts"
    console = Console()
    console.print(table)
    line = f"τ {mode.tau:.2f}"
    if (speedup := mode.speedup) is not None:
        line += f", speedup {speedup.value:.2f}× ({speedup.low:.2f} to {speedup.high:.2f} {speedup.spread})"
    if mode.identical is not None:
        line += f", identical output {mode.identical.prompts}/{mode.identical.of}"
    console.print(line)
    accepted = " ".join("–" if v is None else f"{v:.2f}" for v in mode.acceptance.conditional)
    console.print(f"accepted, given that all earlier were: {accepted}")


def print_costs(table: CostTable) -> None:
    """Print a cost table."""
    measured = zip(table.rows, table.seconds_median, table.seconds_p10, table.seconds_p90, strict=True)
    _print(
        f"Target pass, {table.context} tokens of context ({table.machine})",
        ["rows", "median ms", "p10", "p90", "steps/s"],
        (
            [
                str(rows),
                *(f"{value:.1f}" for value in (1000 * middle, 1000 * low, 1000 * high, 1 / middle)),
            ]
            for rows, middle, low, high in measured
        ),
    )


def print_calibration(result: CalibrationResult) -> None:
    """Print what calibration found, as tables."""
    held, console = result.heldout, Console()
    title = (
        f"{result.sampling.label}: {result.fit_rounds} rounds to fit, {held.rounds} held out; "
        "ECE in % of prefix survival ± what counting alone makes"
    )
    ways = (held.before, held.sts, held.after)
    columns = ("position", "trained", "T", "T alone", "T", "bias and T", "Brier trained", "bias and T", "AUC")
    table = _empty(title, columns)
    pairs = zip(result.fitted.alone.temperatures, result.fitted.best.temperatures, strict=True)
    for k, (alone, best) in enumerate(pairs):
        before, scaled, after = (f"{100 * way.ece[k]:.1f} ± {100 * way.noise[k]:.1f}" for way in ways)
        scores = (held.before.brier[k], held.after.brier[k], held.after.auc[k])
        cells = (before, f"{alone:.2f}", scaled, f"{best:.2f}", after, *(f"{value:.3f}" for value in scores))
        table.add_row(str(k + 1), *cells)
    before, scaled, after = (f"{100 * way.mean_ece:.1f} ± {100 * way.mean_noise:.1f}" for way in ways)
    table.add_row("mean", before, "", scaled, "", after, "", "", "", style="bold")
    console.print(table)
    if result.fitted.with_bias is not None:
        console.print(f"  bias {result.fitted.best.bias:+.3f}, for {result.sampling.label} alone")
    for name, part in result.domains.items():
        before, scaled, after, noise = (
            f"{100 * value:.1f} %"
            for value in (part.before.mean_ece, part.sts.mean_ece, part.after.mean_ece, part.after.mean_noise)
        )
        console.print(
            f"  {name}: ECE {before} → {scaled} with T alone → {after} ({part.rounds} rounds, noise {noise})"
        )
