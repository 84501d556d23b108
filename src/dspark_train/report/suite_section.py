"""Chapters about benchmark suites, from what ``evaluate`` measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dspark_train.decoding.statistics import Estimate
from dspark_train.evaluation.summary import PLAIN, EvaluationResult, MethodResult, SamplingResult
from dspark_train.report import figures
from dspark_train.report.page import Figure, Section, Table
from dspark_train.report.pictures import Bar
from dspark_train.report.tables import Cell, conditions, context_table, paper_table
from dspark_train.report.text import factor, fixed, share_or_dash, signed


def suites_section(name: str, evaluation: EvaluationResult) -> Section | None:
    """Accepted length and speedup by suite and method, with intervals; None for one without results."""
    if not evaluation.results:
        return None
    labels = evaluation.labels
    tables: list[Table] = []
    lengths: list[Figure] = []
    positions: list[Figure] = []
    for result in evaluation.results:
        mode = figures.sampled(result.temperature)
        drafted = [key for key in labels if key in result.macro and key != PLAIN]
        header = ["Suite", "Domain", *(labels[key] for key in drafted)]
        rows = _rows(result, drafted, lambda cell: estimate(cell.tau))
        tables.append(Table(f"Accepted length τ, {mode}", header, rows, text_columns=(1,)))
        timed = [key for key in drafted if result.macro[key].speedup]
        if timed:
            header = ["Suite", "Domain", *(labels[key] for key in timed)]
            rows = _rows(result, timed, lambda cell: estimate(cell.speedup, factor))
            tables.append(Table(f"Speedup over plain decoding, {mode}", header, rows, text_columns=(1,)))
        if any(result.macro[key].ece is not None for key in drafted):
            tables.append(_calibration_table(result, labels, drafted, mode))
        if (by_position := context_table(result, labels)) is not None:
            tables.append(Table(*by_position))
        if result.differences:
            tables.append(_difference_table(result, labels, mode))
        lengths.append(_macro_figure(result, labels, drafted, mode))
        positions.append(_position_figure(result, labels, drafted, mode))
    if (compared := paper_table(evaluation)) is not None:
        tables.append(Table(*compared))
    count = sum(suite.prompts for suite in evaluation.results[0].suites.values())
    lead = (
        f"{count} prompts; every method decodes the same ones. "
        f"Intervals are {100 * evaluation.settings['confidence']:g} % bootstrap intervals over prompts. "
        f"{conditions(evaluation)}"
    ).strip()
    return Section(
        "suites" if name == "suites" else f"suites-{name}",
        "Benchmark suites" if name == "suites" else f"Benchmark suites: {name}",
        lead,
        "Suites" if name == "suites" else name,
        [*lengths, *positions],
        tables,
        source=f"evaluation/{name}.json",
    )


def estimate(value: Estimate | None, text: Callable[[float], str] = fixed) -> Cell:
    """Return an estimate and its interval as a table shows them: 2.31, (2.20 to 2.42)."""
    if value is None or value.value is None:
        return "–"
    if value.low is None or value.high is None:
        return text(value.value)
    return text(value.value), f"{fixed(value.low)} to {fixed(value.high)}"


def _rows(
    result: SamplingResult, keys: Sequence[str], write: Callable[[MethodResult], Cell]
) -> list[list[Cell]]:
    """One row a suite, a domain that several suites share, and the average over suites."""

    def cells(methods: dict[str, MethodResult]) -> list[Cell]:
        return [write(methods[key]) if key in methods else "–" for key in keys]

    rows: list[list[Cell]] = [
        [name, suite.domain, *cells(suite.methods)] for name, suite in result.suites.items()
    ]
    rows += [
        [f"all {domain}", "", *cells(group.methods)]
        for domain, group in result.domains.items()
        if sum(suite.domain in (domain, "mixed") for suite in result.suites.values()) > 1
    ]
    if len(result.suites) > 1:
        rows.append(["macro average", "", *cells(result.macro)])
    return rows


def _calibration_table(
    result: SamplingResult, labels: dict[str, str], keys: Sequence[str], mode: str
) -> Table:
    shown = [key for key in keys if result.macro[key].ece is not None]
    groups = [(name, suite.domain, suite.methods) for name, suite in result.suites.items()]
    if len(groups) > 1:
        groups.append(("macro average", "", result.macro))
    rows = [
        [name, domain, *(share_or_dash(methods[key].ece if key in methods else None) for key in shown)]
        for name, domain, methods in groups
    ]
    header = ["Suite", "Domain", *(labels[key] for key in shown)]
    return Table(f"Calibration error of the confidences (ECE), {mode}", header, rows, text_columns=(1,))


def _difference_table(result: SamplingResult, labels: dict[str, str], mode: str) -> Table:
    rows = [
        [f"{labels[d.first]} − {labels[d.second]}", estimate(d.macro, signed), f"{100 * d.relative:+.1f} %"]
        for d in result.differences
    ]
    return Table(
        f"Paired differences of τ, macro average, {mode}", ["Methods", "Difference", "Relative"], rows
    )


def _macro_figure(result: SamplingResult, labels: dict[str, str], keys: Sequence[str], mode: str) -> Figure:
    bars = [
        Bar(labels[key], tau.value, colour, tau.low, tau.high)
        for colour, key in enumerate(keys)
        if (tau := result.macro[key].tau).value is not None
    ]
    title = f"Accepted length τ, macro average, {mode}"
    return Figure(figures.lengths(title, bars), "Plain decoding is 1 by definition.")


def _position_figure(
    result: SamplingResult, labels: dict[str, str], keys: Sequence[str], mode: str
) -> Figure:
    shares = {labels[key]: result.macro[key].conditional for key in keys}
    longest = max(map(len, shares.values()), default=0)
    title = f"Acceptance by position, given all earlier ones, {mode}"
    groups = [(name, suite.methods) for name, suite in result.suites.items()]
    if len(groups) > 1:
        groups.append(("macro average", result.macro))
    rows = []
    for key in keys:
        for group, methods in groups:
            known = [share_or_dash(value) for value in (methods[key].conditional if key in methods else [])]
            rows.append([labels[key], group, *known, *["–"] * (longest - len(known))])
    header = ["", "Suite", *map(str, range(1, longest + 1))]
    table = Table(title, header, rows, folded=True, text_columns=(1,))
    return Figure(figures.suite_positions(title, shares), "Averaged over suites.", table)
