"""Checkpoints that survive anything: atomic, verified, rotated; resumed exactly; pre-emption saves first."""

from __future__ import annotations

import os
import pickle
import re
import signal
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from typing_extensions import override

from dspark_train.errors import UserError
from dspark_train.progress import say
from dspark_train.training.csv_logger import RunCSVLogger

_NAME = re.compile(r"step=(\d+)\.ckpt$")


class Preempted(SystemExit):
    """Training stopped at a step boundary because of a signal; its state has been saved.

    The exit status is 128 + the signal's number, as shells report it: 130 for Ctrl-C, 143 for SIGTERM.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(128 + number)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint aside, forces it to the disk, and moves it into place."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save so that ``path`` is, at any moment, either absent, the old file, or the complete new one."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.tmp")
        with aside.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read tensors and plain values only, whatever is asked for: a stranger's file must not run code.

        Raises:
            UserError: the file holds anything else.
        """
        try:
            content: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{path} holds more than tensors and plain values, so it could run code and is not opened ({reason})"
            ) from error
        return content


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint file, or None: its length and every record's checksum are verified."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        return str(error) or type(error).__name__
    return None if broken is None else f"checksum of {broken}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a folder, newest (most steps) first."""
    steps = {path: int(match[1]) for path in folder.glob("*.ckpt") if (match := _NAME.search(path.name))}
    return sorted(steps, key=lambda path: -steps[path])


def latest_checkpoint(folder: Path | str) -> Path | None:
    """The newest sound checkpoint of a run; damaged ones are passed over with a warning.

    Args:
        folder: of the checkpoints.

    Returns:
        None where there is none yet.

    Raises:
        UserError: there are checkpoints, but every one is damaged.
    """
    found = list_checkpoints(Path(folder))
    for path in found:
        problem = damage(path)
        if problem is None:
            return path
        warnings.warn(f"the checkpoint {path} is damaged ({problem}); using the one before it", stacklevel=2)
    if found:
        raise UserError(f"every checkpoint in {folder} is damaged: delete the folder to start again")
    return None


class BestWeights(ModelCheckpoint):
    """Keeps the weights of the best validation in the run's folder, for the draft that is handed over."""

    def __init__(self, metric: str) -> None:
        """Choose what is best.

        Args:
            metric: logged in validation; the smallest is best of losses and errors, the largest of all others.
        """
        smallest = any(word in metric for word in ("loss", "ce", "l1", "error"))
        super().__init__(
            filename="best",
            monitor=metric,
            mode="min" if smallest else "max",
            save_weights_only=True,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The folder is known by now."""
        self.dirpath = str(Path(trainer.default_root_dir) / "trainer")
        super().setup(trainer, pl_module, stage)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save where this validation was the best.

        Raises:
            UserError: validation logs no such metric.
        """
        known = [name for name in trainer.callback_metrics if name.startswith("val/")]
        if not trainer.sanity_checking and self.monitor not in known:
            raise UserError(f"run.keep.best is {self.monitor!r}: validation logs {', '.join(sorted(known))}")
        super().on_validation_end(trainer, pl_module)

    def restore(self, trainer: Trainer, draft: torch.nn.Module) -> dict[str, Any]:
        """Give a draft, whole on this rank, the best weights where they are not the last ones.

        Returns:
            Metric, value, step of the best and of the last; empty where nothing was validated.
        """
        path = Path(self.best_model_path)
        if self.best_model_score is None or not path.is_file():
            return {}
        saved = AtomicCheckpointIO().load_checkpoint(path)
        if saved["global_step"] != trainer.global_step:
            weights = {name.removeprefix("draft."): value for name, value in saved["state_dict"].items()}
            draft.load_state_dict(weights)
        return {
            "metric": self.monitor,
            "value": float(self.best_model_score),
            "step": saved["global_step"],
            "last_step": trainer.global_step,
        }


class TrainingCheckpoint(Checkpoint):
    """Saves the whole training state every so many steps, at the end, and on SIGTERM or Ctrl-C.

    The files are the same for every strategy, so a run can continue under another one.
    """

    def __init__(self, folder: str | None = None, every_n_steps: int = 0, keep: int = 2) -> None:
        """Choose when and where.

        Args:
            folder: of the checkpoints; left out, ``trainer`` in the run's folder.
            every_n_steps: optimiser steps between checkpoints; 0 saves at the end (and when it is stopped) only.
            keep: newest checkpoints to keep. With two, a damaged newest one costs ``every_n_steps`` steps.
        """
        if keep < 1:
            raise UserError(f"keep is {keep}: at least 1 checkpoint must be kept")
        if every_n_steps < 0:
            raise UserError(f"every_n_steps is {every_n_steps}: it must be 0 or more")
        self.folder = None if folder is None else Path(folder)
        self.every_n_steps, self.keep = every_n_steps, keep
        self._seen_step = self._saved_step = 0
        self._signal = 0
        self._previous_handlers: dict[int, Any] = {}
        self._group: Any = None

    # -- set-up -------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make every checkpoint of this trainer an atomic one."""
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        if self.folder is None:
            self.folder = Path(trainer.default_root_dir) / "trainer"

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over SIGTERM and Ctrl-C, and take back what the logs say about steps after the checkpoint.

        Lightning answers SIGTERM with a broadcast inside the signal handler and a device synchronisation per
        micro-batch. Here the ranks agree once per optimiser step, on the CPU, and stop at a step boundary.
        """
        self._seen_step = self._saved_step = trainer.global_step
        for logger in trainer.loggers:
            if isinstance(logger, RunCSVLogger) and trainer.global_step:
                logger.rewind(trainer.global_step)
        self._previous_handlers = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)
        }
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        advance_end = epoch_loop.on_advance_end

        def after_step(data_fetcher: Any) -> None:
            skipped = epoch_loop._skip_next_val
            advance_end(data_fetcher)
            if skipped:  # resumed right after a validation: no step was made, and none must be counted
                epoch_loop._batches_that_stepped -= 1
            self._after_step(trainer)

        epoch_loop.on_advance_end = after_step
        if trainer.world_size > 1:
            epoch_loop._broadcast_sigterm_tensor = lambda: None
            self._group = torch.distributed.new_group(backend="gloo")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the signals and the loop back."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
        for name in ("on_advance_end", "_broadcast_sigterm_tensor"):
            vars(trainer.fit_loop.epoch_loop).pop(name, None)

    def _on_signal(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            if self._signal:
                raise KeyboardInterrupt
            say("stopping after this step, to save it; press Ctrl-C again to stop at once")
        self._signal = number

    def _asked_to_stop(self) -> int:
        """Number of the signal that any rank was sent; 0 for none."""
        if self._group is None:
            return self._signal
        asked = torch.tensor(self._signal)
        torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return int(asked.item())

    # -- saving -------------------------------------------------------------------------------------------------

    def _after_step(self, trainer: Trainer) -> None:
        """After an optimiser step, its logging and its validation: save where it is due, stop where asked to.

        Saved at this point, a checkpoint is complete: nothing of the step has to be done again on resuming.
        """
        step = trainer.global_step
        if step == self._seen_step:
            return
        self._seen_step = step
        stop = self._asked_to_stop()
        if stop or (self.every_n_steps and step % self.every_n_steps == 0):
            path = self.save(trainer)
        if stop:
            say(f"stopped after step {step:,} and saved it as {path}: the same command goes on from there")
            raise Preempted(stop)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the final state."""
        if trainer.global_step != self._saved_step:
            self.save(trainer)

    def save(self, trainer: Trainer) -> Path:
        """Save now, then delete all but the newest ``keep``."""
        assert self.folder is not None
        path = self.folder / f"step={trainer.global_step:08d}.ckpt"
        for logger in trainer.loggers:
            logger.save()
        trainer.save_checkpoint(path)
        self._saved_step = trainer.global_step
        if trainer.is_global_zero:
            for old in list_checkpoints(self.folder)[self.keep :]:
                old.unlink()
        return path
