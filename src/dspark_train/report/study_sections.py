"""Chapters of a run's report about calibration and load, from the studies of its recorded rounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from dspark_train.report import figures
from dspark_train.report.page import Figure, Section, Table
from dspark_train.report.text import fixed, maybe, mode_name, share, share_or_dash
from dspark_train.run import CALIBRATION_REPORT
from dspark_train.studies.online_threshold import ThresholdDriftStudy
from dspark_train.studies.reliability import CalibrationReport
from dspark_train.studies.rounds import DriftStudy, OfRounds, ThresholdStudy
from dspark_train.studies.simulate import (
    BASELINE,
    LoadPoint,
    LoadStudy,
    budget_points,
    equal_throughputs,
    read,
    speed_at,
    throughput_at,
)


def _of(study: OfRounds) -> str:
    """Say at the end of a lead what rounds a study is of."""
    about = figures.over(study)
    return f" Over {about}." if about else ""


def thresholds(study: ThresholdStudy | None) -> Section | None:
    """The threshold sweep: acceptance rate and tokens per round against a static confidence threshold."""
    if study is None or not any(study.groups.values()):
        return None
    writers = {"acceptance_rate_with_bonus": share}
    shown = []
    for picture, measure in zip(
        figures.thresholds(study),
        ("acceptance_rate_with_bonus", "tokens_per_round", "verified_per_round", "rejected_per_round"),
        strict=True,
    ):
        columns = [{p.threshold: getattr(p, measure) for p in points} for points in study.groups.values()]
        grid = sorted({x for column in columns for x in column})
        write = writers.get(measure, fixed)
        rows = [
            [f"{x:g}", *(maybe(column.get(x), write) for column in columns)]
            for x in grid[:: max(1, len(grid) // 12)]
        ]
        table = Table(picture.title, ["Threshold", *study.groups], rows, folded=True)
        shown.append(Figure(picture, table=table))
    lead = (
        "Verification stops at the first draft token whose confidence lies below the threshold. "
        "A higher one wastes fewer rows of the target and commits fewer tokens per round. The acceptance rate "
        "counts the target's own token and the anchor's row." + _of(study)
    )
    source = "studies/threshold_sweep.json"
    return Section("threshold", "Threshold sweep", lead, "Threshold", shown, source=source)


WAYS = ("ECE as trained", "ECE, T alone", "ECE, bias and T")
"""Columns: as trained, with sequential temperature scaling alone, and with a bias besides."""


def reliability(reports: Sequence[CalibrationReport]) -> Section | None:
    """Reliability diagrams per position, and the calibration table, of the first sampling temperature."""
    if not reports:
        return None
    report = reports[0]
    shown = []
    for index, picture in enumerate(figures.reliability(report)):
        error = f"{share_or_dash(report.ece_before[index])} → {share_or_dash(report.ece_after[index])}"
        shown.append(Figure(picture, f"ECE {error}"))
    lead = (
        f"Predicted against observed survival of the prefix over {figures.over(report)}: "
        "grey as the draft says it, blue as calibrated for this way of sampling. On the dotted line a confidence "
        "means what it says. The table tells what temperatures alone gain from what a bias adds, each with the error "
        "that so few rounds make of honest confidences."
    )
    if report.mean_noise is not None:
        lead += (
            f" So few rounds alone make an error of {share(report.mean_noise)}, however good the confidences."
        )
    tables = [_calibration_table(entry) for entry in reports]
    if report.domains:
        rows = [
            [
                name,
                *map(share_or_dash, (domain.mean_ece_before, domain.mean_ece_sts, domain.mean_ece_after)),
                share_or_dash(domain.mean_noise),
            ]
            for name, domain in report.domains.items()
        ]
        tables.append(Table("Mean ECE by domain", ["Domain", *WAYS, "noise"], rows))
    return Section(
        "reliability",
        "Reliability of the confidences",
        lead,
        "Reliability",
        shown,
        tables,
        source=CALIBRATION_REPORT,
    )


def _calibration_table(report: CalibrationReport) -> Table:
    columns: list[tuple[str, Sequence[float | None], Callable[[float], str]]] = [
        (WAYS[0], report.ece_before, share),
        ("noise", report.noise_before, share),
        ("T alone", report.temperatures_alone or [], fixed),
        (WAYS[1], report.ece_sts, share),
        ("noise", report.noise_sts, share),
        ("T with bias" if report.bias else "T", report.temperatures or [], fixed),
        (WAYS[2], report.ece_after, share),
        ("noise", report.noise_after, share),
        ("AUC", report.auc, lambda v: fixed(v, 3)),
        ("Brier before", report.brier_before, lambda v: fixed(v, 4)),
        ("Brier after", report.brier_after, lambda v: fixed(v, 4)),
    ]
    rows = [
        [str(i + 1), *(maybe(values[i], text) for _, values, text in columns if values)]
        for i in range(len(report.ece_before))
    ]
    means = {
        WAYS[0]: share_or_dash(report.mean_ece_before),
        WAYS[1]: share_or_dash(report.mean_ece_sts),
        WAYS[2]: share_or_dash(report.mean_ece_after),
    }
    rows.append(["mean", *(means.get(name, "") for name, values, _ in columns if values)])
    bias = f", bias {report.bias:+.3f}" if report.bias else ""
    caption = f"By draft position, {mode_name(report.sampling_temperature or 0.0).lower()}{bias}"
    return Table(caption, ["Position", *(name for name, values, _ in columns if values)], rows)


def drift(study: DriftStudy | None) -> Section | None:
    """Calibration error under a load that drifts from one domain to another, frozen and followed online."""
    if study is None or not study.points:
        return None
    picture = figures.drift(study)
    lead = (
        f"Temperatures fitted on {study.first}, replayed over rounds of {study.first}, then of {study.second}. "
        "Online correction follows what is accepted; even honest probabilities show an error on so few "
        "rounds." + _of(study)
    )
    rows = [
        [f"{p.rounds:,}", p.phase, share(p.frozen), share(p.online), share(p.noise)] for p in study.points
    ]
    header = ["Rounds", "Traffic", "frozen", "online", "honest"]
    table = Table(picture.title, header, rows, folded=True, text_columns=(1,))
    shown = [Figure(picture, table=table)]
    return Section("drift", "Drifting load", lead, "Drift", shown, source="studies/online.json")


def threshold_drift(study: ThresholdDriftStudy | None) -> Section | None:
    """What a frozen and an online threshold keep accepted under a load that drifts from one domain to another."""
    if study is None or not study.points:
        return None
    picture = figures.threshold_drift(study)
    lead = (
        f"Both thresholds begin at {study.start:g}, at which rounds of {study.first} accept the wanted "
        f"{share(study.wanted)} of the verified draft tokens. One stays, the other follows what is accepted."
        + _of(study)
    )
    rows = [
        [
            f"{p.rounds:,}",
            p.phase,
            share_or_dash(p.frozen),
            fixed(p.frozen_verified),
            share_or_dash(p.online),
            fixed(p.online_verified),
            fixed(p.threshold),
        ]
        for p in study.points
    ]
    header = ["Rounds", "Traffic", "frozen", "verified", "online", "verified", "threshold"]
    table = Table(picture.title, header, rows, folded=True, text_columns=(1,))
    source = "studies/online_threshold.json"
    shown = [Figure(picture, table=table)]
    return Section(
        "threshold-drift", "Threshold under a drifting load", lead, "Online threshold", shown, source=source
    )


def load(study: LoadStudy | None) -> Section | None:
    """Throughput against per-user speed, and the verification budget against concurrency, by policy."""
    if study is None or not any(study.policies.values()):
        return None
    throughput, budget = figures.load(study)
    every = [point for points in study.policies.values() for point in points]
    rings = any(point.extrapolated for point in every)
    loads, *read_out, rows = load_tables(study)
    point = "a rate of arrivals" if study.arrivals else "a number of concurrent requests"
    shown = [
        Figure(
            throughput,
            f"Up and to the right is better. Each point is {point}."
            + (f" Rings: passes beyond the {study.measured_rows} measured rows." if rings else ""),
            dataclasses.replace(loads, folded=True),
        ),
        Figure(
            budget,
            "A good policy gives up verification as load grows.",
            dataclasses.replace(rows, folded=True),
        ),
    ]
    about = figures.over(study)
    rounds = f"{about}," if about else "recorded rounds"
    lead = f"Simulated from {rounds} and this machine's measured cost of a target step"
    if study.machine:
        lead += f" ({study.machine}, {study.context} tokens of context)"
    if study.arrivals:
        arrivals = "Poisson arrivals" if study.arrivals == "poisson" else f"arrivals of {study.arrivals}"
        bound = f", {study.cache_tokens:,} positions of cache" if study.cache_tokens else ""
        lead += (
            f". {arrivals}, the same for every policy; prompts of {study.prompt_tokens or 0:.0f} tokens, whose passes "
            f"hold up the rounds, and answers of {study.answer_tokens or 0:.0f} on average; at most {study.slots} "
            f"requests at once{bound}. "
        )
        lead += (
            f"What a cut changes was fitted from {study.after_cut.rounds:,} rounds after one"
            if study.after_cut
            else "Acceptance after a cut is taken as in the record"
        )
    return Section(
        "load", "Throughput under load", f"{lead}.", "Load", shown, read_out, source="studies/simulate.json"
    )


def load_tables(study: LoadStudy) -> list[Table]:
    """Each load; throughput at promised speeds and speed at equal throughput, against the baseline; budgets."""
    names = list(study.policies)
    longest = max(map(len, study.policies.values()))

    def at_load(points: Sequence[LoadPoint], place: int) -> str:
        if place >= len(points):
            return "–"
        point = points[place]
        return f"{point.throughput:.0f}{'*' if point.extrapolated else ''} / {point.per_user:.1f}"

    def name_of(place: int) -> str:
        point = max(study.policies.values(), key=len)[place]
        return f"{point.requests:g}" if point.rate is None else f"{point.rate:.2g}"

    loads = Table(
        "Tokens per second: all requests / one user (* beyond the measured rows)",
        ["Arrivals per second" if study.arrivals else "Requests", *names],
        [
            [name_of(place), *(at_load(points, place) for points in study.policies.values())]
            for place in range(longest)
        ],
    )
    compared = "" if BASELINE not in names else f", and against {BASELINE}"
    read_out = [
        Table(
            title, [axis, *names], [[fixed(at, 0 if at >= 100 else 1), *against(found)] for at, found in rows]
        )
        for title, axis, rows in (
            (
                f"Tokens per second of all at a promised speed per user{compared}",
                "Tokens/s, each user",
                [(at, read(study, throughput_at, at)) for at in study.speeds],
            ),
            (
                f"Tokens per second of one user at equal throughput{compared}",
                "Tokens/s, all",
                [(at, read(study, speed_at, at)) for at in equal_throughputs(study)],
            ),
        )
        if rows
    ]
    cells: dict[int, dict[str, str]] = {}
    for name, points in budget_points(study).items():
        for point in points:
            group = math.ceil(math.log2(max(1.0, point.requests)) - 1e-9)
            cells.setdefault(2**group, {})[name] = fixed(point.budget, 1)
    rows = [[str(group), *(cells[group].get(name, "–") for name in names)] for group in sorted(cells)]
    title = "Rows verified per request and round, the anchor's included"
    return [loads, *read_out, Table(title, ["Requests at work, up to", *names], rows)]


def against(found: dict[str, float | None]) -> list[str]:
    """Values, each with its difference from the baseline's."""
    base = found.get(BASELINE)

    def cell(name: str, value: float | None) -> str:
        if value is None:
            return "–"
        compared = "" if base is None or name == BASELINE else f" ({value / base - 1:+.0%})"
        return f"{fixed(value, 0 if value >= 100 else 1)}{compared}"

    return [cell(name, value) for name, value in found.items()]
