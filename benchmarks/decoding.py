"""Time of a decoding round by part, beside what a bare target pass of the same rows costs.

    python benchmarks/decoding.py checkpoints/quickstart                   # a run's target and draft
    python benchmarks/decoding.py --target smollm2-135m-instruct           # its target and a random draft
    python benchmarks/decoding.py checkpoints/quickstart --requests 1 4 16 --markdown benchmarks/decoding.md

The bare pass is the Hugging Face model as it comes (its own attention, no cache, no context), so the
difference to ``verify`` holds the cache, the context and this project's bookkeeping. The scheduler is timed
on 512 requests of 16 draft tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dspark_train.decoding.policies import FixedLength, causal_lengths
from dspark_train.draft.model import DSparkDraft
from dspark_train.draft.recipe import DraftRecipe, build_config
from dspark_train.run import Run, environment
from dspark_train.studies.profile import RoundCost, time_rounds
from dspark_train.target.config import TargetConfig
from dspark_train.target.frozen import FrozenTarget

PARTS = ("draft", "head", "schedule", "verify", "target_head", "sampling", "bookkeeping")
TURNS = 5


def milliseconds(call: Callable[[], object], repetitions: int) -> list[float]:
    """Of each repetition, after two untimed ones."""
    samples = []
    for index in range(repetitions + 2):
        started = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if index >= 2:
            samples.append(1000 * (time.perf_counter() - started))
    return samples


def random_draft(target: FrozenTarget, vocabulary: int) -> DSparkDraft:
    """A draft of the quickstart's shape with random weights: as fast as a trained one, never accepted."""
    config = build_config(
        DraftRecipe(num_layers=2, block_size=7, markov_rank=128, mask_token_id=0),
        target.config,
        target.layer_ids,
        vocab_size=target.vocab_size,
        embedding_scale=target.embedding_scale,
    )
    config.draft_vocab_size = min(vocabulary, target.vocab_size)
    draft = DSparkDraft(config, target=target, draft_token_ids=torch.arange(config.draft_vocab_size))
    return draft.to(target.dtype).eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="where no run is given")
    parser.add_argument("--vocabulary", type=int, default=7080, help="draft vocabulary of the random draft")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--dtype", default="float32" if not torch.cuda.is_available() else "auto")
    parser.add_argument("--markdown", type=Path, help="write the tables there as well")
    options = parser.parse_args()

    # outside inference mode: weights made inside it could change unnoticed, and are not packed
    if options.run:
        opened = Run(options.run, options.dtype)
        target, draft = opened.target, opened.draft
    else:
        target = FrozenTarget.load(TargetConfig(name_or_path=options.target, dtype=options.dtype))
        draft = random_draft(target, options.vocabulary)
    with torch.inference_mode():
        measure(target, draft, options)


def measure(target: FrozenTarget, draft: DSparkDraft, options: argparse.Namespace) -> None:
    """Time every shape, print the table and write it."""
    slots = draft.config.block_size
    about = environment()
    lines = [
        "# Decoding rounds by part",
        "",
        f"{target.name}, {str(target.dtype).removeprefix('torch.')}, γ {slots}, {options.context} tokens of context, "
        f"median of {options.repetitions} rounds; {about['machine']}, torch {about['versions']['torch']}, "
        f"commit {about['commit']}.",
        "",
        "Milliseconds. `bare` is the Hugging Face model's own pass over as many rows, without context or cache, and "
        "`bare head` its LM head on them.",
        "",
        "| requests | rows | " + " | ".join(PARTS) + " | round | bare | bare head |",
        "|" + "--:|" * (5 + len(PARTS)),
    ]
    # requests, and draft tokens verified by each; 0 is plain decoding
    shapes = [(requests, length) for requests in options.requests for length in sorted({0, 1, 3, slots})]
    rounds = {shape: RoundCost() for shape in shapes}
    bare: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    heads: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    repetitions = -(-options.repetitions // TURNS)
    for _ in range(TURNS):  # in turns, so that no shape has the machine's slow minutes to itself
        for shape in shapes:
            requests, length = shape
            time_rounds(
                target,
                draft if length else None,
                requests=requests,
                policy=FixedLength(length),
                context=options.context,
                repetitions=repetitions,
                found=rounds[shape],
            )
            rows = requests * (length + 1)
            ids = torch.arange(rows, device=target.device)[None] % target.vocab_size
            hidden = torch.zeros(rows, target.hidden_size, dtype=target.dtype, device=target.device)
            bare[shape] += milliseconds(
                lambda ids=ids: target.decoder(input_ids=ids, use_cache=False), repetitions
            )
            heads[shape] += milliseconds(lambda hidden=hidden: target.lm_head(hidden), repetitions)
    for shape in shapes:
        requests, length = shape
        parts = [1000 * rounds[shape].parts[part] for part in PARTS]
        cells = [*parts, sum(parts), statistics.median(bare[shape]), statistics.median(heads[shape])]
        kind = f"{requests * (length + 1)}" if length else "plain"
        lines.append(f"| {requests} | {kind} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
    survival = torch.rand(512, 16).cumprod(1)
    curve = 1 / (1 + 0.001 * torch.arange(512 * 17 + 1, dtype=torch.float64))
    scheduler = statistics.median(milliseconds(lambda: causal_lengths(survival, curve), 50))
    lines += ["", f"Scheduling 512 requests × 16 draft tokens (CPU): {scheduler:.2f} ms."]
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
