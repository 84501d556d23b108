"""A run is one folder; this is how it is begun, described and opened again."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from dspark_train.data.module import DSparkDataModule
from dspark_train.draft.model import DSparkDraft
from dspark_train.errors import UserError
from dspark_train.files import read_json
from dspark_train.target.config import TargetConfig
from dspark_train.target.frozen import FrozenTarget

Stage = Literal["calibrate", "decode", "report"]


@dataclass
class RunConfig:
    """Where a run lands and what follows training.

    Args:
        folder: the run's folder; everything about the run is in it.
        overwrite: delete what an earlier run left in ``folder``.
        minutes: time that the whole command may take, what follows training included. Training then makes as many
            steps as the machine's pace allows, never more than the recipe has, and the schedule follows.
        save_every: optimiser steps between checkpoints; 0 saves at the end only.
        after: stages that run by themselves once training has ended and the draft is exported.
        options: arguments of those stages, by stage, named as on their own command lines.
    """

    folder: str = "checkpoints/run"
    overwrite: bool = False
    minutes: float | None = None
    save_every: int = 0
    after: list[Stage] = field(default_factory=lambda: ["calibrate", "decode", "report"])
    options: dict[Stage, dict[str, Any]] = field(default_factory=dict)


def open_run(config: RunConfig, resolved: dict[str, Any]) -> Path | None:
    """Prepare the run's folder.

    The same command continues a run that was interrupted: where the folder holds an unfinished run of the same
    config, its last checkpoint's folder is returned.

    Args:
        config: of the run.
        resolved: the whole resolved configuration, as it is written to ``config.yaml``.

    Returns:
        The folder of checkpoints to resume from, or None for a fresh start.

    Raises:
        UserError: the folder holds a finished run, or one of another config.
    """
    folder = Path(config.folder)
    text = yaml.safe_dump(resolved, sort_keys=False)
    if folder.exists() and config.overwrite:
        if not (folder / "config.yaml").is_file() and any(folder.iterdir()):
            raise UserError(
                f"run.overwrite: {folder} holds no config.yaml, so it is no run of this tool; not deleted"
            )
        shutil.rmtree(folder)
    resume = None
    if folder.exists() and any(folder.iterdir()):
        previous = folder / "config.yaml"
        finished = is_finished(folder)
        if not previous.is_file() or finished:
            what = "a finished run" if finished else "files that are no run"
            raise UserError(
                f"run.folder {folder} already holds {what}: choose another run.folder, or pass --run.overwrite true"
            )
        if previous.read_text() != text:
            different = _differences(yaml.safe_load(previous.read_text()), resolved)
            raise UserError(
                f"run.folder {folder} holds an unfinished run of another configuration (differs in "
                f"{', '.join(different[:5])}): resume it with its own config.yaml, choose another run.folder, or "
                "pass --run.overwrite true"
            )
        resume = folder / "trainer"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(text)
    return resume


def is_finished(folder: Path) -> bool:
    """Whether a run folder holds a run that has ended."""
    return bool(read_json(folder / "run.json").get("finished"))


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict) and old and new:
        keys = [key for key in old if key in new]  # both are whole: what one lacks belongs to another version
        return [
            name
            for key in keys
            for name in _differences(old.get(key), new.get(key), f"{path}.{key}".strip("."))
        ]
    return [] if old == new else [path or "everything"]


def update_run(folder: Path, **values: Any) -> None:
    """Merge ``values`` into ``run.json`` (dictionaries one level deep), atomically."""
    path = folder / "run.json"
    content = read_json(path)
    for key, value in values.items():
        content[key] = content.get(key, {}) | value if isinstance(value, dict) else value
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(content, indent=2) + "\n")
    aside.replace(path)


def environment() -> dict[str, Any]:
    """Versions, machine and commit, for ``run.json`` and benchmark tables."""
    names = ("dspark-train", "torch", "lightning", "deepspeed", "transformers", "datasets")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "versions": {name: version(name) for name in names} | {"python": platform.python_version()},
        "machine": f"{device}, {torch.get_num_threads()} threads",
        "commit": commit.stdout.strip() or None,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def read_config(run: Path) -> dict[str, Any]:
    """Resolved configuration of a run.

    Raises:
        UserError: the folder is no run.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise UserError(f"{run} is no run folder: it holds no config.yaml (runs are made by `fit`)")
    return yaml.safe_load(path.read_text())


def data_module(config: dict[str, Any], target: FrozenTarget) -> DSparkDataModule:
    """The data of a run, with what the command line links from other sections."""
    linked = {"block_size": config["draft"]["block_size"], "decay": config["objective"]["decay"]}
    settings = config["data"] | linked | {"seed": config["seed_everything"]}
    paths = {name: Path(settings[name]) for name in ("path", "cache_dir") if settings.get(name) is not None}
    data = DSparkDataModule(**(settings | paths))
    data.tokenizer = target.tokenizer
    return data


@dataclass(frozen=True, eq=False)
class Run:
    """A finished training, opened: the pair that decodes, and its data."""

    folder: Path
    config: dict[str, Any]
    target: FrozenTarget
    draft: DSparkDraft
    data: DSparkDataModule


def load_run(run: Path, dtype: Literal["auto", "bfloat16", "float32"] | None = None) -> Run:
    """Open a run for decoding: its target, its exported draft in the same dtype, and its data.

    Args:
        run: the run's folder.
        dtype: of target and draft; None takes the run's own choice for the target.

    Raises:
        UserError: no run, no exported draft, or a damaged one.
    """
    config = read_config(run)
    if not (run / "draft" / "config.json").is_file():
        raise UserError(
            f"{run} holds no exported draft ({run / 'draft'}): finish `fit`, or run `export {run}`"
        )
    settings = TargetConfig(**config["target"])
    if dtype is not None:
        settings.dtype = dtype
    target = FrozenTarget.load(settings, rows=config["draft"]["block_size"] + 1)
    draft: Any = DSparkDraft.load(run / "draft", dtype=target.dtype)
    draft.to(target.device).eval()
    draft.borrow(target)
    return Run(run, config, target, draft, data_module(config, target))
