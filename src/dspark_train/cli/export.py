"""The ``export`` command: a draft for a serving engine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
    fold_temperature: bool = False
    """Divide the confidence logits by one temperature, for engines that take none; says what that costs in
    calibration error."""


def export(options: ExportOptions) -> None:
    """Write a run's draft in the layout of a serving engine, with a model card, and read it back."""
    import torch

    from dspark_train.interchange.export import TargetWeights, export_draft
    from dspark_train.interchange.temperature import single_temperature
    from dspark_train.progress import say, stage
    from dspark_train.report.model_card import CardFacts, copy_plots, model_card, write_tokenizer
    from dspark_train.run import STS_FILE, Run

    run = Run(options.run)
    cost = single_temperature(run) if options.fold_temperature else None
    folder = options.output or run.path / "export" / options.format
    kind = None if options.dtype == "auto" else getattr(torch, options.dtype)
    weights = TargetWeights.of(run.target)
    with stage(f"writing {folder} and reading it back"):
        result = export_draft(
            run.draft,
            weights,
            folder,
            options.format,
            kind,
            cost.temperature if cost else None,
            warn=lambda line: say(f"warning: {line}"),
        )
    if run.sts_path().is_file() and cost is None and result.config.get("enable_confidence_head"):
        shutil.copy2(run.sts_path(), folder / STS_FILE)
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
    )
    (folder / "README.md").write_text(model_card(run, facts), encoding="utf-8")
    print(f"wrote {folder} ({options.format}, {result.config['dtype']})")
    print(f"read back: {gap.drafts} draft tokens equal, logits within {gap.logits:.1e}")
    for line in (*result.notes, *((cost.sentence(),) if cost else ())):
        print(f"note: {line}")
    for line in result.commands:
        print(line)
