"""What the parts of a decoding step cost on this machine: measured with the decoder's own code.

The cache is filled up to a given context, then whole rounds are timed part by part. Tokens and weights' values do
not matter for time, so requests are made up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dspark_train.decoding.cost import CostTable
from dspark_train.decoding.decoder import ActiveRun, Decoder
from dspark_train.decoding.policies import FixedLength
from dspark_train.decoding.timing import PARTS
from dspark_train.draft.model import DSparkDraft
from dspark_train.errors import UserError
from dspark_train.target.frozen import FrozenTarget

DRAFT_PARTS = ("draft", "head")
TARGET_PARTS = ("verify", "target_head")


@dataclass(frozen=True)
class RoundCost:
    """Seconds of repeated rounds of one shape (lists over repetitions)."""

    target: list[float]
    """Target's pass and LM head."""
    draft: list[float]
    """Draft's context, parallel pass and walk."""
    overhead: list[float]
    """Everything else."""
    parts: dict[str, float]
    """Median of each timed part, and of ``bookkeeping``."""


@torch.inference_mode()
def time_rounds(
    target: FrozenTarget,
    draft: DSparkDraft | None,
    *,
    requests: int,
    length: int,
    context: int,
    repetitions: int,
    warm_up: int = 2,
) -> RoundCost:
    """Time rounds of ``requests`` requests that verify ``length`` draft tokens each.

    Args:
        target: frozen target.
        draft: None times plain decoding.
        requests: concurrent requests.
        length: draft tokens verified per request.
        context: positions before each anchor; grows by what is accepted.
        repetitions: rounds timed.
        warm_up: rounds before that.
    """
    decoder = Decoder(target, draft, FixedLength(length))
    rounds = repetitions + warm_up
    growth = rounds * (length + 1) + 1
    room = target.context_length
    if room is not None and context + growth > room:
        raise UserError(
            f"profile: {context} tokens of context and {rounds} rounds of up to {length + 1} tokens do not fit into "
            f"the target's {room}: lower context or repetitions"
        )
    run = decoder.start(requests, context + growth, seed=0)
    samples: list[dict[str, float]] = []
    with run:
        _fill(run, requests, context, growth)
        before = run.watch.read()
        for index in range(rounds):
            started = time.perf_counter()
            run.round()
            after = run.watch.read()
            total = time.perf_counter() - started
            sample = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in PARTS}
            sample["bookkeeping"] = max(0.0, total - sum(sample.values()))
            before = after
            if index >= warm_up:
                samples.append(sample)
    return RoundCost(
        target=[sum(sample[part] for part in TARGET_PARTS) for sample in samples],
        draft=[sum(sample[part] for part in DRAFT_PARTS) for sample in samples],
        overhead=[
            sum(value for part, value in sample.items() if part not in (*DRAFT_PARTS, *TARGET_PARTS))
            for sample in samples
        ],
        parts={part: statistics.median(sample[part] for sample in samples) for part in samples[0]},
    )


def _fill(run: ActiveRun, requests: int, context: int, growth: int) -> None:
    """Make up requests whose prompts end at ``context``; only the last token of each prompt is really run."""
    vocabulary = run.decoder.target.vocab_size
    prompts = [[(7 * i + r) % vocabulary for i in range(context)] for r in range(requests)]
    for request in run.decoder.requests(prompts, growth, [[] for _ in prompts]):
        run.join([request], known=context - 1)


def measure_costs(
    target: FrozenTarget,
    draft: DSparkDraft | None,
    *,
    max_rows: int,
    requests: Sequence[int] = (1,),
    context: int = 256,
    repetitions: int = 20,
) -> CostTable:
    """Measure a cost table of a target and, where given, its draft.

    Args:
        target: frozen target.
        draft: None measures the target alone.
        max_rows: rows of the largest verification pass.
        requests: concurrent requests to measure the draft and the overheads at.
        context: positions before each anchor.
        repetitions: rounds timed at each point.

    Raises:
        UserError: nothing to measure, or a context that the target cannot hold.
    """
    slots = draft.config.block_size + 1 if draft is not None else 1
    if max_rows < 1 or repetitions < 1 or context < 1 or not requests or min(requests) < 1:
        raise UserError(
            f"profile: max_rows ({max_rows}), repetitions ({repetitions}), context ({context}) and every number "
            f"of requests ({list(requests)}) must be at least 1"
        )
    common: dict[str, Any] = {"context": context, "repetitions": repetitions}
    rows, target_seconds = [], []
    for count, length in _shapes(max_rows, slots):
        cost = time_rounds(target, draft if length else None, requests=count, length=length, **common)
        rows.append(count * (length + 1))
        target_seconds.append(cost.target)
    counts = sorted(set(requests) | {1})
    plain = [time_rounds(target, None, requests=count, length=0, **common) for count in counts]
    drafted = []
    if draft is not None:
        drafted = [time_rounds(target, draft, requests=n, length=slots - 1, **common) for n in counts]
    return CostTable(
        context=context,
        rows=tuple(rows),
        seconds_median=tuple(map(statistics.median, target_seconds)),
        seconds_p10=tuple(_quantile(sample, 0.1) for sample in target_seconds),
        seconds_p90=tuple(_quantile(sample, 0.9) for sample in target_seconds),
        rows_per_request=slots,
        requests=tuple(counts),
        single_row_seconds_median=tuple(statistics.median(cost.target) for cost in plain),
        draft_seconds_median=tuple(statistics.median(cost.draft) for cost in drafted),
        round_overhead_seconds_median=tuple(statistics.median(cost.overhead) for cost in drafted),
        step_overhead_seconds_median=tuple(statistics.median(cost.overhead) for cost in plain),
        machine=machine(target.device),
    )


def _shapes(max_rows: int, slots: int) -> Iterator[tuple[int, int]]:
    """Requests and draft tokens of passes of 1, 2, …, ``slots`` rows, then of 2, 4, 8, … whole requests."""
    for rows in range(1, min(slots, max_rows) + 1):
        yield 1, rows - 1
    count = 2
    while count * slots < 2 * max_rows:
        count_here = min(count, -(-max_rows // slots))
        yield count_here, slots - 1
        if count_here < count:
            return
        count *= 2


def _quantile(sample: list[float], share: float) -> float:
    return float(torch.tensor(sample, dtype=torch.float64).quantile(share))


def machine(device: torch.device) -> str:
    """Device and threads, for the reader of a table."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
