"""Nothing that is set is lost: honoured, or refused in a line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace
from safetensors.torch import load_file
from tiny_data import tiny_recipe

from dspark_train.cli.fit import check_trainer
from dspark_train.cli.main import main
from dspark_train.cli.parsing import configs_first, run_command
from dspark_train.cli.recipe import parse_recipe
from dspark_train.errors import UserError


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    sections: dict[str, Any] = tiny_recipe(folder)
    sections["trainer"] = {
        "accelerator": "cpu",
        "precision": "32-true",
        "max_steps": 40,
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
        "callbacks": [
            {
                "class_path": "lightning.pytorch.callbacks.EarlyStopping",
                "init_args": {"monitor": "val/loss", "patience": 2},
            },
            {
                "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                "init_args": {
                    "dirpath": str(folder / "mine"),
                    "filename": "{step}",
                    "save_top_k": -1,
                    "monitor": "val/loss",
                },
            },
        ],
    }
    sections["data"]["micro_batch_size"] = 4
    sections["optimizer"] = {"lr": 3.0}  # it diverges, so the first validation is the best
    sections["run"] = {"folder": str(folder / "run"), "after": [], "keep": {"best": "val/loss"}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(sections))
    return folder


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["dspark-train", *words])
    main()


def test_a_users_callbacks_work_and_the_best_draft_is_handed_over(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, "fit", "--config", str(recipe / "tiny.yaml"))
    best = json.loads((recipe / "run" / "run.json").read_text())["best"]
    assert best["metric"] == "val/loss"
    assert best["step"] < best["last_step"] < 40, "EarlyStopping ended training"
    saved = {path: torch.load(path, weights_only=True) for path in (recipe / "mine").glob("*.ckpt")}
    assert len(saved) >= 3, "the user's ModelCheckpoint saved at every validation"
    weights = next(one["state_dict"] for one in saved.values() if one["global_step"] == best["step"])
    draft = load_file(recipe / "run" / "draft" / "model.safetensors")
    same = [name for name in draft if f"draft.{name}" in weights]
    assert same
    assert all(torch.equal(draft[name], weights[f"draft.{name}"]) for name in same)
    said = capsys.readouterr().out
    assert f"the draft is that of step {best['step']}" in said
    assert "training  " in said, (
        "our progress, not Lightning's silent bar, is shown beside a user's callbacks"
    )
    written = {path.parent for path in (recipe / "run").rglob("*.ckpt")}
    assert written == {recipe / "run" / "trainer"}, "Lightning's own checkpoints are left out"


def test_validating_a_finished_runs_config_validates_its_draft(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recipe / "run"
    before = (run / "metrics.csv").read_text()
    best = json.loads((run / "run.json").read_text())["best"]
    command(monkeypatch, "validate", "--config", str(run / "config.yaml"))
    said = capsys.readouterr().out
    assert f"validating the draft of {run}" in said
    assert f"{best['value']:.4f}"[:5] in said
    assert (run / "metrics.csv").read_text() == before
    elsewhere = ["--run.folder", str(recipe / "nowhere")]
    command(monkeypatch, "validate", "--config", str(run / "config.yaml"), *elsewhere)
    assert "validating a fresh, untrained draft" in capsys.readouterr().out


def test_a_flag_before_the_config_wins_too(recipe: Path) -> None:
    flags = ["--draft.num_layers", "2", "--config", str(recipe / "tiny.yaml"), "--trainer.accelerator=gpu"]
    assert parse_recipe(flags).draft.num_layers == 2
    assert configs_first(["--a", "1", "--config=x", "--b", "--config", "y", "--c"]) == [
        "--config",
        "x",
        "--config",
        "y",
        "--a",
        "1",
        "--b",
        "--c",
    ]


def trainer(**more: Any) -> Namespace:
    return Namespace(
        {"accumulate_grad_batches": 1, "max_steps": -1, "max_epochs": None, "max_time": None} | more
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"accumulate_grad_batches": 4},
            "accumulate_grad_batches is 4: it follows from data.global_batch_size",
        ),
        ({"max_epochs": -1}, "training has no last step"),
        ({"max_time": "00:01:00:00"}, "training has no last step"),
    ],
)
def test_what_would_be_lost_or_cannot_work_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_trainer(trainer(**settings))
    check_trainer(trainer(max_epochs=2))
    check_trainer(trainer(max_steps=5, max_epochs=-1))


def test_a_vocabulary_beyond_the_targets_is_refused(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", str(recipe / "tiny.yaml"), "--draft.vocab_size", "5000"]
    with pytest.raises(SystemExit):
        command(monkeypatch, "fit", *words, "--run.folder", str(recipe / "other"))
    assert "draft.vocab_size is 5000, and the target's vocabulary has 97 tokens" in capsys.readouterr().err


@dataclass
class PairOptions:
    """Two that go by their place."""

    run: Path
    """First."""
    url: str
    """Second."""
    limit: int = 8
    """By name."""


@pytest.mark.parametrize(
    "words",
    ["R U --limit 3", "R --url U --limit 3", "--limit 3 --run R U", "--url=U --run=R --limit=3"],
)
def test_arguments_by_place_may_be_named(words: str) -> None:
    found: list[PairOptions] = []

    def pair(options: PairOptions) -> None:
        found.append(options)

    pair.__annotations__ = {"options": PairOptions, "return": None}
    run_command(pair, words.split(), "pair")
    assert found == [PairOptions(Path("R"), "U", 3)]
