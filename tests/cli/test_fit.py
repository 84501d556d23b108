"""What ``fit`` decides before it starts: dtypes, machine, time."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from jsonargparse import Namespace
from tiny_data import tiny_recipe
from transformers import LlamaConfig

from dspark_train import machine
from dspark_train.cli import fit
from dspark_train.cli.recipe import parse_recipe
from dspark_train.draft.recipe import DraftRecipe
from dspark_train.errors import UserError
from dspark_train.machine import Choice
from dspark_train.run import RunConfig, Stages, environment
from dspark_train.target import frozen


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was chosen before, and nothing is handed on."""
    monkeypatch.setattr(machine, "_decided", {})
    monkeypatch.delenv(fit.CHOICES, raising=False)


def kept(folder: Path, on: str) -> dict[str, dict]:
    """A run that began on another machine."""
    choice = Choice("training (8 rows of 8)", "bfloat16", {"float32": 2.0, "bfloat16": 1.0})
    folder.mkdir()
    content = {"machine": f"{on}, 2 threads", "chosen": {choice.purpose: choice.to_json()}}
    (folder / "run.json").write_text(json.dumps(content))
    return content["chosen"]


def test_a_run_that_moves_to_another_processor_keeps_its_dtypes_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = kept(tmp_path / "run", "Some Other Processor")
    fit.remember_choices(tmp_path / "run", overwrite=False)
    assert machine.decided() == chosen
    assert "began on Some Other Processor, and goes on in the dtypes" in capsys.readouterr().out


def test_at_home_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = kept(tmp_path / "run", environment()["machine"].split(",")[0])
    fit.remember_choices(tmp_path / "run", overwrite=False)
    assert machine.decided() == chosen
    assert capsys.readouterr().out == ""


def test_a_run_that_is_overwritten_measures_anew(tmp_path: Path) -> None:
    kept(tmp_path / "run", "Some Other Processor")
    fit.remember_choices(tmp_path / "run", overwrite=True)
    assert machine.decided() == {}


def test_other_ranks_take_the_first_ones_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Choice("training", "float32", {"float32": 1.0, "bfloat16": 2.0})
    monkeypatch.setenv(fit.CHOICES, json.dumps({"training": choice.to_json()}))
    kept(tmp_path / "run", "Some Other Processor")
    fit.remember_choices(tmp_path / "run", overwrite=False)
    assert list(machine.decided()) == ["training"]


@pytest.mark.parametrize(("winner", "precision"), [("float32", "32-true"), ("bfloat16", "bf16-mixed")])
def test_precision_follows_the_faster_of_two_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, winner: str, precision: str
) -> None:
    times = {"float32": 1.0, "bfloat16": 3.0 if winner == "float32" else 0.3}
    monkeypatch.setattr(
        machine, "fastest", lambda purpose, forms: Choice(purpose, min(times, key=times.__getitem__), times)
    )
    monkeypatch.setattr(machine, "tune", lambda: None)
    monkeypatch.setattr(fit, "read_target_config", lambda target: LlamaConfig(hidden_size=64))
    config = SimpleNamespace(
        trainer=SimpleNamespace(accelerator="cpu", precision=None),
        target=SimpleNamespace(dtype="float32"),
        draft=DraftRecipe(num_key_value_heads=2),
    )
    fit.choose_forms(config)
    assert config.trainer.precision == precision


@pytest.mark.parametrize("winner", ["float32", "float32, packed", "bfloat16"])
def test_a_target_is_loaded_in_the_form_that_was_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, winner: str
) -> None:
    monkeypatch.setattr(
        frozen, "fastest", lambda purpose, forms: Choice(purpose, winner, dict.fromkeys(forms, 1.0))
    )
    name = tiny_recipe(tmp_path)["target"]["name_or_path"]
    target = frozen.FrozenTarget.load(name)
    assert target.dtype == (torch.bfloat16 if winner == "bfloat16" else torch.float32)
    assert str(target.form).startswith("the target's passes")


def test_bfloat16_is_no_choice_for_decoding_where_rows_round_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered: list[str] = []

    def faked(purpose: str, forms: dict) -> Choice:
        offered.extend(forms)
        return Choice(purpose, next(iter(forms)))

    monkeypatch.setattr(frozen, "fastest", faked)
    monkeypatch.setattr(frozen, "rows_stand_alone", lambda dtype: False)
    frozen.choose_form(LlamaConfig(hidden_size=64), torch.device("cpu"), rows=6)
    assert offered == ["float32"]
    monkeypatch.setattr(frozen, "rows_stand_alone", lambda dtype: True)
    frozen.choose_form(LlamaConfig(hidden_size=64), torch.device("cpu"), rows=6)
    assert offered == ["float32", "float32", "bfloat16"]


def test_time_is_set_aside_for_what_follows_training() -> None:
    options = {"calibrate": {"seconds": 150}, "decode": {"seconds": 50}}
    run = RunConfig(minutes=25, options=options)  # type: ignore[arg-type]
    assert fit.training_seconds(run) == 25 * 60 - 150 - 50 - 2 * fit.OVERHEAD
    assert fit.training_seconds(RunConfig(minutes=25, after=[])) == 1500
    with pytest.raises(UserError, match=r"run.minutes is 4, and calibrate, decode, report take about"):
        fit.training_seconds(RunConfig(minutes=4, options=options))  # type: ignore[arg-type]


def recipe(folder: Path) -> Namespace:
    sections = tiny_recipe(folder) | {"trainer": {"accelerator": "cpu", "max_steps": 5}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(sections | {"run": {"folder": str(folder)}}))
    return parse_recipe(["--config", str(folder / "tiny.yaml")])


def test_too_little_memory_or_disk_is_said_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe(tmp_path)
    assert "needs about" in fit.check_resources(config)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "free_memory", lambda: 2**30)
        with pytest.raises(UserError, match=r"needs about .* GiB of memory, and 1.0 GiB are free: close"):
            fit.check_resources(config)
    monkeypatch.setattr(fit.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"the disk of .* has 0.0 GiB free: choose another run.folder"):
        fit.check_resources(config)


@pytest.mark.parametrize(
    ("after", "splits", "missing"),
    [
        ("calibrate,decode", "train,calibration,test", None),
        ("decode,report", "train,calibration,validation", "'test' is empty, and `decode` reads it"),
        ("calibrate", "train,test", "'calibration' is empty, and `calibrate` reads it"),
        ("report", "train", None),
    ],
)
def test_splits_that_stages_read_are_asked_for_before_training(
    after: str, splits: str, missing: str | None
) -> None:
    data = SimpleNamespace(path="rows.jsonl", prepared=SimpleNamespace(splits=splits.split(",")))
    module = SimpleNamespace(draft=SimpleNamespace(confidence_head=object()))
    asking = fit.SplitsForStages(RunConfig(after=Stages.parse(after)))
    with pytest.raises(UserError, match=missing) if missing else nullcontext():
        asking.on_fit_start(SimpleNamespace(datamodule=data), module)  # type: ignore[arg-type]


def test_a_trial_chooses_by_validation() -> None:
    decode = {"temperatures": [0.0]}
    run = RunConfig(options={"decode": decode})
    assert fit.stage_settings(run) == {"decode": decode}
    run.trial = True
    assert fit.stage_settings(run) == {"decode": {"split": "validation", **decode}}
    run.options["decode"] = {"split": "train"}
    assert fit.stage_settings(run) == {"decode": {"split": "train"}}


@pytest.mark.parametrize("given", ["decode,report", "[decode, report]"])
def test_stages_after_training_are_a_list_in_either_form(tmp_path: Path, given: str) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_recipe(tmp_path)))
    words = ["--config", str(tmp_path / "tiny.yaml"), "--trainer.accelerator=gpu"]
    assert list(parse_recipe([*words, f"--run.after={given}"]).run.after) == ["decode", "report"]
    with pytest.raises(UserError, match=r"stages \(calibrate, decode, report\) with commas between"):
        parse_recipe([*words, "--run.after=decod"])


@pytest.mark.parametrize(("given", "wanted"), [(10, 40), (0.5, 0.5), (None, None)])
def test_validations_are_counted_in_optimiser_steps(given: float | None, wanted: float | None) -> None:
    """Lightning counts micro-batches: here four of them make a step. A share of an epoch stays one."""
    trainer = SimpleNamespace(world_size=2, val_check_interval=given, loggers=[], default_root_dir="nowhere")
    data = SimpleNamespace(accumulation=lambda ranks: 8 // ranks)
    cli = SimpleNamespace(trainer=trainer, datamodule=data, model=SimpleNamespace())
    fit.DSparkCLI.before_fit(cli)  # type: ignore[arg-type]
    assert trainer.accumulate_grad_batches == 4
    assert trainer.val_check_interval == wanted


def test_slurm_tasks_get_their_cores() -> None:
    script = (Path(__file__).parents[2] / "configs" / "slurm.sbatch").read_text()
    assert "#SBATCH --cpus-per-task=" in script
    assert '--cpus-per-task="$SLURM_CPUS_PER_TASK"' in script.split("srun ", 1)[1]
