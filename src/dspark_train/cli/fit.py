"""``fit`` and ``validate``: the LightningCLI, and what follows training."""

from __future__ import annotations

import argparse
import gc
import logging
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets.utils.logging import disable_progress_bar
from huggingface_hub import utils as hub_progress
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from dspark_train.cli.calibrate import calibrate
from dspark_train.cli.decode import decode
from dspark_train.cli.parsing import STRICT, explain, stage_options
from dspark_train.cli.report import report
from dspark_train.data.module import DSparkDataModule
from dspark_train.draft.recipe import DraftRecipe
from dspark_train.errors import UserError
from dspark_train.interchange.importing import warm_start
from dspark_train.run import RunConfig, Stage, environment, open_run, update_run
from dspark_train.target.config import TargetConfig
from dspark_train.target.frozen import has_fast_bfloat16
from dspark_train.training.checkpointing import TrainingCheckpoint, latest_checkpoint
from dspark_train.training.csv_logger import RunCSVLogger
from dspark_train.training.module import DSparkModule
from dspark_train.training.monitor import StepMonitor
from dspark_train.training.optimizer import OptimizerConfig
from dspark_train.training.progress import TrainingProgress
from dspark_train.training.terms import ObjectiveConfig
from dspark_train.training.zero_state import whole_parameters

STARTED = time.monotonic()
"""When this process began, for the run's wall time."""
THREADS = torch.get_num_threads()
"""Threads of this process alone, before a launcher divides them."""

SECTIONS = {
    "target": TargetConfig,
    "draft": DraftRecipe,
    "objective": ObjectiveConfig,
    "optimizer": OptimizerConfig,
}
STAGES: dict[Stage, Callable[[Any], None]] = {"calibrate": calibrate, "decode": decode, "report": report}
"""Commands that can follow training, each with its dataclass of options."""


class DSparkCLI(LightningCLI):
    """Target, draft, objective, optimiser, data, trainer and run, all from YAML; flags win over files."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Declare the sections, and which values flow from one to another."""
        for name, section in SECTIONS.items():
            parser.add_class_arguments(section, name)
            parser.link_arguments(name, f"model.{name}", apply_on="instantiate")
        parser.add_class_arguments(RunConfig, "run")
        parser.link_arguments("draft.block_size", "data.block_size")
        parser.link_arguments("objective.decay", "data.decay")
        parser.link_arguments("seed_everything", "data.seed")
        parser.link_arguments("run.folder", "trainer.default_root_dir")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Only what this project has a meaning for."""
        return {
            name: skip for name, skip in LightningCLI.subcommands().items() if name in ("fit", "validate")
        }

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and refuse what does not fit in one line."""
        try:
            super().parse_arguments(parser, args)
        except argparse.ArgumentError as error:
            raise explain(error, self.parser_of(str(args[0]) if isinstance(args, list) else "fit")) from error

    def before_instantiate_classes(self) -> None:
        """Open the run's folder before anything heavy is loaded."""
        config = self.config[self.subcommand]
        if config.trainer.precision is None:
            config.trainer.precision = automatic_precision(config.trainer.accelerator)
        if self.subcommand == "fit":
            check_options(config.run.options)
            text = self.parser_of("fit").dump(config, skip_none=False)
            if _get_rank() in (None, 0):
                checkpoints = open_run(config.run, yaml.safe_load(text))
            else:  # rank zero opens the folder; the others only look for what to resume from
                checkpoints = None if config.run.overwrite else Path(config.run.folder) / "trainer"
            latest = latest_checkpoint(checkpoints) if checkpoints else None
            if latest is not None:
                print(f"continuing the run in {config.run.folder} from {latest.name}")
                config.ckpt_path, config.weights_only = str(latest), False

    def parser_of(self, subcommand: str) -> LightningArgumentParser:
        """Parser of one subcommand."""
        return self._subcommand_parsers[subcommand]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add what every run has: the CSV of its metrics, and checkpoints that can be resumed."""
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except MisconfigurationException as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"the settings under `trainer` do not work together: {reason}") from error
        others = [
            callback
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if not isinstance(callback, ProgressBar | Checkpoint)
        ]
        every = self.config[self.subcommand].run.save_every
        saving = [TrainingCheckpoint(every_n_steps=every)] if self.subcommand == "fit" else []
        own = [TrainingProgress(), *([StepMonitor()] if self.subcommand == "fit" else [])]
        trainer.callbacks = [*own, *others, *saving]  # type: ignore[attr-defined]
        folder = Path(trainer.default_root_dir)
        trainer.loggers = [RunCSVLogger(folder), *trainer.loggers]
        return trainer

    def before_fit(self) -> None:
        """The accumulation follows from the global batch and the number of ranks."""
        self.model.outside["warm_start"] = warm_start
        self.trainer.accumulate_grad_batches = self.datamodule.accumulation(self.trainer.world_size)

    def after_fit(self) -> None:
        """Export the draft, then run the stages that the config names."""
        finish(self.trainer, self.model, self.config["fit"])


def automatic_precision(accelerator: str) -> str:
    """``bf16-mixed`` where the hardware computes in bfloat16, else ``32-true``."""
    on_gpu = torch.cuda.is_available() and accelerator in ("auto", "gpu", "cuda")
    return "bf16-mixed" if has_fast_bfloat16(torch.device("cuda" if on_gpu else "cpu")) else "32-true"


def finish(trainer: Trainer, module: DSparkModule, config: Namespace) -> None:
    """Export what was trained, and run the stages after training on rank zero."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Lightning's handler would only take note of it
    folder = Path(trainer.default_root_dir)
    draft = module.draft
    with whole_parameters(draft):
        if trainer.is_global_zero:
            draft.save(folder / "draft", dtype=module.target.dtype)
    trainer.strategy.barrier("draft saved")
    if not trainer.is_global_zero:
        return
    has_confidence = draft.confidence_head is not None
    facts = data_facts(trainer)
    release(trainer, module)
    wall = {"fit": round(time.monotonic() - STARTED, 1)}
    update_run(folder, wall_seconds=wall, data=facts, **environment())
    stages = list(config.run.after)
    if not has_confidence and "calibrate" in stages:
        stages.remove("calibrate")
        print("calibrate is left out: this draft has no confidence head")
    run_stages(folder, stages, config.run.options)
    update_run(folder, finished=True)


def data_facts(trainer: Trainer) -> dict[str, Any]:
    """What the run was trained on, for ``run.json`` and the model card: file, fingerprint, counts of each split."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    manifest = data.prepared.manifest
    return {
        "file": Path(data.path).name,
        "fingerprint": manifest.fingerprint,
        "splits": {name: asdict(counts) for name, counts in manifest.splits.items()},
    }


def release(trainer: Trainer, module: DSparkModule) -> None:
    """Give the memory of training back before the stages after it load what they need."""
    module.outside.clear()
    module.draft = None
    trainer.strategy.optimizers = []
    gc.collect()
    torch.set_num_threads(THREADS)  # with several processes each had its share only
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_options(options: dict[Stage, dict[str, Any]]) -> None:
    """Refuse options that a stage does not have, before anything is loaded."""
    for stage, given in options.items():
        stage_options(STAGES[stage], stage, "run", given)


def run_stages(folder: Path, stages: list[Stage], options: dict[Stage, dict[str, Any]]) -> None:
    """Run the stages after training, in order, each timed into ``run.json``."""
    for stage in stages:
        begun = time.monotonic()
        STAGES[stage](stage_options(STAGES[stage], stage, str(folder), options.get(stage, {})))
        update_run(folder, wall_seconds={stage: round(time.monotonic() - begun, 1)})


def quiet() -> None:
    """Keep notices of other libraries, which the user can do nothing about, off the terminal."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for module in (r"lightning\.", r"torch\.", r"deepspeed\."):
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=module)
    disable_progress_bar()
    hub_progress.disable_progress_bars()


def main(arguments: ArgsType) -> None:
    """Run ``fit`` or ``validate``.

    Args:
        arguments: command line, subcommand first. ``--init_from`` is short for ``--model.init_from``.
    """
    quiet()
    if isinstance(arguments, list):
        arguments = [re.sub(r"^--init_from(?==|$)", "--model.init_from", word) for word in arguments]
    DSparkCLI(
        DSparkModule,
        DSparkDataModule,
        save_config_callback=None,
        seed_everything_default=0,
        trainer_defaults={
            "use_distributed_sampler": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "logger": False,
        },
        auto_configure_optimizers=False,
        parser_kwargs={**STRICT, "prog": "dspark-train", "fit": dict(STRICT), "validate": dict(STRICT)},
        args=None if arguments == sys.argv[1:] else arguments,
    )
