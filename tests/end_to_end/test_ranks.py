"""``fit`` on two processes: whole, and ended by a rank that dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_data import tiny_recipe

pytestmark = pytest.mark.end_to_end

DYING = """
import os, signal
from lightning.pytorch import Callback

class DieOnRankOne(Callback):
    def on_before_backward(self, trainer, *_):
        if trainer.global_step == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def fit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``fit`` as a user starts it; more than two minutes count as hanging."""
    return subprocess.run(
        [sys.executable, "-m", "dspark_train", "fit", "--config", str(folder / "ranks.yaml"), *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "dying.py").write_text(DYING)
    config = {
        **tiny_recipe(folder),
        "draft": {"num_layers": 1, "block_size": 3, "markov_rank": 4, "init": "linear"},
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": "ddp",
            "precision": "32-true",
            "max_steps": 4,
            "callbacks": [
                {
                    "class_path": "dspark_train.training.cache_builder.CacheFeatures",
                    "init_args": {"keep": False},
                }
            ],
        },
        "run": {"folder": str(folder / "run")},
    }
    (folder / "ranks.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_two_processes_share_a_run_and_one_finishes_it(ready: Path) -> None:
    done = fit(ready)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((ready / "run" / "run.json").read_text())["finished"] is True
    assert (ready / "run" / "report.html").is_file()
    assert not (ready / "run" / "feature_cache").exists()


def test_a_rank_that_dies_ends_the_others(ready: Path) -> None:
    folder = ready / "dead"
    callbacks = '[{"class_path": "dying.DieOnRankOne"}]'
    done = fit(ready, "--run.folder", str(folder), "--trainer.callbacks", callbacks)
    assert done.returncode != 0
    left = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True).stdout.split()
    assert not left
