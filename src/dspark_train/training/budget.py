"""Training within a budget of time: as many steps as the machine's pace allows, and the schedule fitted to them."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from dspark_train.errors import UserError
from dspark_train.progress import say
from dspark_train.training.feature_cache import FeatureCache, Filling

PLAN_EVERY = 10
"""Optimiser steps between two plans."""
_RECENT = 3
"""Intervals between plans that the pace is the mean of."""


class TimeBudget(Callback):
    """Ends training in time: measures its pace, and plans the number of steps anew every few of them.

    Never more steps than the recipe's own ``max_steps``. Validations keep their share of the way: one that the recipe
    has in the middle stays in the middle. Time counts over resumed processes.

    Args:
        seconds: from the start of the process to the end of training.
        started: ``time.monotonic()`` at the start of the process.
    """

    def __init__(self, seconds: float, started: float | None = None) -> None:
        self.seconds = seconds
        self.planned: int | None = None
        """Steps of the run, as planned last."""
        self.recipe_steps = 0
        self.remaining: float | None = None
        """Seconds that the rest of training takes, validations included; None before the first plan."""
        self._started = time.monotonic() if started is None else started
        self._before = 0.0
        self._paces: list[float] = []
        self._validation_seconds: float | None = None
        self._validations = 0
        self._interval = 0.0
        self._by_epoch: list[int] = []

    # -- what a checkpoint holds ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Time used and steps planned, for a checkpoint."""
        return {"elapsed": self.elapsed(), "planned": self.planned, "validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what was left."""
        self._before, self.planned = state_dict["elapsed"], state_dict["planned"]
        self._validations = state_dict["validations"]

    def elapsed(self) -> float:
        """Seconds used, those of interrupted processes included."""
        return self._before + time.monotonic() - self._started

    # -- measuring --------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the plan of the checkpoint, or with the recipe's own number."""
        most = trainer.estimated_stepping_batches
        if most == float("inf"):
            raise UserError(
                "run.minutes needs the recipe's own end too, beyond which no time is used: set trainer.max_steps or "
                "trainer.max_epochs"
            )
        self.recipe_steps = int(most)
        batches = (trainer.val_check_batch if trainer.limit_val_batches else None) or float("inf")
        if trainer.check_val_every_n_epoch is None:
            self._interval = float(batches) / trainer.accumulate_grad_batches
        else:
            self._by_epoch = self._validations_by_epoch(trainer, float(batches))
        self._apply(trainer, pl_module, self.planned or self.recipe_steps)
        self._mark(trainer, pl_module)

    def _mark(self, trainer: Trainer, module: Any) -> None:
        filling = _filling(module)
        self._last = (trainer.global_step, time.monotonic(), filling.seconds)
        self._paused = 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is no part of a step's pace."""
        if trainer.sanity_checking:
            return
        self._validation_began, self._filled_before = time.monotonic(), _filling(pl_module).seconds

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember what a validation takes, and when the next one is due."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        took = time.monotonic() - self._validation_began
        step, begun, filled = self._last  # what validation computed is part of the pause already
        self._last = step, begun, filled + _filling(pl_module).seconds - self._filled_before
        self._validation_seconds, self._paused = took, self._paused + took
        self._validations += 1
        self._apply(trainer, pl_module, self.planned or self.recipe_steps, validated=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Plan anew, every few steps."""
        step = trainer.global_step
        begun_step, begun, filled = self._last
        if step - begun_step < PLAN_EVERY:
            return
        module: Any = pl_module
        spent = time.monotonic() - begun - self._paused - (_filling(module).seconds - filled)
        self._paces = [*self._paces[-_RECENT + 1 :], max(0.0, spent) / (step - begun_step)]
        self._mark(trainer, pl_module)
        steps = trainer.strategy.broadcast(self.plan(trainer, module))
        self._apply(trainer, pl_module, int(steps))

    # -- planning ---------------------------------------------------------------------------------------------------

    def plan(self, trainer: Trainer, module: Any) -> int:
        """Steps of the whole run that fit into the time that is left."""
        step, left = trainer.global_step, self.seconds - self.elapsed()
        pace = sum(self._paces) / len(self._paces)
        filling, data = _filling(module), trainer.datamodule  # type: ignore[attr-defined]
        lengths = data.store(data.train_split).lengths
        ranks = trainer.world_size  # which fill side by side
        per_token = filling.seconds / filling.tokens / ranks if filling.tokens else 0.0
        step_tokens = float(lengths.mean()) * data.global_batch_size
        whole = float(lengths.sum())
        validation = self._validation_seconds
        if validation is None:  # none yet: its states have to be computed, its passes are a third of a step's
            held_out = data.store(data.val_split).lengths if self._due(self.recipe_steps) else lengths[:0]
            validation = per_token * float(held_out.sum()) + pace * len(held_out) / data.global_batch_size / 3

        def needed(total: int) -> float:
            missing = max(0.0, min(whole, total * step_tokens) - filling.held * ranks)
            checks = len(self._due(total)) - self._validations
            return (total - step) * pace + missing * per_token + max(0, checks) * validation

        low, high = step, self.recipe_steps
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if needed(middle) <= left else (low, middle - 1)
        steps = max(low, min(step + 1, self.recipe_steps))
        self.remaining = needed(steps)
        return steps

    def _validations_by_epoch(self, trainer: Trainer, batches: float) -> list[int]:
        """Steps after which validations come that Lightning places in every so many epochs."""
        per_epoch, every = int(trainer.num_training_batches), int(trainer.check_val_every_n_epoch or 1)
        places = range(1, int(per_epoch / batches) + 1)
        epochs = range(every, self.recipe_steps * trainer.accumulate_grad_batches // per_epoch + 1, every)
        return [
            round(((epoch - 1) * per_epoch + place * batches) / trainer.accumulate_grad_batches)
            for epoch in epochs
            for place in places
        ]

    def _due(self, total: int) -> list[int]:
        """Steps after which a run of ``total`` steps is validated."""
        if self._by_epoch:
            return [step for step in self._by_epoch if step <= total]
        if not 0 < self._interval <= self.recipe_steps:
            return []
        count = int(self.recipe_steps / self._interval)
        return [
            max(1, round(total * self._interval * (place + 1) / self.recipe_steps)) for place in range(count)
        ]

    def _apply(self, trainer: Trainer, module: Any, steps: int, validated: bool = False) -> None:
        """Let loop, schedule and validation follow a plan; ``validated``: a validation has just ended."""
        if self.planned is not None and steps < self.recipe_steps and self.planned == self.recipe_steps:
            say(
                f"the time allows about {steps:,} of the recipe's {self.recipe_steps:,} steps; the schedule follows"
            )
        self.planned = steps
        trainer.fit_loop.epoch_loop.max_steps = steps
        if module.schedule is not None:
            module.schedule.total_steps = steps
        due = self._due(steps)[self._validations :]
        if (
            due and not self._by_epoch
        ):  # at the latest now: a new plan may have moved it to a step that is over
            earliest = trainer.global_step + validated
            trainer.val_check_batch = max(due[0], earliest) * trainer.accumulate_grad_batches


def _filling(module: Any) -> Filling:
    source = module.source
    return source.filling if isinstance(source, FeatureCache) else Filling()
