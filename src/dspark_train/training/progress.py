"""The progress display of training: steps, loss, expected τ, tokens per second, time left."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from dspark_train.progress import Stage, say, stage
from dspark_train.training.budget import TimeBudget

SHOWN = {
    "train/loss": "loss {:.3f}",
    "train/tau": "τ {:.2f}",
    "val/loss": "validation loss {:.3f}",
    "val/tau": "validation, expected τ {:.2f}",
    "decode/tau": "decoded τ {:.2f}",
    "decode/speedup": "speedup {:.2f}×",
    "tokens_per_second": "{:,.0f} tokens/s",
}
"""Logged metrics that the display shows, in this order."""


class TrainingProgress(ProgressBar):
    """Training and validation as stages of :mod:`dspark_train.progress`."""

    def __init__(self) -> None:
        super().__init__()
        self._training, self._validation = ExitStack(), ExitStack()
        self._shown: Stage | None = None
        self._checked: Stage | None = None
        self._budget: TimeBudget | None = None
        self._text = ""

    def disable(self) -> None:
        """Only the first rank shows anything in any case."""

    def enable(self) -> None:
        """Only the first rank shows anything in any case."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the steps from here on."""
        budgets = [one for one in trainer.callbacks if isinstance(one, TimeBudget)]  # type: ignore[attr-defined]
        self._budget = budgets[0] if budgets else None
        self._shown = self._training.enter_context(
            stage("training", steps_of(trainer, pl_module), "steps", trainer.global_step)
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance; values are read once after a logging step, so nothing waits for the device between."""
        if self._shown is not None and trainer.global_step != self._shown.done:
            every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
            if every == 1 or trainer.global_step % every == 1:
                self._text = self.describe(trainer)
            self._shown.remaining = None if self._budget is None else self._budget.remaining
            self._shown.update(trainer.global_step, self._text, steps_of(trainer, pl_module))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the batches of a validation."""
        total = sum(int(count) for count in trainer.num_val_batches if count != float("inf"))
        self._checked = self._validation.enter_context(stage("validation conversations", total, "batches"))

    def on_validation_batch_end(self, *arguments: Any, **named: Any) -> None:
        """Advance."""
        if self._checked is not None:
            self._checked.advance()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what it found."""
        self._validation.close()
        say(f"step {trainer.global_step}: {self.describe(trainer, ('val/', 'decode/'))}")

    def describe(self, trainer: Trainer, prefixes: tuple[str, ...] = ("",)) -> str:
        """Text of the metrics that were logged last, those with one of ``prefixes``."""
        values = trainer.logged_metrics
        shown = (name for name in SHOWN if name in values and name.startswith(prefixes))
        return "  ".join(SHOWN[name].format(float(values[name])) for name in shown)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        say(" ".join(str(arg) for arg in args))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the terminal as it was."""
        self._training.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the terminal as it was."""
        self._validation.close()
        self._training.close()


def steps_of(trainer: Trainer, module: Any) -> int | None:
    """Steps of the run, as the schedule has them now."""
    schedule = getattr(module, "schedule", None)
    return int(trainer.estimated_stepping_batches) if schedule is None else schedule.total_steps
