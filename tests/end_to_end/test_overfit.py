"""One conversation of the real target, learnt by heart: τ reaches γ + 1 in real decoding."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dspark_train.cli.main import main

pytestmark = [pytest.mark.end_to_end, pytest.mark.real_model]

ROOT = Path(__file__).parents[2]


def test_debug_overfit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    words = ["fit", "--config", "configs/debug_overfit.yaml", "--run.folder", str(run)]
    monkeypatch.setattr(sys, "argv", ["dspark-train", *words])
    main()
    decoded = json.loads((run / "decode.json").read_text())
    gamma = json.loads((run / "draft" / "config.json").read_text())["block_size"]
    greedy = decoded["modes"]["greedy"]
    assert decoded["identical"] is True
    # every block is accepted whole; only the last round may be cut short by the end of the answer
    assert greedy["tau"] > gamma + 1 - 0.5
