"""Every kind of draft through the whole command: trained, decoded without loss, exported, read back."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from tiny_data import tiny_recipe

from dspark_train.cli.main import main
from dspark_train.draft.kinds import load_draft

pytestmark = pytest.mark.end_to_end
KINDS = {
    "eagle3": {"draft": {"kind": "eagle3", "num_layers": 1, "block_size": 3}},
    "dflash": {
        "draft": {
            "head": "none",
            "markov_rank": 0,
            "confidence_head": False,
            "confidence_with_markov": False,
        },
        "objective": {"ce": 1.0, "tv": 0.0, "confidence": 0.0},
    },
}


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["dspark-train", *map(str, words)])
    main()


def write(folder: Path, changes: dict) -> Path:
    base = tiny_recipe(folder)
    if "kind" in changes["draft"]:
        base["draft"] = {}
    config = base | {name: base.get(name, {}) | section for name, section in changes.items()}
    config["trainer"] = {"accelerator": "cpu", "precision": "32-true", "max_steps": 4, "log_every_n_steps": 1}
    config["run"] = {"folder": str(folder / "run")}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    return folder / "tiny.yaml"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_goes_all_the_way(kind, tmp_path, monkeypatch):
    run = tmp_path / "run"
    call(monkeypatch, "fit", "--config", write(tmp_path, KINDS[kind]))
    header = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/loss", "train/tau", "train/accept_3"} <= set(header)
    decoded = json.loads((run / "decode.json").read_text())
    assert decoded["identical"] is True
    assert decoded["modes"]["greedy"]["tau"] >= 1
    layout = "native" if kind == "eagle3" else "dflash"
    call(monkeypatch, "export", run, "--format", layout, "--output", tmp_path / "exported")
    if kind == "eagle3":
        assert load_draft(tmp_path / "exported").config.ttt_length == 3


def test_the_loss_falls(tmp_path, monkeypatch):
    config = write(tmp_path, KINDS["eagle3"])
    call(
        monkeypatch, "fit", "--config", config, "--trainer.max_steps", "40", "--run.after", "[]",
        "--optimizer.lr", "0.01",
    )  # fmt: skip
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("train/loss")
    losses = [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("option", ["head: gated", "markov_rank: 64", "num_layers: 3", "vocab_size: 50"])
def test_options_of_another_kind_are_refused(option, tmp_path, monkeypatch, capsys):
    name, value = option.split(": ")
    changes = {"draft": KINDS["eagle3"]["draft"] | {name: yaml.safe_load(value)}}
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, "fit", "--config", write(tmp_path, changes))
    assert stopped.value.code == 2
    assert f"draft.kind eagle3 has no draft.{name}" in capsys.readouterr().err
