"""`fit` from another project's draft: its backbone is where training starts, and it is no resuming."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny_data import tiny_recipe

from dspark_train.cli.main import main

pytestmark = pytest.mark.end_to_end


def fit(folder: Path, run: str, *flags: str) -> Path:
    words = ["dspark-train", "fit", "--config", str(folder / "tiny.yaml"), f"--run.folder={folder / run}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*words, *flags])
        main()
    return folder / run / "draft"


def without_heads(draft: Path, folder: Path) -> Path:
    """Rewrite a run's draft as a published DFlash draft."""
    raw = json.loads((draft / "config.json").read_text())
    raw["dflash_config"] = {name: raw.pop(name) for name in ("mask_token_id", "target_layer_ids")}
    raw = {name: value for name, value in raw.items() if not name.startswith(("markov", "sample_from"))}
    raw |= {"architectures": ["DFlashDraftModel"], "block_size": raw["block_size"] + 1}
    heads = ("embed_tokens", "lm_head", "markov_head", "confidence_head")
    tensors = load_file(draft / "model.safetensors")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({n: t for n, t in tensors.items() if not n.startswith(heads)}, folder / "model.safetensors")
    return folder


def test_training_starts_from_a_foreign_backbone_with_new_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        **tiny_recipe(tmp_path),
        "trainer": {
            "accelerator": "cpu",
            "precision": "32-true",
            "max_steps": 3,
            "val_check_interval": None,
            "log_every_n_steps": 1,
        },
        "run": {"after": []},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    source = without_heads(fit(tmp_path, "first"), tmp_path / "dflash")
    still = ["--optimizer.lr=1e-12", "--trainer.max_steps=1", "--seed_everything=5"]
    started = load_file(fit(tmp_path, "second", *still, f"--init_from={source}") / "model.safetensors")
    for name, value in load_file(source / "model.safetensors").items():
        torch.testing.assert_close(started[name], value, rtol=0, atol=1e-6)
    printed = capsys.readouterr().out
    assert f"starting from {source} (dflash)" in printed
    assert "note: new: confidence_head, markov_head" in printed
    first = load_file(tmp_path / "first" / "draft" / "model.safetensors")
    new = [name for name in started if name.startswith(("markov_head.markov_w1", "confidence_head.proj.w"))]
    assert len(new) == 2
    assert all(not torch.allclose(started[name], first[name], atol=1e-3) for name in new)
    with (tmp_path / "second" / "metrics.csv").open() as file:
        steps = [row["step"] for row in csv.DictReader(file)]
    assert steps == ["0"]  # not the first run's schedule gone on
