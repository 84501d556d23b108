"""``fit`` and ``validate``: the LightningCLI, and what follows training."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from dspark_train import machine
from dspark_train.cli.calibrate import calibrate
from dspark_train.cli.decode import decode
from dspark_train.cli.parsing import STRICT, configs_first, explain, stage_options
from dspark_train.cli.recipes import data_file
from dspark_train.cli.report import report
from dspark_train.cli.tracking import record_recipe, record_results, same_record
from dspark_train.data.dataset import PreparedSet
from dspark_train.data.module import DSparkDataModule
from dspark_train.decoding.pass_choice import choose_pass
from dspark_train.draft.recipe import DraftRecipe, attention_shape, dense_width
from dspark_train.errors import UserError
from dspark_train.files import nearest_folder
from dspark_train.interchange.importing import warm_start
from dspark_train.machine import Choice, LayerShape
from dspark_train.progress import quiet_libraries, say, stage
from dspark_train.run import Run, RunConfig, Stage, environment, open_run
from dspark_train.target.config import TargetConfig
from dspark_train.target.frozen import PASS_ROWS, choose_form, read_target_config
from dspark_train.training.budget import TimeBudget
from dspark_train.training.checkpointing import BestWeights, TrainingCheckpoint, latest_checkpoint
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
        data = self.config[self.config.subcommand].data
        data.path = data_file(Path(data.path))

    def before_instantiate_classes(self) -> None:
        """Open the run's folder before anything heavy is loaded."""
        config = self.config[self.subcommand]
        config.run.folder = config.trainer.default_root_dir = expand(config.run.folder)
        first = _get_rank() in (None, 0)
        folder = Path(config.run.folder)
        check_trainer(config.trainer)
        if self.subcommand == "validate" and config.ckpt_path is None and config.model.init_from is None:
            choose_weights(config)
        if self.subcommand == "fit":
            check_options(config.run.options)
            if config.run.minutes is not None:
                training_seconds(config.run)
            if first and Run(folder).finished and not config.run.overwrite:
                open_run(config.run, {})  # refuses, before anything is measured
            remember_choices(folder, config.run.overwrite)
        choose_forms(config)
        if self.subcommand == "fit":
            if first:
                say(check_resources(config))
            text = self.parser_of("fit").dump(config, skip_none=False)
            if first:
                checkpoints = open_run(config.run, yaml.safe_load(text))
                Run(folder).update(chosen=machine.decided(), **environment())
            else:  # rank zero opens the folder; the others only look for what to resume from
                checkpoints = None if config.run.overwrite else folder / "trainer"
            latest = latest_checkpoint(checkpoints) if checkpoints else None
            self.store_draft = first and same_record(config, folder)  # only the first rank has a record
            if latest is not None:
                say(f"continuing the run in {config.run.folder} from {latest.name}")
                config.ckpt_path, config.weights_only = str(latest), True

    def parser_of(self, subcommand: str) -> LightningArgumentParser:
        """Parser of one subcommand."""
        return self._subcommand_parsers[subcommand]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add what every run has: the CSV of its metrics, and checkpoints that can be resumed."""
        given = self.config_init[self.subcommand].trainer.callbacks or []
        wanted = (
            list(given) if isinstance(given, list) else [given]
        )  # Lightning adds its own to the list itself
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except MisconfigurationException as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"the settings under `trainer` do not work together: {reason}") from error
        run, fitting = self.config[self.subcommand].run, self.subcommand == "fit"
        others = [
            callback
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if callback in wanted or not isinstance(callback, ProgressBar | Checkpoint)  # not Lightning's own
        ]
        own: list[Callback] = []
        if not any(isinstance(callback, ProgressBar) for callback in others):
            own.append(TrainingProgress())
        saving: list[Callback] = []
        if fitting:
            own += [StepMonitor(), RecordChoices(), SplitsForStages(run), CheckDecoding(run.after)]
            saving.append(TrainingCheckpoint(every_n_steps=run.save_every, keep=run.keep.last))
            if run.keep.best is not None:
                saving.insert(0, BestWeights(run.keep.best))
            if run.minutes is not None:
                own.append(TimeBudget(training_seconds(run), STARTED))
        trainer.callbacks = [*own, *others, *saving]  # type: ignore[attr-defined]
        if fitting:
            trainer.loggers = [RunCSVLogger(Path(trainer.default_root_dir)), *trainer.loggers]
        return trainer

    def before_validate(self) -> None:
        """``--init_from`` reads checkpoints of any layout."""
        self.model.warm_start = warm_start

    def before_fit(self) -> None:
        """The accumulation follows from the global batch and the number of ranks."""
        self.model.warm_start = warm_start
        accumulated = self.datamodule.accumulation(self.trainer.world_size)
        self.trainer.accumulate_grad_batches = accumulated
        if isinstance(self.trainer.val_check_interval, int):  # of steps; Lightning counts micro-batches
            self.trainer.val_check_interval *= accumulated
        record_recipe(self.trainer.loggers, Run(Path(self.trainer.default_root_dir)))

    def after_fit(self) -> None:
        """Export the draft, then run the stages that the config names."""
        finish(self.trainer, self.model, self.config["fit"])
        if self.trainer.is_global_zero:
            record_results(self.trainer.loggers, Run(Path(self.trainer.default_root_dir)), self.store_draft)


def expand(folder: Path | str) -> str:
    """The folder of a run, with the environment's variables in it: a sweep names its runs by ``$WANDB_RUN_ID``.

    Raises:
        UserError: a variable that is not set.
    """
    found = os.path.expandvars(str(folder))
    if "$" in found:
        raise UserError(f"run.folder {folder} names an environment variable that is not set")
    return found


def check_trainer(trainer: Namespace) -> None:
    """Refuse what would be overwritten, or could not work.

    Raises:
        UserError: names the setting.
    """
    if trainer.accumulate_grad_batches != 1:
        raise UserError(
            f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}: it follows from "
            "data.global_batch_size / (data.micro_batch_size × ranks); set these, and leave it out"
        )
    endless = trainer.max_epochs == -1 or (trainer.max_epochs is None and trainer.max_time is not None)
    if trainer.max_steps in (-1, None) and endless:
        raise UserError(
            "training has no last step, which the schedule of the learning rate needs: set trainer.max_steps or "
            "trainer.max_epochs (with run.minutes, training ends in time and the schedule follows)"
        )


def choose_weights(config: Namespace) -> None:
    """Let ``validate`` take the draft of the run in ``run.folder``, or its last checkpoint, and say which."""
    folder = Path(config.run.folder)
    if (folder / "draft" / "config.json").is_file():
        config.model.init_from = str(folder / "draft")
        say(f"validating the draft of {folder}")
    elif (latest := latest_checkpoint(folder / "trainer")) is not None:
        config.ckpt_path, config.weights_only = str(latest), True
        say(f"validating {latest}")
    else:
        say(f"validating a fresh, untrained draft: {folder} holds no run; give --init_from or --ckpt_path")


CHOICES = "DSPARK_TRAIN_CHOICES"
"""Environment variable by which the first rank hands its choices to those that it starts."""


def remember_choices(folder: Path, overwrite: bool) -> None:
    """Compute as the run in ``folder`` does, where there is one that goes on, and as the first rank does."""
    record = {} if overwrite else Run(folder).facts
    if CHOICES in os.environ:
        machine.remember(json.loads(os.environ[CHOICES]))
    elif record.get("chosen"):
        machine.remember(record["chosen"])
        here = environment()["machine"].split(",")[0]
        there = str(record.get("machine", here)).split(",")[0]
        if here != there:
            say(
                f"this run began on {there}, and goes on in the dtypes that were chosen there; this is {here}"
            )


def choose_forms(config: Namespace) -> None:
    """Fill in the precision: by the GPU's units, or by how fast this processor computes a layer.

    On a CPU the target's dtype is chosen too, so that the run's record holds it from the start.
    """
    if torch.cuda.is_available() and config.trainer.accelerator in ("auto", "gpu", "cuda"):
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        config.trainer.precision = config.trainer.precision or ("bf16-mixed" if fast else "32-true")
        return
    with stage("measuring this processor"):
        machine.tune()
        if config.trainer.precision is None:
            config.trainer.precision = measured_precision(config)
        if config.target.dtype == "auto":
            choose_form(read_target_config(config.target), torch.device("cpu"))
    os.environ[CHOICES] = json.dumps(machine.decided())
    for chosen in machine.decided().values():
        say(f"  {Choice.from_json(chosen)}")


class RecordChoices(Callback):
    """Writes what was chosen while the run was set up into ``run.json``, so that a resumed one goes on with it."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is chosen by now."""
        if trainer.is_global_zero:
            Run(Path(trainer.default_root_dir)).update(chosen=machine.decided())


class SplitsForStages(Callback):
    """Refuses, before training, data that lack a split which a stage after training reads.

    Args:
        run: section of the configuration.
    """

    def __init__(self, run: Any) -> None:
        decoded = stage_settings(run).get("decode", {}).get("split", "test")
        read = {"calibrate": ("calibration", "test"), "decode": (decoded,)}
        self.read = {name: read[name] for name in run.after if name in read}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The data are open and the draft is made by now."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        has_confidence = pl_module.draft.confidence_head is not None  # type: ignore[union-attr]
        for name, splits in self.read.items():
            if name == "calibrate" and not has_confidence:
                continue
            for split in splits:
                if split not in data.prepared.splits:
                    raise UserError(
                        f"{data.path}: the split {split!r} is empty, and `{name}` reads it after training: give it "
                        "conversations (data.heldout_share and data.calibration_share, or `shares` of prepare), or "
                        f"leave {name} out of run.after"
                    )


class CheckDecoding(Callback):
    """Refuses, before the first step, a target that the stages after training could not decode."""

    def __init__(self, after: Sequence[str]) -> None:
        """``after``: names of those stages."""
        self.decodes = bool({"calibrate", "decode"} & set(after))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The target is loaded by now; one that is shared by ranks is tried when it decodes."""
        module: Any = pl_module
        if self.decodes and module.target_config.sharding == "none":
            choose_pass(module.target)


def measured_precision(config: Namespace) -> str:
    """``bf16-mixed`` or ``32-true``, whichever a CPU trains a layer of this draft faster in."""
    target = read_target_config(config.target)
    heads, kv_heads, head_dim = attention_shape(config.draft, target)
    width = config.draft.intermediate_size or dense_width(target)
    kv_heads = kv_heads if heads % kv_heads == 0 else heads  # which is refused later
    shape = LayerShape(target.hidden_size, width, heads, kv_heads, head_dim)
    choice = machine.choose_dtype("training", shape, PASS_ROWS, backward=True)
    return "bf16-mixed" if choice.name == "bfloat16" else "32-true"


LIBRARIES = 1.5 * 2**30
"""Bytes that Python and the libraries take."""
SPREAD = 1.7
"""How far the memory of a step may lie above its plan (``tests/training/test_costs.py``)."""
COPIES = 3
"""Checkpoints on the disk at once: two that are kept, and one that is being written."""


def check_resources(config: Namespace) -> str:
    """Hold what a run will need against what the machine has free, before anything is loaded.

    Returns:
        Cores, memory and disk, in a line.

    Raises:
        UserError: too little memory, or too little disk.
    """
    from dspark_train.cli.plan import PlanOptions
    from dspark_train.cli.planning import plan_of
    from dspark_train.training.plan import caches_features

    folder = Path(config.run.folder)
    free, disk, gib = machine.free_memory(), shutil.disk_usage(nearest_folder(folder)).free, 2**30
    line = f"{machine.usable_cores()} cores"
    if config.trainer.accelerator != "cpu" and torch.cuda.is_available():
        return f"{line}, {disk / gib:.1f} GiB of disk free for {folder}"
    recipe = config.as_dict()
    devices = recipe["trainer"].get("devices", 1)
    recipe["trainer"] |= {"accelerator": "cpu", "devices": 1 if devices == "auto" else devices}
    with stage("reading the recipe, its target's shape and its data"):
        plan = plan_of(recipe, PlanOptions())
    memory = int(plan.ranks * (SPREAD * plan.total_memory + LIBRARIES))
    written = COPIES * 12 * plan.trained
    if caches_features(recipe["trainer"]):
        there = sum(path.stat().st_size for path in folder.glob("feature_cache/*.safetensors"))
        written += max(0, plan.cache_bytes - there)
    if free is not None and memory > free:
        raise UserError(
            f"this run needs about {memory / gib:.1f} GiB of memory, and {free / gib:.1f} GiB are free: close other "
            "programs, or lower data.micro_batch_size, data.max_length or draft.num_layers"
        )
    if written > disk:
        raise UserError(
            f"this run writes about {written / gib:.1f} GiB, and the disk of {folder} has {disk / gib:.1f} GiB free: "
            "choose another run.folder, or train without CacheFeatures"
        )
    has = "" if free is None else f" of {free / gib:.1f} free"
    return (
        f"{line}; needs about {memory / gib:.1f}{has} GiB of memory and {written / gib:.1f} of {disk / gib:.1f} free "
        "GiB of disk"
    )


OVERHEAD = 20.0
"""Seconds for which a stage after training loads and writes, beside the work that it bounds itself."""
USUAL = 60.0
"""Seconds that are set aside for a stage that is given no time of its own."""


def training_seconds(run: Any) -> float:
    """Time until training has to end, so that what follows it ends within ``run.minutes``.

    Raises:
        UserError: nothing is left for training.
    """
    given = [run.options.get(name, {}).get("seconds") for name in run.after if name != "report"]
    after = [float(seconds or USUAL) + OVERHEAD for seconds in given]
    seconds = 60 * run.minutes - sum(after)
    if seconds <= 60:
        raise UserError(
            f"run.minutes is {run.minutes}, and {', '.join(run.after)} take about {sum(after) / 60:.1f} of them: "
            "give the run more minutes, or those stages fewer `seconds` in run.options"
        )
    return seconds


def finish(trainer: Trainer, module: DSparkModule, config: Namespace) -> None:
    """Export what was trained, and run the stages after training on rank zero."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Lightning's handler would only take note of it
    folder = Path(trainer.default_root_dir)
    draft = module.draft
    with whole_parameters(draft):
        if trainer.is_global_zero:
            keeping = next((one for one in trainer.callbacks if isinstance(one, BestWeights)), None)  # type: ignore[attr-defined]
            best = keeping.restore(trainer, draft) if keeping is not None else {}
            draft.save(folder / "draft", dtype=module.target.dtype)
    trainer.strategy.barrier("draft saved")
    first = trainer.is_global_zero
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # what follows runs alone, and must wait for nobody
    if not first:
        return
    has_confidence = draft.confidence_head is not None
    budget = next((one for one in trainer.callbacks if isinstance(one, TimeBudget)), None)  # type: ignore[attr-defined]
    recipe = (budget and budget.recipe_steps) or trainer.max_steps
    steps = {"made": trainer.global_step, "recipe": recipe, "minutes": config.run.minutes}
    facts = data_facts(trainer)
    release(trainer, module)
    wall = {"fit": round(time.monotonic() - STARTED, 1)}
    Run(folder).update(wall_seconds=wall, data=facts, chosen=machine.decided(), steps=steps, best=best)
    if best and best["step"] != best["last_step"]:
        say(
            f"the draft is that of step {best['step']:,}, whose {best['metric']} of {best['value']:.3f} was not "
            f"reached again by step {best['last_step']:,}"
        )
    stages = list(config.run.after)
    if not has_confidence and "calibrate" in stages:
        stages.remove("calibrate")
        say("calibrate is left out: this draft has no confidence head")
    run_stages(folder, stages, stage_settings(config.run))
    Run(folder).update(finished=True, chosen=machine.decided())
    tell(folder)


def stage_settings(run: Any) -> dict[Stage, dict[str, Any]]:
    """Options of the stages after training: those of one trial among several leave the test split alone."""
    options = dict(run.options)
    if run.trial:
        options["decode"] = {"split": "validation"} | options.get("decode", {})
    return options


def data_facts(trainer: Trainer) -> dict[str, Any]:
    """What the run was trained on, for ``run.json`` and the model card: file, fingerprint, chat-template arguments,
    how answers were drawn (where the set says so), counts of each split.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    prepared: PreparedSet = data.prepared
    facts: dict[str, Any] = {
        "file": Path(data.path).name,
        "fingerprint": prepared.manifest.fingerprint,
        "template": prepared.template,
        "splits": {name: asdict(counts) for name, counts in prepared.splits.items()},
    }
    if prepared.manifest.answers:
        facts["answers"] = prepared.manifest.answers
    if len(prepared.templates) > 1:
        facts["template_share"] = round(prepared.templates[0][1], 4)
    return facts


def release(trainer: Trainer, module: DSparkModule) -> None:
    """Give the memory of training back before the stages after it load what they need."""
    module.release()
    trainer.strategy.optimizers = []
    gc.collect()
    chosen = machine.decided().get("threads", {})
    alone = chosen and chosen["reason"] != machine.SET_ELSEWHERE
    torch.set_num_threads(
        int(chosen["name"]) if alone else THREADS
    )  # each of several processes had its share only
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_options(options: dict[Stage, dict[str, Any]]) -> None:
    """Refuse options that a stage does not have, before anything is loaded."""
    for name, given in options.items():
        stage_options(STAGES[name], name, "run", given)


def tell(folder: Path) -> None:
    """Say at the end what this machine was made to do, and why."""
    record = Run(folder).facts
    steps = record.get("steps", {})
    if steps.get("minutes"):
        short = steps["made"] < steps["recipe"]
        say(
            f"{steps['made']:,} steps in the {steps['minutes']:g} minutes given"
            + (f" (the recipe has {steps['recipe']:,}: this machine's pace allows no more)" if short else "")
        )
    say("chosen for this machine:")
    for choice in record.get("chosen", {}).values():
        say(f"  {Choice.from_json(choice)}")


def run_stages(folder: Path, stages: list[Stage], options: dict[Stage, dict[str, Any]]) -> None:
    """Run the stages after training, in order, each timed into ``run.json``."""
    for name in stages:
        begun = time.monotonic()
        STAGES[name](stage_options(STAGES[name], name, str(folder), options.get(name, {})))
        Run(folder).update(wall_seconds={name: round(time.monotonic() - begun, 1)})


def run_cli(cli: type[DSparkCLI], arguments: ArgsType) -> DSparkCLI:
    """Parse a command line of ``fit`` or ``validate``, and do with it what ``cli`` does.

    Args:
        cli: this project's LightningCLI, or one that does less.
        arguments: command line, subcommand first. ``--init_from`` is short for ``--model.init_from``.
    """
    quiet_libraries()
    if isinstance(arguments, list):
        arguments = [*arguments[:1], *configs_first(arguments[1:])]
        arguments = [re.sub(r"^--init_from(?==|$)", "--model.init_from", word) for word in arguments]
    return cli(
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
        parser_kwargs={
            **STRICT,
            "prog": "dspark-train",
            **{name: dict(STRICT) for name in cli.subcommands()},
        },
        args=None if arguments == sys.argv[1:] else arguments,
    )


def main(arguments: ArgsType) -> None:
    """Run ``fit`` or ``validate``.

    Args:
        arguments: command line, subcommand first.
    """
    try:
        run_cli(DSparkCLI, arguments)
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):  # which Lightning makes an exit of status 1
            raise KeyboardInterrupt from None
        raise
