"""Recipes by name, the doctor, and lists on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from tiny_data import tiny_recipe

import dspark_train
from dspark_train import machine
from dspark_train.cli import doctor
from dspark_train.cli.doctor import DoctorOptions
from dspark_train.cli.main import main
from dspark_train.cli.recipe import parse_recipe
from dspark_train.cli.recipes import config_file, data_file, recipes_of
from dspark_train.errors import UserError


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["dspark-train", *words])
    main()


def test_recipes_are_listed_shown_and_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, "recipes")
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for folder in ("configs", "data_prep") for name in recipes_of(folder))
    run(monkeypatch, "recipes", "show", "debug_overfit")
    shown = capsys.readouterr().out
    run(monkeypatch, "recipes", "copy", "debug_overfit", "--to", "mine/own.yaml")
    assert (tmp_path / "mine" / "own.yaml").read_text() == shown
    with pytest.raises(SystemExit):
        run(monkeypatch, "recipes", "copy", "debug_overfit", "--to", "mine/own.yaml")
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(monkeypatch, "recipes", "show", "debug_overfti")
    assert "did you mean 'debug_overfit'" in capsys.readouterr().err


def test_a_recipe_is_given_by_name_in_any_folder_its_data_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    parsed = parse_recipe(["--config", "debug_overfit", "--trainer.accelerator=gpu"])
    assert Path(parsed.data.path).is_file()
    assert config_file("quickstart", "data_prep") == str(recipes_of("data_prep")["quickstart"])
    (tmp_path / "quickstart").write_text("")  # a user's own file of that name wins
    assert config_file("quickstart") == "quickstart"
    assert config_file("nowhere.yaml") == "nowhere.yaml"
    assert data_file(Path("nowhere.jsonl")) == Path("nowhere.jsonl")


def test_an_installed_package_has_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configs = tmp_path / "dspark_train" / "shipped" / "configs"
    configs.mkdir(parents=True)
    (configs / "one.yaml").write_text("a: 1\n")
    monkeypatch.setattr(dspark_train, "__file__", str(tmp_path / "dspark_train" / "__init__.py"))
    assert config_file("one") == str(configs / "one.yaml")
    assert config_file("configs/one.yaml") == str(configs / "one.yaml")


@pytest.mark.parametrize("given", ["0,2", "[0, 2]"])
def test_tapped_layers_are_a_list_in_either_form(tmp_path: Path, given: str) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_recipe(tmp_path)))
    words = ["--config", str(tmp_path / "tiny.yaml"), "--trainer.accelerator=gpu"]
    assert list(parse_recipe([*words, f"--target.layer_ids={given}"]).target.layer_ids) == [0, 2]
    with pytest.raises(UserError, match="whole numbers with commas between"):
        parse_recipe([*words, "--target.layer_ids=0,x"])


def test_the_doctor_says_what_is_here_and_what_would_stop_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "_decided", {})
    monkeypatch.setattr(machine, "free_memory", lambda: 64 * 2**30)
    monkeypatch.setattr(doctor, "NEEDED_DISK", 0)
    doctor.doctor(DoctorOptions(tmp_path, offline=True))
    said = capsys.readouterr().out
    for part in ("torch", "machine", "cores", "training (", "memory free", "disk free, runs", "vllm"):
        assert part in said, part
    assert said.endswith("nothing here would stop the quickstart\n")
    monkeypatch.setattr(machine, "free_memory", lambda: 2**30)
    with pytest.raises(SystemExit) as stopped:
        doctor.doctor(DoctorOptions(tmp_path, offline=True))
    assert stopped.value.code == 1
    assert "would stop a run: the quickstart needs about 5 GiB of memory" in capsys.readouterr().out
