"""The table of an evaluation as Markdown, for a README or a model card, and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_train.evaluation.text import factor, fixed, mode_name, signed


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" + "---:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _estimate(value: dict[str, Any] | None, text: Any) -> str:
    if not value or value["value"] is None:
        return "–"
    half = "" if value["low"] is None else f" ({fixed(value['low'])}–{fixed(value['high'])})"
    return f"{text(value['value'])}{half}"


def evaluation_markdown(table: dict[str, Any]) -> str:
    """Write τ and speedup of every suite and method, and the paired differences, as Markdown."""
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
        labels = {method["key"]: method["label"] for method in methods}
        for difference in result["differences"]:
            pair = f"{labels[difference['first']]} − {labels[difference['second']]}"
            parts.append(
                f"{pair}: τ {_estimate(difference['macro'], signed)}, {100 * difference['relative']:+.1f} %"
            )
    for suite, indices in table.get("settings", {}).get("too_long", {}).items():
        parts.append(
            f"{suite}: {len(indices)} prompts were longer than the target's context and were left out."
        )
    return "\n\n".join(parts) + "\n"
