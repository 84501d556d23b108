"""Nothing in a training step waits for a GPU: shown on fake CUDA tensors, without one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """Of a step as it is, and of one that is made to wait."""
    compiler = shutil.which("g++")
    if compiler is None or torch.cuda.is_available():
        pytest.skip("needs g++, and a PyTorch without a GPU")
    guard = tmp_path_factory.mktemp("guard") / "guard.so"
    flags = [
        "-shared",
        "-fPIC",
        "-std=c++20",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    flags += [f"-I{folder}" for folder in include_paths()] + [f"-L{folder}" for folder in library_paths()]
    subprocess.run([compiler, *flags, str(HERE / "guard.cpp"), "-lc10", "-o", str(guard)], check=True)
    command = [sys.executable, str(HERE / "audit.py"), str(guard)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_training_step_waits_for_nothing(waits: list[dict[str, list[str]]]) -> None:
    assert waits[0] == {}


def test_the_audit_sees_blocking_copies_and_waits_for_values(waits: list[dict[str, list[str]]]) -> None:
    assert len(waits[1]["copy cpu to cuda, blocking"]) >= 10
    assert any("masking_utils" in where for where in waits[1]["_local_scalar_dense"])
