"""Weights & Biases: one record per run, also when it is resumed, with what was measured after training."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.loggers import Logger, WandbLogger

from dspark_train.report import results
from dspark_train.report.text import mode_name
from dspark_train.run import Run, sampling_label

WANDB = "WandbLogger"


def wandb_settings(config: Namespace) -> list[Namespace]:
    """``init_args`` of every W&B logger in a configuration."""
    given = config.trainer.logger
    loggers = given if isinstance(given, list) else [given]
    return [
        logger.init_args
        for logger in loggers
        if isinstance(logger, Namespace) and logger.class_path.endswith(WANDB)
    ]


def same_record(config: Namespace, folder: Path) -> bool:
    """Let the loggers go on with the record that the run in ``folder`` began, or begin one whose name is kept there.

    Returns:
        Whether the draft is to be stored there as well (``log_model``). Trainer checkpoints are not: the folder of
        the run holds these.
    """
    wanted = False
    for settings in wandb_settings(config):
        if settings.id is None:
            settings.id = (
                Run(folder).facts.get("wandb") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
            )
            Run(folder).update(wandb=settings.id)
        wanted = wanted or bool(settings.log_model)
        settings.log_model = False
    return wanted


def record_recipe(loggers: Sequence[Logger], run: Run) -> None:
    """Hand the user's loggers the resolved recipe, without secrets, and where it runs."""
    facts = results.facts(run)
    about = {name: facts[name] for name in ("versions", "machine", "commit") if name in facts}
    for logger in loggers[1:]:  # the first is the run's own CSV, beside which config.yaml stands
        logger.log_hyperparams({**results.config(run), "environment": about})


def record_results(loggers: Sequence[Logger], run: Run, store_draft: bool) -> None:
    """Add to a W&B record what the stages after training found.

    Args:
        loggers: of the trainer; those that are not W&B's are left alone.
        run: finished.
        store_draft: put the exported draft there too, as an artifact that names target, data and commit.
    """
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            _record(logger.experiment, run, store_draft)


def _record(record: Any, run: Run, store_draft: bool) -> None:
    import wandb

    modes = results.decoded_modes(run)
    found: dict[str, Any] = {}
    if modes:
        found["decoding"] = wandb.Table(
            ["sampling", "accepted length", "speedup", "prompts"],
            [
                [mode_name(m.temperature), m.tau, m.speedup.value if m.speedup else None, m.prompts]
                for m in modes
            ],
        )
        found["acceptance"] = wandb.Table(
            ["sampling", "position", "conditional", "cumulative"],
            [
                [mode_name(mode.temperature), place, *shares]
                for mode in modes
                for place, shares in enumerate(
                    zip(mode.acceptance.conditional, mode.acceptance.cumulative, strict=True), 1
                )
            ],
        )
    errors = [
        [sampling_label(report.sampling_temperature or 0.0), position, before, after]
        for report in results.calibrations(run)
        for position, (before, after) in enumerate(zip(report.ece_before, report.ece_after, strict=True), 1)
    ]
    if errors:
        found["calibration"] = wandb.Table(["sampling", "position", "as trained", "calibrated"], errors)
    for picture in sorted(run.plots_path.glob("*.png")):
        found[f"plots/{picture.stem}"] = wandb.Image(str(picture))
    page = run.path / "report.html"
    if page.is_file():
        found["report"] = wandb.Html(page.read_text(encoding="utf-8"), inject=False)
    if found:
        record.log(found)
    record.summary.update({f"{mode_name(m.temperature).lower()}/accepted_length": m.tau for m in modes})
    if store_draft:
        facts = results.facts(run)
        lineage = {
            "target": run.config.get("target", {}).get("name_or_path"),
            "data": facts.get("data"),
            "commit": facts.get("commit"),
            "record": record.id,
        }
        artifact = wandb.Artifact(f"draft-{record.id}", type="model", metadata=lineage)
        artifact.add_dir(str(run.draft_path))
        record.log_artifact(artifact)
    record.finish()  # all of it is written before the command ends
