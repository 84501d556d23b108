"""What the monitor logs, and that its parts add up."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch import Callback

from dspark_train.training.costs import peak_rate
from dspark_train.training.csv_logger import RunCSVLogger
from dspark_train.training.monitor import PARTS, StepClock, StepMonitor


class Norms(Callback):
    """The gradient norm computed independently."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_before_optimizer_step(self, trainer: object, module: torch.nn.Module, optimizer: object) -> None:
        flat = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
        self.values.append(float(flat.norm()))


def test_every_logging_step_has_rate_norm_memory_and_shares(tmp_path: Path) -> None:
    norms = Norms()
    trainer = tiny.tiny_trainer(
        tmp_path,
        max_steps=6,
        log_every_n_steps=2,
        callbacks=[StepMonitor(), norms],
        logger=RunCSVLogger(tmp_path),
        limit_val_batches=1,
        val_check_interval=2,
        check_val_every_n_epoch=None,
    )
    tiny.fit(tiny.tiny_module(), tiny.TinyData(), trainer)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("tokens_per_second")]
    assert len(rows) == 3
    for index, row in enumerate(rows):
        shares = [float(row[f"time/{part}"]) for part in PARTS]
        assert abs(sum(shares) - 1) < 1e-6
        assert min(shares) >= 0
        tokens = float(row["tokens_per_second"]) * float(row["seconds_per_step"])
        assert 8 * 12 <= tokens <= 8 * 40  # of a step: eight sequences
        assert float(row["memory_gib"]) > 0
        assert float(row["lr"]) > 0 or index == 2
        assert float(row["tflops"]) > 0
        assert float(row["skipped_steps"]) == 0
        assert abs(float(row["grad_norm"]) / norms.values[2 * index + 1] - 1) < 1e-4


def test_time_before_the_first_mark_belongs_to_no_part() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.mark("target")
    assert sum(clock.read().values()) == 0
    clock.mark("target")
    assert clock.read()["target"] > 0
    assert sum(clock.read().values()) == 0


class Poison(Callback):
    """Makes the gradients of one step infinite, or not a number."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.weights: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.weights.append(torch.cat([p.detach().flatten() for p in module.draft.parameters()]))

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 2:
            for parameter in module.draft.parameters():
                parameter.grad.view(-1)[0] = self.value


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path: Path, value: float, name: str) -> None:
    poison, logger = Poison(value), RunCSVLogger(tmp_path)
    trainer = tiny.tiny_trainer(tmp_path, max_steps=5, callbacks=[StepMonitor(), poison], logger=logger)
    module = tiny.fit(tiny.tiny_module(optimizer={"name": name}), tiny.TinyData(), trainer)
    before, after = poison.weights[2], poison.weights[3]
    if name == "adamw":
        assert torch.equal(before, after)
    assert not torch.equal(after, poison.weights[4])
    assert all(bool(parameter.isfinite().all()) for parameter in module.draft.parameters())
    with (tmp_path / "metrics.csv").open(newline="") as file:
        counts = [float(row["skipped_steps"]) for row in csv.DictReader(file) if row.get("skipped_steps")]
    assert counts == [0, 0, 1, 1, 1]


def test_gpus_are_known_by_the_names_that_their_drivers_give() -> None:
    for name, peak in (
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-40GB", 312e12), ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA H200", 989e12), ("Tesla T4", None),
    ):  # fmt: skip
        assert peak_rate(name) == peak
