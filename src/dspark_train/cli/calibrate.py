"""The ``calibrate`` command: scalings of a run's confidences, fitted and judged on real decoding rounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dspark_train.errors import UserError

if TYPE_CHECKING:
    from dspark_train.calibration.fit import CalibrationResult


def calibrate(
    run: Path,
    temperatures: tuple[float, ...] = (0.0, 1.0),
    top_k: int = 0,
    top_p: float = 1.0,
    prompts: int = 64,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    refresh: bool = False,
    shift: bool = True,
    seed: int = 0,
    dtype: Literal["auto", "bfloat16", "float32"] | None = None,
) -> None:
    """Fit the confidence head's bias and one scaling per draft position, so that confidences mean what they say.

    Decodes prompts of the calibration split (to fit) and of the held-out split (to judge), or reuses the rounds
    that the run already holds. The bias goes into the run's draft; drafts exported before keep theirs, so export
    again. Writes calibration.json for the first way of sampling, calibration_LABEL.json for each,
    calibration_report.json, and reliability diagrams.

    Args:
        run: folder of a finished run.
        temperatures: sampling temperatures; 0 is greedy. Each has its own calibration, which is used for decoding in
            the same way only; calibration.json holds that of the first.
        top_k: tokens kept by sampling; 0 keeps all.
        top_p: nucleus kept by sampling; 1 keeps all.
        prompts: prompts of each split to decode at most.
        max_new_tokens: longest answer, in tokens.
        batch_size: requests decoded at once.
        refresh: decode again even where the run holds rounds.
        shift: fit the bias too, on the rounds of the first sampling temperature; false leaves it as it is.
        seed: of the sampling.
        dtype: of target and draft. Left out: float32 on a CPU, else the run's. A CPU that computes in bfloat16 is
            faster in it with many requests at once.
    """
    from dspark_train.calibration.bias import move_bias, shifted, storable_shift
    from dspark_train.calibration.fit import calibrate_traces, choose_shift, write_report
    from dspark_train.decoding.sampling import SamplingRule
    from dspark_train.report.figures import save_reliability
    from dspark_train.studies.record import Recording, recorded_rounds, run_to_record
    from dspark_train.studies.reliability import ReliabilityStudy

    if not temperatures or min(temperatures) < 0 or len(set(temperatures)) < len(temperatures):
        raise UserError(f"temperatures {list(temperatures)} must be different numbers ≥ 0, at least one")
    rules = [SamplingRule(temperature, top_k, top_p) for temperature in temperatures]
    recording = Recording(prompts, max_new_tokens, batch_size, seed, refresh)
    opened = run_to_record(run, dtype)
    data_name = Path(str(opened.required_config()["data"]["path"])).name
    opened.plots_path.mkdir(exist_ok=True)
    results: list[CalibrationResult] = []
    moved = before = opened.confidence_shift
    for rule in rules:
        fit, heldout = (
            shifted(recorded_rounds(opened, split, rule, recording), -before)
            for split in ("calibration", "heldout")
        )
        if shift and not results:
            moved = storable_shift(opened, choose_shift(fit))
        result = calibrate_traces(fit, heldout, moved, rule.label)
        calibration = result.calibration(f"{data_name}, calibration split, {rule.label}")
        calibration.save(opened.sts_path(rule.label))
        if not results:
            calibration.save(opened.sts_path())
        study = ReliabilityStudy.of(
            result.heldout,
            split="heldout",
            sampling_temperature=rule.temperature,
            temperatures=list(result.sts),
        )
        save_reliability(opened.plots_path / f"reliability_{rule.label}.png", study)
        print_result(result)
        results.append(result)
    write_report(opened.calibration_report_path, results)
    move_bias(opened, moved)
    print(f"wrote {opened.sts_path()}, {opened.calibration_report_path} and {opened.plots_path}")


def print_result(result: CalibrationResult) -> None:
    """Print what calibration found, as tables."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    held, console = result.heldout, Console()
    title = f"{result.sampling}: {result.fit_rounds} rounds to fit, {held.rounds} held out"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    columns = ("position", "T", "ECE % trained", "calibrated", "noise", "Brier trained", "calibrated", "AUC")
    for column in columns:
        table.add_column(column, justify="right")
    for k, temperature in enumerate(result.sts):
        ece = (100 * held.before.ece[k], 100 * held.after.ece[k], 100 * held.after.noise[k])
        scores = (held.before.brier[k], held.after.brier[k], held.after.auc[k])
        cells = [
            f"{temperature:.2f}",
            *(f"{value:.1f}" for value in ece),
            *(f"{value:.3f}" for value in scores),
        ]
        table.add_row(str(k + 1), *cells)
    means = (held.before.mean_ece, held.after.mean_ece, held.after.mean_noise)
    table.add_row("mean", "", *(f"{100 * value:.1f}" for value in means), "", "", "", style="bold")
    console.print(table)
    if result.shift:
        console.print(f"  bias of the confidence head moved by {result.shift:+.3f}: it goes into the draft")
    for name, part in result.domains.items():
        before, after, noise = (
            100 * v for v in (part.before.mean_ece, part.after.mean_ece, part.after.mean_noise)
        )
        console.print(
            f"  {name}: ECE {before:.1f} % → {after:.1f} % ({part.rounds} rounds, noise {noise:.1f} %)"
        )
