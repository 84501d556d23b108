"""Chapters of a run's report about calibration and load, from the studies of its recorded rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dspark_train.report.charts import Axis, Series, line_chart, percent, reliability_chart
from dspark_train.report.page import Figure, Legend, Section, Table
from dspark_train.report.text import fixed, maybe, mode_name, quantity, share, share_or_dash
from dspark_train.report.views import CalibrationView, DriftView, LoadView, SweepView


def threshold(sweeps: Sequence[SweepView], source: str) -> Section | None:
    """The threshold sweep: acceptance rate and tokens per round against a static confidence threshold."""
    shown = [sweep for sweep in sweeps if sweep.thresholds]
    if not shown:
        return None
    axis = Axis("Confidence threshold", low=0.0, high=max(1.0, max(max(s.thresholds) for s in shown)))

    def lines(name: str) -> list[Series]:
        return [
            Series(
                sweep.group,
                [
                    (x, math.nan if y is None else y)
                    for x, y in zip(sweep.thresholds, getattr(sweep, name), strict=True)
                ],
                colour,
                markers=True,
            )
            for colour, sweep in enumerate(shown)
            if getattr(sweep, name)
        ]

    charts = [
        (
            "acceptance_rate",
            "Accepted share of verified draft tokens",
            Axis("", low=0.0, high=1.0, text=percent),
        ),
        ("tokens_per_round", "Tokens per round", Axis("", low=None)),
        ("verified_per_round", "Draft tokens verified per round", Axis("", low=0.0)),
    ]
    figures = []
    for name, title, y_axis in charts:
        series = lines(name)
        if not series:
            continue
        drawing = line_chart(title, "Against the threshold", series, axis, y_axis)
        write_number = share if name == "acceptance_rate" else fixed
        columns = [dict(zip(sweep.thresholds, getattr(sweep, name), strict=True)) for sweep in shown]
        grid = sorted({x for column in columns for x in column})
        rows = [
            [f"{x:g}", *(maybe(column.get(x), write_number) for column in columns)]
            for x in grid[:: max(1, len(grid) // 12)]
        ]
        table = Table(title, ["Threshold", *(line.label for line in series)], rows, folded=True)
        figures.append(Figure(title, drawing, Legend.of(series), table=table))
    lead = (
        "Verification stops at the first draft token whose confidence lies below the threshold. "
        "A higher one wastes fewer rows of the target and commits fewer tokens per round."
    )
    return Section("threshold", "Threshold sweep", lead, "Threshold", figures, source=source)


def reliability(views: Sequence[CalibrationView]) -> Section | None:
    """Reliability diagrams per position, and the calibration table, of the first sampling temperature."""
    if not views:
        return None
    view = views[0]
    figures = []
    for index, (before, after) in enumerate(zip(view.bins_before, view.bins_after, strict=True)):
        error = f"{share_or_dash(view.ece_before[index])} → {share_or_dash(view.ece_after[index])}"
        title = f"Position {index + 1}"
        drawing = reliability_chart(
            title, f"Calibration error as trained and as calibrated: {error}", before, after
        )
        figures.append(Figure(title, drawing, caption=f"ECE {error}", small=True))
    lead = (
        f"Predicted against observed survival of the prefix over {quantity(view.rounds)} held-out rounds "
        f"({mode_name(view.temperature).lower()}): grey as the draft says it, blue after one temperature per "
        "position. On the dotted line a confidence means what it says."
    )
    if view.mean_noise is not None:
        lead += (
            f" So few rounds alone make an error of {share(view.mean_noise)}, however good the confidences."
        )
    tables = [_calibration_table(view) for view in views]
    if view.domains:
        rows = [
            [name, share_or_dash(before), share_or_dash(after)]
            for name, (before, after) in view.domains.items()
        ]
        tables.append(Table("Mean ECE by domain", ["Domain", "before", "after"], rows))
    source = "calibration_report.json"
    return Section(
        "reliability", "Reliability of the confidences", lead, "Reliability", figures, tables, source=source
    )


def _calibration_table(view: CalibrationView) -> Table:
    columns: list[tuple[str, Sequence[float | None], Callable[[float], str]]] = [
        ("Temperature", view.temperatures, fixed),
        ("ECE before", view.ece_before, share),
        ("ECE after", view.ece_after, share),
        ("AUC", view.auc, lambda v: fixed(v, 3)),
        ("Brier before", view.brier_before, lambda v: fixed(v, 4)),
        ("Brier after", view.brier_after, lambda v: fixed(v, 4)),
    ]
    rows = [
        [str(i + 1), *(maybe(values[i], text) for _, values, text in columns)]
        for i in range(len(view.ece_before))
    ]
    rows.append(["mean", "", share_or_dash(view.mean_before), share_or_dash(view.mean_after), "", "", ""])
    caption = f"By draft position, {mode_name(view.temperature).lower()}"
    return Table(caption, ["Position", *(name for name, _, _ in columns)], rows)


def drift(study: DriftView | None) -> Section | None:
    """Calibration error under a load that drifts from one domain to another, frozen and followed online."""
    if study is None or not study.rounds:
        return None
    series = [
        Series("frozen temperatures", list(zip(study.rounds, study.frozen, strict=True)), 1, markers=True),
        Series("following online", list(zip(study.rounds, study.online, strict=True)), 0, markers=True),
        Series("honest probabilities", list(zip(study.rounds, study.noise, strict=True)), 5, dashed=True),
    ]
    title = f"Mean calibration error while {study.first} gives way to {study.second}"
    drawing = line_chart(title, "One line a method", series, Axis("Rounds"), Axis("", low=0.0, text=percent))
    lead = (
        f"Temperatures fitted on {study.first}, replayed over rounds of {study.first}, then of {study.second}. "
        "Online correction follows what is accepted; even honest probabilities show an error on so few rounds."
    )
    figures = [Figure(title, drawing, Legend.of(series))]
    return Section("drift", "Drifting load", lead, "Drift", figures, source="studies/online.json")


def load(views: Sequence[LoadView], source: str) -> Section | None:
    """Throughput against per-user speed, and the verification budget against concurrency, by policy."""
    shown = [view for view in views if view.requests]
    if not shown:
        return None
    frontier = [
        Series(v.policy, list(zip(v.per_user, v.throughput, strict=True)), i, dashed=i >= 6, markers=True)
        for i, v in enumerate(shown)
    ]
    title = "Throughput against speed per user"
    drawing = line_chart(
        title,
        "One line a policy, one point a number of concurrent requests",
        frontier,
        Axis("Tokens per second, one user"),
        Axis("", low=0.0),
    )
    header = ["Requests", *(view.policy for view in shown)]
    grid = sorted({r for view in shown for r in view.requests})

    def rows(name: str, digits: int) -> list[list[str]]:
        table = []
        for requests in grid:
            cells = []
            for view in shown:
                values = dict(zip(view.requests, getattr(view, name), strict=False))
                cells.append(fixed(values[requests], digits) if requests in values else "–")
            table.append([f"{requests:g}", *cells])
        return table

    figures = [
        Figure(
            title,
            drawing,
            Legend.of(frontier),
            "Up and to the right is better. Each point is a number of concurrent requests.",
            Table("Tokens per second, all requests", header, rows("throughput", 0), folded=True),
        )
    ]
    budget = [
        Series(v.policy, list(zip(v.requests, v.verified, strict=True)), i, dashed=i >= 6, markers=True)
        for i, v in enumerate(shown)
        if v.verified
    ]
    if budget:
        title = "Draft tokens verified per request"
        drawing = line_chart(
            title, "Against concurrency", budget, Axis("Concurrent requests", log=True), Axis("", low=0.0)
        )
        figures.append(
            Figure(title, drawing, Legend.of(budget), "A good policy gives up verification as load grows.")
        )
    lead = "Simulated from recorded rounds and this machine's measured cost of a target step."
    return Section("load", "Throughput under load", lead, "Load", figures, source=source)
