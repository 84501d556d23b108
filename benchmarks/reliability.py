"""Reliability of prefix survival per position: as trained, with temperatures alone, with bias and temperatures.

    python benchmarks/reliability.py checkpoints/quickstart --suite prompts --markdown benchmarks/reliability.md

Fits on the calibration split of a run, and judges on two sets that training did not see: its test split, and the
first turns of suites (``--suite`` names a folder of JSONL files), which are of another kind than the training data.
There it also shows what helps: scalings fitted on half of the suites' prompts, and the run's own scalings that follow
what is accepted (online correction, every round judged before the correction sees it).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from table import machine

from dspark_train.calibration.fit import fit_scalings
from dspark_train.calibration.online import OnlineSts
from dspark_train.calibration.reliability import Reliability, measure_reliability
from dspark_train.calibration.selection import select_rounds
from dspark_train.decoding.decoder import Decoder
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.errors import UserError
from dspark_train.evaluation.evaluate import Evaluation
from dspark_train.evaluation.options import EvaluateOptions
from dspark_train.evaluation.suites import load_suite
from dspark_train.run import Run
from dspark_train.structures import DecodingTrace
from dspark_train.studies.drift import replay_drift
from dspark_train.studies.record import Recording, recorded_rounds, run_to_record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--suite", type=Path, required=True, help="folder of JSONL files of prompts")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", type=int, default=100, help="of each split and of all suites together")
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--markdown", type=Path, help="write the table there as well")
    options = parser.parse_args()

    run = run_to_record(options.run)
    if run.confidence_shift:
        raise UserError(f"{run.path}: its weights carry a bias of an earlier version; run `calibrate` first")
    rule = SamplingRule(options.temperature)
    recording = Recording(options.prompts, options.tokens, options.batch_size)
    fit, heldout = (recorded_rounds(run, split, rule, recording) for split in ("calibration", "test"))
    other = suite_rounds(run, options.suite, rule, recording)
    fitted = fit_scalings(fit)
    size = fit.block_size
    lines = [
        f"| rounds of | how | {' | '.join(map(str, range(1, size + 1)))} | mean | AUC at 1 |",
        f"|---|---|{'--:|' * (size + 2)}",
    ]
    for name, trace in (("test split", heldout), ("suites", other)):
        for how, sts in (
            ("as trained", None),
            ("T alone", fitted.alone),
            ("bias and T", fitted.best),
        ):
            lines.append(row(name, how, measure_reliability(trace, sts)))
    half = [select_rounds(other, other.request % 2 == odd) for odd in (0, 1)]
    own = fit_scalings(half[0]).best
    lines.append(row("suites, other half", "fitted on one half", measure_reliability(half[1], own)))
    online = OnlineSts(fitted.best)
    (point,) = replay_drift([("suites", other)], online, stretch=len(other.request))
    cells = f"{' |' * size} {100 * point.online:.1f} ± {100 * point.noise:.1f} | |"
    lines.append(f"| suites | bias and T, then followed online |{cells}")
    caption = (
        f"ECE in % of prefix survival (20 bins) ± what counting alone makes; {rule.label}; "
        f"{len(fit.request)} rounds to fit, {len(heldout.request)} of the test split, "
        f"{len(other.request)} of suites. {machine()}"
    )
    text = "\n".join(["# Reliability of the confidences", "", caption, "", *lines]) + "\n"
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text)


def suite_rounds(run: Run, folder: Path, rule: SamplingRule, recording: Recording) -> DecodingTrace:
    """Rounds of the suites' first turns, decoded now; prompts are shared evenly by the files of the folder."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"--suite {folder} holds no JSONL file of prompts")
    each = max(1, recording.prompts // len(files))
    template = run.template
    settings = EvaluateOptions(run.path, tuple(map(str, files)), max_new_tokens=recording.max_new_tokens)
    evaluation = Evaluation(run.target, (), settings, template)
    encoded = [
        evaluation.encode([{"role": "user", "content": prompt.turns[0]}])
        for file in files
        for prompt in load_suite(str(file), limit=each).prompts
    ]
    prompts = [ids for ids in encoded if evaluation.fits(ids)]
    if len(prompts) < len(encoded):
        print(f"{len(encoded) - len(prompts)} prompts are left out: the target's context does not hold them")
    decoder = Decoder(run.target, run.draft, rule=rule)
    requests = decoder.requests(prompts, recording.max_new_tokens, None)
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(0)).tolist()
    mixed = decoder.run([requests[i] for i in order], batch_size=recording.batch_size)
    return mixed.trace


def row(name: str, how: str, found: Reliability) -> str:
    """One line of the table."""
    cells = [
        f"{100 * error:.1f} ± {100 * noise:.1f}" for error, noise in zip(found.ece, found.noise, strict=True)
    ]
    mean = f"**{100 * found.mean_ece:.1f} ± {100 * found.mean_noise:.1f}**"
    return f"| {name} | {how} | {' | '.join(cells)} | {mean} | {found.auc[0]:.3f} |"


if __name__ == "__main__":
    main()
