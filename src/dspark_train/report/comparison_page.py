"""One page that compares runs: results in a table, curves in one chart, and the settings that differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dspark_train.decoding.measure import ModeResult
from dspark_train.errors import UserError
from dspark_train.report import figures, learning_figures, results, text
from dspark_train.report.page import Figure, Page, Section, Table, write
from dspark_train.report.pictures import Bar
from dspark_train.run import Run

IGNORED = ("run", "name", "default_root_dir", "save_dir", "dirpath", "output")
"""Last parts of settings that differ between any two runs and say nothing about the recipe."""


def comparison_page(runs: Sequence[Run], extra: Sequence[Section] = (), title: str = "") -> Page:
    """Build the page that compares runs.

    Args:
        runs: At least two.
        extra: Sections to put behind the overview (an ablation's plots).
        title: Title of the page; left out, the names of the runs.
    """
    if len(runs) < 2:
        raise UserError(f"a comparison needs at least two run folders, got {len(runs)}")
    names = labels(runs)
    modes = {name: results.decoded_modes(run) for name, run in zip(names, runs, strict=True)}
    candidates = [
        _overview(names, runs, modes),
        *extra,
        _curves(names, runs),
        _acceptance(modes),
        _settings(names, runs),
    ]
    sections = [section for section in candidates if section is not None]
    joined = " · ".join(names) if len(names) <= 4 else f"{len(names)} runs"
    return Page(title or joined, "Comparison of DSpark runs", _summary(modes), sections=sections)


def write_comparison(paths: Sequence[Path], output: Path) -> Path:
    """Write the page that compares the run folders ``paths``."""
    return write(comparison_page([Run.existing(path) for path in paths]), output)


def labels(runs: Sequence[Run]) -> list[str]:
    """Return the shortest names that tell the runs apart: folders, with parents where those repeat."""
    parts = [run.path.resolve().parts for run in runs]
    if len(set(parts)) < len(parts):
        raise UserError("the same run folder was given twice; a comparison needs different ones")
    depth = 1
    while len({p[-depth:] for p in parts}) < len(parts):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def _mode(modes: Sequence[ModeResult], temperature: float) -> ModeResult | None:
    return next((mode for mode in modes if mode.temperature == temperature), None)


def _summary(modes: dict[str, list[ModeResult]]) -> str:
    taus = {name: mode.tau for name, found in modes.items() if (mode := _mode(found, 0.0)) is not None}
    if len(taus) < 2:
        return ""
    best, worst = max(taus, key=taus.__getitem__), min(taus, key=taus.__getitem__)
    return (
        f"{best} accepts most: {text.fixed(taus[best])} tokens per target step in greedy decoding, "
        f"{text.fixed(100 * (taus[best] / taus[worst] - 1), 1)}\u202f% more than {worst}."
    )


def _overview(names: Sequence[str], runs: Sequence[Run], modes: dict[str, list[ModeResult]]) -> Section:
    columns: list[tuple[str, Callable[[str, Run], str | None]]] = [
        ("τ greedy", lambda n, r: _length(_mode(modes[n], 0.0))),
        ("τ temperature 1", lambda n, r: _length(_mode(modes[n], 1.0))),
        ("Speedup greedy", lambda n, r: _speedup(_mode(modes[n], 0.0))),
        ("Speedup temperature 1", lambda n, r: _speedup(_mode(modes[n], 1.0))),
        ("ECE after", lambda n, r: _ece(r)),
        ("Layers", lambda n, r: _setting(r, "num_hidden_layers")),
        ("γ", lambda n, r: _setting(r, "block_size")),
        ("Head", lambda n, r: _setting(r, "markov_head_type")),
        (
            "Taps",
            lambda n, r: (
                str(len(r.draft_config["target_layer_ids"]))
                if r.draft_config.get("target_layer_ids")
                else None
            ),
        ),
        ("Training", lambda n, r: _training_time(r)),
    ]
    filled = [(title, [cell(n, r) for n, r in zip(names, runs, strict=True)]) for title, cell in columns]
    kept = [(title, cells) for title, cells in filled if any(cell is not None for cell in cells)]
    rows = [[name, *(cells[i] or "–" for _, cells in kept)] for i, name in enumerate(names)]
    shown = []
    for temperature in (0.0, 1.0):
        found = [(name, mode) for name in names if (mode := _mode(modes[name], temperature)) is not None]
        bars = [Bar(name, mode.tau, names.index(name)) for name, mode in found]
        shown.append(Figure(figures.lengths(f"Accepted length τ, {figures.sampled(temperature)}", bars)))
    table = Table("Runs", ["Run", *(title for title, _ in kept)], rows)
    return Section(
        "overview", "Overview", "", "", shown, [table], source="decode.json, draft/config.json and run.json"
    )


def _length(mode: ModeResult | None) -> str | None:
    return None if mode is None else text.fixed(mode.tau)


def _speedup(mode: ModeResult | None) -> str | None:
    return None if mode is None or mode.speedup is None else text.factor(mode.speedup.value)


def _ece(run: Run) -> str | None:
    reports = results.calibrations(run)
    error = reports[0].mean_ece_after if reports else None
    return None if error is None else text.share(error)


def _setting(run: Run, name: str) -> str | None:
    return str(run.draft_config[name]) if name in run.draft_config else None


def _taps(run: Run) -> str | None:
    layers = run.draft_config.get("target_layer_ids")
    return str(len(layers)) if layers else None


def _training_time(run: Run) -> str | None:
    return None if run.fit_seconds is None else text.duration(run.fit_seconds)


def _curves(names: Sequence[str], runs: Sequence[Run]) -> Section | None:
    named = {name: run.metrics for name, run in zip(names, runs, strict=True)}
    shown = [Figure(picture) for picture in learning_figures.compared_curves(named) if picture.drawable]
    if not shown:
        return None
    return Section("learning", "Learning curves", "", "Learning", shown, source="metrics.csv")


def _acceptance(modes: dict[str, list[ModeResult]]) -> Section | None:
    shown = []
    for temperature in (0.0, 1.0):
        found = {name: mode for name, all_of in modes.items() if (mode := _mode(all_of, temperature))}
        picture = figures.decoded_acceptance(found, "")[0]
        if len(picture.series) < 2 or not picture.drawable:
            continue
        title = f"{picture.title}, {figures.sampled(temperature)}"
        shown.append(Figure(dataclasses.replace(picture, title=title)))
    if not shown:
        return None
    return Section("acceptance", "Acceptance by position", "", "Acceptance", shown, source="decode.json")


def flatten(config: Any, prefix: str = "") -> dict[str, str]:
    """Return a nested configuration as dotted keys and texts."""
    if isinstance(config, dict):
        flat: dict[str, str] = {}
        for key, value in config.items():
            flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {prefix: str(config)}


def _settings(names: Sequence[str], runs: Sequence[Run]) -> Section | None:
    flat = [flatten(results.config(run)) for run in runs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    rows = [
        [key, *(config.get(key, "–") for config in flat)]
        for key in keys
        if key.rsplit(".", 1)[-1] not in IGNORED and len({config.get(key) for config in flat}) > 1
    ]
    if not rows:
        return None
    columns = tuple(range(1, len(names) + 1))
    table = Table("By run", ["Setting", *names], rows, text_columns=columns)
    return Section("settings", "Settings that differ", "", "Settings", tables=[table], source="config.yaml")
