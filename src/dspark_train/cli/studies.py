"""The commands ``studies`` and ``simulate``: what recorded rounds say, as tables, JSON and plots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dspark_train.errors import UserError

if TYPE_CHECKING:
    from dspark_train.run import Run
    from dspark_train.studies.online_threshold import ThresholdDriftStudy
    from dspark_train.studies.rounds import AcceptanceStudy, DriftStudy, ThresholdPoint, ThresholdStudy
    from dspark_train.studies.simulate import LoadPoint


def studies(
    run: Path,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    split: Literal["calibration", "heldout"] = "heldout",
    wanted: float | None = None,
    prompts: int = 64,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    refresh: bool = False,
) -> None:
    """Study a run's recorded rounds: threshold sweep, acceptance per position, reliability.

    Writes threshold_sweep.json, acceptance.json and reliability.json to the run's studies, and a plot of
    each; where the rounds are of several domains also online.json, about scalings that follow a drifting load, and
    online_threshold.json, about a threshold that does.

    Args:
        run: folder of a finished run; its scalings are used where it was calibrated for this sampling.
        temperature: sampling temperature of the rounds; 0 is greedy.
        top_k: tokens kept by sampling; 0 keeps all.
        top_p: nucleus kept by sampling; 1 keeps all.
        split: whose prompts.
        wanted: share of the verified draft tokens that a threshold should keep accepted along a drifting load; left
            out, no such threshold is studied.
        prompts: prompts to decode at most, where the run holds no rounds yet.
        max_new_tokens: longest answer, in tokens.
        batch_size: requests decoded at once.
        refresh: decode again even where the run holds rounds.
    """
    from dspark_train.calibration.io import read_sts
    from dspark_train.calibration.reliability import compare_reliability
    from dspark_train.decoding.acceptance import acceptance_by_position
    from dspark_train.decoding.sampling import SamplingRule
    from dspark_train.files import write_result
    from dspark_train.report import figures
    from dspark_train.report.drawing import save_png
    from dspark_train.studies.online_threshold import threshold_drift
    from dspark_train.studies.record import Recording, recorded_rounds, run_to_record
    from dspark_train.studies.reliability import ReliabilityStudy
    from dspark_train.studies.rounds import AcceptanceStudy, ThresholdStudy, drift_study, threshold_sweep

    recording = Recording(prompts, max_new_tokens, batch_size, refresh=refresh)
    opened, rule = run_to_record(run), SamplingRule(temperature, top_k, top_p)
    trace = recorded_rounds(opened, split, rule, recording)
    sts = read_sts(opened, rule.label, trace.block_size)
    common: dict[str, Any] = {
        "split": split,
        "sampling_temperature": temperature,
        "rounds": len(trace.request),
        "temperatures": sts,
    }
    plots = _folders(opened)
    acceptance = AcceptanceStudy(
        **common, groups={part.group: part for part in acceptance_by_position(trace)}
    )
    write_result(opened.study_path("acceptance"), acceptance)
    save_png(plots / "acceptance.png", figures.acceptance(acceptance), figures.over(acceptance))
    _print_acceptance(acceptance)
    thresholds = ThresholdStudy(**common, groups=threshold_sweep(trace, sts))
    write_result(opened.study_path("threshold_sweep"), thresholds)
    pictures = figures.thresholds(thresholds)
    save_png(plots / "threshold_sweep.png", pictures, figures.over(thresholds), columns=2)
    _print_thresholds(thresholds)
    compared = compare_reliability(trace, sts or [1.0] * trace.block_size)
    reliability = ReliabilityStudy.of(compared, **common)
    write_result(opened.study_path("reliability"), reliability)
    if sts is not None:
        figures.save_reliability(plots / f"reliability_{rule.label}.png", reliability)
    before, after = 100 * compared.before.mean_ece, 100 * compared.after.mean_ece
    scaled = f", {after:.1f} % scaled" if sts else " (not calibrated: run `calibrate`)"
    print(f"reliability: mean ECE {before:.1f} % raw{scaled}; noise {100 * compared.after.mean_noise:.1f} %")
    fitting = opened.trace("calibration", rule.label)
    if fitting is not None and split == "heldout":
        drift = drift_study(fitting, trace)
        if drift is not None:
            drift = dataclasses.replace(drift, **common)
            write_result(opened.study_path("online"), drift)
            save_png(plots / "online.png", [figures.drift(drift)], figures.over(drift))
            _print_drift(drift)
        moving = None if wanted is None else threshold_drift(fitting, trace, wanted, sts)
        if moving is not None:
            moving = dataclasses.replace(moving, **common)
            write_result(opened.study_path("online_threshold"), moving)
            _print_threshold_drift(moving)
    print(f"wrote {opened.studies_path} and {plots}")


def simulate(
    run: Path,
    costs: Path | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    split: Literal["calibration", "heldout"] = "heldout",
    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    threshold: float = 0.5,
    policies: tuple[str, ...] = (),
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
        run: folder of a finished run; its scalings are used where it was calibrated for this sampling.
        costs: cost table; left out: ``RUN/studies/cost_table.json``.
        temperature: sampling temperature of the rounds; 0 is greedy.
        top_k: tokens kept by sampling; 0 keeps all.
        top_p: nucleus kept by sampling; 1 keeps all.
        split: whose prompts.
        requests: numbers of concurrent requests.
        threshold: confidence of the threshold policy.
        policies: further policies, named as in decode, such as online:0.8 or scheduled+online.
        prompts: prompts to decode at most, where the run holds no rounds yet.
        max_new_tokens: longest answer, in tokens.
        batch_size: requests decoded at once.
        refresh: decode again even where the run holds rounds.
    """
    from dspark_train.calibration.io import read_sts
    from dspark_train.decoding.cost import CostTable
    from dspark_train.decoding.policies import parse_policy
    from dspark_train.decoding.sampling import SamplingRule
    from dspark_train.files import write_result
    from dspark_train.report import figures
    from dspark_train.report.drawing import save_png
    from dspark_train.run import Run
    from dspark_train.studies.record import Recording, recorded_rounds, run_to_record
    from dspark_train.studies.simulate import LoadStudy, NamedPolicy, standard_policies
    from dspark_train.studies.simulate import simulate as simulate_load

    if not requests or min(requests) < 1:
        raise UserError(f"requests {list(requests)} must be numbers of at least 1")
    table = CostTable.load(costs or Run(run).cost_table_path)
    recording = Recording(prompts, max_new_tokens, batch_size, refresh=refresh)
    opened, rule = run_to_record(run), SamplingRule(temperature, top_k, top_p)
    trace = recorded_rounds(opened, split, rule, recording)
    sts = read_sts(opened, rule.label, trace.block_size)
    compared = standard_policies(table, trace.block_size, threshold)
    compared += [NamedPolicy(name, parse_policy(name, table)) for name in policies]
    load = LoadStudy(
        split=split,
        sampling_temperature=temperature,
        rounds=len(trace.request),
        block_size=trace.block_size,
        temperatures=sts,
        context=table.context,
        machine=table.machine,
        measured_rows=table.max_rows,
        policies=simulate_load(trace, table, compared, sorted(set(requests)), sts=sts),
    )
    plots = _folders(opened)
    write_result(opened.study_path("simulate"), load)
    save_png(plots / "simulate.png", figures.load(load), figures.over(load))
    _print_load(load.policies)
    print(f"wrote {opened.study_path('simulate')} and {plots / 'simulate.png'}")


def _folders(run: Run) -> Path:
    """Make the folders of studies and of plots; the latter is returned."""
    run.studies_path.mkdir(exist_ok=True)
    run.plots_path.mkdir(exist_ok=True)
    return run.plots_path


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


def _print_threshold_drift(drift: ThresholdDriftStudy) -> None:
    _table(
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
