"""Check the load simulation against the real decoder: same prompts, same policies, same machine.

Decodes held-out prompts of a run with each policy at each batch size, predicts the same from the rounds of the
whole-block run and the costs measured just before and after (a shared machine's speed drifts within minutes), and
prints both. Prompts' passes are left out on both sides.

    python benchmarks/simulate.py checkpoints/quickstart --markdown benchmarks/simulate.md
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Literal

import jsonargparse

from dspark_train.decoding.cost import CostTable
from dspark_train.decoding.decoder import GenerationResult, generate
from dspark_train.decoding.measure import interleave
from dspark_train.decoding.policies import FixedLength
from dspark_train.decoding.profile import measure_costs
from dspark_train.decoding.simulate import NamedPolicy, simulate_queue, standard_policies
from dspark_train.decoding.study_commands import run_temperatures
from dspark_train.training.run import Run, environment, load_run


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


def decode(opened: Run, prompts: list[tuple[int, ...]], named: NamedPolicy, batch_size: int, limit: int,
           temperatures: list[float] | None) -> GenerationResult:  # fmt: skip
    """Decode greedily with one policy."""
    return generate(
        opened.target,
        None if named.policy is None else opened.draft,
        prompts,
        max_new_tokens=limit,
        policy=named.policy,
        batch_size=batch_size,
        temperatures=None if named.policy is None else temperatures,
    )


def costs_now(opened: Run, batch_size: int, repetitions: int) -> CostTable:
    """Costs of rounds with this many requests, as the machine is at this moment."""
    return measure_costs(
        opened.target,
        opened.draft,
        max_rows=batch_size * (opened.draft.config.block_size + 1),
        requests=(batch_size,),
        context=128,
        repetitions=repetitions,
    )


def main(
    run: Path,
    batch_sizes: tuple[int, ...] = (1, 4, 16),
    prompts_per_slot: int = 2,
    max_new_tokens: int = 64,
    repetitions: int = 3,
    cost_repetitions: int = 8,
    threshold: float = 0.5,
    dtype: Literal["auto", "bfloat16", "float32"] | None = None,
    markdown: Path | None = None,
) -> None:
    """Compare simulated with measured throughput.

    Args:
        run: folder of a finished run.
        batch_sizes: requests at once.
        prompts_per_slot: prompts decoded, for each of the requests at once.
        max_new_tokens: longest answer, in tokens.
        repetitions: of each measurement, each between two measurements of the costs; the median counts.
        cost_repetitions: rounds timed at each point of a cost table.
        threshold: of the threshold policy.
        dtype: of target and draft; left out: the run's.
        markdown: file for the table; left out: none.
    """
    opened = load_run(run, dtype)
    block_size = opened.draft.config.block_size
    temperatures = run_temperatures(run, 0.0, block_size)
    every = [prompt.ids for prompt in interleave(opened.data.prompts("heldout"))]
    rows: list[Row] = []
    for batch_size in batch_sizes:
        prompts = [every[index % len(every)] for index in range(prompts_per_slot * batch_size)]
        decode(
            opened, prompts[:batch_size], NamedPolicy("warm-up", FixedLength()), batch_size, 8, temperatures
        )
        recorded = decode(
            opened, prompts, NamedPolicy("record", FixedLength()), batch_size, max_new_tokens, temperatures
        ).trace
        table = costs_now(opened, batch_size, cost_repetitions)
        found: dict[str, list[Row]] = {}
        for _ in range(repetitions):
            for named in standard_policies(table, block_size, threshold):
                result = decode(opened, prompts, named, batch_size, max_new_tokens, temperatures)
                before, table = table, costs_now(opened, batch_size, cost_repetitions)
                simulated = [
                    simulate_queue(recorded, costs, named.policy, batch_size, temperatures=temperatures)
                    for costs in (before, table)
                ]
                made = result.timings.tokens - len(prompts)  # the first token is the prompt's pass's
                tokens, _, rounds = simulated[0]
                row = Row(
                    policy=named.name,
                    batch_size=batch_size,
                    measured=made / result.timings.decoding,
                    predicted=tokens / mean(seconds for _, seconds, _ in simulated),
                    tokens_per_round=made / (len(result.trace.request) or made),
                    predicted_tokens_per_round=tokens / rounds,
                )
                found.setdefault(named.name, []).append(row)
        for tried in found.values():
            rows.append(median_row(tried))
            print(line(rows[-1]), flush=True)
    inside = sum(abs(row.gap) <= 0.1 for row in rows)
    summary = (
        f"{inside} of {len(rows)} within 10 %, largest gap {max(abs(row.gap) for row in rows):.1%}, "
        f"mean gap {mean(abs(row.gap) for row in rows):.1%}."
    )
    print(summary)
    if markdown is not None:
        about, kind = environment(), str(opened.target.dtype).removeprefix("torch.")
        lines = [
            "# Simulated against measured throughput",
            "",
            f"`python benchmarks/simulate.py {run}`: {prompts_per_slot} prompts a slot × {max_new_tokens} tokens, "
            f"greedy, {kind}, median of {repetitions} repetitions, each simulated from the costs before and after; "
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


def median_row(rows: list[Row]) -> Row:
    """The repetition whose gap is the middle one."""
    return sorted(rows, key=lambda row: row.gap)[len(rows) // 2]


def line(row: Row) -> str:
    return (
        f"{row.policy:<16} R={row.batch_size:<3} measured {row.measured:7.1f} tok/s, "
        f"simulated {row.predicted:7.1f} ({row.gap:+.1%}); "
        f"tokens per round {row.tokens_per_round:.2f} measured, {row.predicted_tokens_per_round:.2f} simulated"
    )


if __name__ == "__main__":
    jsonargparse.auto_cli(main, as_positional=True)
