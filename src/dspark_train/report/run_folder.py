"""Reads what a run folder holds. Files that a run has not made are absent; broken files are errors.

What is read is shown, in reports and cards: tokens and keys are left out here, once and for all of them.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dspark_train.decoding.measure import DecodeResult
from dspark_train.errors import UserError
from dspark_train.evaluation.summary import EvaluationResult
from dspark_train.files import read_result
from dspark_train.report.redaction import redact
from dspark_train.studies.reliability import CalibrationReport
from dspark_train.studies.rounds import AcceptanceStudy, DriftStudy, ThresholdStudy
from dspark_train.studies.simulate import LoadStudy

FROZEN = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
"""Tensors of an exported draft that are no parameters of its own."""

Curve = list[tuple[float, float]]
"""(step, value) in order of steps."""


@dataclass(frozen=True)
class RunFolder:
    """The contents of ``checkpoints/<run>/`` that the report reads; empty where the file does not exist."""

    path: Path
    run: dict[str, Any] = field(default_factory=dict)
    """``run.json``: target, versions, commit, wall times."""
    config: dict[str, Any] = field(default_factory=dict)
    """``config.yaml``, resolved."""
    config_text: str = ""
    curves: dict[str, Curve] = field(default_factory=dict)
    """``metrics.csv``, one curve per column."""
    draft: dict[str, Any] = field(default_factory=dict)
    """``draft/config.json``."""
    trained_parameters: int = 0
    """Numbers in the exported weights that training made: all but the copies of the target's own."""
    decode: DecodeResult = field(default_factory=DecodeResult)
    """``decode.json``."""
    calibration: CalibrationReport | None = None
    """``calibration_report.json``."""
    acceptance: AcceptanceStudy | None = None
    """``studies/acceptance.json``."""
    thresholds: ThresholdStudy | None = None
    """``studies/threshold_sweep.json``."""
    drift: DriftStudy | None = None
    """``studies/online.json``."""
    load_study: LoadStudy | None = None
    """``studies/simulate.json``."""
    evaluations: dict[str, EvaluationResult] = field(default_factory=dict)
    """``evaluation/*.json`` by name."""

    @property
    def calibrations(self) -> list[CalibrationReport]:
        """Of each sampling temperature, in the order of the report."""
        return [] if self.calibration is None else [self.calibration, *self.calibration.others]

    @property
    def fit_seconds(self) -> float | None:
        """Wall time of training; None where the run does not say."""
        seconds = self.run.get("wall_seconds", {})
        return float(seconds["fit"]) if isinstance(seconds, dict) and seconds.get("fit") else None

    @property
    def name(self) -> str:
        """Name of the run: its folder's."""
        return self.path.resolve().name

    @classmethod
    def load(cls, path: Path) -> RunFolder:
        """Read a run folder.

        Raises:
            UserError: the folder does not exist, holds nothing of a run, or a file in it cannot be read.
        """
        if not path.is_dir():
            raise UserError(f"run folder {path} does not exist; give the folder that `fit` wrote")
        config, config_text = _config(path / "config.yaml")
        studies = path / "studies"
        run = cls(
            path=path,
            run=redact(_json(path / "run.json")),
            config=config,
            config_text=config_text,
            curves=read_metrics(path / "metrics.csv"),
            draft=_json(path / "draft" / "config.json"),
            trained_parameters=_count_parameters(path / "draft" / "model.safetensors"),
            decode=read_result(path / "decode.json", DecodeResult) or DecodeResult(),
            calibration=read_result(path / "calibration_report.json", CalibrationReport),
            acceptance=read_result(studies / "acceptance.json", AcceptanceStudy),
            thresholds=read_result(studies / "threshold_sweep.json", ThresholdStudy),
            drift=read_result(studies / "online.json", DriftStudy),
            load_study=read_result(studies / "simulate.json", LoadStudy),
            evaluations={
                file.stem: result
                for file in sorted((path / "evaluation").glob("*.json"))
                if (result := read_result(file, EvaluationResult)) is not None
            },
        )
        parts = (
            run.run,
            run.config,
            run.curves,
            run.draft,
            run.decode.modes,
            run.calibration,
            run.acceptance,
            run.thresholds,
            run.drift,
            run.load_study,
            run.evaluations,
        )
        if not any(parts):
            raise UserError(f"{path} holds nothing of a run (no config.yaml, metrics.csv, decode.json, …)")
        return run


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _config(path: Path) -> tuple[dict[str, Any], str]:
    """The configuration and its text, both without secrets; the text is written anew where it named one."""
    text = _text(path)
    config = _yaml(text, path)
    shown = redact(config)
    if shown != config:
        text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    return shown, redact(text)


def _yaml(text: str, path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text) if text else {}
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a mapping, not {type(value).__name__}")
    return value


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); remove it or make it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _count_parameters(path: Path) -> int:
    if not path.is_file():
        return 0
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or truncated: {error}; export the draft again") from error
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in FROZEN)


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
