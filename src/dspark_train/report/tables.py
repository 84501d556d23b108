"""Tables as Markdown, for a README, a model card or the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from dspark_train.decoding.statistics import Estimate
from dspark_train.evaluation import paper
from dspark_train.evaluation.summary import PLAIN, EvaluationResult, MethodResult, SamplingResult
from dspark_train.report.text import factor, fixed, interval, mode_name, share_or_dash, signed

Cell = str | tuple[str, str]
"""A value, or a value and a smaller note beside it (its interval)."""


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Cell]], text_columns: int = 1) -> str:
    """Write a Markdown table.

    Args:
        header: names of the columns.
        rows: cells; the note of a pair goes into parentheses.
        text_columns: columns on the left that hold text; the others are numbers, to the right.
    """

    def line(cells: Iterable[Cell]) -> str:
        written = (cell if isinstance(cell, str) else f"{cell[0]} ({cell[1]})" for cell in cells)
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in written) + " |"

    rule = "|" + "---|" * text_columns + "---:|" * (len(header) - text_columns)
    return "\n".join([line(header), rule, *map(line, rows)])


def _estimate(value: Estimate | None, text: Callable[[float], str]) -> str:
    if value is None or value.value is None:
        return "–"
    bounds = "" if value.low is None or value.high is None else f" ({interval(value.low, value.high)})"
    return f"{text(value.value)}{bounds}"


def _acceptance(
    labels: Mapping[str, str], groups: Sequence[tuple[str, Mapping[str, MethodResult]]]
) -> list[str]:
    """One table: acceptance at each position given all earlier ones, and the calibration error."""
    found = [
        (name, labels[key], methods[key])
        for name, methods in groups
        for key in labels
        if any(value is not None for value in methods[key].conditional)
    ]
    if not found:
        return []
    size = max(len(method.conditional) for _, _, method in found)
    rows = []
    for name, label, method in found:
        shares = [*method.conditional, *[None] * (size - len(method.conditional))]
        rows.append([name, label, *map(share_or_dash, shares), share_or_dash(method.ece)])
    table = markdown_table(["Suite", "method", *map(str, range(1, size + 1)), "ECE"], rows)
    return [f"Accepted at each position, given all earlier ones:\n\n{table}"]


def context_table(
    result: SamplingResult, labels: Mapping[str, str]
) -> tuple[str, list[str], list[list[Cell]]] | None:
    """τ by the position of the anchor: caption, header and rows; None where it was not asked for."""
    if not result.contexts:
        return None
    keys = [key for key in labels if key in result.contexts[0].tau]
    rows: list[list[Cell]] = []
    for found in result.contexts:
        end = "on" if found.last is None else f"to {found.last:,}"
        cells = [[_estimate(found.tau[key], fixed), f"{found.rounds[key]:,}"] for key in keys]
        rows.append([f"{found.first:,} {end}", *(cell for pair in cells for cell in pair)])
    header = ["Anchor at", *(name for key in keys for name in (f"{labels[key]} τ", "rounds"))]
    return f"Accepted length τ by position of the anchor, {mode_name(result.temperature)}", header, rows


def conditions(evaluation: EvaluationResult) -> str:
    """Say how an evaluation was made and where that differs from the paper's Table 1; empty for old ones."""
    if "protocol" not in evaluation.settings:
        return ""
    different = paper.deviations(evaluation.settings)
    made = (
        "Suites of the hub have the reference implementation's wording, files their own; a domain is the mean of its "
        "suites. "
    )
    if not different:
        return f"{made}As in the paper's Table 1."
    return f"{made}Not as in the paper's Table 1: {'; '.join(different)}."


def paper_table(evaluation: EvaluationResult) -> tuple[str, list[str], list[list[Cell]]] | None:
    """Our τ at temperature 1 beside the paper's: caption, header and rows; None where neither is there."""
    result = next((one for one in evaluation.results if one.temperature == paper.TEMPERATURE), None)
    if result is None or "target" not in evaluation.settings:
        return None
    suites = [name for name in result.suites if name in paper.SUITES]
    if not suites:
        return None
    target = evaluation.settings["target"]
    row = paper.row_of(target) or "Qwen3-4B"
    own = [method["key"] for method in evaluation.methods if method["kind"] == "draft"]
    drafters = paper.ACCEPTED_LENGTH[row]
    rows: list[list[Cell]] = []
    for name in suites:
        ours: list[Cell] = [_estimate(result.suites[name].methods[key].tau, fixed) for key in own]
        rows.append(
            [name, *ours, *(fixed(paper.accepted_length(row, drafter, name)) for drafter in drafters)]
        )
    note = "" if paper.row_of(target) else f" ({target} is not among its targets)"
    header = ["Suite", *(evaluation.labels[key] for key in own), *(f"paper's {d}, {row}" for d in drafters)]
    return f"Accepted length τ at temperature 1, beside the paper's Table 1{note}", header, rows


def evaluation_markdown(evaluation: EvaluationResult) -> str:
    """Write τ, speedup, acceptance by position and calibration error of every suite and method as Markdown.

    The paired differences between methods follow.
    """
    labels = {key: label for key, label in evaluation.labels.items() if key != PLAIN}
    parts = [conditions(evaluation)] if conditions(evaluation) else []
    for result in evaluation.results:
        header = ["Suite"]
        for label in labels.values():
            header += [f"{label} τ", "speedup"]
        groups = [(name, suite.methods) for name, suite in result.suites.items()]
        groups += [(f"{name} (domain)", group.methods) for name, group in result.domains.items()]
        groups.append(("macro average", result.macro))
        rows = []
        for name, methods in groups:
            row = [name]
            for key in labels:
                row += [_estimate(methods[key].tau, fixed), _estimate(methods[key].speedup, factor)]
            rows.append(row)
        parts.append(f"**{mode_name(result.temperature)}**\n\n{markdown_table(header, rows)}")
        parts += _acceptance(labels, groups)
        if (table := context_table(result, labels)) is not None:
            parts.append(f"{table[0]}:\n\n{markdown_table(*table[1:])}")
        for difference in result.differences:
            pair = f"{labels[difference.first]} − {labels[difference.second]}"
            parts.append(
                f"{pair}: τ {_estimate(difference.macro, signed)}, {100 * difference.relative:+.1f} %"
            )
    if (table := paper_table(evaluation)) is not None:
        parts.append(f"**{table[0]}**\n\n{markdown_table(*table[1:])}")
    for suite, indices in evaluation.settings.get("too_long", {}).items():
        those = "1 prompt was" if len(indices) == 1 else f"{len(indices)} prompts were"
        parts.append(f"{suite}: {those} longer than the target's context and left out.")
    return "\n\n".join(parts) + "\n"
