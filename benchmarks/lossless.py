"""Is greedy output the target's own, token for token, whatever the policy and the batch?

    python benchmarks/lossless.py checkpoints/quickstart --markdown benchmarks/lossless.md

Decodes prompts of a run plainly, one at a time, and then with every policy at every batch size, requests joining as
others leave. In float32 every difference counts; it is printed with the target's logit gap at that place, since a sum
over several rows rounds otherwise than over one and a tie may fall either way.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from dspark_train.calibration.io import read_sts
from dspark_train.decoding.decoder import generate
from dspark_train.decoding.measure import Comparison, divergences, interleave
from dspark_train.decoding.policies import FixedLength, Policy, Scheduled, ScheduledAsync, Threshold
from dspark_train.run import Run, environment
from dspark_train.studies.profile import costs_now


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--markdown", type=Path, help="write the table there as well")
    options = parser.parse_args()

    opened = Run(options.run, "float32")
    prompts = interleave([*opened.data.prompts("test"), *opened.data.prompts("calibration")])
    prompts = prompts[: options.prompts]
    sts = read_sts(opened, "greedy", opened.draft.config.block_size)
    ids = [prompt.ids for prompt in prompts]
    plain = generate(opened.target, None, ids, max_new_tokens=options.tokens)
    lines = [
        "| batch | policy | identical | τ | rows a round | seconds | gaps at differences |",
        "|--:|---|--:|--:|--:|--:|---|",
    ]
    print("\n".join(lines), flush=True)
    different = 0
    for batch_size in options.batch_sizes:
        costs = costs_now(opened.target, opened.draft, batch_size)
        policies: dict[str, Policy] = {
            "fixed": FixedLength(),
            "threshold 0.5": Threshold(0.5),
            "scheduled": Scheduled(costs),
            "asynchronous": ScheduledAsync(costs),
        }
        for name, policy in policies.items():
            started = time.monotonic()
            result = generate(
                opened.target,
                opened.draft,
                ids,
                max_new_tokens=options.tokens,
                policy=policy,
                batch_size=batch_size,
                sts=sts,
            )
            seconds = time.monotonic() - started
            found = Comparison(0.0, prompts, [len(prompts)], [plain], [result])
            differing = divergences(opened.target, found)
            different += len(differing)
            rows = float(result.trace.verify_length.double().mean()) + 1
            gaps = ", ".join(f"{divergence.gap:.1e}" for divergence in differing)
            lines.append(
                f"| {batch_size} | {name} | {len(prompts) - len(differing)}/{len(prompts)} "
                f"| {result.trace.accepted_length:.2f} | {rows:.2f} | {seconds:.0f} | {gaps} |"
            )
            print(lines[-1], flush=True)
    lines += ["", f"{different} differences."]
    print(lines[-1])
    if options.markdown:
        about = environment()
        caption = (
            f"`python benchmarks/lossless.py {options.run}`: {len(prompts)} test and calibration prompts × "
            f"{options.tokens} tokens, float32; {about['machine']}, torch {about['versions']['torch']}, "
            f"commit {about['commit']}."
        )
        head = ["# Greedy output against plain decoding", "", caption, ""]
        options.markdown.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
