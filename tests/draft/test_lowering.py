"""FlexAttention finds a kernel for every micro-batch. No GPU is needed, but Triton is, whose parts Inductor chooses."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "lowering.py"
BLOCKS = [[1], [4], [5], [8], [18], [19], [40, 25]]
"""Per sequence. Up to four and from 19 on, any kernel would do; between, the decoding kernel has no valid form."""
HEADS = [[8, 8], [32, 8], [40, 8], [16, 2]]
"""Of queries, and of keys and values: one, four, five and eight queries share a key."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (pip install triton)")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/draft/test_flex.py runs the kernels themselves")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_every_micro_batch_has_a_kernel() -> None:
    words = [sys.executable, str(SCRIPT), json.dumps(BLOCKS), json.dumps(HEADS)]
    path = os.pathsep.join(part for part in sys.path if part)
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(BLOCKS) * len(HEADS)
    assert {said for _, _, said in found} == {"lowered"}, found
