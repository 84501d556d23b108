"""The ``simulate`` command: serving under load, replayed from recorded rounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dspark_train.cli.studies import run_temperatures, study_folders, write_study
from dspark_train.errors import UserError
from dspark_train.lists import Integers


@dataclass(frozen=True)
class SimulateOptions:
    """Options of ``simulate``."""

    run: Path
    """Folder of a finished run; its temperatures are used where it was calibrated."""
    costs: Path | None = None
    """Cost table; left out: ``RUN/studies/cost_table.json``."""
    temperature: float = 0.0
    """Sampling temperature of the rounds; 0 is greedy."""
    split: Literal["calibration", "heldout"] = "heldout"
    """Whose prompts."""
    requests: Integers = Integers((1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
    """Numbers of concurrent requests, with commas between."""
    threshold: float = 0.5
    """Confidence of the threshold policy."""
    prompts: int = 64
    """Prompts to decode at most, where the run holds no rounds yet."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    batch_size: int = 8
    """Requests decoded at once."""
    refresh: bool = False
    """Decode again even where the run holds rounds."""

    def __post_init__(self) -> None:
        if not self.requests or min(self.requests) < 1:
            raise UserError(f"requests {list(self.requests)} must be numbers of at least 1")


def simulate(options: SimulateOptions) -> None:
    """Simulate serving under load: throughput against per-user speed, by verification policy.

    Replays recorded rounds against measured costs (``profile``). Compares plain decoding, one draft token,
    whole blocks, a threshold, and the scheduler in its causal and its asynchronous form. Writes
    simulate.json and a plot.
    """
    from dspark_train.cli.tables import print_load
    from dspark_train.decoding.cost import CostTable
    from dspark_train.report.study_plots import plot_load
    from dspark_train.studies.record import RecordedRounds, Recording
    from dspark_train.studies.simulate import points_to_json, standard_policies
    from dspark_train.studies.simulate import simulate as simulate_load

    run, temperature, split = options.run, options.temperature, options.split
    table = CostTable.load(options.costs or run / "studies" / "cost_table.json")
    recording = Recording(options.prompts, options.max_new_tokens, options.batch_size)
    rounds = RecordedRounds(run, recording, refresh=options.refresh)
    trace = rounds.trace(split, temperature)
    temperatures = run_temperatures(run, temperature, trace.block_size)
    policies = standard_policies(table, trace.block_size, options.threshold)
    points = simulate_load(trace, table, policies, sorted(set(options.requests)), temperatures=temperatures)
    folder, plots = study_folders(run)
    content = {
        "split": split,
        "sampling_temperature": temperature,
        "rounds": len(trace.request),
        "block_size": trace.block_size,
        "temperatures": temperatures,
        "context": table.context,
        "machine": table.machine,
        "measured_rows": table.max_rows,
        "policies": points_to_json(points),
    }
    write_study(folder / "simulate.json", content)
    plot_load(plots / "simulate.png", points)
    print_load(points)
    print(f"wrote {folder / 'simulate.json'} and {plots / 'simulate.png'}")
