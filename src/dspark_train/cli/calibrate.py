"""The ``calibrate`` command: temperatures of a run's confidences, fitted and judged on real decoding rounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dspark_train.errors import UserError
from dspark_train.lists import Numbers


@dataclass(frozen=True)
class CalibrateOptions:
    """Options of ``calibrate``."""

    run: Path
    """Folder of a finished run."""
    temperatures: Numbers = Numbers((0.0, 1.0))
    """Sampling temperatures, with commas between; 0 is greedy. Each has its own calibration; calibration.json
    holds that of the first."""
    prompts: int = 64
    """Prompts of each split to decode at most."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    batch_size: int = 8
    """Requests decoded at once."""
    refresh: bool = False
    """Decode again even where the run holds rounds."""
    shift: bool = True
    """Fit the bias too, on the rounds of the first sampling temperature; false leaves it as it is."""
    seed: int = 0
    """Of the sampling."""
    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Of target and draft. Left out: float32 on a CPU, else the run's. A CPU that computes in bfloat16 is
    faster in it with many requests at once."""

    def __post_init__(self) -> None:
        given = self.temperatures
        if not given or min(given) < 0 or len(set(given)) < len(given):
            raise UserError(f"temperatures {list(given)} must be different numbers ≥ 0, at least one")


def calibrate(options: CalibrateOptions) -> None:
    """Fit the confidence head's bias and one temperature per draft position, so that confidences mean what they say.

    Decodes prompts of the calibration split (to fit) and of the held-out split (to judge), or reuses the rounds
    that the run already holds. The bias goes into the run's draft; drafts exported before keep theirs, so export
    again. Writes calibration.json for the first sampling temperature,
    calibration_LABEL.json for each, calibration_report.json, and reliability diagrams.
    """
    from dspark_train.calibration.report import (
        CalibrationResult,
        calibrate_traces,
        choose_shift,
        shifted,
        trace_label,
        write_report,
    )
    from dspark_train.cli.tables import print_calibration
    from dspark_train.report.calibration_plots import plot_reliability
    from dspark_train.studies.confidence_shift import ShiftedRun
    from dspark_train.studies.record import RecordedRounds, Recording

    run = options.run
    recording = Recording(
        options.prompts, options.max_new_tokens, options.batch_size, options.seed, options.dtype
    )
    rounds = RecordedRounds(run, recording, refresh=options.refresh)
    (run / "plots").mkdir(exist_ok=True)
    draft = ShiftedRun(run)
    results: list[CalibrationResult] = []
    moved = draft.shift
    for temperature in options.temperatures:
        fit, heldout = (
            shifted(rounds.trace(split, temperature), -draft.shift) for split in ("calibration", "heldout")
        )
        if options.shift and not results:
            moved = draft.storable(choose_shift(fit))
        result = calibrate_traces(fit, heldout, moved)
        label = trace_label(temperature)
        calibration = result.calibration(f"{_data_name(run)}, calibration split, {label}")
        calibration.save(run / f"calibration_{label}.json")
        if not results:
            calibration.save(run / "calibration.json")
        plot_reliability(
            run / "plots" / f"reliability_{label}.png", result.temperatures, result.heldout, temperature
        )
        print_calibration(result)
        results.append(result)
    write_report(run / "calibration_report.json", results)
    draft.move(moved)
    print(f"wrote {run / 'calibration.json'}, {run / 'calibration_report.json'} and {run / 'plots'}")


def _data_name(run: Path) -> str:
    """Name of the data that the run's prompts come from."""
    from dspark_train.run import read_config

    return Path(str(read_config(run)["data"]["path"])).name
