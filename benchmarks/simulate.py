"""Check the load simulation against the real decoder: same requests, same arrivals, same policies, same machine.

All policies serve the same Poisson arrivals of test prompts, a few rounds of each policy in turn, each on a clock
of its own that runs while it works and jumps where it would only wait. The points of the cost table are timed
in the same turns: a shared machine's speed drifts within minutes, and both sides are to see the same of it. The rounds
of the whole-block policy, and the mean costs of the turns in which a policy decoded, then predict what that policy
did: prompts' passes, growing contexts and waiting included. What a cut changes is fitted on calibration prompts.

    python benchmarks/simulate.py checkpoints/quickstart --markdown benchmarks/simulate.md
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import jsonargparse
import torch

from dspark_train.calibration.io import read_sts
from dspark_train.calibration.sts import Sts
from dspark_train.decoding.cost import CostTable
from dspark_train.decoding.decoder import Decoder
from dspark_train.decoding.measure import interleave
from dspark_train.decoding.policies import FixedLength
from dspark_train.decoding.requests import Request
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.run import Run, environment
from dspark_train.structures import DecodingTrace
from dspark_train.studies.cuts import CutEffect, recorded_effect
from dspark_train.studies.profile import CostProfiler
from dspark_train.studies.record import Recording, recorded_rounds
from dspark_train.studies.simulate import NamedPolicy, Server, play, rate_for, standard_policies
from dspark_train.studies.traffic import Recorded, Traffic

LENGTHS_EVERY = 3
"""Turns until prompts and the longer context are timed again."""


@dataclass(frozen=True)
class Served:
    """What one policy did with the arrivals, really or simulated."""

    throughput: float
    """Tokens per second, from the first arrival to the last token."""
    per_user: float
    """Tokens per second of one request, from its first token to its last."""
    first_token: float
    """Median seconds from arrival to first token."""
    tokens_per_round: float
    """Of one request; the first token, which the prompt's pass makes, is not among them."""


@dataclass(frozen=True)
class Row:
    """One policy at one load."""

    policy: str
    requests: int
    """Requests at work that the rate of arrivals aims at."""
    measured: Served
    predicted: Served
    equal: float
    """Tokens per round as predicted where a cut changes nothing."""

    @property
    def gap(self) -> float:
        """Predicted over measured throughput, minus one."""
        return self.predicted.throughput / self.measured.throughput - 1

    @property
    def speed_gap(self) -> float:
        """The same of the speed of one user."""
        return self.predicted.per_user / self.measured.per_user - 1


class Serving:
    """One policy's service of all arrivals, greedily, a few rounds at a time."""

    def __init__(
        self,
        opened: Run,
        named: NamedPolicy,
        prompts: list[tuple[int, ...]],
        arrivals: list[float],
        slots: int,
        limit: int,
        sts: Sts | None,
    ) -> None:
        self.named, self.arrivals, self.slots, self.sts = named, arrivals, slots, sts
        plain = named.policy is None
        decoder = Decoder(
            opened.target, None if plain else opened.draft, named.policy, sts=None if plain else sts
        )
        self.requests = decoder.requests(prompts, limit, None)
        self.run = decoder.start(slots, max(len(ids) for ids in prompts) + limit, seed=0)
        self.waiting: deque[Request] = deque()
        self.arrived = 0
        self.clock = 0.0
        self.turns = 0
        self.started: dict[int, float] = {}
        self.finished: dict[int, float] = {}

    @property
    def unfinished(self) -> bool:
        return len(self.finished) < len(self.requests)

    def advance(self, rounds: int) -> None:
        """Serve for so many rounds, or to the end. (Rounds and not seconds: as many in slow turns as in fast ones.)"""
        with self.run:
            for _ in range(rounds):
                if not self.unfinished:
                    break
                self._step()
        self.turns += 1

    def _step(self) -> None:
        if not (self.waiting or self.run.active):
            self.clock = max(self.clock, self.arrivals[self.arrived])
        while self.arrived < len(self.requests) and self.arrivals[self.arrived] <= self.clock:
            self.waiting.append(self.requests[self.arrived])
            self.arrived += 1
        before, prompts = time.perf_counter(), self.run.watch.read().get("prefill", 0.0)
        self.run.step(self.waiting)
        spent = time.perf_counter() - before
        joined = self.clock + self.run.watch.read().get("prefill", 0.0) - prompts
        self.clock += spent
        for request in self.requests[: self.arrived]:
            if request.tokens:
                self.started.setdefault(request.index, joined)
            if request.finished_by:
                self.finished.setdefault(request.index, self.clock)

    def trace(self) -> DecodingTrace:
        """Rounds so far."""
        return self.run.rounds.trace(0.0, ())

    def served(self) -> Served:
        """What it did, measured."""
        made = [len(request.tokens) for request in self.requests]
        spent = sum(self.finished[index] - self.started[index] for index in self.finished)
        return Served(
            throughput=sum(made) / self.clock,
            per_user=(sum(made) - len(made)) / spent,
            first_token=median(self.started[index] - at for index, at in enumerate(self.arrivals)),
            tokens_per_round=(sum(made) - len(made)) / len(self.trace().request),
        )


def predict(serving: Serving, whole: Serving, costs: CostTable, effect: CutEffect | None) -> Served:
    """What the rounds of whole blocks and these costs say that a policy does with the same arrivals."""
    trace = whole.trace()
    place = {index: at for at, index in enumerate(trace.request.unique().tolist())}
    traffic = Traffic(
        torch.tensor(whole.arrivals, dtype=torch.float64),
        torch.tensor([place.get(request.index, 0) for request in whole.requests]),
        torch.tensor([len(request.prompt) for request in whole.requests]),
        torch.tensor([len(request.tokens) for request in whole.requests]),
    )
    policy, server = serving.named.policy, Server(serving.slots)
    played = play(Recorded.of(trace), traffic, server, policy, costs, sts=serving.sts, effect=effect)
    return Served(
        throughput=float(traffic.answer.sum()) / played.end[-1],
        per_user=float((traffic.answer - 1).sum() / (played.finished - played.started).sum()),
        first_token=median((played.started - played.arrived).tolist()),
        tokens_per_round=sum(played.tokens) / sum(played.active),
    )


@torch.inference_mode()
def compare(
    opened: Run,
    prompts: list[tuple[int, ...]],
    load: int,
    limit: int,
    threshold: float,
    sts: Sts | None,
    effect: CutEffect | None,
    recorded: Recorded,
    turn: int,
) -> list[Row]:
    """Serve with every policy in turns, and predict it."""
    block_size, slots, label = opened.draft.config.block_size, 2 * load, f"{load} at work"
    profiler = CostProfiler(
        opened.target,
        opened.draft,
        max_rows=slots * (block_size + 1),
        requests=[count for count in (1, 2, 4, 8, 16, 32, 64) if count < slots] + [slots],
        context=round(fmean(map(len, prompts)) + limit / 2),
        prompts=(32, 128, 512),
    )
    profiler.sweep(4)
    believed = profiler.table().monotone()
    arrivals = recorded.poisson(rate_for(recorded, believed, load), len(prompts)).seconds.tolist()
    servings = [
        Serving(opened, named, prompts, arrivals, slots, limit, sts)
        for named in standard_policies(believed, block_size, threshold)
    ]
    profiler.reset()
    costs: dict[int, CostTable] = {}
    turns = 0
    while going := [serving for serving in servings if serving.unfinished]:
        if turns % LENGTHS_EVERY == 0:
            profiler.lengths(4, warm_up=1)
        profiler.sweep(2, warm_up=1)
        for serving in going:
            serving.advance(turn)
        turns += 1
        if any(not serving.unfinished for serving in going):
            costs[turns] = profiler.table(fmean)
        print(f"\r{label}: turn {turns}, {len(going)} policies left ", end="", flush=True)
    print("\r", end="")
    whole = next(one for one in servings if one.named.policy == FixedLength())
    return [
        Row(
            serving.named.name,
            load,
            serving.served(),
            predict(serving, whole, costs[serving.turns], effect),
            predict(serving, whole, costs[serving.turns], None).tokens_per_round,
        )
        for serving in servings
    ]


def main(
    run: Path,
    loads: tuple[int, ...] = (1, 3, 8),
    prompts: int = 24,
    max_new_tokens: int = 64,
    threshold: float = 0.5,
    turn: int = 6,
    dtype: Literal["auto", "bfloat16", "float32"] | None = None,
    markdown: Path | None = None,
) -> None:
    """Compare simulated with measured service of the same arrivals.

    Args:
        run: folder of a finished run.
        loads: requests at work that the rates of arrivals aim at; the decoder has slots for twice as many.
        prompts: prompts that arrive at each load; at least four for each request aimed at.
        max_new_tokens: longest answer, in tokens.
        threshold: of the threshold policy.
        turn: rounds that a policy decodes until the next one has its turn.
        dtype: of target and draft; left out: the run's.
        markdown: file for the table; left out: none.
    """
    opened = Run(run, dtype)
    sts = read_sts(opened, "greedy", opened.draft.config.block_size)
    rule, recording = SamplingRule(), Recording(max_new_tokens=max_new_tokens)
    recorded = Recorded.of(recorded_rounds(opened, "test", rule, recording))
    effect = recorded_effect(opened, rule, recording)
    every = [prompt.ids for prompt in interleave(opened.data.prompts("test"))]
    rows: list[Row] = []
    for load in loads:
        chosen = [every[index % len(every)] for index in range(max(prompts, 4 * load))]
        found = compare(opened, chosen, load, max_new_tokens, threshold, sts, effect, recorded, turn)
        rows += found
        print(*map(line, found), sep="\n", flush=True)
    gaps = [gap for row in rows for gap in (row.gap, row.speed_gap)]
    inside = sum(abs(gap) <= 0.1 for gap in gaps)
    tau = fmean(abs(row.predicted.tokens_per_round / row.measured.tokens_per_round - 1) for row in rows)
    equal = fmean(abs(row.equal / row.measured.tokens_per_round - 1) for row in rows)
    summary = (
        f"Throughput and speed per user: {inside} of {len(gaps)} within 10 %, largest gap "
        f"{max(map(abs, gaps)):.1%}, mean gap {fmean(map(abs, gaps)):.1%}. Tokens a round: mean gap {tau:.1%}; "
        f"{equal:.1%} where a cut is taken to change nothing."
    )
    print(summary)
    if markdown is not None:
        about, kind = environment(), str(opened.target.dtype).removeprefix("torch.")
        fitted = f"{effect.rounds:,} rounds" if effect else "none"
        lines = [
            "# Simulated against measured service",
            "",
            f"`python benchmarks/simulate.py {run}`: {prompts} prompts, or four for each request aimed at, × "
            f"{max_new_tokens} tokens, greedy, {kind}; Poisson arrivals, the same for every policy and for the "
            f"simulation; policies and costs timed in turns of {turn} rounds; rounds after a cut behind the fit: "
            f"{fitted}; {about['machine']}, torch {about['versions']['torch']}, commit {about['commit']}.",
            "",
            "| aimed at | policy | tokens/s, all | simulated | gap | tokens/s, one user | simulated | gap "
            "| first token, s | simulated | tokens a round | simulated | cuts equal |",
            "|--:|---|" + "--:|" * 11,
            *map(markdown_line, rows),
            "",
            summary,
        ]
        markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


def markdown_line(row: Row) -> str:
    one, two = row.measured, row.predicted
    return (
        f"| {row.requests} | {row.policy} | {one.throughput:.1f} | {two.throughput:.1f} | {row.gap:+.1%} "
        f"| {one.per_user:.1f} | {two.per_user:.1f} | {row.speed_gap:+.1%} "
        f"| {one.first_token:.2f} | {two.first_token:.2f} "
        f"| {one.tokens_per_round:.2f} | {two.tokens_per_round:.2f} | {row.equal:.2f} |"
    )


def line(row: Row) -> str:
    one, two = row.measured, row.predicted
    return (
        f"{row.policy:<16} {row.requests:>3} at work: {one.throughput:7.1f} tok/s, simulated {two.throughput:7.1f} "
        f"({row.gap:+.1%}); each {one.per_user:6.1f}, simulated {two.per_user:6.1f} ({row.speed_gap:+.1%}); tokens "
        f"a round {one.tokens_per_round:.2f}, simulated {two.tokens_per_round:.2f} (cuts equal {row.equal:.2f})"
    )


if __name__ == "__main__":
    jsonargparse.auto_cli(main, as_positional=True)
