"""The model card of an exported draft: only what files in the run back, no section without content."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_train.interchange.checkpoint import write_json
from dspark_train.report.redaction import redact

if TYPE_CHECKING:
    from dspark_train.interchange.export import ExportResult
    from dspark_train.interchange.temperature import SingleTemperature
    from dspark_train.report.run_folder import RunFolder

RECIPE_SECTIONS = ("draft", "objective", "optimizer", "data", "trainer")
"""Sections of ``config.yaml`` that the card shows."""


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; a cell that is a pair shows its second part in parentheses."""

    def cell(value: Any) -> str:
        if isinstance(value, tuple):
            return f"{value[0]} ({value[1]})" if len(value) > 1 else str(value[0])
        return str(value).replace("|", "\\|").replace("\n", " ")

    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def model_card(
    run: RunFolder, result: ExportResult, target: str, cost: SingleTemperature | None = None
) -> str:
    """Return the text of ``README.md``.

    Args:
        run: that the draft comes from.
        result: of the export.
        target: name or path of the target.
        cost: what folding one temperature into the confidence head costs; None where none was folded.
    """
    parts = [
        _front_matter(result, target),
        f"# DSpark draft for {target}",
        _introduction(result, target),
        _section("Serving", _serving(result)),
        _section("Measured", _measured(run)),
        _section("Benchmark suites", _suites(run)),
        _section("Confidence calibration", _calibration(run, result, cost)),
        _section("Recipe", _recipe(run)),
        _section("Data", _data(run)),
        _section("Plots", _plots(result.folder)),
        _section("Made with", _made_with(run)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _front_matter(result: ExportResult, target: str) -> str:
    base = "" if _is_path(target) else f"base_model: {target}\n"
    return (
        f"---\nlibrary_name: {'speculators' if result.format == 'speculators' else 'transformers'}\n{base}"
        "tags:\n- speculative-decoding\n- dspark\n- draft-model\n---"
    )


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _introduction(result: ExportResult, target: str) -> str:
    config = result.config
    layers = config.get("transformer_layer_config", config)
    taps = config.get("target_layer_ids") or config.get("dflash_config", {}).get("target_layer_ids")
    if taps is None:
        taps = [tap - 1 for tap in config["aux_hidden_state_layer_ids"]]
    head = config.get("markov_head_type")
    sequential = f"{head} sequential head of rank {config['markov_rank']}" if head else "no sequential head"
    confidence = "a confidence head" if config.get("enable_confidence_head") else "no confidence head"
    depth = layers["num_hidden_layers"]
    read = "1 layer that reads" if depth == 1 else f"{depth} layers that read"
    lines = [
        f"Proposes {config['block_size']} tokens a round for lossless speculative decoding of `{target}`: "
        f"{read} the target's layers {', '.join(map(str, taps))} "
        f"(counted from 0), {sequential}, {confidence}. "
        f"Layout: {result.format}; weights: {config['dtype']}.",
        *(f"- {note[:1].upper()}{note[1:]}." for note in result.notes),
    ]
    gap = result.read_back
    lines.append(
        f"\nRead back by an independent reader after writing: {gap.drafts} greedy draft tokens equal, logits "
        "within "
        f"{gap.logits:.1e}"
        + (f", confidence logits within {gap.confidence:.1e}." if gap.confidence is not None else ".")
    )
    return "\n".join(lines)


def _serving(result: ExportResult) -> str:
    blocks = [f"```bash\n{command}\n```" for command in result.commands]
    warnings = [f"- {warning}" for warning in result.warnings]
    return "\n\n".join([*blocks, "\n".join(warnings)] if warnings else blocks)


def _measured(run: RunFolder) -> str:
    from dspark_train.report import readers

    modes = readers.modes(run.decode)
    if not modes:
        return ""
    rows = []
    for mode in modes:
        speed = "–" if mode.speedup is None else f"{mode.speedup:.2f}×"
        rows.append((mode.name, f"{mode.tau:.3f}", speed, "–" if mode.prompts is None else mode.prompts))
    parts = [
        "On held-out prompts of the run, with this project's decoder. τ: tokens per round, the target's own "
        "included.",
        table(("sampling", "accepted length τ", "speedup over plain decoding", "prompts"), rows),
    ]
    for mode in modes:
        if mode.domain_tau:
            parts.append(
                table(
                    ("domain", f"τ, {mode.name.lower()}"),
                    [(d, f"{v:.3f}") for d, v in mode.domain_tau.items()],
                )
            )
    positions = max((len(mode.conditional) for mode in modes), default=0)
    if positions:
        header = ("acceptance, given all earlier", *(f"{k}" for k in range(1, positions + 1)))
        reached = [["–" if v is None else f"{v:.3f}" for v in mode.conditional] for mode in modes]
        parts.append(table(header, [(mode.name, *row) for mode, row in zip(modes, reached, strict=True)]))
    return "\n\n".join(parts)


def _suites(run: RunFolder) -> str:
    from dspark_train.report.suite_section import suites_section

    parts = []
    for name, summary in run.evaluations.items():
        section = suites_section(name, summary)
        if section is None:
            continue
        parts.append(section.lead)
        folded = [figure.table for figure in section.figures if figure.table is not None]
        parts += [
            f"**{entry.caption}**\n\n{table(entry.header, entry.rows)}"
            for entry in (*section.tables, *folded)
            if entry.rows
        ]
    return "\n\n".join(parts)


def _calibration(run: RunFolder, result: ExportResult, cost: SingleTemperature | None) -> str:
    from dspark_train.report import readers

    parts = []
    for view in readers.calibration(run.calibration):
        sampling = "greedy" if view.temperature == 0 else f"temperature {view.temperature:g}"
        rows = [
            (k, f"{t:.3f}", _share(before), _share(after), _number(auc))
            for k, (t, before, after, auc) in enumerate(
                zip(view.temperatures, view.ece_before, view.ece_after, view.auc, strict=False), start=1
            )
        ]
        header = ("position", "temperature", "ECE before", "ECE after", "ROC-AUC")
        parts += [f"{view.rounds} held-out rounds, {sampling}.", table(header, rows)]
    if parts and (result.folder / "calibration.json").is_file():
        parts.append("`calibration.json` holds the temperatures in SGLang's form.")
    if cost is not None:
        parts.append(cost.sentence())
    return "\n\n".join(parts)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _recipe(run: RunFolder) -> str:
    if not run.config:
        return ""
    rows = []
    for section in RECIPE_SECTIONS:
        settings = run.config.get(section)
        if isinstance(settings, dict):
            rows += [(f"{section}.{key}", f"`{json.dumps(value)}`") for key, value in _flat(redact(settings))]
    return table(("setting", "value"), rows) if rows else ""


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


def _data(run: RunFolder) -> str:
    facts = run.run.get("data")
    if not isinstance(facts, dict):
        return ""
    rows = [(key, value) for key, value in _flat(redact(facts))]
    return table(("", ""), rows) if rows else ""


def _plots(folder: Path) -> str:
    return "\n\n".join(
        f"![{p.stem.replace('_', ' ')}](plots/{p.name})" for p in sorted((folder / "plots").glob("*.png"))
    )


def _made_with(run: RunFolder) -> str:
    versions = run.run.get("versions")
    parts = [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
    if run.run.get("commit"):
        parts.append(f"commit {run.run['commit']}")
    return ", ".join(parts)


def copy_plots(run: Path, folder: Path) -> None:
    """Copy the run's plots beside the card."""
    plots = sorted((run / "plots").glob("*.png"))
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
        write_json(folder / "generation_config.json", json.loads(settings.to_json_string()))
