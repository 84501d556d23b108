"""The ``export`` command: a draft for a serving engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dspark_train.errors import UserError
from dspark_train.interchange.engines import ExportFormat


@dataclass(frozen=True)
class ExportOptions:
    """Options of ``export``."""

    run: Path
    """Folder of a finished run."""
    format: ExportFormat = "native"
    """``native`` for vLLM and SGLang, ``speculators`` for vLLM, ``sglang`` for SGLang alone, ``dflash`` for
    drafts without heads."""
    output: Path | None = None
    """Folder to write; left out: ``RUN/export/FORMAT``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights; ``auto`` is that of the target in the run."""
    temperature: float | None = None
    """Sampling temperature whose calibration goes along; left out, that of the run's calibration.json."""
    top_k: int = 0
    """Tokens kept by that sampling; 0 keeps all."""
    top_p: float = 1.0
    """Nucleus kept by that sampling; 1 keeps all."""
    fold_bias: bool = False
    """Add the calibrated bias to the confidence head of the copy, for engines that take temperatures only
    (SGLang); it holds for that way of sampling alone. The run's own weights stay as trained."""
    fold_temperature: bool = False
    """Divide the confidence logits by one temperature, for engines that take none; says what that costs in
    calibration error."""
    push: str | None = None
    """Hub repository (owner/name) to put it into as well; made where there is none."""
    private: bool = False
    """Whether a repository that ``push`` makes is private."""
    license: str | None = None
    """Of the draft, for its card, as the hub names licences (apache-2.0, llama3.1, …)."""


def export(options: ExportOptions) -> None:
    """Write a run's draft in the layout of a serving engine, with a model card, and read it back."""
    import torch

    from dspark_train.calibration.io import exported_calibration
    from dspark_train.draft.eagle3 import ARCHITECTURE, Eagle3Draft
    from dspark_train.hub import check_push, push
    from dspark_train.interchange.eagle3 import export_eagle3
    from dspark_train.interchange.export import TargetWeights, export_draft
    from dspark_train.interchange.temperature import single_temperature
    from dspark_train.progress import say, stage
    from dspark_train.report.model_card import CardFacts, copy_plots, model_card, write_tokenizer
    from dspark_train.run import STS_FILE, Run, sampling_label

    if options.push is not None:
        check_push(options.push)
    run = Run(options.run)
    folder = options.output or run.path / "export" / options.format
    kind = None if options.dtype == "auto" else getattr(torch, options.dtype)
    draft = run.draft
    if isinstance(draft, Eagle3Draft):
        if options.format != "native" or options.fold_temperature:
            raise UserError(
                "an Eagle3 draft is exported in the reference's layout (--format native) and has no confidences"
            )
        difference = export_eagle3(draft, folder, kind or run.target.dtype)
        write_tokenizer(run.target, folder)
        print(f"wrote {folder} ({ARCHITECTURE}); read back: logits within {difference:.1e}")
        if options.push is not None:
            print(f"pushed to {push(folder, options.push, options.private)}")
        return
    label = (
        None
        if options.temperature is None
        else sampling_label(options.temperature, options.top_k, options.top_p)
    )
    calibration = exported_calibration(run, label, options.fold_bias)
    cost = single_temperature(run, calibration) if options.fold_temperature else None
    weights = TargetWeights.of(run.target)
    with stage(f"writing {folder} and reading it back"):
        result = export_draft(
            draft,
            weights,
            folder,
            options.format,
            kind,
            cost.temperature if cost else None,
            calibration,
            warn=lambda line: say(f"warning: {line}"),
        )
    held = calibration if cost is None and result.config.get("enable_confidence_head") else None
    if held is not None:
        held.save(folder / STS_FILE)
    write_tokenizer(run.target, folder)
    copy_plots(run, folder)
    gap = result.read_back
    facts = CardFacts(
        folder=folder,
        target=weights.name,
        format=options.format,
        config=result.config,
        notes=result.notes,
        warnings=result.warnings,
        commands=result.commands,
        equal_drafts=gap.drafts,
        logits_gap=gap.logits,
        confidence_gap=gap.confidence,
        folding=cost.sentence() if cost else "",
        license=options.license,
    )
    (folder / "README.md").write_text(model_card(run, facts), encoding="utf-8")
    print(f"wrote {folder} ({options.format}, {result.config['dtype']})")
    print(f"read back: {gap.drafts} draft tokens equal, logits within {gap.logits:.1e}")
    said = [] if held is None else [f"{STS_FILE}: {held.sentence()}"]
    for line in (*result.notes, *([cost.sentence()] if cost else []), *said):
        print(f"note: {line}")
    for line in result.commands:
        print(line)
    if options.push is not None:
        print(f"pushed to {push(folder, options.push, options.private)}")
