"""The report of a run: one HTML page in which every number comes from a file of that run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dspark_train.decoding.measure import ModeResult
from dspark_train.files import read_result
from dspark_train.machine import Choice
from dspark_train.report import results, sections, study_sections, text
from dspark_train.report.page import Fact, Page, Section, write
from dspark_train.report.suite_section import suites_section
from dspark_train.run import Run
from dspark_train.studies.online_threshold import ThresholdDriftStudy
from dspark_train.studies.reliability import CalibrationReport
from dspark_train.studies.rounds import AcceptanceStudy, DriftStudy, ThresholdStudy
from dspark_train.studies.simulate import LoadStudy

_Format = Callable[[Any], str]


def run_page(run: Run) -> Page:
    """Build the page of one run; sections whose files are missing are left out."""
    decoded, calibrations = results.decoded(run), results.calibrations(run)
    modes = list(decoded.modes.values())
    found: list[Section | None] = [
        sections.learning(
            run.metrics,
            sections.decoded_validation(run.config),
            results.facts(run).get("data", {}).get("answers"),
        ),
        sections.acceptance(decoded, read_result(run.study_path("acceptance"), AcceptanceStudy)),
        sections.speed(decoded),
        *(suites_section(name, value) for name, value in results.evaluations(run).items()),
        study_sections.reliability(calibrations),
        study_sections.thresholds(read_result(run.study_path("threshold_sweep"), ThresholdStudy)),
        study_sections.drift(read_result(run.study_path("online"), DriftStudy)),
        study_sections.threshold_drift(read_result(run.study_path("online_threshold"), ThresholdDriftStudy)),
        study_sections.load(read_result(run.study_path("simulate"), LoadStudy)),
        sections.examples(decoded.examples),
        sections.recipe(settings(run), results.config_text(run)),
    ]
    return Page(
        title=run.name,
        kicker=_kicker(run),
        summary=summary(modes, calibrations),
        facts=facts(run, modes, calibrations),
        sections=[section for section in found if section is not None],
        footer=_footer(run),
    )


def write_report(path: Path, output: Path | None = None) -> Path:
    """Write ``report.html`` of the run folder ``path`` (or to ``output``) and return where it lies."""
    return write(run_page(Run.existing(path)), output or path / "report.html")


def summary(modes: Sequence[ModeResult], calibrations: Sequence[CalibrationReport]) -> str:
    """Say in two or three sentences what the run achieved."""
    parts = []
    greedy = next((mode for mode in modes if mode.temperature == 0), None)
    if greedy is not None:
        sentence = (
            f"With this draft the target commits {text.fixed(greedy.tau)} tokens per step in greedy decoding"
        )
        if greedy.speedup is not None:
            sentence += f" and answers {text.factor(greedy.speedup.value)} as fast as it does alone"
        parts.append(sentence + ".")
        if greedy.identical is not None and greedy.prompts:
            same = greedy.identical.prompts == greedy.prompts
            count = f"all {greedy.prompts}" if same else f"{greedy.identical.prompts} of {greedy.prompts}"
            rounding = not same and greedy.identical.failures == 0
            rest = "; the rest differs within rounding" if rounding else ""
            parts.append(f"Its output is token for token the target's own on {count} prompts{rest}.")
    if (errors := _mean_errors(calibrations)) is not None:
        before, after = map(text.share, errors)
        alone = calibrations[0].mean_ece_sts
        scaled = "" if alone is None else f", {text.share(alone)} with temperatures alone"
        parts.append(
            f"Its confidences are off by {after} on average after calibration ({before} as trained{scaled})."
        )
    return " ".join(parts)


def facts(run: Run, modes: Sequence[ModeResult], calibrations: Sequence[CalibrationReport]) -> list[Fact]:
    """The figures on top of the page."""
    found: list[Fact] = []
    for mode in modes:
        note = "tokens per target step" + (f", {mode.prompts} prompts" if mode.prompts else "")
        name = text.mode_name(mode.temperature).lower()
        found.append(Fact(f"Accepted length τ, {name}", text.fixed(mode.tau), note))
    for mode in modes:
        if mode.speedup is not None:
            name = text.mode_name(mode.temperature).lower()
            found.append(Fact(f"Speedup, {name}", text.factor(mode.speedup.value), _speed_note(mode)))
    greedy = next((mode for mode in modes if mode.temperature == 0), None)
    if greedy is not None and greedy.identical is not None and greedy.prompts:
        same = greedy.identical.prompts == greedy.prompts
        rounding = not same and greedy.identical.failures == 0
        note = "the rest differs within rounding" if rounding else "greedy output equals plain decoding"
        count = f"{greedy.identical.prompts} of {greedy.prompts}"
        found.append(Fact("Identical output", count, note, good=same or rounding))
    if (errors := _mean_errors(calibrations)) is not None:
        note = f"from {text.share(errors[0])} as trained"
        found.append(Fact("Calibration error (ECE)", text.share(errors[1]), note))
    if run.fit_seconds is not None:
        found.append(Fact("Training time", text.duration(run.fit_seconds), _steps_note(run)))
    memory = max((value for _, value in run.metrics.get("memory_gib", [])), default=None)
    if memory is not None:
        found.append(Fact("Peak memory", text.size(memory * 2**30), "while training"))
    return found


def _mean_errors(calibrations: Sequence[CalibrationReport]) -> tuple[float, float] | None:
    """Mean ECE before and after, at the first sampling temperature; None where either is unknown."""
    first = calibrations[0] if calibrations else None
    if first is None or first.mean_ece_before is None or first.mean_ece_after is None:
        return None
    return first.mean_ece_before, first.mean_ece_after


def _speed_note(mode: ModeResult) -> str:
    parts = []
    if mode.plain is not None and mode.speculative is not None:
        rates = mode.plain.tokens_per_second, mode.speculative.tokens_per_second
        parts.append(f"{rates[0]:.1f} → {rates[1]:.1f} tokens/s")
    speedup = mode.speedup
    if speedup is not None and speedup.low is not None and speedup.high is not None:
        parts.append(f"{text.interval(speedup.low, speedup.high)} {speedup.spread}".rstrip())
    return "; ".join(parts)


def _steps_note(run: Run) -> str:
    last = max(
        (curve[-1][0] for name, curve in run.metrics.items() if name.startswith("train/") and curve),
        default=None,
    )
    if not last:
        return ""
    made = f"{last + 1:,.0f} steps"  # counted from 0 there
    steps = results.facts(run).get("steps", {})
    if steps.get("minutes") and steps["made"] < steps["recipe"]:
        made += f" of the recipe's {steps['recipe']:,}: {steps['minutes']:g} minutes allow no more on this machine"
    return made


def _kicker(run: Run) -> str:
    target = results.config(run).get("target", {}).get("name_or_path")
    return f"DSpark draft for {Path(str(target)).name}" if target else "DSpark draft"


def _footer(run: Run) -> str:
    said = results.facts(run)
    versions = said.get("versions", {})
    parts = [f"{name} {version}" for name, version in versions.items() if name in SHOWN_VERSIONS]
    if said.get("commit"):
        parts.append(f"commit {said['commit']}")
    if said.get("machine"):
        parts.append(str(said["machine"]))
    return " · ".join(parts)


SHOWN_VERSIONS = ("dspark-train", "torch", "transformers", "lightning")

DRAFT_SETTINGS: tuple[tuple[str, str, _Format], ...] = (
    ("Draft layers", "num_hidden_layers", str),
    ("Block size γ", "block_size", str),
    ("Sequential head", "markov_head_type", str),
    ("Markov rank", "markov_rank", str),
    ("Tapped target layers", "target_layer_ids", lambda ids: ", ".join(map(str, ids))),
    ("Draft vocabulary", "draft_vocab_size", lambda count: f"{text.quantity(count)} tokens"),
    ("Confidence head", "enable_confidence_head", lambda on: "yes" if on else "no"),
    ("Stored as", "dtype", str),
)
"""Rows of the recipe from ``draft/config.json``: label, key, how it is written."""

RECIPE_SETTINGS: tuple[tuple[str, str, _Format], ...] = (
    ("Optimiser steps", "trainer.max_steps", lambda count: f"{count:,}"),
    ("Global batch", "data.global_batch_size", lambda count: f"{count:,} sequences"),
    ("Longest sequence", "data.max_length", lambda count: f"{count:,} tokens"),
    ("Anchors per sequence", "data.num_anchors", lambda count: f"up to {count:,}"),
    ("Optimiser", "optimizer.name", str),
    ("Learning rate", "optimizer.lr", lambda rate: f"{rate:g}"),
    ("Precision", "trainer.precision", str),
    ("Seed", "seed_everything", str),
)
"""Rows of the recipe from ``config.yaml``."""


def settings(run: Run) -> list[tuple[str, str]]:
    """The main settings of the recipe; those that no file of the run states are left out."""
    found = [
        (label, write_value(value))
        for label, key, write_value in DRAFT_SETTINGS
        if (value := run.draft_config.get(key)) not in (None, 0)
    ]
    if run.trained_parameters:
        found.append(("Trained parameters", text.quantity(run.trained_parameters)))
    config = results.config(run)
    for label, key, write_value in RECIPE_SETTINGS:
        node: Any = config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node is not None:
            found.append((label, write_value(node)))
    for content in results.facts(run).get("chosen", {}).values():
        label, _, said = str(Choice.from_json(content)).partition(": ")
        found.append((f"Chosen here for {label}", said))
    return found
