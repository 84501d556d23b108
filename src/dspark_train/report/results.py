"""What is shown of a run: its results, and its settings without secrets.

Reports, comparisons and cards show what is read here: tokens and keys are left out once and for all of them.
"""

from __future__ import annotations

from typing import Any

import yaml

from dspark_train.decoding.measure import DecodeResult, ModeResult
from dspark_train.evaluation.summary import EvaluationResult
from dspark_train.files import read_result
from dspark_train.report.redaction import redact
from dspark_train.run import Run
from dspark_train.studies.reliability import CalibrationReport


def decoded(run: Run) -> DecodeResult:
    """What ``decode`` measured; empty where it has not run."""
    return read_result(run.decode_path, DecodeResult) or DecodeResult()


def decoded_modes(run: Run) -> list[ModeResult]:
    """What ``decode`` measured of each way of sampling."""
    return list(decoded(run).modes.values())


def calibrations(run: Run) -> list[CalibrationReport]:
    """What ``calibrate`` found of each way of sampling, in the order of the report."""
    report = read_result(run.calibration_report_path, CalibrationReport)
    return [] if report is None else [report, *report.others]


def evaluations(run: Run) -> dict[str, EvaluationResult]:
    """What ``evaluate`` measured, by the evaluation's name."""
    found = {name: read_result(path, EvaluationResult) for name, path in run.evaluation_paths.items()}
    return {name: result for name, result in found.items() if result is not None}


def facts(run: Run) -> dict[str, Any]:
    """``run.json`` without secrets: target, versions, commit, data."""
    return dict(redact(run.facts))


def config(run: Run) -> dict[str, Any]:
    """``config.yaml`` without secrets."""
    return dict(redact(run.config))


def config_text(run: Run) -> str:
    """``config.yaml`` as it stands; written anew where it names a secret."""
    shown = config(run)
    text = run.config_text
    if shown != run.config:
        text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    return str(redact(text))
