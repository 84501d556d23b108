"""Check the load simulation against the real decoder: same prompts, same policies, same machine.

All policies decode test prompts of a run side by side, a few rounds of each in turn, and the points of the cost
table are timed in the same turns: a shared machine's speed drifts within minutes, and both sides are to see the same
of it. The rounds of the whole-block policy, and the mean costs of the turns in which a policy decoded, then predict
what that policy did. Prompts' passes are left out on both sides.

    python benchmarks/simulate.py checkpoints/quickstart --markdown benchmarks/simulate.md
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import jsonargparse
import torch

from dspark_train.calibration.io import read_sts
from dspark_train.decoding.cost import CostTable
from dspark_train.decoding.decoder import Decoder
from dspark_train.decoding.measure import interleave
from dspark_train.decoding.policies import FixedLength
from dspark_train.run import Run, environment
from dspark_train.structures import DecodingTrace
from dspark_train.studies.profile import CostProfiler
from dspark_train.studies.simulate import NamedPolicy, simulate_queue, standard_policies


@dataclass(frozen=True)
class Row:
    """One policy at one batch size."""

    policy: str
    batch_size: int
    measured: float
    """Tokens per second of the decoder."""
    predicted: float
    """Tokens per second of the simulation."""
    tokens_per_round: float
    predicted_tokens_per_round: float

    @property
    def gap(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted / self.measured - 1


class Decoding:
    """One policy's decoding of all prompts, greedily, a few rounds at a time."""

    def __init__(
        self,
        opened: Run,
        named: NamedPolicy,
        prompts: list[tuple[int, ...]],
        batch_size: int,
        limit: int,
        sts: list[float] | None,
    ) -> None:
        self.named, self.batch_size, self.sts = named, batch_size, sts
        plain = named.policy is None
        decoder = Decoder(
            opened.target,
            None if plain else opened.draft,
            named.policy,
            sts=None if plain else sts,
        )
        self.requests = decoder.requests(prompts, limit, None)
        self.waiting = deque(self.requests)
        self.run = decoder.start(batch_size, max(len(ids) for ids in prompts) + limit, seed=0)
        self.seconds = 0.0
        self.turns = 0

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.run.active)

    @property
    def longest(self) -> int:
        """Positions of the longest request of this moment; of the longest prompt before the first round."""
        return max(request.position for request in self.run.active or self.requests)

    def advance(self, rounds: int) -> None:
        """Decode so many rounds, or to the end. (Rounds and not seconds: as many in slow turns as in fast ones.)"""
        with self.run:
            prompts, started = self.run.watch.read().get("prefill", 0.0), time.perf_counter()
            for _ in range(rounds):
                if not self.run.step(self.waiting):
                    break
            spent = time.perf_counter() - started
            self.seconds += spent - (self.run.watch.read().get("prefill", 0.0) - prompts)
        self.turns += 1

    def trace(self) -> DecodingTrace:
        """Rounds so far."""
        return self.run.rounds.trace(0.0, ())

    def row(self, recorded: DecodingTrace, costs: CostTable) -> Row:
        """Throughput beside what the recorded rounds of whole blocks and these costs predict."""
        # a first token is its prompt's pass's
        made = sum(len(request.tokens) - 1 for request in self.requests)
        tokens, seconds, rounds = simulate_queue(
            recorded, costs, self.named.policy, self.batch_size, sts=self.sts
        )
        return Row(
            policy=self.named.name,
            batch_size=self.batch_size,
            measured=made / self.seconds,
            predicted=tokens / seconds,
            tokens_per_round=made / len(self.trace().request),
            predicted_tokens_per_round=tokens / rounds,
        )


@torch.inference_mode()
def compare(
    opened: Run,
    prompts: list[tuple[int, ...]],
    batch_size: int,
    limit: int,
    threshold: float,
    sts: list[float] | None,
    turn: int,
    label: str,
) -> list[Row]:
    """Decode with every policy in turns, and predict it."""
    block_size = opened.draft.config.block_size
    profiler = CostProfiler(
        opened.target,
        opened.draft,
        max_rows=batch_size * (block_size + 1),
        requests=[count for count in (1, 2, 4, 8, 16, 32, 64) if count < batch_size] + [batch_size],
        context=round(fmean(map(len, prompts)) + limit / 2),
    )
    profiler.sweep(4)
    believed = profiler.table().monotone()
    decodings = [
        Decoding(opened, named, prompts, batch_size, limit, sts)
        for named in standard_policies(believed, block_size, threshold)
    ]
    profiler.reset()
    costs: dict[int, CostTable] = {}
    turns = 0
    while going := [decoding for decoding in decodings if decoding.unfinished]:
        # attention reads as far as the longest of the requests at once, in whole tiles: each policy's in turn
        profiler.sweep(2, warm_up=1, context=going[turns % len(going)].longest)
        for decoding in going:
            decoding.advance(turn)
        turns += 1
        if any(not decoding.unfinished for decoding in going):
            costs[turns] = profiler.table(fmean)
        print(f"\r{label}: turn {turns}, {len(going)} policies left ", end="", flush=True)
    print("\r", end="")
    whole = next(one for one in decodings if one.named.policy == FixedLength())
    return [decoding.row(whole.trace(), costs[decoding.turns]) for decoding in decodings]


def main(
    run: Path,
    batch_sizes: tuple[int, ...] = (1, 4, 16),
    prompts: int = 8,
    max_new_tokens: int = 64,
    threshold: float = 0.5,
    turn: int = 6,
    dtype: Literal["auto", "bfloat16", "float32"] | None = None,
    markdown: Path | None = None,
) -> None:
    """Compare simulated with measured throughput.

    Args:
        run: folder of a finished run.
        batch_sizes: requests at once.
        prompts: prompts decoded at each batch size; at least three for each of the requests at once.
        max_new_tokens: longest answer, in tokens.
        threshold: of the threshold policy.
        turn: rounds that a policy decodes until the next one has its turn.
        dtype: of target and draft; left out: the run's.
        markdown: file for the table; left out: none.
    """
    opened = Run(run, dtype)
    sts = read_sts(opened, "greedy", opened.draft.config.block_size)
    every = [prompt.ids for prompt in interleave(opened.data.prompts("test"))]
    rows: list[Row] = []
    for batch_size in batch_sizes:
        chosen = [every[index % len(every)] for index in range(max(prompts, 3 * batch_size))]
        label = f"R={batch_size}"
        found = compare(opened, chosen, batch_size, max_new_tokens, threshold, sts, turn, label)
        rows += found
        print(*map(line, found), sep="\n", flush=True)
    inside = sum(abs(row.gap) <= 0.1 for row in rows)
    summary = (
        f"{inside} of {len(rows)} within 10 %, largest gap {max(abs(row.gap) for row in rows):.1%}, "
        f"mean gap {fmean(abs(row.gap) for row in rows):.1%}."
    )
    print(summary)
    if markdown is not None:
        about, kind = environment(), str(opened.target.dtype).removeprefix("torch.")
        lines = [
            "# Simulated against measured throughput",
            "",
            f"`python benchmarks/simulate.py {run}`: {prompts} prompts, or three for each request at once, × "
            f"{max_new_tokens} tokens, greedy, {kind}; policies and costs timed in turns of {turn} rounds; "
            f"{about['machine']}, torch {about['versions']['torch']}, commit {about['commit']}.",
            "",
            "| requests | policy | measured tokens/s | simulated | gap | tokens a round, measured | simulated |",
            "|--:|---|--:|--:|--:|--:|--:|",
            *(
                f"| {row.batch_size} | {row.policy} | {row.measured:.1f} | {row.predicted:.1f} | {row.gap:+.1%} "
                f"| {row.tokens_per_round:.2f} | {row.predicted_tokens_per_round:.2f} |"
                for row in rows
            ),
            "",
            summary,
        ]
        markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


def line(row: Row) -> str:
    return (
        f"{row.policy:<16} R={row.batch_size:<3} measured {row.measured:7.1f} tok/s, "
        f"simulated {row.predicted:7.1f} ({row.gap:+.1%}); "
        f"tokens per round {row.tokens_per_round:.2f} measured, {row.predicted_tokens_per_round:.2f} simulated"
    )


if __name__ == "__main__":
    jsonargparse.auto_cli(main, as_positional=True)
