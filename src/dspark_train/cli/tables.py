"""What commands print: results as tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from dspark_train.calibration.report import CalibrationResult
    from dspark_train.decoding.cost import CostTable
    from dspark_train.decoding.measure import Comparison
    from dspark_train.studies.rounds import Acceptance, Drift, Sweep
    from dspark_train.studies.simulate import LoadPoint


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


def print_acceptance(acceptances: Sequence[Acceptance]) -> None:
    """Print the acceptance per position, a row for each group of rounds."""
    positions = range(len(acceptances[0].conditional))
    _print(
        "Acceptance in %, given that all earlier ones were accepted",
        ["rounds of", "rounds", "τ", *(str(k + 1) for k in positions)],
        [
            [part.group, str(part.rounds), f"{part.tau:.2f}", *(_share(value) for value in part.conditional)]
            for part in acceptances
        ],
    )


def print_sweeps(sweeps: Sequence[Sweep]) -> None:
    """Print every other threshold of the sweeps, a column for each group of rounds."""
    every = sweeps[0]
    chosen = [i for i in range(len(every.thresholds)) if i % 2 == 0 or i == len(every.thresholds) - 1]
    _print(
        "Threshold sweep: accepted share of verified tokens in % (tokens per round)",
        ["threshold", *(sweep.group for sweep in sweeps)],
        [
            [
                f"{every.thresholds[i]:.2f}",
                *(f"{_share(s.acceptance_rate[i])} ({s.tokens_per_round[i]:.2f})" for s in sweeps),
            ]
            for i in chosen
        ],
    )


def print_drift(drift: Drift) -> None:
    """Print the calibration error under each traffic."""
    _print(
        f"Load drifting from {drift.first} to {drift.second}: mean ECE in %",
        ["traffic", "rounds", "frozen", "online", "noise"],
        [
            [p.phase, str(p.rounds), *(f"{100 * value:.1f}" for value in (p.frozen, p.online, p.noise))]
            for p in drift.points
        ],
    )


def print_load(points: Sequence[LoadPoint]) -> None:
    """Print throughput and verified tokens, a row for each number of requests."""
    names = list(dict.fromkeys(point.policy for point in points))
    counts = list(dict.fromkeys(point.requests for point in points))
    at = {(point.policy, point.requests): point for point in points}

    def rows(cell: Callable[[LoadPoint], str]) -> list[list[str]]:
        return [[str(count), *(cell(at[name, count]) for name in names)] for count in counts]

    _print(
        "Tokens per second of all requests (* beyond the measured rows)",
        ["requests", *names],
        rows(lambda point: f"{point.throughput:.0f}{'*' if point.extrapolated else ''}"),
    )
    _print(
        "Draft tokens verified per request and round",
        ["requests", *names],
        rows(lambda point: f"{point.verified_per_request:.1f}"),
    )


def print_comparison(found: Comparison, label: str, content: dict[str, Any]) -> None:
    """Print one mode as a table."""
    columns = ("", "tokens/s", "rounds", "rows", "ms", "draft", "head", "verify")
    table = _empty(f"{label}: {len(found.prompts)} prompts", columns)
    for side in ("plain", "speculative"):
        row = content[side]
        parts = row["milliseconds"]
        shown = (parts["draft"], parts["head"], parts["verify"] + parts["target_head"])
        table.add_row(
            side,
            f"{row['tokens_per_second']:.1f}",
            f"{row['rounds']:,}",
            f"{row['rows'] / max(1, row['rounds']):.1f}",
            f"{row['round_milliseconds']:.1f}",
            *(f"{value:.1f}" for value in shown),
        )
    table.caption = "rows and milliseconds of a round, and of its parts"
    console = Console()
    console.print(table)
    speedup = content["speedup"]
    line = (
        f"τ {content['tau']:.2f}, speedup {speedup['value']:.2f}× "
        f"({speedup['low']:.2f} to {speedup['high']:.2f} {speedup['spread']})"
    )
    if (identical := content.get("identical")) is not None:
        line += f", identical output {identical['prompts']}/{identical['of']}"
    console.print(line)
    accepted = " ".join("–" if v is None else f"{v:.2f}" for v in content["acceptance"]["conditional"])
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
    from dspark_train.calibration.report import trace_label

    held, console = result.heldout, Console()
    title = f"{trace_label(result.sampling_temperature)}: {result.fit_rounds} rounds to fit, {held.rounds} held out"
    columns = ("position", "T", "ECE % trained", "calibrated", "noise", "Brier trained", "calibrated", "AUC")
    table = _empty(title, columns)
    for k, temperature in enumerate(result.temperatures):
        ece = (100 * held.before.ece[k], 100 * held.after.ece[k], 100 * held.after.noise[k])
        scores = (held.before.brier[k], held.after.brier[k], held.after.auc[k])
        cells = [
            f"{temperature:.2f}",
            *(f"{value:.1f}" for value in ece),
            *(f"{value:.3f}" for value in scores),
        ]
        table.add_row(str(k + 1), *cells)
    means = (held.before.mean_ece, held.after.mean_ece, held.after.mean_noise)
    table.add_row("mean", "", *(f"{100 * value:.1f}" for value in means), "", "", "", style="bold")
    console.print(table)
    if result.shift:
        console.print(f"  bias of the confidence head moved by {result.shift:+.3f}: it goes into the draft")
    for name, part in result.domains.items():
        before, after, noise = (
            100 * v for v in (part.before.mean_ece, part.after.mean_ece, part.after.mean_noise)
        )
        console.print(
            f"  {name}: ECE {before:.1f} % → {after:.1f} % ({part.rounds} rounds, noise {noise:.1f} %)"
        )
