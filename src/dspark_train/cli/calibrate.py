"""The ``calibrate`` command: scalings of a run's confidences, fitted and judged on real decoding rounds."""

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
    temperatures: Numbers = Numbers((1.0, 0.0))
    """Sampling temperatures, with commas between; 0 is greedy. Each has its own calibration, which is used for
    decoding in the same way only; calibration.json holds that of the first: 1, as the confidence head's labels are."""
    top_k: int = 0
    """Tokens kept by sampling; 0 keeps all."""
    top_p: float = 1.0
    """Nucleus kept by sampling; 1 keeps all."""
    prompts: int = 64
    """Prompts of each split to decode at most."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    batch_size: int = 8
    """Requests decoded at once."""
    refresh: bool = False
    """Decode again even where the run holds rounds."""
    bias: bool = True
    """Fit a bias beside the temperatures; false fits temperatures alone."""
    seed: int = 0
    """Of the sampling."""
    seconds: float = float("inf")
    """For decoding, all splits and ways of sampling together; prompts that have not begun by then are left out."""
    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Of target and draft. Left out: float32 on a CPU, else the run's. A CPU that computes in bfloat16 is
    faster in it with many requests at once."""

    def __post_init__(self) -> None:
        given = self.temperatures
        if not given or min(given) < 0 or len(set(given)) < len(given):
            raise UserError(f"temperatures {list(given)} must be different numbers ≥ 0, at least one")


def calibrate(options: CalibrateOptions) -> None:
    """Fit one temperature per draft position, alone and with a bias, so that confidences mean what they say.

    Decodes prompts of the calibration split (to fit) and of the test split (to judge), or reuses the rounds
    that the run already holds. The draft's weights stay as trained. Writes calibration.json for the first way of
    sampling, calibration_LABEL.json for each, calibration_report.json, and reliability diagrams.
    """
    from dspark_train.calibration.bias import restore_weights
    from dspark_train.calibration.fit import CalibrationResult, calibrate_traces, write_report
    from dspark_train.calibration.io import Sampling
    from dspark_train.cli.tables import print_calibration
    from dspark_train.decoding.sampling import SamplingRule
    from dspark_train.report.figures import save_reliability
    from dspark_train.studies.record import Recording, recorded_rounds, run_to_record
    from dspark_train.studies.reliability import ReliabilityStudy

    rules = [SamplingRule(temperature, options.top_k, options.top_p) for temperature in options.temperatures]
    recording = Recording(
        options.prompts,
        options.max_new_tokens,
        options.batch_size,
        options.seed,
        options.refresh,
        options.seconds / (2 * len(rules)),
    )
    run = run_to_record(options.run, options.dtype)
    data_name = Path(str(run.required_config()["data"]["path"])).name
    run.plots_path.mkdir(exist_ok=True)
    if moved := restore_weights(run):
        print(
            f"the bias of {moved:+.3f} that an earlier version wrote into the draft's weights and rounds is taken out; "
            "its calibrations are gone, and drafts exported before still have it"
        )
    results: list[CalibrationResult] = []
    for rule in rules:
        fit, heldout = (recorded_rounds(run, split, rule, recording) for split in ("calibration", "test"))
        sampling = Sampling(rule.temperature, rule.top_k, rule.top_p)
        result = calibrate_traces(fit, heldout, sampling, bias=options.bias)
        calibration = result.calibration(f"{data_name}, calibration split, {rule.label}")
        calibration.save(run.sts_path(rule.label))
        if not results:
            calibration.save(run.sts_path())
        study = ReliabilityStudy.of(
            result.heldout,
            split="test",
            sampling_temperature=rule.temperature,
            temperatures=list(result.fitted.best.temperatures),
            bias=result.fitted.best.bias,
        )
        save_reliability(run.plots_path / f"reliability_{rule.label}.png", study)
        print_calibration(result)
        results.append(result)
    write_report(run.calibration_report_path, results)
    print(f"wrote {run.sts_path()}, {run.calibration_report_path} and {run.plots_path}")
