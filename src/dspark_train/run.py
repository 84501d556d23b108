"""A run is one folder. Here it is begun, described and read; what its files are called stands here alone."""

from __future__ import annotations

import csv
import json
import math
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from dspark_train.errors import UserError
from dspark_train.files import read_json
from dspark_train.lists import Listed
from dspark_train.progress import stage

if TYPE_CHECKING:
    from dspark_train.data.module import DSparkDataModule
    from dspark_train.data.tokenize import ConversationEncoder
    from dspark_train.draft.kinds import Draft
    from dspark_train.structures import DecodingTrace
    from dspark_train.target.frozen import FrozenTarget

Stage = Literal["calibrate", "decode", "report"]


def _stage(word: str) -> str:
    if word not in get_args(Stage):
        raise ValueError(word)
    return word


class Stages(Listed[Stage]):
    """Stages that follow training."""

    kind = _stage
    plural = f"stages ({', '.join(get_args(Stage))})"


@dataclass
class Keep:
    """Which states of a run are kept."""

    best: str | None = "val/tau"
    """Metric of the validation whose best weights become the run's draft; null hands over the last ones."""
    last: int = 2
    """Newest checkpoints to resume from; with two, a damaged one costs ``run.save_every`` steps."""


@dataclass
class RunConfig:
    """Where a run lands and what follows training."""

    folder: str = "checkpoints/run"
    """The run's folder; everything about the run is in it."""
    overwrite: bool = False
    """Delete what an earlier run left in ``folder``."""
    minutes: float | None = None
    """Time that the whole command may take, what follows training included. Training then makes as many steps as the
    machine's pace allows, never more than the recipe has, and the schedule follows."""
    save_every: int = 0
    """Optimiser steps between checkpoints; 0 saves at the end only."""
    keep: Keep = field(default_factory=Keep)
    """Which states are kept: the best weights for the draft, the last checkpoints to resume from."""
    after: Stages = Stages(("calibrate", "decode", "report"))
    """Stages that run by themselves once training has ended and the draft is exported, with commas between."""
    trial: bool = False
    """One of several runs to choose from (``ablate`` sets it): ``decode`` reads the validation split, so that the test
    split has chosen nothing."""
    options: dict[Stage, dict[str, Any]] = field(default_factory=dict)
    """Arguments of those stages, by stage, named as on their own command lines."""


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
        finished = Run(folder).finished
        if not previous.is_file() or finished:
            what = "a finished run" if finished else "files that are no run"
            raise UserError(
                f"run.folder {folder} already holds {what}: choose another run.folder, or pass --run.overwrite true"
            )
        different = _differences(yaml.safe_load(previous.read_text()), resolved)
        if different:
            raise UserError(
                f"run.folder {folder} holds an unfinished run of another configuration (differs in "
                f"{', '.join(different[:5])}): resume it with its own config.yaml, choose another run.folder, or "
                "pass --run.overwrite true"
            )
        resume = folder / "trainer"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(text)
    return resume


_FREE = ("run.options", "data.template")
"""Sections whose keys the user chooses; all others are whole in every version."""


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict) and path not in _FREE:
        keys = [key for key in old if key in new]  # both are whole: what one lacks belongs to another version
        return [
            name
            for key in keys
            for name in _differences(old.get(key), new.get(key), f"{path}.{key}".strip("."))
        ]
    return [] if old == new else [path or "everything"]


def environment() -> dict[str, Any]:
    """Versions, machine and commit, for ``run.json`` and benchmark tables."""
    import torch

    names = ("dspark-train", "torch", "lightning", "deepspeed", "transformers", "datasets")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    commit = ""
    if git := shutil.which("git"):
        asked = [git, "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "versions": {name: version(name) for name in names} | {"python": platform.python_version()},
        "machine": f"{device}, {torch.get_num_threads()} threads",
        "commit": commit or None,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


Dtype = Literal["auto", "bfloat16", "float32"]
Curve = list[tuple[float, float]]
"""(step, value), in order of steps."""

CALIBRATION_REPORT = "calibration_report.json"
"""Name of the file of what calibration found."""
STS_FILE = "calibration.json"
"""Confidence scalings in the form that engines read, in a run and beside an exported draft."""
BORROWED = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
"""Tensors of an exported draft that training did not make: the target's own, and vocabulary maps."""


def sampling_label(temperature: float, top_k: int = 0, top_p: float = 1.0) -> str:
    """Name of a way of sampling in file names: ``greedy``, ``t1.0``, ``t1.0_k20``, ``t0.7_k20_p0.95``.

    Two ways of sampling have one name where they sample alike: at temperature 0 the best token is taken, whatever
    ``top_k`` and ``top_p`` are.
    """
    if temperature == 0:
        return "greedy"
    cut = (f"_k{top_k}" if top_k else "") + (f"_p{float(top_p)}" if top_p < 1 else "")
    return f"t{float(temperature)}{cut}"


@dataclass(frozen=True, eq=False)
class Run:
    """One run's folder. Each file is read when it is asked for; what the run has not made is empty.

    A file that is there and cannot be read is a :class:`UserError` that names it. Results whose types belong to later
    packages are read by these, from the paths that stand here.
    """

    path: Path
    dtype: Dtype | None = None
    """Of target and draft; None takes the run's own choice for the target."""

    @classmethod
    def existing(cls, path: Path, dtype: Dtype | None = None) -> Run:
        """A run of which there is something to read.

        Raises:
            UserError: the folder does not exist, or holds nothing of a run.
        """
        run = cls(path, dtype)
        if not path.is_dir():
            raise UserError(f"run {path} does not exist: no such folder; give the folder that `fit` wrote")
        files = ("config.yaml", "run.json", "metrics.csv", "draft/config.json")
        some = (*(path / name for name in files), run.decode_path, run.calibration_report_path)
        folders = ("traces/*.safetensors", "studies/*.json", "evaluation/*.json")
        if not any(file.is_file() for file in some) and not any(any(path.glob(name)) for name in folders):
            raise UserError(f"{path} holds nothing of a run (no config.yaml, metrics.csv, decode.json, …)")
        return run

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    # -- how it was made ---------------------------------------------------------------------------------------

    @property
    def facts(self) -> dict[str, Any]:
        """``run.json``: versions, machine, commit, data, wall times. Read anew each time."""
        return read_json(self.path / "run.json")

    def update(self, **values: Any) -> None:
        """Merge ``values`` into ``run.json`` (dictionaries one level deep), atomically."""
        content = self.facts
        for key, value in values.items():
            content[key] = content.get(key, {}) | value if isinstance(value, dict) else value
        path = self.path / "run.json"
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(content, indent=2) + "\n")
        aside.replace(path)

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return bool(self.facts.get("finished"))

    @property
    def fit_seconds(self) -> float | None:
        """Wall time of training; None where the run does not say."""
        seconds = self.facts.get("wall_seconds", {}).get("fit")
        return float(seconds) if seconds else None

    @property
    def confidence_shift(self) -> float:
        """How far an earlier version's calibration has moved the bias of the draft's confidence head; else 0."""
        return float(self.facts.get("confidence_shift", 0.0))

    @cached_property
    def config_text(self) -> str:
        """``config.yaml`` as it stands."""
        path = self.path / "config.yaml"
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """``config.yaml``, the resolved configuration."""
        path = self.path / "config.yaml"
        try:
            value = yaml.safe_load(self.config_text) if self.config_text else {}
        except yaml.YAMLError as error:
            raise UserError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from error
        if not isinstance(value, dict):
            raise UserError(f"{path} must hold a mapping, not {type(value).__name__}")
        return value

    def required_config(self) -> dict[str, Any]:
        """The configuration of a folder that must have one.

        Raises:
            UserError: the folder is no run.
        """
        if not self.config:
            raise UserError(f"{self.path} is no run folder: it holds no config.yaml (runs are made by `fit`)")
        return self.config

    @cached_property
    def metrics(self) -> dict[str, Curve]:
        """``metrics.csv``: one curve per column."""
        return read_metrics(self.path / "metrics.csv")

    # -- the pair that decodes ---------------------------------------------------------------------------------

    @cached_property
    def _pair(self) -> tuple[FrozenTarget, Draft]:
        from dspark_train.draft.kinds import load_draft
        from dspark_train.target.config import TargetConfig
        from dspark_train.target.frozen import FrozenTarget

        config = self.required_config()
        if not (self.draft_path / "config.json").is_file():
            raise UserError(
                f"{self.path} holds no exported draft ({self.draft_path}): finish `fit`, or run `export {self.path}`"
            )
        settings = TargetConfig(**config["target"])
        settings.sharding = "none"  # there are no ranks to share it
        if self.dtype is not None:
            settings.dtype = self.dtype
        with stage("loading target and draft"):
            target = FrozenTarget.load(settings, rows=config["draft"]["block_size"] + 1)
            draft: Any = load_draft(self.draft_path, dtype=target.dtype)
        draft.to(target.device).eval()
        draft.borrow(target)
        return target, draft

    @property
    def target(self) -> FrozenTarget:
        """The frozen target, loaded together with the draft.

        Raises:
            UserError: no run, no exported draft, or a damaged one.
        """
        return self._pair[0]

    @property
    def draft(self) -> Draft:
        """The exported draft, ready to decode: in the target's dtype, on its device, with its embedding and head.

        Raises:
            UserError: no run, no exported draft, or a damaged one.
        """
        return self._pair[1]

    def load(self) -> Run:
        """Load target and draft now; returns the run."""
        _ = self._pair
        return self

    @cached_property
    def data(self) -> DSparkDataModule:
        """The data of the run, with what the command line links from other sections."""
        from dspark_train.data.module import DSparkDataModule

        config = self.required_config()
        linked = {"block_size": config["draft"]["block_size"], "decay": config["objective"]["decay"]}
        settings = config["data"] | linked | {"seed": config["seed_everything"]}
        paths = {
            name: Path(settings[name]) for name in ("path", "cache_dir") if settings.get(name) is not None
        }
        data = DSparkDataModule(**(settings | paths))
        data.tokenizer = self.target.tokenizer
        return data

    @cached_property
    def template(self) -> dict[str, Any]:
        """Chat-template arguments that the run's conversations were rendered with, as its record says, else its data.

        Raises:
            UserError: the record does not say, and the data are not there.
        """
        recorded = self.facts.get("data", {}).get("template")
        if isinstance(recorded, dict):
            return recorded
        try:
            return self.data.template
        except UserError as error:
            raise UserError(
                f"run {self.path} does not record which chat-template arguments it was trained with, and its data do "
                f"not say ({error}); give them with --template '{{}}' where there are none"
            ) from error

    @cached_property
    def encoder(self) -> ConversationEncoder:
        """Renders new prompts as the run's conversations were."""
        from dspark_train.data.tokenize import ConversationEncoder

        return ConversationEncoder(self.target.tokenizer, max_length=2**31, arguments=self.template)

    @property
    def draft_path(self) -> Path:
        """Folder of the exported draft."""
        return self.path / "draft"

    @property
    def draft_weights_path(self) -> Path:
        """File of the exported draft's weights."""
        return self.draft_path / "model.safetensors"

    @cached_property
    def draft_config(self) -> dict[str, Any]:
        """``draft/config.json``."""
        return read_json(self.draft_path / "config.json")

    @cached_property
    def trained_parameters(self) -> int:
        """Numbers in the exported weights that training made: all but the copies of the target's own."""
        path = self.draft_weights_path
        if not path.is_file():
            return 0
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="numpy") as file:
                shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise UserError(f"{path} is damaged or truncated: {error}; export the draft again") from error
        return sum(math.prod(shape) for name, shape in shapes.items() if name not in BORROWED)

    # -- what was measured with it -----------------------------------------------------------------------------

    def sts_path(self, label: str | None = None) -> Path:
        """File of the confidence scalings that were fitted for a way of sampling.

        Args:
            label: of the sampling (:func:`sampling_label`); None is the file for engines, which holds those of the
                first way of sampling that was calibrated.
        """
        return self.path / (f"calibration_{label}.json" if label else STS_FILE)

    @property
    def sts_paths(self) -> list[Path]:
        """Files of all confidence scalings, that for engines among them."""
        return [*sorted(self.path.glob("calibration_[gt]*.json")), *filter(Path.is_file, [self.sts_path()])]

    @property
    def calibration_report_path(self) -> Path:
        """File of what calibration found."""
        return self.path / CALIBRATION_REPORT

    def trace_path(self, split: str, label: str) -> Path:
        """File of recorded rounds.

        Args:
            split: whose prompts; ``decode`` for the rounds of that command.
            label: of the sampling (:func:`sampling_label`).
        """
        return self.path / "traces" / f"{split}_{label}.safetensors"

    def recorded_path(self, split: str, label: str) -> Path:
        """File that recorded rounds are read from: as :meth:`trace_path`, and where a run of an earlier version has
        no rounds of the test split, its held-out ones stand for them.
        """
        path = self.trace_path(split, label)
        former = self.trace_path("heldout", label)
        return former if split == "test" and not path.is_file() and former.is_file() else path

    def trace(self, split: str, label: str) -> DecodingTrace | None:
        """Recorded rounds; None where there are none. Arguments as of :meth:`trace_path`."""
        from dspark_train.structures import DecodingTrace

        path = self.recorded_path(split, label)
        return DecodingTrace.load(path) if path.is_file() else None

    @property
    def trace_paths(self) -> list[Path]:
        """Files of all recorded rounds."""
        return sorted((self.path / "traces").glob("*.safetensors"))

    @property
    def plots_path(self) -> Path:
        """Folder of the figures."""
        return self.path / "plots"

    @property
    def studies_path(self) -> Path:
        """Folder of the studies."""
        return self.path / "studies"

    @property
    def cost_table_path(self) -> Path:
        """File of the costs that ``profile`` measured."""
        return self.study_path("cost_table")

    def study_path(self, name: str) -> Path:
        """File of a study of recorded rounds, such as ``acceptance``."""
        return self.studies_path / f"{name}.json"

    @property
    def decode_path(self) -> Path:
        """File of what ``decode`` measured."""
        return self.path / "decode.json"

    @property
    def evaluation_paths(self) -> dict[str, Path]:
        """Files of what ``evaluate`` measured, by the evaluation's name."""
        return {file.stem: file for file in sorted((self.path / "evaluation").glob("*.json"))}


def read_metrics(path: Path) -> dict[str, Curve]:
    """Read a metrics table: one curve per column against ``step``, empty cells left out.

    A step that was logged twice (a run that was resumed) keeps the later row.
    """
    if not path.is_file():
        return {}
    curves: dict[str, dict[float, float]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames and "step" not in reader.fieldnames:
            raise UserError(f"{path} has no column 'step'; it is not the metrics table of a run")
        for row in reader:
            step = _number(row.get("step"))
            if step is None:
                continue
            for name, cell in row.items():
                if name != "step" and isinstance(name, str) and (value := _number(cell)) is not None:
                    curves.setdefault(name, {})[step] = value
    return {name: sorted(values.items()) for name, values in curves.items()}


def _number(cell: Any) -> float | None:
    try:
        value = float(cell)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
