"""The ``studies`` command: what recorded rounds say, as tables, JSON and plots."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class StudiesOptions:
    """Options of ``studies``."""

    run: Path
    """Folder of a finished run; its temperatures are used where it was calibrated."""
    temperature: float = 0.0
    """Sampling temperature of the rounds; 0 is greedy."""
    split: Literal["calibration", "heldout"] = "heldout"
    """Whose prompts."""
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
    each.
    """
    from dspark_train.calibration.report import compare_reliability, trace_label
    from dspark_train.cli.tables import print_acceptance, print_drift, print_sweeps
    from dspark_train.report.calibration_plots import plot_reliability
    from dspark_train.report.study_plots import plot_acceptance, plot_drift, plot_sweep
    from dspark_train.studies.record import RecordedRounds, Recording
    from dspark_train.studies.rounds import acceptance_by_position, drift_study, threshold_sweep

    run, temperature, split = options.run, options.temperature, options.split
    recording = Recording(options.prompts, options.max_new_tokens, options.batch_size)
    rounds = RecordedRounds(run, recording, refresh=options.refresh)
    trace = rounds.trace(split, temperature)
    temperatures = run_temperatures(run, temperature, trace.block_size)
    common = {
        "split": split,
        "sampling_temperature": temperature,
        "rounds": len(trace.request),
        "temperatures": temperatures,
    }
    folder, plots = study_folders(run)
    acceptances = acceptance_by_position(trace)
    by_group = {part.group: part.to_json() for part in acceptances}
    write_study(folder / "acceptance.json", {**common, "groups": by_group})
    plot_acceptance(plots / "acceptance.png", acceptances)
    print_acceptance(acceptances)
    sweeps = threshold_sweep(trace, temperatures)
    write_study(folder / "threshold_sweep.json", {**common, "groups": {s.group: s.to_json() for s in sweeps}})
    plot_sweep(plots / "threshold_sweep.png", sweeps)
    print_sweeps(sweeps)
    compared = compare_reliability(trace, temperatures or [1.0] * trace.block_size)
    write_study(folder / "reliability.json", {**common, **compared.to_json()})
    if temperatures is not None:
        plot_reliability(
            plots / f"reliability_{trace_label(temperature)}.png", temperatures, compared, temperature
        )
    before, after = 100 * compared.before.mean_ece, 100 * compared.after.mean_ece
    scaled = f", {after:.1f} % scaled" if temperatures else " (not calibrated: run `calibrate`)"
    print(f"reliability: mean ECE {before:.1f} % raw{scaled}; noise {100 * compared.after.mean_noise:.1f} %")
    fitting = rounds.path("calibration", temperature)
    if fitting.is_file() and split == "heldout":
        from dspark_train.structures import DecodingTrace

        drift = drift_study(DecodingTrace.load(fitting), trace)
        if drift is not None:
            write_study(folder / "online.json", {**common, **drift.to_json()})
            plot_drift(plots / "online.png", drift)
            print_drift(drift)
    print(f"wrote {folder} and {plots}")


def run_temperatures(run: Path, sampling_temperature: float, block_size: int) -> list[float] | None:
    """Temperatures of a run for rounds of one sampling temperature; None where it was not calibrated for them."""
    from dspark_train.calibration.io import Calibration
    from dspark_train.calibration.report import trace_label

    path = run / f"calibration_{trace_label(sampling_temperature)}.json"
    return list(Calibration.load(path, block_size).temperatures) if path.is_file() else None


def study_folders(run: Path) -> tuple[Path, Path]:
    """The run's folders of studies and of plots, made where they are missing."""
    folder, plots = run / "studies", run / "plots"
    folder.mkdir(exist_ok=True)
    plots.mkdir(exist_ok=True)
    return folder, plots


def write_study(path: Path, content: dict[str, Any]) -> None:
    """Write what a study found."""
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
