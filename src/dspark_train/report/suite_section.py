"""Chapters about benchmark suites, from the tables that ``evaluate`` writes (layout: :mod:`.evaluate`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dspark_train.errors import UserError
from dspark_train.report import figures
from dspark_train.report.drawing import Bar
from dspark_train.report.page import Figure, Section, Table
from dspark_train.report.text import factor, fixed, share_or_dash, signed


def suites_section(name: str, summary: dict[str, Any]) -> Section | None:
    """Accepted length and speedup by suite and method, with intervals; None for a table without results."""
    if not summary.get("results"):
        return None
    try:
        return _section(name, summary)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"evaluation/{name}.json is not laid out as this version writes it ({error!r}); make it again"
        ) from error


def _section(name: str, summary: dict[str, Any]) -> Section:
    labels = {method["key"]: method["label"] for method in summary["methods"]}
    tables: list[Table] = []
    lengths: list[Figure] = []
    positions: list[Figure] = []
    for result in summary["results"]:
        mode = "greedy" if result["temperature"] == 0 else f"temperature {result['temperature']:g}"
        drafted = [key for key in labels if key in result["macro"] and key != "plain"]
        tables.append(_tau_table(result, labels, drafted, mode))
        speed = [key for key in drafted if result["macro"][key].get("speedup")]
        if speed:
            tables.append(_speed_table(result, labels, speed, mode))
        if any(result["macro"][key].get("ece") is not None for key in drafted):
            tables.append(_calibration_table(result, labels, drafted, mode))
        if result.get("differences"):
            tables.append(_difference_table(result, labels, mode))
        lengths.append(_macro_figure(result, labels, drafted, mode))
        positions.append(_position_figure(result, labels, drafted, mode))
    count = sum(suite["prompts"] for suite in summary["results"][0]["suites"].values())
    lead = (
        f"{count} prompts; every method decodes the same ones. "
        f"Intervals are {100 * summary['settings']['confidence']:g} % bootstrap intervals over prompts."
    )
    key = "suites" if name == "suites" else f"suites-{name}"
    title = "Benchmark suites" if name == "suites" else f"Benchmark suites: {name}"
    return Section(
        key,
        title,
        lead,
        "Suites" if name == "suites" else name,
        [*lengths, *positions],
        tables,
        source=f"evaluation/{name}.json",
    )


def estimate(value: dict[str, Any] | None, text: Callable[[float], str] = fixed) -> str | tuple[str, str]:
    """Return an estimate and its interval as a table shows them: 2.31, (2.20 to 2.42)."""
    if not value or value["value"] is None:
        return "–"
    if value.get("low") is None:
        return text(value["value"])
    return text(value["value"]), f"{fixed(value['low'])} to {fixed(value['high'])}"


def _rows(
    result: dict[str, Any], keys: list[str], name: str, text: Callable[[float], str]
) -> list[list[Any]]:
    rows = [
        [suite, entry["domain"], *(estimate(entry["methods"].get(key, {}).get(name), text) for key in keys)]
        for suite, entry in result["suites"].items()
    ]
    rows += [
        [f"all {domain}", "", *(estimate(entry["methods"].get(key, {}).get(name), text) for key in keys)]
        for domain, entry in (result.get("domains") or {}).items()
        if sum(suite["domain"] in (domain, "mixed") for suite in result["suites"].values()) > 1
    ]
    if len(result["suites"]) > 1:
        rows.append(["macro average", "", *(estimate(result["macro"][key].get(name), text) for key in keys)])
    return rows


def _tau_table(result: dict[str, Any], labels: dict[str, str], keys: list[str], mode: str) -> Table:
    header = ["Suite", "Domain", *(labels[key] for key in keys)]
    return Table(f"Accepted length τ, {mode}", header, _rows(result, keys, "tau", fixed), text_columns=(1,))


def _speed_table(result: dict[str, Any], labels: dict[str, str], keys: list[str], mode: str) -> Table:
    header = ["Suite", "Domain", *(labels[key] for key in keys)]
    rows = _rows(result, keys, "speedup", factor)
    return Table(f"Speedup over plain decoding, {mode}", header, rows, text_columns=(1,))


def _calibration_table(result: dict[str, Any], labels: dict[str, str], keys: list[str], mode: str) -> Table:
    shown = [key for key in keys if result["macro"][key].get("ece") is not None]
    rows = [
        [suite, entry["domain"], *(share_or_dash(entry["methods"].get(key, {}).get("ece")) for key in shown)]
        for suite, entry in result["suites"].items()
    ]
    if len(rows) > 1:
        rows.append(["macro average", "", *(share_or_dash(result["macro"][key]["ece"]) for key in shown)])
    header = ["Suite", "Domain", *(labels[key] for key in shown)]
    return Table(f"Calibration error of the confidences (ECE), {mode}", header, rows, text_columns=(1,))


def _difference_table(result: dict[str, Any], labels: dict[str, str], mode: str) -> Table:
    rows = [
        [
            f"{labels[d['first']]} − {labels[d['second']]}",
            estimate(d["macro"], signed),
            f"{100 * d['relative']:+.1f} %",
        ]
        for d in result["differences"]
    ]
    return Table(
        f"Paired differences of τ, macro average, {mode}", ["Methods", "Difference", "Relative"], rows
    )


def _macro_figure(result: dict[str, Any], labels: dict[str, str], keys: list[str], mode: str) -> Figure:
    bars = []
    for colour, key in enumerate(keys):
        tau = result["macro"][key]["tau"]
        bars.append(Bar(labels[key], tau["value"], colour, tau["low"], tau["high"]))
    title = f"Accepted length τ, macro average, {mode}"
    return Figure(figures.lengths(title, bars), "Plain decoding is 1 by definition.")


def _position_figure(result: dict[str, Any], labels: dict[str, str], keys: list[str], mode: str) -> Figure:
    shares = {labels[key]: result["macro"][key]["conditional"] for key in keys}
    longest = max(map(len, shares.values()))
    title = f"Acceptance by position, given all earlier ones, {mode}"
    groups = [(suite, entry["methods"]) for suite, entry in result["suites"].items()]
    if len(groups) > 1:
        groups.append(("macro average", result["macro"]))
    rows = []
    for key in keys:
        for group, cells in groups:
            known = [share_or_dash(value) for value in cells.get(key, {}).get("conditional", [])]
            rows.append([labels[key], group, *known, *["–"] * (longest - len(known))])
    header = ["", "Suite", *map(str, range(1, longest + 1))]
    table = Table(title, header, rows, folded=True, text_columns=(1,))
    return Figure(figures.suite_positions(title, shares), "Averaged over suites.", table)
