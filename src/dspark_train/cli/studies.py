"""The commands ``studies`` and ``simulate``: what recorded rounds say, as tables, JSON and plots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dspark_train.errors import UserError

if TYPE_CHECKING:
    from dspark_train.studies.rounds import AcceptanceStudy, DriftStudy, ThresholdPoint, ThresholdStudy
    from dspark_train.studies.simulate import LoadPoint


def studies(
    run: Path,
    temperature: float = 0.0,
    split: Literal["calibration", "heldout"] = "heldout",
    prompts: int = 64,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    refresh: bool = False,
) -> None:
    """Study a run's recorded rounds: threshold sweep, acceptance per position, reliability.

    Writes threshold_sweep.json, acceptance.json and reliability.json to the run's studies, and a plot of
    each.

    Args:
        run: folder of a finished run; its temperatures are used where it was calibrated.
        temperature: sampling temperature of the rounds; 0 is greedy.
        split: whose prompts.
        prompts: prompts to decode at most, where the run holds no rounds yet.
        max_new_tokens: longest answer, in tokens.
        batch_size: requests decoded at once.
        refresh: decode again even where the run holds rounds.
    """
    from dspark_train.calibration.report import compare_reliability, trace_label
    from dspark_train.decoding.acceptance import acceptance_by_position
    from dspark_train.files import write_result
    from dspark_train.report import figures
    from dspark_train.report.drawing import save_png
    from dspark_train.structures import DecodingTrace
    from dspark_train.studies.record import RecordedRounds, Recording
    from dspark_train.studies.reliability import ReliabilityStudy
    from dspark_train.studies.rounds import AcceptanceStudy, ThresholdStudy, drift_study, threshold_sweep

    rounds = RecordedRounds(run, Recording(prompts, max_new_tokens, batch_size), refresh=refresh)
    trace = rounds.trace(split, temperature)
    temperatures = run_temperatures(run, temperature, trace.block_size)
    common: dict[str, Any] = {
        "split": split,
        "sampling_temperature": temperature,
        "rounds": len(trace.request),
        "temperatures": temperatures,
    }
    folder, plots = _folders(run)
    acceptance = AcceptanceStudy(
        **common, groups={part.group: part for part in acceptance_by_position(trace)}
    )
    write_result(folder / "acceptance.json", acceptance)
    save_png(plots / "acceptance.png", figures.acceptance(acceptance), figures.over(acceptance))
    _print_acceptance(acceptance)
    thresholds = ThresholdStudy(**common, groups=threshold_sweep(trace, temperatures))
    write_result(folder / "threshold_sweep.json", thresholds)
    pictures = figures.thresholds(thresholds)
    save_png(plots / "threshold_sweep.png", pictures, figures.over(thresholds), columns=2)
    _print_thresholds(thresholds)
    compared = compare_reliability(trace, temperatures or [1.0] * trace.block_size)
    reliability = ReliabilityStudy.of(compared, **common)
    write_result(folder / "reliability.json", reliability)
    if temperatures is not None:
        figures.save_reliability(plots / f"reliability_{trace_label(temperature)}.png", reliability)
    before, after = 100 * compared.before.mean_ece, 100 * compared.after.mean_ece
    scaled = f", {after:.1f} % scaled" if temperatures else " (not calibrated: run `calibrate`)"
    print(f"reliability: mean ECE {before:.1f} % raw{scaled}; noise {100 * compared.after.mean_noise:.1f} %")
    fitting = rounds.path("calibration", temperature)
    if fitting.is_file() and split == "heldout":
        drift = drift_study(DecodingTrace.load(fitting), trace)
        if drift is not None:
            drift = dataclasses.replace(drift, **common)
            write_result(folder / "online.json", drift)
            save_png(plots / "online.png", [figures.drift(drift)], figures.over(drift))
            _print_drift(drift)
    print(f"wrote {folder} and {plots}")


def simulate(
    run: Path,
    costs: Path | None = None,
    temperature: float = 0.0,
    split: Literal["calibration", "heldout"] = "heldout",
    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    threshold: float = 0.5,
    prompts: int = 64,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    refresh: bool = False,
) -> None:
    """Simulate serving under load: throughput against per-user speed, by verification policy.

    Replays recorded rounds against measured costs (``profile``). Compares plain decoding, one draft token,
    whole blocks, a threshold, and the scheduler in its causal and its asynchronous form. Writes
    simulate.json and a plot.

    Args:
        run: folder of a finished run; its temperatures are used where it was calibrated.
        costs: cost table; left out: ``RUN/studies/cost_table.json``.
        temperature: sampling temperature of the rounds; 0 is greedy.
        split: whose prompts.
        requests: numbers of concurrent requests.
        threshold: confidence of the threshold policy.
        prompts: prompts to decode at most, where the run holds no rounds yet.
        max_new_tokens: longest answer, in tokens.
        batch_size: requests decoded at once.
        refresh: decode again even where the run holds rounds.
    """
    from dspark_train.decoding.cost import CostTable
    from dspark_train.files import write_result
    from dspark_train.report import figures
    from dspark_train.report.drawing import save_png
    from dspark_train.studies.record import RecordedRounds, Recording
    from dspark_train.studies.simulate import LoadStudy, standard_policies
    from dspark_train.studies.simulate import simulate as simulate_load

    if not requests or min(requests) < 1:
        raise UserError(f"requests {list(requests)} must be numbers of at least 1")
    source = costs or run / "studies" / "cost_table.json"
    table = CostTable.load(source)
    rounds = RecordedRounds(run, Recording(prompts, max_new_tokens, batch_size), refresh=refresh)
    trace = rounds.trace(split, temperature)
    temperatures = run_temperatures(run, temperature, trace.block_size)
    policies = standard_policies(table, trace.block_size, threshold)
    load = LoadStudy(
        split=split,
        sampling_temperature=temperature,
        rounds=len(trace.request),
        block_size=trace.block_size,
        temperatures=temperatures,
        context=table.context,
        machine=table.machine,
        measured_rows=table.max_rows,
        policies=simulate_load(trace, table, policies, sorted(set(requests)), temperatures=temperatures),
    )
    folder, plots = _folders(run)
    write_result(folder / "simulate.json", load)
    save_png(plots / "simulate.png", figures.load(load), figures.over(load))
    _print_load(load.policies)
    print(f"wrote {folder / 'simulate.json'} and {plots / 'simulate.png'}")


def run_temperatures(run: Path, sampling_temperature: float, block_size: int) -> list[float] | None:
    """Temperatures of a run for rounds of one sampling temperature; None where it was not calibrated for them."""
    from dspark_train.calibration.io import Calibration
    from dspark_train.calibration.report import trace_label

    path = run / f"calibration_{trace_label(sampling_temperature)}.json"
    return list(Calibration.load(path, block_size).temperatures) if path.is_file() else None


def _folders(run: Path) -> tuple[Path, Path]:
    folder, plots = run / "studies", run / "plots"
    folder.mkdir(exist_ok=True)
    plots.mkdir(exist_ok=True)
    return folder, plots


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _print_acceptance(study: AcceptanceStudy) -> None:
    parts = list(study.groups.values())
    _table(
        "Acceptance in %, given that all earlier ones were accepted",
        ["rounds of", "rounds", "τ", *(str(k + 1) for k in range(len(parts[0].conditional)))],
        [
            [part.group, str(part.rounds), f"{part.tau:.2f}", *(_share(value) for value in part.conditional)]
            for part in parts
        ],
    )


def _print_thresholds(study: ThresholdStudy) -> None:
    from dspark_train.studies.rounds import THRESHOLDS

    columns = [{point.threshold: point for point in points} for points in study.groups.values()]

    def cell(point: ThresholdPoint | None) -> str:
        # no point: nothing was verified, and a round gives the target's own token
        return (
            "– (1.00)" if point is None else f"{_share(point.acceptance_rate)} ({point.tokens_per_round:.2f})"
        )

    _table(
        "Threshold sweep: accepted share of verified tokens in % (tokens per round)",
        ["threshold", *study.groups],
        [
            [f"{threshold:.2f}", *(cell(column.get(threshold)) for column in columns)]
            for threshold in (*THRESHOLDS[:-1:2], THRESHOLDS[-1])
        ],
    )


def _print_drift(drift: DriftStudy) -> None:
    _table(
        f"Load drifting from {drift.first} to {drift.second}: mean ECE in %",
        ["traffic", "rounds", "frozen", "online", "noise"],
        [
            [p.phase, str(p.rounds), *(f"{100 * value:.1f}" for value in (p.frozen, p.online, p.noise))]
            for p in drift.points
        ],
    )


def _print_load(policies: Mapping[str, Sequence[LoadPoint]]) -> None:
    names = list(policies)
    at = {(name, point.requests): point for name, points in policies.items() for point in points}
    counts = list(dict.fromkeys(requests for _, requests in at))

    def rows(cell: Callable[[LoadPoint], str]) -> list[list[str]]:
        return [[str(count), *(cell(at[name, count]) for name in names)] for count in counts]

    _table(
        "Tokens per second of all requests (* beyond the measured rows)",
        ["requests", *names],
        rows(lambda point: f"{point.throughput:.0f}{'*' if point.extrapolated else ''}"),
    )
    _table(
        "Draft tokens verified per request and round",
        ["requests", *names],
        rows(lambda point: f"{point.verified_per_request:.1f}"),
    )
