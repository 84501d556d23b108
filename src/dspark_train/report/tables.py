"""The table of an evaluation as Markdown, for a README or a model card, and for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dspark_train.report.text import factor, fixed, mode_name, share_or_dash, signed

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


def _estimate(value: dict[str, Any] | None, text: Any) -> str:
    if not value or value["value"] is None:
        return "–"
    half = "" if value["low"] is None else f" ({fixed(value['low'])}–{fixed(value['high'])})"
    return f"{text(value['value'])}{half}"


def _acceptance(methods: Sequence[dict[str, Any]], groups: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """One table: acceptance at each position given all earlier ones, and the calibration error."""
    rows = []
    for name, cells in groups:
        for method in methods:
            cell = cells[method["key"]]
            if any(value is not None for value in cell["conditional"]):
                rows.append((name, method["label"], cell["conditional"], cell["ece"]))
    if not rows:
        return []
    size = max(len(row[2]) for row in rows)
    header = ["Suite", "method", *map(str, range(1, size + 1)), "ECE"]
    written = [
        [name, label, *map(share_or_dash, [*shares, *[None] * (size - len(shares))]), share_or_dash(ece)]
        for name, label, shares, ece in rows
    ]
    return [f"Accepted at each position, given all earlier ones:\n\n{markdown_table(header, written)}"]


def evaluation_markdown(table: dict[str, Any]) -> str:
    """Write τ, speedup, acceptance by position and calibration error of every suite and method as Markdown.

    The paired differences between methods follow.
    """
    methods = [method for method in table["methods"] if method["kind"] != "plain"]
    parts = []
    for result in table["results"]:
        header = ["Suite"]
        for method in methods:
            header += [f"{method['label']} τ", "speedup"]
        groups = [(name, entry["methods"]) for name, entry in result["suites"].items()]
        groups += [(f"{name} (domain)", entry["methods"]) for name, entry in result["domains"].items()]
        groups.append(("macro average", result["macro"]))
        rows = []
        for name, cells in groups:
            row = [name]
            for method in methods:
                cell = cells[method["key"]]
                row += [_estimate(cell["tau"], fixed), _estimate(cell["speedup"], factor)]
            rows.append(row)
        parts.append(f"**{mode_name(result['temperature'])}**\n\n{markdown_table(header, rows)}")
        parts += _acceptance(methods, groups)
        labels = {method["key"]: method["label"] for method in methods}
        for difference in result["differences"]:
            pair = f"{labels[difference['first']]} − {labels[difference['second']]}"
            parts.append(
                f"{pair}: τ {_estimate(difference['macro'], signed)}, {100 * difference['relative']:+.1f} %"
            )
    for suite, indices in table.get("settings", {}).get("too_long", {}).items():
        those = "1 prompt was" if len(indices) == 1 else f"{len(indices)} prompts were"
        parts.append(f"{suite}: {those} longer than the target's context and left out.")
    return "\n\n".join(parts) + "\n"
