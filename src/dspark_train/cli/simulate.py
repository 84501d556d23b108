"""The ``simulate`` command: serving under load, replayed from recorded rounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dspark_train.cli.studies import make_folders
from dspark_train.errors import UserError
from dspark_train.lists import Integers, Names
from dspark_train.run import Run


@dataclass(frozen=True)
class SimulateOptions:
    """Options of ``simulate``."""

    run: Path
    """Folder of a finished run; its scalings are used where it was calibrated for this sampling."""
    costs: Path | None = None
    """Cost table; left out: ``RUN/studies/cost_table.json``."""
    temperature: float = 0.0
    """Sampling temperature of the rounds; 0 is greedy."""
    top_k: int = 0
    """Tokens kept by sampling; 0 keeps all."""
    top_p: float = 1.0
    """Nucleus kept by sampling; 1 keeps all."""
    split: Literal["calibration", "heldout"] = "heldout"
    """Whose prompts."""
    requests: Integers = Integers((1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
    """Numbers of concurrent requests, with commas between."""
    threshold: float = 0.5
    """Confidence of the threshold policy."""
    policies: Names = Names()
    """Further policies, with commas between, named as in decode, such as online:0.8 or scheduled+online."""
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
    from dspark_train.calibration.io import read_sts
    from dspark_train.cli.tables import print_load
    from dspark_train.decoding.cost import CostTable
    from dspark_train.decoding.policies import parse_policy
    from dspark_train.decoding.sampling import SamplingRule
    from dspark_train.files import write_result
    from dspark_train.report import figures
    from dspark_train.report.drawing import save_png
    from dspark_train.studies.record import Recording, recorded_rounds, run_to_record
    from dspark_train.studies.simulate import LoadStudy, NamedPolicy, standard_policies
    from dspark_train.studies.simulate import simulate as simulate_load

    table = CostTable.load(options.costs or Run(options.run).cost_table_path)
    recording = Recording(
        options.prompts, options.max_new_tokens, options.batch_size, refresh=options.refresh
    )
    rule = SamplingRule(options.temperature, options.top_k, options.top_p)
    run = run_to_record(options.run)
    trace = recorded_rounds(run, options.split, rule, recording)
    sts = read_sts(run, rule.label, trace.block_size)
    policies = standard_policies(table, trace.block_size, options.threshold)
    policies += [NamedPolicy(name, parse_policy(name, table)) for name in options.policies]
    load = LoadStudy(
        split=options.split,
        sampling_temperature=options.temperature,
        rounds=len(trace.request),
        block_size=trace.block_size,
        temperatures=None if sts is None else list(sts.temperatures),
        bias=0.0 if sts is None else sts.bias,
        context=table.context,
        machine=table.machine,
        measured_rows=table.max_rows,
        policies=simulate_load(trace, table, policies, sorted(set(options.requests)), sts=sts),
    )
    make_folders(run)
    picture = run.plots_path / "simulate.png"
    write_result(run.study_path("simulate"), load)
    save_png(picture, figures.load(load), figures.over(load))
    print_load(load.policies)
    print(f"wrote {run.study_path('simulate')} and {picture}")
