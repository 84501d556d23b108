"""A record of Weights & Biases, offline, read back from its file."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tiny_data import tiny_recipe

pytestmark = pytest.mark.end_to_end


def train(folder: Path, *words: str, **variables: str) -> None:
    command = [sys.executable, "-m", "dspark_train", "fit", "--config", str(folder / "tiny.yaml"), *words]
    env = os.environ | variables
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


def records_of(file: Path) -> Iterator[bytes]:
    """Records of a log in LevelDB's format, as W&B writes it: blocks of 32 KiB, long records in several parts."""
    content, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def read_back(folder: Path) -> tuple[dict, dict, list[str], list[str]]:
    """Configuration, summary, artifacts and ids of the records that lie in a folder."""
    from wandb.proto import wandb_internal_pb2

    config, summary, artifacts, ids = {}, {}, [], []
    for file in sorted(folder.rglob("*.wandb")):
        for data in records_of(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.append(record.run.run_id)
            if kind in ("config", "run"):
                updates = record.config if kind == "config" else record.run.config
                config |= {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in updates.update}
            if kind == "summary":
                summary |= {
                    i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.summary.update
                }
            if kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
                artifacts.append(record.request.log_artifact.artifact.name)
            if kind == "artifact":
                artifacts.append(record.artifact.name)
    return config, summary, artifacts, ids


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked")
    trainer = {"accelerator": "cpu", "precision": "32-true", "max_steps": 4, "log_every_n_steps": 1}
    logger = {"project": "tiny", "offline": True, "save_dir": str(folder), "log_model": True}
    config = {
        **tiny_recipe(folder),
        "trainer": {
            **trainer,
            "logger": {
                "class_path": "lightning.pytorch.loggers.WandbLogger",
                "init_args": logger,
            },
        },
        "run": {"folder": str(folder / "run"), "save_every": 2},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    train(folder)
    return folder


def test_the_record_holds_recipe_results_and_draft(record):
    config, summary, artifacts, ids = read_back(record / "wandb")
    assert config["draft"]["block_size"] == 3
    assert config["environment"]["versions"]["torch"]
    assert "train/loss" in summary
    kinds = {name.removesuffix("/_type"): kind for name, kind in summary.items() if name.endswith("/_type")}
    assert {kinds[name] for name in ("decoding", "acceptance", "calibration")} == {"table-file"}
    assert kinds["plots/reliability_greedy"] == "image-file"
    assert kinds["report"] == "html-file"
    assert summary["greedy/accepted_length"] >= 1
    assert [name for name in artifacts if name.startswith("draft-")]
    facts = json.loads((record / "run" / "run.json").read_text())
    assert set(ids) == {facts["wandb"]}


def test_a_resumed_run_goes_on_with_its_record(record):
    facts = json.loads((record / "run" / "run.json").read_text())
    first = facts["wandb"]
    (record / "run" / "run.json").write_text(json.dumps(facts | {"finished": False}))
    train(record)
    assert set(read_back(record / "wandb")[3]) == {first}


def test_a_sweep_names_the_folder_by_its_record(record):
    sweep = yaml.safe_load((Path(__file__).parents[2] / "configs/sweep.yaml").read_text())
    words = [word for word in sweep["command"] if not word.startswith("${")]
    assert words[:4] == ["python", "-m", "dspark_train", "fit"]
    (folder,) = (word.partition("=")[2] for word in words if word.startswith("--run.folder="))
    (record / "tiny.yaml").write_text((record / "tiny.yaml").read_text().replace(str(record / "run"), folder))
    train(
        record, "--trainer.max_steps", "1", "--run.after", "[]", WANDB_RUN_ID="abcd1234", WANDB_SWEEP_ID="s1"
    )
    facts = json.loads((record / "checkpoints/sweep/abcd1234/run.json").read_text())
    assert facts["wandb"] == "abcd1234"
