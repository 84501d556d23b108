"""Check the load simulation against the real decoder: same prompts, same policies, same machine.

Decodes held-out prompts of a run with each policy at each batch size, predicts the same from the rounds of the
whole-block run and the machine's cost table, and prints both. Prompts' passes are left out on both sides.

    python -m dspark_train profile checkpoints/quickstart
    python benchmarks/simulate.py checkpoints/quickstart
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import jsonargparse

from dspark_train.decoding.cost import CostTable
from dspark_train.decoding.decoder import GenerationResult, generate
from dspark_train.decoding.measure import interleave
from dspark_train.decoding.policies import FixedLength
from dspark_train.decoding.simulate import NamedPolicy, simulate_queue, standard_policies
from dspark_train.decoding.study_commands import run_temperatures
from dspark_train.target.frozen import default_device
from dspark_train.training.run import Run, environment, load_run


@dataclass(frozen=True)
class Row:
    """One policy at one batch size."""

    policy: str
    batch_size: int
    tokens: int
    measured: float
    """Tokens per second of the decoder: median over repetitions."""
    measured_low: float
    measured_high: float
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


def main(
    run: Path,
    costs: Path | None = None,
    batch_sizes: tuple[int, ...] = (1, 4, 16),
    prompts_per_slot: int = 2,
    max_new_tokens: int = 64,
    repetitions: int = 3,
    threshold: float = 0.5,
    output: Path | None = None,
) -> None:
    """Compare simulated with measured throughput.

    Args:
        run: folder of a finished run.
        costs: cost table; left out: RUN/studies/cost_table.json.
        batch_sizes: requests at once.
        prompts_per_slot: prompts decoded, for each of the requests at once.
        max_new_tokens: longest answer, in tokens.
        repetitions: of each measurement; the median counts.
        threshold: of the threshold policy.
        output: JSON file for the rows; left out: none.
    """
    opened = load_run(run, "float32" if default_device().type == "cpu" else None)
    table = CostTable.load(costs or run / "studies" / "cost_table.json")
    block_size = opened.draft.config.block_size
    temperatures = run_temperatures(run, 0.0, block_size)
    every = [prompt.ids for prompt in interleave(opened.data.prompts("heldout"))]
    rows = []
    for batch_size in batch_sizes:
        prompts = [every[index % len(every)] for index in range(prompts_per_slot * batch_size)]
        decode(
            opened, prompts[:batch_size], NamedPolicy("warm-up", FixedLength()), batch_size, 8, temperatures
        )
        recorded = decode(
            opened, prompts, NamedPolicy("record", FixedLength()), batch_size, max_new_tokens, temperatures
        ).trace
        for named in standard_policies(table, block_size, threshold):
            results = [
                decode(opened, prompts, named, batch_size, max_new_tokens, temperatures)
                for _ in range(repetitions)
            ]
            made = results[0].timings.tokens - len(prompts)  # the first token is the prompt's pass's
            rates = sorted(made / result.timings.decoding for result in results)
            tokens, seconds, rounds = simulate_queue(
                recorded, table, named.policy, batch_size, temperatures=temperatures
            )
            rows.append(
                Row(
                    policy=named.name,
                    batch_size=batch_size,
                    tokens=made,
                    measured=median(rates),
                    measured_low=rates[0],
                    measured_high=rates[-1],
                    predicted=tokens / seconds,
                    tokens_per_round=made / (len(results[0].trace.request) or made),
                    predicted_tokens_per_round=tokens / rounds,
                )
            )
            print(line(rows[-1]), flush=True)
    inside = sum(abs(row.gap) <= 0.1 for row in rows)
    print(f"{inside} of {len(rows)} within 10 %, largest gap {max(abs(row.gap) for row in rows):.1%}")
    if output is not None:
        content = {
            "environment": environment(),
            "context": table.context,
            "rows": [asdict(row) for row in rows],
        }
        output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def line(row: Row) -> str:
    return (
        f"{row.policy:<16} R={row.batch_size:<3} measured {row.measured:7.1f} ({row.measured_low:.1f}–"
        f"{row.measured_high:.1f}) tok/s, simulated {row.predicted:7.1f} ({row.gap:+.1%}); "
        f"tokens per round {row.tokens_per_round:.2f} measured, {row.predicted_tokens_per_round:.2f} simulated"
    )


if __name__ == "__main__":
    jsonargparse.auto_cli(main, as_positional=True)
