"""A round and a plain token in float32 and in bfloat16, side by side: which is the best plain form, and what is left of
a speedup against it.

``python benchmarks/dtypes.py RUN`` opens the pair of a run twice and times, in turns, a target pass of one row with its
LM head, a pass of a whole block with its LM head, and the draft, one request, 120 tokens of context. The ratios are
the accepted length that a round must reach to be worth its time. The table goes into ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from table import machine, write_table

from dspark_train.decoding.draft_pass import DraftPass
from dspark_train.decoding.layout import RowLayout
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.decoding.target_pass import TargetPass
from dspark_train.run import Run

DTYPES: tuple[Literal["float32"], Literal["bfloat16"]] = ("float32", "bfloat16")
CONTEXT = 120


def measure(run: Path, repetitions: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of ``plain`` and of ``round`` in each dtype, one of each per repetition."""
    cpu = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    pairs = [Run(run, dtype).load() for dtype in DTYPES]  # outside inference mode, whose tensors do not pack
    with torch.inference_mode(), ExitStack() as stack:
        work: list[tuple[str, str, Callable[[], Any]]] = []
        for dtype, opened in zip(DTYPES, pairs, strict=True):
            target, draft = opened.target, opened.draft
            ids = torch.randint(5, 1000, (CONTEXT + draft.config.block_size + 1,), generator=generator)
            passing = stack.enter_context(TargetPass(target, 1, 256, features=True))
            drafting = stack.enter_context(DraftPass(draft, 1, 256))
            _, features = passing(ids[:CONTEXT], RowLayout([CONTEXT], [0], cpu))
            assert features is not None
            drafting.append(features, RowLayout([CONTEXT], [0], cpu))

            def verify(rows: int, passing=passing, target=target, ids=ids) -> Any:
                hidden, features = passing(ids[CONTEXT : CONTEXT + rows], RowLayout([rows], [CONTEXT], cpu))
                target.lm_head(hidden).argmax(-1)
                return features

            def whole(verify=verify, drafting=drafting, draft=draft, ids=ids) -> None:
                rows = draft.config.block_size + 1
                drafting.append(verify(rows), RowLayout([rows], [CONTEXT], cpu))
                anchor = ids[CONTEXT : CONTEXT + 1]
                drafting.walk(drafting.hidden(anchor, [CONTEXT]), anchor, SamplingRule())

            work += [(dtype, "plain", lambda verify=verify: verify(1)), (dtype, "round", whole)]
        for repetition in range(repetitions + 3):
            for dtype, part, function in work:
                begun = time.perf_counter()
                function()
                if repetition >= 3:
                    found[dtype, part].append(1000 * (time.perf_counter() - begun))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--repetitions", type=int, default=100)
    options = parser.parse_args()
    found = measure(options.run, options.repetitions)
    lines = [
        "| | float32: plain | round | bfloat16: plain | round | round / plain, float32 | bfloat16 "
        "| bfloat16 round / better plain |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, of in (("median", statistics.median), ("fastest", min)):
        plain = {dtype: of(found[dtype, "plain"]) for dtype in DTYPES}
        whole = {dtype: of(found[dtype, "round"]) for dtype in DTYPES}
        cells = [f"{value[dtype]:.1f} ms" for dtype in DTYPES for value in (plain, whole)]
        ratios = [f"{whole[dtype] / plain[dtype]:.2f}" for dtype in DTYPES]
        lines.append(
            f"| {name} | {' | '.join([*cells, *ratios])} | {whole['bfloat16'] / min(plain.values()):.2f} |"
        )
    caption = (
        f"One request, {CONTEXT} tokens of context, {options.repetitions} repetitions in turns. {machine()}"
    )
    write_table("dtypes", "python benchmarks/dtypes.py RUN", caption, lines)


if __name__ == "__main__":
    main()
