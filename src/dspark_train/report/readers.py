"""From the result files of a run to the views that the report shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dspark_train.errors import UserError
from dspark_train.report.charts import ReliabilityBin
from dspark_train.report.views import (
    AcceptanceView,
    CalibrationView,
    DriftView,
    LoadView,
    ModeView,
    SweepView,
)

MODE_NAMES = {"greedy": "Greedy", "t1.0": "Temperature 1"}


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn a file of another layout into an error that names it."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"{name} is not laid out as this version writes it ({error!r}); make it again"
        ) from error


def modes(decode: dict[str, Any]) -> list[ModeView]:
    """Read ``decode.json``: one view per sampling temperature."""
    with _reading("decode.json"):
        policy = str(decode.get("policy", ""))
        return [_mode(key, value, policy) for key, value in decode.get("modes", {}).items()]


def _mode(key: str, value: dict[str, Any], policy: str) -> ModeView:
    speedup = value.get("speedup") or {}
    plain, speculative = value.get("plain") or {}, value.get("speculative") or {}
    identical = value.get("identical") or {}
    conditional = value.get("acceptance", {}).get("conditional", [])
    return ModeView(
        name=MODE_NAMES.get(key, key),
        temperature=float(value.get("temperature", 0.0)),
        tau=float(value["tau"]),
        conditional=conditional,
        cumulative=value.get("acceptance", {}).get("cumulative", []),
        speedup=speedup.get("value"),
        speedup_low=speedup.get("low"),
        speedup_high=speedup.get("high"),
        spread=str(speedup.get("spread", "")),
        plain_rate=plain.get("tokens_per_second"),
        rate=speculative.get("tokens_per_second"),
        prompts=value.get("prompts"),
        identical=identical.get("prompts"),
        divergences=identical.get("failures"),
        policy=policy,
        round_milliseconds=speculative.get("round_milliseconds"),
        step_milliseconds=plain.get("round_milliseconds"),
        parts=speculative.get("milliseconds", {}),
        rows_per_round=value.get("verified_rows_per_round"),
        domain_tau={str(k): float(v["tau"]) for k, v in value.get("domains", {}).items()},
    )


def calibration(report: dict[str, Any]) -> list[CalibrationView]:
    """Read ``calibration_report.json``: one view per sampling temperature of its rounds."""
    if not report:
        return []
    with _reading("calibration_report.json"):
        return [_calibration(part) for part in (report, *report.get("others", []))]


def _calibration(part: dict[str, Any]) -> CalibrationView:
    return CalibrationView(
        temperature=float(part["sampling_temperature"]),
        temperatures=part["temperatures"],
        ece_before=part["ece_before"],
        ece_after=part["ece_after"],
        mean_before=part["mean_ece_before"],
        mean_after=part["mean_ece_after"],
        auc=part["auc"],
        brier_before=part["brier_before"],
        brier_after=part["brier_after"],
        bins_before=_bins(part["bins_before"]),
        bins_after=_bins(part["bins_after"]),
        rounds=part["rounds"],
        mean_noise=part["mean_noise"],
        domains={name: (d["mean_ece_before"], d["mean_ece_after"]) for name, d in part["domains"].items()},
    )


def _bins(positions: list[list[dict[str, float]]]) -> list[list[ReliabilityBin]]:
    return [[ReliabilityBin(b["confidence"], b["accepted"], b["count"]) for b in bins] for bins in positions]


def sweeps(study: dict[str, Any]) -> list[SweepView]:
    """Read ``studies/threshold_sweep.json``: all rounds first, then each domain."""
    with _reading("studies/threshold_sweep.json"):
        return [
            SweepView(
                group=str(name),
                thresholds=_column(points, "threshold"),
                acceptance_rate=_column(points, "acceptance_rate"),
                tokens_per_round=_column(points, "tokens_per_round"),
                verified_per_round=_column(points, "verified_per_round"),
            )
            for name, points in study.get("groups", {}).items()
        ]


def acceptances(study: dict[str, Any]) -> list[AcceptanceView]:
    """Read ``studies/acceptance.json``: all rounds first, then each domain."""
    with _reading("studies/acceptance.json"):
        return [
            AcceptanceView(str(name), part["conditional"], part["low"], part["high"], part["rounds"])
            for name, part in study.get("groups", {}).items()
        ]


def drift(study: dict[str, Any]) -> DriftView | None:
    """Read ``studies/online.json``."""
    if not study:
        return None
    with _reading("studies/online.json"):
        columns = (_column(study["points"], name) for name in ("rounds", "frozen", "online", "noise"))
        return DriftView(study["first"], study["second"], *columns)


def loads(study: dict[str, Any]) -> list[LoadView]:
    """Read ``studies/simulate.json``."""
    with _reading("studies/simulate.json"):
        return [
            LoadView(
                policy=str(name),
                requests=_column(points, "requests"),
                throughput=_column(points, "throughput"),
                per_user=_column(points, "per_user"),
                verified=_column(points, "verified_per_request"),
            )
            for name, points in study.get("policies", {}).items()
        ]


def _column(points: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [float(point[name]) for point in points]


def fit_seconds(run: dict[str, Any]) -> float | None:
    """Wall time of training, from ``run.json``."""
    seconds = run.get("wall_seconds", {})
    return float(seconds["fit"]) if isinstance(seconds, dict) and seconds.get("fit") else None
