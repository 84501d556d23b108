"""The model card of an exported draft: only what files in the run back, no section without content."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_train.report import results
from dspark_train.report.suite_section import suites_section
from dspark_train.report.tables import markdown_table
from dspark_train.report.text import factor, maybe, mode_name, split_name
from dspark_train.run import STS_FILE, Run

RECIPE_SECTIONS = ("draft", "objective", "optimizer", "data", "trainer")
"""Sections of ``config.yaml`` that the card shows."""


@dataclass(frozen=True)
class CardFacts:
    """What the card says of an export."""

    folder: Path
    """That was written."""
    target: str
    """Name or path of the target."""
    format: str
    config: dict[str, Any]
    """Of the exported draft, as written."""
    notes: Sequence[str]
    """What was rewritten for the engines."""
    warnings: Sequence[str]
    """Engines that cannot serve it, and why."""
    commands: Sequence[str]
    """How to serve it."""
    equal_drafts: int
    """Draft tokens that reading back gave again."""
    logits_gap: float
    """Largest difference of a logit after reading back."""
    confidence_gap: float | None
    """Largest difference of a confidence logit; None without a confidence head."""
    folding: str = ""
    """What folding one temperature into the confidence head costs, in words; empty where none was folded."""
    license: str | None = None
    """As the hub names it; None says nothing."""


def model_card(run: Run, exported: CardFacts) -> str:
    """Return the text of ``README.md``.

    Args:
        run: that the draft comes from.
        exported: the export.
    """
    parts = [
        _front_matter(run, exported),
        f"# DSpark draft for {exported.target}",
        _introduction(exported),
        _section("Serving", _serving(exported, results.facts(run).get("data", {}).get("template", {}))),
        _section("Measured", _measured(run)),
        _section("Benchmark suites", _suites(run)),
        _section("Confidence calibration", _calibration(run, exported)),
        _section("Recipe", _recipe(run)),
        _section("Data", _data(run)),
        _section("Plots", _plots(exported.folder)),
        _section("Made with", _made_with(run)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _front_matter(run: Run, exported: CardFacts) -> str:
    """What the hub reads: target, licence, tags, and the measured numbers as its ``model-index``."""
    from huggingface_hub import EvalResult, ModelCardData

    measured = [
        EvalResult(
            task_type="text-generation",
            dataset_type="held-out-prompts",
            dataset_name=f"{mode.prompts} held-out prompts" if mode.prompts else "held-out prompts",
            metric_type=kind,
            metric_name=f"{name}, {mode_name(mode.temperature).lower()}",
            metric_value=round(value, 4),
        )
        for mode in results.decoded_modes(run)
        for kind, name, value in (
            ("accepted-length", "accepted length (τ)", mode.tau),
            ("speedup", "speedup over plain decoding", mode.speedup.value if mode.speedup else None),
        )
        if value is not None
    ]
    data = ModelCardData(
        base_model=None if _is_path(exported.target) else exported.target,
        library_name="speculators" if exported.format == "speculators" else "transformers",
        license=exported.license,
        tags=["speculative-decoding", "dspark", "draft-model"],
        model_name=f"DSpark draft for {exported.target}" if measured else None,
        eval_results=measured or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _introduction(exported: CardFacts) -> str:
    config = exported.config
    layers = config.get("transformer_layer_config", config)
    taps = config.get("target_layer_ids") or config.get("dflash_config", {}).get("target_layer_ids")
    if taps is None:
        taps = [tap - 1 for tap in config["aux_hidden_state_layer_ids"]]
    head = config.get("markov_head_type")
    sequential = f"{head} sequential head of rank {config['markov_rank']}" if head else "no sequential head"
    scored = "a confidence head" if config.get("enable_confidence_head") else "no confidence head"
    depth = layers["num_hidden_layers"]
    read = "1 layer that reads" if depth == 1 else f"{depth} layers that read"
    lines = [
        f"Proposes {config['block_size']} tokens a round for lossless speculative decoding of `{exported.target}`: "
        f"{read} the target's layers {', '.join(map(str, taps))} "
        f"(counted from 0), {sequential}, {scored}. "
        f"Layout: {exported.format}; weights: {config['dtype']}.",
        *(f"- {note[:1].upper()}{note[1:]}." for note in exported.notes),
    ]
    confidence = exported.confidence_gap
    lines.append(
        f"\nRead back by an independent reader after writing: {exported.equal_drafts} greedy draft tokens equal, "
        f"logits within {exported.logits_gap:.1e}"
        + (f", confidence logits within {confidence:.1e}." if confidence is not None else ".")
    )
    return "\n".join(lines)


def _serving(exported: CardFacts, template: dict[str, Any]) -> str:
    """Commands, warnings, and the chat-template arguments that the draft was trained with."""
    blocks = [f"```bash\n{command}\n```" for command in exported.commands]
    warnings = [f"- {warning}" for warning in exported.warnings]
    if template:
        text = json.dumps(template)
        warnings.append(
            f"- Trained on prompts rendered with `{text}`: send `chat_template_kwargs: {text}` with requests, or fewer "
            "tokens are accepted."
        )
    return "\n\n".join([*blocks, "\n".join(warnings)] if warnings else blocks)


def _measured(run: Run) -> str:
    modes = results.decoded_modes(run)
    if not modes:
        return ""
    names = [mode_name(mode.temperature) for mode in modes]
    rows = [
        (
            name,
            f"{mode.tau:.3f}",
            "–" if mode.speedup is None else factor(mode.speedup.value),
            maybe(mode.prompts, str),
        )
        for name, mode in zip(names, modes, strict=True)
    ]
    parts = [
        f"On {split_name(results.decoded(run).split or 'heldout')} prompts of the run, with this project's decoder. τ: "
        "tokens per round, the target's own included.",
        markdown_table(("sampling", "accepted length τ", "speedup over plain decoding", "prompts"), rows),
    ]
    for name, mode in zip(names, modes, strict=True):
        if mode.domains:
            lengths = [(domain, f"{part.tau:.3f}") for domain, part in mode.domains.items()]
            parts.append(markdown_table(("domain", f"τ, {name.lower()}"), lengths))
    shares = {name: mode.acceptance.conditional for name, mode in zip(names, modes, strict=True)}
    positions = max(map(len, shares.values()))
    if positions:
        header = ("acceptance, given all earlier", *map(str, range(1, positions + 1)))
        parts.append(markdown_table(header, [(name, *map(_number, row)) for name, row in shares.items()]))
    return "\n\n".join(parts)


def _suites(run: Run) -> str:
    parts = []
    for name, summary in results.evaluations(run).items():
        section = suites_section(name, summary)
        if section is None:
            continue
        parts.append(section.lead)
        folded = [figure.table for figure in section.figures if figure.table is not None]
        parts += [
            f"**{entry.caption}**\n\n" + markdown_table(entry.header, entry.rows, 1 + len(entry.text_columns))
            for entry in (*section.tables, *folded)
            if entry.rows
        ]
    return "\n\n".join(parts)


def _calibration(run: Run, exported: CardFacts) -> str:
    parts = []
    for report in results.calibrations(run):
        sampling = mode_name(report.sampling_temperature or 0.0).lower()
        unknown: list[Any] = [None] * len(report.ece_before)
        columns = zip(
            report.ece_before,
            report.temperatures_alone or unknown,
            report.ece_sts or unknown,
            report.temperatures or unknown,
            report.ece_after,
            report.auc,
            strict=False,
        )
        rows = [
            (str(k), _share(before), _number(alone), _share(scaled), _number(t), _share(after), _number(auc))
            for k, (before, alone, scaled, t, after, auc) in enumerate(columns, start=1)
        ]
        best = f"T with bias {report.bias:+.3f}" if report.bias else "T"
        header = ("position", "ECE as trained", "T alone", "ECE, T alone", best, "ECE, calibrated", "ROC-AUC")
        parts += [f"{report.rounds} held-out rounds, {sampling}.", markdown_table(header, rows)]
    if parts and (exported.folder / STS_FILE).is_file():
        from dspark_train.calibration.io import Calibration

        held = Calibration.load(exported.folder / STS_FILE)
        sampling = f", fitted for {held.sampling.label} decoding" if held.sampling else ""
        bias = (
            f", to go with the bias of {held.folded_bias:+.3f} in these weights" if held.folded_bias else ""
        )
        parts.append(f"`{STS_FILE}` holds temperatures in SGLang's form{sampling}{bias}.")
    if exported.folding:
        parts.append(exported.folding)
    return "\n\n".join(parts)


def _share(value: float | None) -> str:
    return maybe(value, lambda share: f"{100 * share:.2f} %")


def _number(value: float | None) -> str:
    return maybe(value, lambda number: f"{number:.3f}")


def _recipe(run: Run) -> str:
    config = results.config(run)
    rows = []
    for section in RECIPE_SECTIONS:
        settings = config.get(section)
        if isinstance(settings, dict):
            rows += [(f"{section}.{key}", f"`{json.dumps(value)}`") for key, value in _flat(settings)]
    return markdown_table(("setting", "value"), rows, 2) if rows else ""


def _flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted names and values; of a path only the last part, because folders are this machine's own affair."""
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        elif value is not None:
            shown = Path(value).name if isinstance(value, str) and _is_path(value) else value
            found.append((f"{prefix}{key}", shown))
    return found


def _data(run: Run) -> str:
    facts = results.facts(run).get("data")
    if not isinstance(facts, dict):
        return ""
    rows = [(key, str(value)) for key, value in _flat(facts)]
    return markdown_table(("", ""), rows, 2) if rows else ""


def _plots(folder: Path) -> str:
    return "\n\n".join(
        f"![{p.stem.replace('_', ' ')}](plots/{p.name})" for p in sorted((folder / "plots").glob("*.png"))
    )


def _made_with(run: Run) -> str:
    facts = results.facts(run)
    versions = facts.get("versions")
    parts = [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
    if facts.get("commit"):
        parts.append(f"commit {facts['commit']}")
    return ", ".join(parts)


def copy_plots(run: Run, folder: Path) -> None:
    """Copy the run's plots beside the card."""
    plots = sorted(run.plots_path.glob("*.png"))
    if plots:
        (folder / "plots").mkdir(exist_ok=True)
        for plot in plots:
            shutil.copy2(plot, folder / "plots" / plot.name)


def write_tokenizer(target: Any, folder: Path) -> None:
    """Write the target's tokenizer files and generation settings beside the draft."""
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)
    settings = getattr(target.model, "generation_config", None)
    if settings is not None:
        content = json.dumps(
            json.loads(settings.to_json_string()), indent=2, sort_keys=True, ensure_ascii=False
        )
        (folder / "generation_config.json").write_text(content + "\n", encoding="utf-8")
