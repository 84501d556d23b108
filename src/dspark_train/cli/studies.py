"""The ``studies`` command: what recorded rounds say, as tables, JSON and plots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dspark_train.run import Run


@dataclass(frozen=True)
class StudiesOptions:
    """Options of ``studies``."""

    run: Path
    """Folder of a finished run; its scalings are used where it was calibrated for this sampling."""
    temperature: float = 1.0
    """Sampling temperature of the rounds; 0 is greedy. The paper's is 1."""
    top_k: int = 0
    """Tokens kept by sampling; 0 keeps all."""
    top_p: float = 1.0
    """Nucleus kept by sampling; 1 keeps all."""
    split: Literal["calibration", "validation", "test"] = "test"
    """Whose prompts."""
    wanted: float | None = None
    """Share of the verified draft tokens that a threshold should keep accepted along a drifting load; left out, no
    such threshold is studied."""
    prompts: int = 64
    """Prompts to decode at most, where the run holds no rounds yet."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    batch_size: int = 8
    """Requests decoded at once."""
    refresh: bool = False
    """Decode again even where the run holds rounds."""


def studies(options: StudiesOptions) -> None:
    """Study a run's recorded rounds: threshold sweep, acceptance per position, reliability.

    Writes threshold_sweep.json, acceptance.json and reliability.json to the run's studies, and a plot of
    each; where the rounds are of several domains also online.json, about scalings that follow a drifting load, and
    online_threshold.json, about a threshold that does.
    """
    from dspark_train.calibration.io import read_calibration
    from dspark_train.calibration.reliability import compare_reliability
    from dspark_train.cli import tables
    from dspark_train.decoding.acceptance import acceptance_by_position
    from dspark_train.decoding.sampling import SamplingRule
    from dspark_train.files import write_result
    from dspark_train.report import figures
    from dspark_train.report.drawing import save_png
    from dspark_train.studies.online_threshold import threshold_drift
    from dspark_train.studies.record import Recording, recorded_rounds, run_to_record
    from dspark_train.studies.reliability import ReliabilityStudy
    from dspark_train.studies.rounds import AcceptanceStudy, ThresholdStudy, drift_study, threshold_sweep

    recording = Recording(
        options.prompts, options.max_new_tokens, options.batch_size, refresh=options.refresh
    )
    rule = SamplingRule(options.temperature, options.top_k, options.top_p)
    run = run_to_record(options.run)
    trace = recorded_rounds(run, options.split, rule, recording)
    calibrated = read_calibration(run, rule.label, trace.block_size)
    sts = None if calibrated is None else calibrated.scalings
    common: dict[str, Any] = {
        "split": options.split,
        "sampling_temperature": options.temperature,
        "rounds": len(trace.request),
        "temperatures": None if sts is None else list(sts.temperatures),
        "bias": 0.0 if sts is None else sts.bias,
    }
    make_folders(run)
    plots = run.plots_path
    acceptance = AcceptanceStudy(
        **common, groups={part.group: part for part in acceptance_by_position(trace)}
    )
    write_result(run.study_path("acceptance"), acceptance)
    save_png(plots / "acceptance.png", figures.acceptance(acceptance), figures.over(acceptance))
    tables.print_acceptance(acceptance)
    thresholds = ThresholdStudy(**common, groups=threshold_sweep(trace, sts))
    write_result(run.study_path("threshold_sweep"), thresholds)
    pictures = figures.thresholds(thresholds)
    save_png(plots / "threshold_sweep.png", pictures, figures.over(thresholds), columns=2)
    tables.print_thresholds(thresholds)
    alone = None if calibrated is None else calibrated.temperatures
    compared = compare_reliability(trace, alone, sts)
    reliability = ReliabilityStudy.of(compared, **common)
    write_result(run.study_path("reliability"), reliability)
    if sts is not None:
        figures.save_reliability(plots / f"reliability_{rule.label}.png", reliability)
    before, scaled, after = (100 * way.mean_ece for way in (compared.before, compared.sts, compared.after))
    gained = f", {scaled:.1f} % with temperatures alone, {after:.1f} % with the bias"
    how = gained if sts is not None else " (not calibrated: run `calibrate`)"
    print(f"reliability: mean ECE {before:.1f} % raw{how}; noise {100 * compared.after.mean_noise:.1f} %")
    fitting = run.trace("calibration", rule.label)
    if fitting is not None and options.split != "calibration":
        drift = drift_study(fitting, trace)
        if drift is not None:
            drift = replace(drift, **common)
            write_result(run.study_path("online"), drift)
            save_png(plots / "online.png", [figures.drift(drift)], figures.over(drift))
            tables.print_drift(drift)
        moving = None if options.wanted is None else threshold_drift(fitting, trace, options.wanted, sts)
        if moving is not None:
            moving = replace(moving, **common)
            write_result(run.study_path("online_threshold"), moving)
            save_png(plots / "online_threshold.png", [figures.threshold_drift(moving)], figures.over(moving))
            tables.print_threshold_drift(moving)
    print(f"wrote {run.studies_path} and {plots}")


def make_folders(run: Run) -> None:
    """Make a run's folders of studies and of plots where they are missing."""
    run.studies_path.mkdir(exist_ok=True)
    run.plots_path.mkdir(exist_ok=True)
