"""What a newcomer gets wrong: one clear line, status 2, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_data import tiny_conversations, write_rows, write_target

from dspark_train.cli.main import main

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target and data."""
    folder = tmp_path_factory.mktemp("ready")
    write_target(folder / "target")
    write_rows(folder / "rows.jsonl", tiny_conversations())
    return folder


def arguments(ready: Path, run: Path, *more: str) -> list[str]:
    settings = {
        "target.name_or_path": ready / "target",
        "target.layer_ids": "[0,1,2]",
        "target.dtype": "float32",
        "draft.num_layers": 1,
        "draft.block_size": 3,
        "draft.markov_rank": 4,
        "data.path": ready / "rows.jsonl",
        "data.global_batch_size": 4,
        "data.micro_batch_size": 4,
        "data.max_length": 64,
        "data.num_anchors": 4,
        "data.cache_dir": ready / "cache",
        "trainer.accelerator": "cpu",
        "trainer.precision": "32-true",
        "trainer.max_steps": 2,
        "trainer.limit_val_batches": 0,
        "run.folder": run,
        "run.after": "[]",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return ["fit", *flags, *more]


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]) -> str:
    """Run a command line that must be refused; return its one line."""
    monkeypatch.setattr(sys, "argv", ["dspark-train", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, error
    assert "Traceback" not in error
    return lines[0]


def test_missing_config(capsys, monkeypatch) -> None:
    line = refused(capsys, monkeypatch, ["fit", "--config", "configs/quikstart.yaml"])
    assert "quikstart.yaml" in line
    assert "does not exist" in line


def test_unknown_command_names_the_nearest(capsys, monkeypatch) -> None:
    assert "did you mean 'decode'" in refused(capsys, monkeypatch, ["decoed"])


def test_unknown_key_names_the_nearest(capsys, monkeypatch, tmp_path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("draft:\n  num_layer: 3\n")
    line = refused(capsys, monkeypatch, ["fit", "--config", str(config)])
    assert "'draft.num_layer'" in line
    assert "did you mean 'draft.num_layers'" in line
    line = refused(
        capsys, monkeypatch, ["fit", "--config", "configs/quickstart.yaml", "--draft.blok_size", "3"]
    )
    assert "did you mean 'draft.block_size'" in line


def test_wrong_type_and_broken_yaml(capsys, monkeypatch, tmp_path, ready) -> None:
    line = refused(capsys, monkeypatch, arguments(ready, tmp_path / "run", "--draft.num_layers", "many"))
    assert "draft.num_layers" in line
    assert "many" in line
    config = tmp_path / "c.yaml"
    config.write_text("draft: [")
    assert "line" in refused(capsys, monkeypatch, ["fit", "--config", str(config)])


def test_target_without_weights(capsys, monkeypatch, tmp_path, ready) -> None:
    shutil.copytree(ready / "target", tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").unlink()
    words = arguments(ready, tmp_path / "run", "--target.name_or_path", str(tmp_path / "target"))
    assert "no weights" in refused(capsys, monkeypatch, words)


def test_tokenizer_without_a_chat_template(capsys, monkeypatch, tmp_path, ready) -> None:
    shutil.copytree(ready / "target", tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").unlink(missing_ok=True)
    config = tmp_path / "target" / "tokenizer_config.json"
    content = json.loads(config.read_text())
    content.pop("chat_template", None)
    config.write_text(json.dumps(content))
    rows = [{"messages": row["messages"], "split": row["split"]} for row in tiny_conversations(6)]
    path = write_rows(tmp_path / "plain.jsonl", rows)
    words = arguments(
        ready, tmp_path / "run", "--target.name_or_path", str(tmp_path / "target"), "--data.path", str(path)
    )
    assert "chat template" in refused(capsys, monkeypatch, words)


def test_no_supervised_token_in_the_data(capsys, monkeypatch, tmp_path, ready) -> None:
    rows = [{"messages": [{"role": "user", "content": "w1 w2"}], "split": "train"}] * 3
    path = write_rows(tmp_path / "users.jsonl", rows)
    line = refused(capsys, monkeypatch, arguments(ready, tmp_path / "run", "--data.path", str(path)))
    assert "users.jsonl" in line or "supervised" in line


def test_missing_data(capsys, monkeypatch, tmp_path, ready) -> None:
    line = refused(capsys, monkeypatch, arguments(ready, tmp_path / "run", "--data.path", "absent.jsonl"))
    assert "absent.jsonl" in line


def test_last_layer_as_a_tap(capsys, monkeypatch, tmp_path, ready) -> None:
    line = refused(capsys, monkeypatch, arguments(ready, tmp_path / "run", "--target.layer_ids", "[0,3]"))
    assert "last decoder layer" in line


def test_trainer_settings_that_lightning_refuses(capsys, monkeypatch, tmp_path, ready) -> None:
    more = ["--trainer.gradient_clip_algorithm", "sideways"]
    line = refused(capsys, monkeypatch, arguments(ready, tmp_path / "run", *more))
    assert "trainer" in line
    assert "sideways" in line


def test_head_that_cannot_work(capsys, monkeypatch, tmp_path, ready) -> None:
    line = refused(capsys, monkeypatch, arguments(ready, tmp_path / "run", "--draft.head", "none"))
    assert "markov_rank" in line


def test_finished_run_truncated_draft_and_foreign_folder(capsys, monkeypatch, tmp_path, ready) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["dspark-train", *arguments(ready, run)])
    main()
    assert (run / "draft" / "model.safetensors").is_file()
    assert "already holds a finished run" in refused(capsys, monkeypatch, arguments(ready, run))
    weights = run / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "truncated" in refused(capsys, monkeypatch, ["decode", str(run)])
    assert "no run folder" in refused(capsys, monkeypatch, ["decode", str(ready)])
    assert "files that are no run" in refused(capsys, monkeypatch, arguments(ready, ready))
    assert "not deleted" in refused(capsys, monkeypatch, arguments(ready, ready, "--run.overwrite", "true"))
    assert (ready / "rows.jsonl").is_file()


def test_nobody_reads_the_output() -> None:
    """As in ``dspark-train --help | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "dspark_train", "--help"], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
