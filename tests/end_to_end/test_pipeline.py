"""Whole commands on a tiny model: fit with everything after it, and each stage as a command of its own."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tiny_data import tiny_recipe

from dspark_train.cli.main import main
from dspark_train.decoding.decoder import generate
from dspark_train.draft.config import EVERYTHING, Sight
from dspark_train.draft.model import DSparkDraft
from dspark_train.run import Run

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ready")
    config = {
        **tiny_recipe(folder),
        "trainer": {
            "accelerator": "cpu",
            "precision": "32-true",
            "max_steps": 6,
            "log_every_n_steps": 2,
            "val_check_interval": 3,
            "check_val_every_n_epoch": None,
            "gradient_clip_val": 1.0,
        },
        "run": {"folder": str(folder / "run")},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    return folder


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["dspark-train", *map(str, words)])
    main()


@pytest.fixture(scope="module")
def run(ready: Path) -> Path:
    """A finished run with all stages after training."""
    with pytest.MonkeyPatch.context() as patch:
        call(patch, "fit", "--config", ready / "tiny.yaml")
    return ready / "run"


def test_a_run_holds_everything(run: Path) -> None:
    for name in ("config.yaml", "run.json", "metrics.csv", "decode.json", "calibration.json", "report.html"):
        assert (run / name).is_file(), name
    facts = json.loads((run / "run.json").read_text())
    assert facts["finished"] is True
    assert facts["data"]["splits"]["train"]["supervised"] > 0
    assert list((run / "trainer").glob("*.ckpt"))
    assert list((run / "traces").glob("*.safetensors"))
    header = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/loss", "train/tau", "train/accept_1", "val/loss", "val/tau"} <= set(header)


def test_calibration_is_in_the_engines_layout(run: Path) -> None:
    content = json.loads((run / "calibration.json").read_text())
    assert len(content["temperatures"]) == 3
    assert all(temperature > 0 for temperature in content["temperatures"])
    assert {"dataset", "num_samples", "ece_before", "ece_after"} <= set(content)


def test_decoding_is_lossless_in_fp32(run: Path) -> None:
    content = json.loads((run / "decode.json").read_text())
    assert content["dtype"] == "float32"
    assert content["identical"] is True
    greedy = content["modes"]["greedy"]["identical"]
    assert greedy["prompts"] == greedy["of"] > 0


def test_config_of_a_run_makes_it_again(run: Path, ready: Path, monkeypatch, tmp_path) -> None:
    call(
        monkeypatch,
        "fit",
        "--config",
        run / "config.yaml",
        "--run.folder",
        tmp_path / "again",
        "--run.after",
        "[]",
    )
    first, second = DSparkDraft.load(run / "draft"), DSparkDraft.load(tmp_path / "again" / "draft")
    for (name, a), (_, b) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_stages_are_commands_of_their_own(run: Path, monkeypatch) -> None:
    for name in ("decode.json", "calibration.json", "report.html"):
        (run / name).unlink()
    call(monkeypatch, "calibrate", run)
    call(monkeypatch, "decode", run, "--graphs", "true")
    call(monkeypatch, "report", run)
    call(monkeypatch, "export", run)
    for name in ("decode.json", "calibration.json", "report.html", "export/native/config.json"):
        assert (run / name).is_file(), name


def test_a_draft_of_its_own_shape_goes_all_the_way(ready: Path, monkeypatch, tmp_path) -> None:
    """Windows in one of two layers, heads and widths unlike the target's, scaled rope: trained to served."""
    run, rope = tmp_path / "run", "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 64}"
    words = ["fit", "--config", ready / "tiny.yaml", "--run.folder", run, "--run.after", "[decode]"]
    words += ["--draft.num_layers", 2, "--draft.sliding_window", 8, "--draft.full_attention_layers", "[1]"]
    words += ["--draft.num_attention_heads", 3, "--draft.num_key_value_heads", 3, "--draft.head_dim", 32]
    call(monkeypatch, *words, "--draft.intermediate_size", 40, "--draft.rope", rope)
    assert json.loads((run / "decode.json").read_text())["identical"] is True
    draft = DSparkDraft.load(run / "draft")
    assert draft.config.sights == (Sight(8, causal=True), EVERYTHING)
    assert draft.rotary.attention_scaling > 1
    call(monkeypatch, "export", run, "--format", "speculators")
    target = yaml.safe_load((ready / "tiny.yaml").read_text())["target"]["name_or_path"]
    call(
        monkeypatch,
        "import",
        run / "export" / "speculators",
        tmp_path / "back",
        "--target.name_or_path",
        target,
    )
    back = DSparkDraft.load(tmp_path / "back")
    assert (back.config.sights, back.config.rope_parameters) == (
        draft.config.sights,
        draft.config.rope_parameters,
    )
    for name, value in draft.state_dict().items():
        torch.testing.assert_close(back.state_dict()[name].float(), value.float(), rtol=0, atol=1e-2)


def test_flags_win_over_files(ready: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "dspark-train",
            "fit",
            "--config",
            str(ready / "tiny.yaml"),
            "--draft.num_layers",
            "2",
            "--print_config",
        ],
    )
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["draft"]["num_layers"] == 2


def test_validate(ready: Path, monkeypatch, capsys) -> None:
    call(monkeypatch, "validate", "--config", ready / "tiny.yaml", "--run.folder", ready / "validated")
    assert "val/tau" in capsys.readouterr().out


def test_validating_a_draft_finds_what_its_training_found(
    run: Path, ready: Path, monkeypatch, capsys
) -> None:
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    trained = float([row["val/tau"] for row in rows if row["val/tau"]][-1])
    words = ["validate", "--config", ready / "tiny.yaml", "--init_from", run / "draft"]
    call(monkeypatch, *words, "--run.folder", ready / "validated")
    found = re.search(r"val/tau\D+([\d.]+)", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) == pytest.approx(trained, abs=1e-4)


def test_wandb_offline(ready: Path, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    overlay = Path(__file__).parents[2] / "configs" / "wandb.yaml"
    words = ["fit", "--config", ready / "tiny.yaml", "--config", overlay, "--run.folder", tmp_path / "run"]
    words += ["--trainer.logger.init_args.save_dir", tmp_path, "--run.after", "[decode]"]
    call(monkeypatch, *words)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert (tmp_path / "run" / "metrics.csv").is_file()


def test_a_conversation(run: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("w1 w2\n/plain\nw3\n/reset\n/nonsense\n" + "w4 " * 400 + "\n")
    )
    call(monkeypatch, "chat", run, "--max_new_tokens", "12")
    out = capsys.readouterr().out
    assert "tokens/s with the draft" in out
    assert "times as fast" in out
    assert "decoding plainly" in out
    assert "unknown command /nonsense" in out
    assert "/reset forgets the conversation" in out  # the last message is longer than the target's context


def test_generate_answers_as_the_target_alone(run: Path, monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / "prompts.txt").write_text("w1 w2 w3\nw9\n")
    words = ("--file", tmp_path / "prompts.txt", "--max_new_tokens", "12")
    call(monkeypatch, "generate", run, *words, "--output", tmp_path / "answers.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    target = Run(run).target
    for row, prompt in zip(rows, ("w1 w2 w3", "w9"), strict=True):
        asked = [{"role": "user", "content": prompt}]
        ids = target.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        (tokens,) = generate(target, None, [ids], max_new_tokens=12).tokens
        assert row["messages"] == [
            *asked,
            {"role": "assistant", "content": target.tokenizer.decode(tokens, skip_special_tokens=True)},
        ]


def test_generate_from_an_exported_draft(run: Path, ready: Path, monkeypatch, capsys, tmp_path) -> None:
    call(monkeypatch, "export", run, "--output", tmp_path / "native")
    words = ("--prompt", "w1", "--max_new_tokens", "8")
    call(monkeypatch, "generate", tmp_path / "native", "--target", ready / "target", *words)
    assert "τ" in capsys.readouterr().out
    named = tmp_path / "named"
    shutil.copytree(tmp_path / "native", named)
    card = (named / "README.md").read_text()
    (named / "README.md").write_text(card.replace("tags:", f"base_model: {ready / 'target'}\ntags:", 1))
    call(monkeypatch, "generate", named, *words)
    assert "τ" in capsys.readouterr().out
    for refused, reason in (
        ((tmp_path / "native", *words), "--target"),
        ((tmp_path / "nowhere", *words), "no such folder"),
        ((run,), "--prompt TEXT or --file FILE"),
        ((run, "--target", "another", *words), "names its own target"),
    ):
        with pytest.raises(SystemExit) as stopped:
            call(monkeypatch, "generate", *refused)
        assert stopped.value.code == 2
        assert reason in capsys.readouterr().err
