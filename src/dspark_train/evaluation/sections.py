"""Chapters of a run's report. Each function returns a section, or None where the run has no data for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dspark_train.evaluation.charts import (
    Axis,
    Series,
    by_position,
    line_chart,
    percent,
    plain_number,
    reliability_chart,
)
from dspark_train.evaluation.page import Example, Figure, Legend, Section, Table, Token
from dspark_train.evaluation.run_folder import Curve
from dspark_train.evaluation.text import fixed, maybe, mode_name, quantity, share, share_or_dash
from dspark_train.evaluation.views import CalibrationView, LoadView, ModeView, SweepView

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
    ]
    kept = [figure for figure in figures if figure is not None]
    if not kept:
        return None
    lead = "Dashed lines are measured on held-out conversations. τ counts the target's own token."
    return Section("learning", "Learning curves", lead, "Learning", kept, source="metrics.csv")


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


def acceptance(modes: Sequence[ModeView]) -> Section | None:
    """Acceptance per draft position, conditional and cumulative, and τ by domain."""
    shown = [mode for mode in modes if mode.conditional]
    if not shown:
        return None
    size = max(len(mode.conditional) for mode in shown)
    axis = Axis("Draft position", low=0.5, high=size + 0.5, ticks=tuple(range(1, size + 1)))

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
        y_axis = Axis("", low=0.0, high=1.0, ticks=(0, 0.25, 0.5, 0.75, 1.0), text=percent)
        drawing = line_chart(f"Acceptance, {title.lower()}", caption, series, axis, y_axis)
        figures.append(
            Figure(title, drawing, Legend.of(series), caption, table(name, f"Acceptance, {title.lower()}"))
        )
    tables = []
    domains = sorted({domain for mode in modes for domain in mode.domain_tau})
    if domains:
        rows = [[d, *(fixed(m.domain_tau[d]) if d in m.domain_tau else "–" for m in modes)] for d in domains]
        tables.append(Table("Accepted length τ by domain", ["Domain", *(mode.name for mode in modes)], rows))
    lead = "How often the target keeps a draft token, by its place in the block, decoding held-out prompts."
    return Section(
        "acceptance", "Acceptance by position", lead, "Acceptance", figures, tables, source="decode.json"
    )


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
                list(zip(sweep.thresholds, getattr(sweep, name), strict=True)),
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
        text = share if name == "acceptance_rate" else fixed
        grid = sorted({x for line in series for x, _ in line.points})
        step = max(1, len(grid) // 12)
        rows = [
            [f"{x:g}", *(text(dict(line.points)[x]) if x in dict(line.points) else "–" for line in series)]
            for x in grid[::step]
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
            title, f"Calibration error before and after scaling: {error}", before, after
        )
        figures.append(Figure(title, drawing, caption=f"ECE {error}", small=True))
    lead = (
        f"Predicted against observed survival of the prefix over {quantity(view.rounds)} held-out rounds "
        f"({mode_name(view.temperature).lower()}): grey as the draft says it, blue after one temperature per "
        "position. On the dotted line a confidence means what it says."
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
