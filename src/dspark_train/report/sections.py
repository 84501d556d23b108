"""Chapters of a run's report. Each function returns a section, or None where the run has no data for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from dspark_train.report.charts import (
    Axis,
    Bar,
    Series,
    bar_chart,
    by_position,
    line_chart,
    percent,
    plain_number,
)
from dspark_train.report.page import Example, Figure, Legend, Section, Table, Token
from dspark_train.report.run_folder import Curve
from dspark_train.report.text import factor, fixed, maybe, share, share_or_dash
from dspark_train.report.views import AcceptanceView, ModeView

MAX_POINTS = 240
"""Points of a learning curve that the page keeps; more are averaged in groups."""


def thin(curve: Curve, limit: int = MAX_POINTS) -> Curve:
    """Average neighbouring points so that at most ``limit`` are left."""
    if len(curve) <= limit:
        return curve
    groups = [curve[len(curve) * i // limit : len(curve) * (i + 1) // limit] for i in range(limit)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def smooth(curve: Curve) -> Curve:
    """Return a running mean over about a twentieth of the curve, centred, for the eye."""
    reach = len(curve) // 40
    if reach < 1:
        return curve
    smoothed = []
    for i, (x, _) in enumerate(curve):
        window = curve[max(0, i - reach) : i + reach + 1]
        smoothed.append((x, sum(y for _, y in window) / len(window)))
    return smoothed


def _training_lines(curve: Curve, label: str, colour: int) -> list[Series]:
    """Draw a curve of training: where it is noisy, its points faint and their running mean on top."""
    points = thin(curve)
    mean = smooth(points)
    reach = max(y for _, y in points) - min(y for _, y in points)
    bends = zip(points, points[1:], points[2:], strict=False)
    noise = sum(abs(2 * b[1] - a[1] - c[1]) for a, b, c in bends) / len(points)
    if noise < reach / 200:
        return [Series(label, points, colour)]
    return [Series("", points, colour, faint=True), Series(label, mean, colour)]


def _curve_figure(
    title: str,
    parts: Sequence[tuple[str, Curve, int, bool]],
    label: str,
    description: str,
    text: Callable = plain_number,
) -> Figure | None:
    """Draw learning curves from (label, curve, colour, is validation); None without any curve."""
    series: list[Series] = []
    for name, curve, colour, validation in parts:
        if len(curve) < 2 and not (validation and curve):
            continue
        if validation:
            series.append(Series(name, thin(curve), colour, dashed=True, markers=len(curve) <= 40))
        else:
            series += _training_lines(curve, name, colour)
    if not series:
        return None
    drawing = line_chart(title, description, series, Axis("Optimiser step"), Axis(label, text=text))
    return Figure(title, drawing, Legend.of(series))


def learning(curves: dict[str, Curve]) -> Section | None:
    """Learning curves: loss terms, accepted length, acceptance per position, speed."""
    get = curves.get
    tau_parts = [
        ("expected, training", get("train/tau", []), 0, False),
        ("expected, validation", get("val/tau", []), 1, True),
        ("by decoding", get("decode/tau", []), 2, True),
    ]
    loss_parts = [
        ("training", get("train/loss", []), 0, False),
        ("validation", get("val/loss", []), 1, True),
    ]
    term_parts = [
        ("cross-entropy", get("val/ce") or get("train/ce", []), 0, bool(get("val/ce"))),
        ("total variation", get("val/tv") or get("train/tv", []), 1, bool(get("val/tv"))),
        ("confidence", get("val/confidence") or get("train/confidence", []), 2, bool(get("val/confidence"))),
    ]
    where = "validation" if get("val/ce") else "training"
    rate = get("lr") or next((c for name, c in sorted(curves.items()) if name.startswith("lr")), [])
    figures = [
        _curve_figure("Accepted length τ", tau_parts, "tokens per round", "Accepted length against steps"),
        _curve_figure("Loss", loss_parts, "loss", "Training and validation loss against steps"),
        _curve_figure(
            f"Terms of the loss, {where}", term_parts, "value", "Each term of the loss against steps"
        ),
        _position_curves(curves),
        _curve_figure(
            "Measured speedup while training",
            [("", get("decode/speedup", []), 2, True)],
            "times plain decoding",
            "Speedup against steps",
        ),
        _curve_figure(
            "Learning rate", [("", rate, 5, False)], "learning rate", "Learning rate against steps"
        ),
        _curve_figure(
            "Gradient norm",
            [("", get("grad_norm", []), 5, False)],
            "norm before clipping",
            "Gradient norm against steps",
        ),
        _curve_figure(
            "Training speed",
            [("", get("tokens_per_second", []), 5, False)],
            "tokens per second",
            "Tokens per second",
        ),
        _curve_figure(
            "Calibration error by decoding, raw confidences",
            [("", get("decode/ece", []), 2, True)],
            "ECE",
            "Calibration error against steps",
            share,
        ),
        _time_figure(curves),
    ]
    kept = [figure for figure in figures if figure is not None]
    if not kept:
        return None
    lead = "Dashed lines are measured on held-out conversations. τ counts the target's own token."
    return Section("learning", "Learning curves", lead, "Learning", kept, source="metrics.csv")


def _time_figure(curves: dict[str, Curve]) -> Figure | None:
    """Draw what share of a training step each part takes, averaged over the run."""
    means = {
        name.removeprefix("time/"): sum(y for _, y in curve) / len(curve)
        for name, curve in curves.items()
        if name.startswith("time/") and curve
    }
    if not means:
        return None
    title = "Where a training step's time goes"
    bars = [Bar(name, value, 5) for name, value in means.items()]
    return Figure(
        title, bar_chart(title, "One bar a part", bars, text=share), caption="Averaged over the run."
    )


def _position_curves(curves: dict[str, Curve]) -> Figure | None:
    prefix = "val/accept_" if any(name.startswith("val/accept_") for name in curves) else "train/accept_"
    found = sorted(
        (int(n.removeprefix(prefix)), c) for n, c in curves.items() if n.removeprefix(prefix).isdigit()
    )
    found = [(position, curve) for position, curve in found if len(curve) >= 2]
    if not found:
        return None
    steps = max(1, len(found) - 1)
    series = [
        Series(f"{position}", smooth(thin(curve)), shade=1 - index / steps)
        for index, (position, curve) in enumerate(found)
    ]
    where = "validation" if prefix.startswith("val") else "training"
    title = f"Expected acceptance by draft position, {where}"
    drawing = line_chart(title, "One line a position", series, Axis("Optimiser step"), Axis("", text=percent))
    return Figure(title, drawing, Legend.of(series))


def acceptance(modes: Sequence[ModeView], groups: Sequence[AcceptanceView] = ()) -> Section | None:
    """Acceptance per draft position, conditional and cumulative, by domain, and τ by domain."""
    by_domain = _domain_figure(groups)
    shown = [mode for mode in modes if mode.conditional]
    if not shown and by_domain is None:
        return None
    figures, tables = _mode_figures(shown) if shown else [], []
    if by_domain is not None:
        figures.append(by_domain)
    domains = sorted({domain for mode in modes for domain in mode.domain_tau})
    if domains:
        rows = [[d, *(fixed(m.domain_tau[d]) if d in m.domain_tau else "–" for m in modes)] for d in domains]
        tables.append(Table("Accepted length τ by domain", ["Domain", *(mode.name for mode in modes)], rows))
    lead = "How often the target keeps a draft token, by its place in the block, decoding held-out prompts."
    files = [name for name, used in (("decode.json", shown), ("studies/acceptance.json", by_domain)) if used]
    source = " and ".join(files)
    return Section("acceptance", "Acceptance by position", lead, "Acceptance", figures, tables, source=source)


def _domain_figure(groups: Sequence[AcceptanceView]) -> Figure | None:
    shown = [group for group in groups if group.group != "all"] or list(groups)
    if not shown:
        return None
    series = [
        Series(
            group.group,
            by_position(group.conditional, 0.1 * (colour - (len(shown) - 1) / 2)),
            colour,
            markers=True,
            errors=[
                (low if low is not None else math.nan, high if high is not None else math.nan)
                for low, high in zip(group.low, group.high, strict=True)
            ],
        )
        for colour, group in enumerate(shown)
    ]
    title = "Given that all earlier ones were accepted, by domain"
    size = len(shown[0].conditional)
    drawing = line_chart(title, "One line a domain", series, position_axis(size), share_axis())
    rows = [[g.group, f"{g.rounds:,}", *map(share_or_dash, g.conditional)] for g in shown]
    table = Table(title, ["", "Rounds", *map(str, range(1, size + 1))], rows, folded=True)
    return Figure(title, drawing, Legend.of(series), "Whiskers are 95 % intervals.", table)


def position_axis(size: int) -> Axis:
    """Return the axis of draft positions 1..γ."""
    return Axis(
        "Draft position", low=0.5, high=size + 0.5, ticks=tuple(range(1, size + 1)), text=lambda x: f"{x:.0f}"
    )


def share_axis() -> Axis:
    """Return a vertical axis from 0 to 100 %."""
    return Axis("", low=0.0, high=1.0, ticks=(0, 0.25, 0.5, 0.75, 1.0), text=percent)


def _mode_figures(shown: Sequence[ModeView]) -> list[Figure]:
    size = max(len(mode.conditional) for mode in shown)

    def lines(name: str) -> list[Series]:
        return [
            Series(mode.name, by_position(getattr(mode, name)), colour, markers=True)
            for colour, mode in enumerate(shown)
        ]

    def table(name: str, caption: str) -> Table:
        rows = [[mode.name, *map(share_or_dash, getattr(mode, name))] for mode in shown]
        return Table(caption, ["", *map(str, range(1, size + 1))], rows, folded=True)

    figures = []
    for name, title, caption in (
        (
            "conditional",
            "Given that all earlier ones were accepted",
            "A flat line: later tokens are as good as early ones.",
        ),
        ("cumulative", "Together with all earlier ones", "The share of rounds that get at least this far."),
    ):
        if not all(getattr(mode, name) for mode in shown):
            continue
        series = lines(name)
        drawing = line_chart(
            f"Acceptance, {title.lower()}", caption, series, position_axis(size), share_axis()
        )
        figures.append(
            Figure(title, drawing, Legend.of(series), caption, table(name, f"Acceptance, {title.lower()}"))
        )
    return figures


PARTS = {
    "draft": "draft, parallel pass",
    "head": "sequential head",
    "schedule": "schedule",
    "verify": "target, verification",
    "target_head": "target, LM head",
    "sampling": "sampling",
    "bookkeeping": "everything else",
}
"""Parts of a round's time, in the order of the chart."""


def speed(modes: Sequence[ModeView], batch_size: int | None = None) -> Section | None:
    """Plain against speculative decoding: tokens per second, and where the time of a round goes."""
    shown = [mode for mode in modes if mode.rate is not None and mode.plain_rate is not None]
    if not shown:
        return None
    figures = []
    for mode in shown:
        bars = [Bar(label, mode.parts[part]) for part, label in PARTS.items() if mode.parts.get(part)]
        if bars:
            if mode.step_milliseconds is not None:
                bars.append(Bar("plain step, whole", mode.step_milliseconds, 5))
            title = f"Milliseconds of a round by part, {mode.name.lower()}"
            drawing = bar_chart(title, "One bar a part", bars, text=lambda value: fixed(value, 2))
            figures.append(
                Figure(title, drawing, caption="Grey: a step of plain decoding, which gives one token.")
            )
    columns: list[tuple[str, Callable[[ModeView], str]]] = [
        ("Plain tokens/s", lambda m: maybe(m.plain_rate, lambda v: fixed(v, 1))),
        ("Speculative tokens/s", lambda m: maybe(m.rate, lambda v: fixed(v, 1))),
        ("Speedup", lambda m: maybe(m.speedup, factor)),
        ("τ", lambda m: fixed(m.tau)),
        ("Rows per round", lambda m: maybe(m.rows_per_round, lambda v: fixed(v, 1))),
        ("Plain ms/step", lambda m: maybe(m.step_milliseconds, lambda v: fixed(v, 1))),
        ("Speculative ms/round", lambda m: maybe(m.round_milliseconds, lambda v: fixed(v, 1))),
    ]
    filled = [(title, [write_cell(mode) for mode in shown]) for title, write_cell in columns]
    kept = [(title, cells) for title, cells in filled if any(cell != "–" for cell in cells)]
    rows = [[mode.name, *(cells[i] for _, cells in kept)] for i, mode in enumerate(shown)]
    table = Table("Plain against speculative decoding", ["", *(title for title, _ in kept)], rows)
    lead = "The same prompts, decoded in turns by the same decoder with and without the draft"
    if batch_size:
        lead += ", one at a time" if batch_size == 1 else f", {batch_size} at once"
    lead += f"; verification policy: {shown[0].policy}." if shown[0].policy else "."
    return Section("speed", "Speed", lead, "", figures, [table], source="decode.json")


def examples(found: Sequence[dict[str, Any]], limit: int = 6) -> Section | None:
    """Generations with every token coloured by who wrote it; one domain after the other."""
    by_domain: dict[str, list[dict[str, Any]]] = {}
    for item in found:
        if item.get("tokens") and len(item["tokens"]) == len(item.get("origin", [])):
            by_domain.setdefault(str(item.get("domain", "")), []).append(item)
    shown: list[dict[str, Any]] = []
    while len(shown) < limit and any(by_domain.values()):
        for items in by_domain.values():
            if items and len(shown) < limit:
                shown.append(items.pop(0))
    if not shown:
        return None
    made = []
    for item in shown:
        tokens = [
            Token(str(text), str(origin)) for text, origin in zip(item["tokens"], item["origin"], strict=True)
        ]
        drafted = sum(token.origin == "draft" for token in tokens)
        note = f"{drafted} of {len(tokens)} tokens from the draft"
        made.append(Example(str(item.get("prompt", "")), str(item.get("domain", "")), tokens, note))
    lead = "The target checked every token; those on blue the draft had guessed right, several at a time."
    return Section("examples", "Example generations", lead, "Examples", examples=made, source="decode.json")


def recipe(
    settings: Sequence[tuple[str, str]], config_text: str, source: str = "config.yaml and run.json"
) -> Section | None:
    """The recipe: its main settings, and the whole configuration to unfold."""
    if not settings and not config_text:
        return None
    return Section(
        "recipe",
        "Recipe",
        settings=settings,
        listing=config_text,
        listing_title="The whole configuration",
        source=source,
    )
