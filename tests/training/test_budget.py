"""A budget of time: as many steps as the pace allows, and a schedule that ends with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback

from dspark_train.training import budget as module
from dspark_train.training.budget import TimeBudget
from dspark_train.training.cache_builder import CacheFeatures
from dspark_train.training.feature_cache import FeatureCache, Filling


class Clock(Callback):
    """Time that passes in steps and validations only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: float = 1.0, validation: float = 0.0) -> None:
        self.now, self.step, self.validation = 100.0, step, validation
        self.validated: list[int] = []
        self.rates: list[float] = []
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.now += self.step
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        self.now += self.validation
        self.validated.append(trainer.global_step)


def run(folder: Path, clock: Clock, seconds: float, steps: int = 100, **options: Any) -> Any:
    budget = TimeBudget(seconds)
    trainer = tiny.tiny_trainer(
        folder,
        max_steps=steps,
        callbacks=[clock, budget],
        limit_val_batches=1,
        val_check_interval=steps // 2,
        check_val_every_n_epoch=None,
        **options,
    )
    tiny.fit(tiny.tiny_module(), tiny.TinyData(16), trainer)
    return trainer, budget


def test_a_fast_machine_makes_the_recipes_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    trainer, budget = run(tmp_path, clock, seconds=1000, steps=40)
    assert trainer.global_step == budget.planned == 40
    assert clock.validated == [20, 40]


def test_a_slow_machine_makes_fewer_and_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 seconds, two of which each of two validations takes: 56 steps of a second, give or take a plan."""
    clock = Clock(monkeypatch, validation=2.0)
    trainer, _ = run(tmp_path, clock, seconds=60)
    assert 54 <= trainer.global_step <= 57
    assert clock.now - 100 <= 61
    assert clock.validated[-1] == trainer.global_step
    assert abs(clock.validated[0] - trainer.global_step / 2) <= 3
    assert len(clock.validated) == 2
    assert clock.rates[-1] < 0.02 * max(clock.rates)


def test_validations_by_epoch_are_planned_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs of two steps; every fifth ends with a validation of five seconds: 40 steps and four of them in 60."""
    clock, budget = Clock(monkeypatch, validation=5.0), TimeBudget(60)
    trainer = tiny.tiny_trainer(
        tmp_path, max_steps=100, callbacks=[clock, budget], limit_val_batches=1, check_val_every_n_epoch=5
    )
    tiny.fit(tiny.tiny_module(), tiny.TinyData(16), trainer)
    assert clock.validated == list(range(10, trainer.global_step + 1, 10))
    assert 38 <= trainer.global_step <= 41
    assert clock.now - 100 <= 61


def test_a_machine_that_slows_down_still_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slowing(Clock):
        def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
            self.step = 1.0 if trainer.global_step < 30 else 3.0
            super().on_train_batch_start(trainer, *rest)

    clock = Slowing(monkeypatch)
    trainer, _ = run(tmp_path, clock, seconds=90)
    assert clock.now - 100 <= 95
    assert 44 <= trainer.global_step <= 52


def test_time_counts_over_resumed_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    first = TimeBudget(60)
    clock.now += 25
    first.planned = 70
    second = TimeBudget(60)
    second.load_state_dict(first.state_dict())
    clock.now += 10
    assert second.elapsed() == pytest.approx(35)
    assert second.planned == 70


def at_step(step: int, pace: float, seconds: float, filling: Filling, recipe: int = 1000) -> int:
    """What a budget plans after ``step`` steps at a pace, 160 samples of 100 tokens, 16 a step."""
    budget = TimeBudget(seconds, started=module.time.monotonic())
    budget.recipe_steps, budget._paces, budget._interval = recipe, [pace], float("inf")
    lengths = np.full(160, 100)
    data = SimpleNamespace(
        store=lambda split: SimpleNamespace(lengths=lengths, __len__=lambda: 160),
        train_split="train",
        val_split="train",
        global_batch_size=16,
    )
    source = object.__new__(FeatureCache)
    source.filling = filling
    budget._validation_seconds = 0.0
    trainer = SimpleNamespace(global_step=step, datamodule=data, world_size=1)
    return budget.plan(trainer, SimpleNamespace(source=source))  # type: ignore[arg-type]


def test_states_that_are_still_to_be_computed_cost_their_time() -> None:
    """Half of an epoch is missing: 8,000 tokens at 100 a second are 80 seconds less for steps of a second."""
    half = Filling(tokens=8_000, seconds=80.0, held=8_000)
    full = Filling(tokens=16_000, seconds=160.0, held=16_000)
    assert abs(at_step(5, 1.0, 300, full) - 305) <= 1
    assert abs(at_step(5, 1.0, 300, half) - 225) <= 1


@given(
    step=st.integers(1, 900),
    pace=st.floats(0.01, 10),
    seconds=st.floats(1, 5000),
    more=st.floats(0, 5000),
    held=st.integers(0, 16_000),
)
def test_plans_grow_with_the_time_and_never_leave_the_recipe(
    step: int, pace: float, seconds: float, more: float, held: int
) -> None:
    filling = Filling(tokens=max(1, held), seconds=held / 100, held=held)
    less, longer = at_step(step, pace, seconds, filling), at_step(step, pace, seconds + more, filling)
    assert step + 1 <= less <= longer + 1
    assert longer <= 1000


def test_states_that_a_validation_computes_are_no_part_of_a_steps_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second a step, three for each of 40 samples once, and for each of 6 held-out ones at the first validation."""
    clock = Clock(monkeypatch, step=1.0)
    original, paces = FeatureCache._run, []

    def slow(self: FeatureCache, batch: Any) -> Any:
        clock.now += 3.0 * len(batch)
        return original(self, batch)

    monkeypatch.setattr(FeatureCache, "_run", slow)
    monkeypatch.setattr("dspark_train.training.feature_cache.time.perf_counter", lambda: clock.now)
    plan = TimeBudget.plan
    monkeypatch.setattr(TimeBudget, "plan", lambda self, *a: (paces.extend(self._paces), plan(self, *a))[1])
    trainer = tiny.tiny_trainer(
        tmp_path,
        max_steps=60,
        limit_val_batches=1,
        val_check_interval=15,
        check_val_every_n_epoch=None,
        callbacks=[CacheFeatures(str(tmp_path / "cache")), clock, TimeBudget(1000)],
    )
    tiny.fit(tiny.tiny_module(), tiny.TinyData(40), trainer)
    assert trainer.global_step == 60
    assert paces == pytest.approx([1.0] * len(paces))


def test_with_a_cache_the_first_epoch_is_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which only the target's passes take time: 40 samples once, then steps for nothing."""
    clock = Clock(monkeypatch, step=0.0)
    original = FeatureCache._run

    def slow(self: FeatureCache, batch: Any) -> Any:
        clock.now += 2.0 * len(batch)
        return original(self, batch)

    monkeypatch.setattr(FeatureCache, "_run", slow)
    monkeypatch.setattr("dspark_train.training.feature_cache.time.perf_counter", lambda: clock.now)
    budget = TimeBudget(500)
    callbacks = [CacheFeatures(str(tmp_path / "cache")), clock, budget]
    trainer = tiny.tiny_trainer(tmp_path, max_steps=60, callbacks=callbacks)
    tiny.fit(tiny.tiny_module(), tiny.TinyData(40), trainer)
    assert trainer.global_step == 60
    assert clock.now == pytest.approx(100 + 80)
