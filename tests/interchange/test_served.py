"""A real engine on an exported draft: the benchmark's comparison, where an environment with vLLM exists."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "served_acceptance.py"
INTERPRETER = os.environ.get("VLLM_PYTHON")
"""Of an environment with vLLM."""


@pytest.mark.end_to_end
@pytest.mark.skipif(not INTERPRETER, reason="VLLM_PYTHON names no interpreter with vLLM")
def test_vllm_accepts_what_this_decoder_accepts(tmp_path: Path) -> None:
    words = ["--only", "tied matrices", "--max-tokens", "16", "--work", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--vllm", str(INTERPRETER), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    # the script's exit status is 0 only where completions and acceptance are equal in every layout
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| tiny Qwen3, tied matrices")]
    assert len(rows) == 2
