"""The progress display of training: steps, loss, expected τ, tokens per second, time left."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SHOWN = {
    "train/loss": "loss {:.3f}",
    "train/tau": "τ {:.2f}",
    "val/loss": "held-out loss {:.3f}",
    "val/tau": "held-out τ {:.2f}",
    "decode/tau": "decoded τ {:.2f}",
    "decode/speedup": "speedup {:.2f}×",
    "tokens_per_second": "{:,.0f} tokens/s",
}
"""Logged metrics that the display shows, in this order."""


class TrainingProgress(ProgressBar):
    """One line for the whole run; on a pipe, one line each time that metrics are logged.

    Args:
        plain: print lines even on a terminal.
    """

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.console = Console(file=sys.stdout, soft_wrap=True)
        self.lively = self.console.is_terminal and not plain
        self.bar: Progress | None = None
        self.task = TaskID(0)
        self._printed = -1
        self._enabled = True

    def disable(self) -> None:
        """Show nothing (ranks other than zero)."""
        self._enabled = False

    def enable(self) -> None:
        """Show again."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        total = int(trainer.estimated_stepping_batches)
        if not (self._enabled and self.lively):
            return
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=2,
        )
        self.bar.start()
        self.task = self.bar.add_task("training", total=total, completed=trainer.global_step, metrics="")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance; the values are those that were logged last, so nothing waits for the device."""
        step = trainer.global_step
        if self.bar is not None:
            self.bar.update(self.task, completed=step, metrics=self.describe(trainer))
        elif self._enabled and step != self._printed and step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._printed = step
            total = int(trainer.estimated_stepping_batches)
            self.console.print(f"step {step}/{total}  {self.describe(trainer)}", highlight=False)

    def describe(self, trainer: Trainer) -> str:
        """Text of the metrics that were logged last."""
        values = trainer.logged_metrics
        return "  ".join(text.format(float(values[name])) for name, text in SHOWN.items() if name in values)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        if self._enabled:
            self.console.print(*args, **kwargs)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the terminal as it was."""
        self._stop()

    def _stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
