"""``make gpu-check`` on a CPU: the script that is prepared for a GPU runs, and no part of it can stop the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, time
sys.modules |= dict.fromkeys(("deepspeed", "datasets", "jsonargparse"))  # as if they were not installed
sys.path.insert(0, {benchmarks!r})
import gpu_check
gpu_check.PARTS["hangs"] = (lambda *_: time.sleep(60), 2)
gpu_check.PARTS["crashes"] = (lambda *_: __import__("os").abort(), 9)
sys.argv = ["gpu_check", "--device", "cpu", "--output", {output!r}]
sys.exit(gpu_check.main())
"""


def test_every_part_runs_on_a_cpu_without_what_a_lent_machine_may_lack(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    script = SCRIPT.format(benchmarks=str(ROOT / "benchmarks"), output=str(output))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stderr[-3000:]  # two parts were made to fail
    parts = json.loads(output.read_text())["parts"]
    status = {name: part["status"] for name, part in parts.items()}
    assert status.pop("hangs") == "failed: not done in 2 s"
    assert status.pop("crashes").startswith("failed: exit status")
    assert status.pop("resuming").startswith("left out: import of deepspeed")
    assert status == dict.fromkeys(["correctness", "waits", "training", "decoding", "cache"], "ok")
    assert parts["training"]["found"]["ms"].keys() >= {"target", "draft", "objective", "backward", "mask"}
    assert "| objective · W2 |" in done.stdout
