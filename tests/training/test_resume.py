"""Interrupted at any step and started again, a run ends as if nothing had happened."""

from __future__ import annotations

import csv
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch import Callback

from dspark_train.errors import UserError
from dspark_train.training.checkpointing import (
    AtomicCheckpointIO,
    Preempted,
    TrainingCheckpoint,
    damage,
    latest_checkpoint,
    list_checkpoints,
)
from dspark_train.training.csv_logger import RunCSVLogger

STEPS = 13
"""Two and a half epochs of five steps, with a shorter last batch in each."""


class Crash(BaseException):
    """Stands for a kill: nothing is saved on the way out."""


class CrashAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Crash


class SignalAt(CrashAt):
    def __init__(self, step: int, number: int) -> None:
        super().__init__(step)
        self.number = number

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and signal.getsignal(self.number) is not signal.SIG_DFL:
            os.kill(os.getpid(), self.number)
            self.step = -1


class Order(Callback):
    """Records which samples each step saw, and at which rate."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[list[int], float]]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        samples = batch.batch.tokens.sample_ids.tolist()
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.setdefault(trainer.global_step, []).append((samples, rate))


def start(folder: Path, every: int, *extra: Callback, micro: int = 4, **options: Any) -> tuple[Any, Order]:
    """The same command each time: resumes where there is something to resume from."""
    order = Order()
    trainer = tiny.tiny_trainer(
        folder,
        max_steps=STEPS,
        callbacks=[order, *extra, TrainingCheckpoint(every_n_steps=every)],
        enable_checkpointing=True,
        logger=RunCSVLogger(folder),
        **({"val_check_interval": 3, "check_val_every_n_epoch": None, "limit_val_batches": None} | options),
    )
    data = tiny.TinyData(37, micro_batch_size=micro)
    if options.get("check_val_every_n_epoch") is None:
        trainer.val_check_interval = 3 * data.accumulation(1)
    resume = latest_checkpoint(folder / "trainer")
    module = tiny.fit(
        tiny.tiny_module(), data, trainer, ckpt_path=resume, weights_only=True if resume else None
    )
    return module, order


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [dict(sorted(row.items())) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], Order]:
    folder = tmp_path_factory.mktemp("whole")
    module, order = start(folder, 1)
    return folder, tiny.weights_of(module), order


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 6, 9, 10, 12])
def test_interrupted_at_any_step_a_run_ends_the_same(step: int, whole: Any, tmp_path: Path) -> None:
    """Bitwise the same weights, metrics, sample order and rates; steps 3, 6, … end with a validation, 5 and 10
    end an epoch.
    """
    folder, weights, order = whole
    with pytest.raises(Crash):
        start(tmp_path, 1, CrashAt(step))
    module, rest = start(tmp_path, 1)
    assert module.trainer.global_step == STEPS
    for name, value in tiny.weights_of(module).items():
        assert torch.equal(value, weights[name]), name
    assert rest.seen == {key: value for key, value in order.seen.items() if key >= step}
    assert rows(tmp_path) == rows(folder)


def test_steps_since_the_last_checkpoint_are_repeated_and_logged_once(whole: Any, tmp_path: Path) -> None:
    folder, weights, _ = whole
    for step in (7, 9):
        with pytest.raises(Crash):
            start(tmp_path, 4, CrashAt(step))
    module, _ = start(tmp_path, 4)
    assert all(torch.equal(value, weights[name]) for name, value in tiny.weights_of(module).items())
    assert rows(tmp_path) == rows(folder)


def test_every_step_and_every_validation_is_logged(whole: Any) -> None:
    found = rows(whole[0])
    assert len([row for row in found if row["train/loss"]]) == STEPS
    assert len([row for row in found if row["val/loss"]]) == STEPS // 3


def test_max_steps_is_exact_and_the_end_is_saved(whole: Any) -> None:
    folder, _, order = whole
    assert len(order.seen) == STEPS
    assert [path.name for path in list_checkpoints(folder / "trainer")] == [
        f"step={STEPS:08d}.ckpt",
        f"step={STEPS - 1:08d}.ckpt",
    ]


def test_a_finished_run_is_not_trained_further(whole: Any, tmp_path: Path) -> None:
    start(tmp_path, 5)
    module, order = start(tmp_path, 5)
    assert order.seen == {}
    assert module.trainer.global_step == STEPS


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_says_so_and_exits(
    number: int, status: int, whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, weights, _ = whole
    before = signal.getsignal(number)
    with pytest.raises(Preempted) as raised:
        start(tmp_path, 0, SignalAt(6, number))
    assert raised.value.code == status
    assert signal.getsignal(number) == before
    said = capsys.readouterr().out
    assert "stopped after step 7 and saved it as" in said
    assert "the same command goes on from there" in said
    assert [path.name for path in list_checkpoints(tmp_path / "trainer")] == ["step=00000007.ckpt"]
    module, order = start(tmp_path, 0)
    assert min(order.seen) == 7
    assert all(torch.equal(value, weights[name]) for name, value in tiny.weights_of(module).items())


def test_a_truncated_checkpoint_is_passed_over_with_a_warning(whole: Any, tmp_path: Path) -> None:
    folder, weights, _ = whole
    with pytest.raises(Crash):
        start(tmp_path, 3, CrashAt(8))
    newest = list_checkpoints(tmp_path / "trainer")[0]
    newest.write_bytes(newest.read_bytes()[:-1000])
    with pytest.warns(UserWarning, match=r"step=00000006\.ckpt is damaged"):
        module, order = start(tmp_path, 3)
    assert min(order.seen) == 3
    assert all(torch.equal(value, weights[name]) for name, value in tiny.weights_of(module).items())
    assert rows(tmp_path) == rows(folder)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "step=00000001.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weight": torch.arange(1000.0)}, path)
    assert damage(path) is None
    content = bytearray(path.read_bytes())
    place = bytes(content).index(torch.arange(1000.0).numpy().tobytes()[400:440])
    content[place] ^= 1
    path.write_bytes(bytes(content))
    assert damage(path) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UserError, match="every checkpoint"):
            latest_checkpoint(tmp_path)


def test_a_kill_while_writing_leaves_the_former_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "step=00000001.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    former = path.read_bytes()

    def killed(*_: Any) -> None:
        raise Crash

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(Crash):
        AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert path.read_bytes() == former
    assert list_checkpoints(tmp_path) == [path]


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_a_strangers_checkpoint_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trainer" / "step=00000001.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "callbacks": Payload()}, path)
    with pytest.raises(UserError, match="could run code and is not opened"):
        AtomicCheckpointIO().load_checkpoint(path, weights_only=False)
    with pytest.raises(UserError, match="could run code and is not opened"):
        start(tmp_path, 1)
    assert not (tmp_path / "ran").exists()


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "trainer") is None


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match="keep is 0"):
        TrainingCheckpoint(keep=0)
    with pytest.raises(UserError, match="every_n_steps is -1"):
        TrainingCheckpoint(every_n_steps=-1)
