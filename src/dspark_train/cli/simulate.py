"""The ``simulate`` command: serving under load, replayed from recorded rounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dspark_train.cli.studies import make_folders
from dspark_train.errors import UserError
from dspark_train.lists import Integers, Names, Numbers
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
    split: Literal["calibration", "validation", "test"] = "test"
    """Whose prompts."""
    requests: Integers = Integers()
    """Requests at work that the rates of arrivals aim at, with commas between. Left out: 1, 2, 4, … up to as many as
    the cost table has rows for whole blocks of."""
    rates: Numbers = Numbers()
    """Requests that arrive per second, with commas between, instead."""
    arrivals: Path | None = None
    """Arrivals of real traffic, stretched to each rate: a JSONL file, a line a request, with ``seconds`` and, where
    known, ``prompt_tokens`` and ``answer_tokens``. Left out: Poisson arrivals."""
    slots: int | None = None
    """Requests at once, at most; left out, as many as are aimed at."""
    cache_tokens: int | None = None
    """Positions that the cache holds, all requests together. A request joins when its prompt and the longest answer
    fit; left out, they always do."""
    arriving: int | None = None
    """Requests that arrive at each rate; left out, six for each that is at work at once, and at least 100."""
    speeds: Numbers = Numbers()
    """Promised speeds per user, in tokens per second, at which throughput is read out; left out, four of them."""
    after_cut: bool = True
    """Fit from rounds of cut blocks what a cut changes in the next round; they are decoded where the run holds none."""
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
        for name in ("requests", "rates", "speeds"):
            values, least = getattr(self, name), 1 if name == "requests" else 0
            if any(not value >= least or value == 0 for value in values):
                raise UserError(
                    f"{name} {list(values)} must be numbers {'of at least 1' if least else 'above 0'}"
                )
        for name in ("slots", "cache_tokens", "arriving"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name} {value} must be at least 1")


def simulate(options: SimulateOptions) -> None:
    """Simulate serving under load: what each verification policy makes of the same arriving requests.

    Requests arrive at random or as in a recorded traffic; their rounds are replayed from the record against measured
    costs (``profile``), prompts and context included. Compares plain decoding, one draft token, whole
    blocks, a threshold, and the scheduler in its causal and its asynchronous form: throughput at a promised speed,
    speed at equal throughput, budget by concurrency. Writes simulate.json and a plot.
    """
    from dspark_train.calibration.io import read_sts
    from dspark_train.cli.tables import print_load
    from dspark_train.decoding.cost import CostTable
    from dspark_train.decoding.policies import parse_policy
    from dspark_train.decoding.sampling import SamplingRule
    from dspark_train.files import write_result
    from dspark_train.report import figures
    from dspark_train.report.drawing import save_png
    from dspark_train.studies import simulate as load
    from dspark_train.studies.cuts import recorded_effect
    from dspark_train.studies.record import Recording, recorded_rounds, run_to_record
    from dspark_train.studies.traffic import Arrivals, Recorded

    table = CostTable.load(options.costs or Run(options.run).cost_table_path)
    arrivals = None if options.arrivals is None else Arrivals.load(options.arrivals)
    recording = Recording(
        options.prompts, options.max_new_tokens, options.batch_size, refresh=options.refresh
    )
    rule = SamplingRule(options.temperature, options.top_k, options.top_p)
    run = run_to_record(options.run)
    trace = recorded_rounds(run, options.split, rule, recording)
    sts = read_sts(run, rule.label, trace.block_size)
    effect = recorded_effect(run, rule, recording) if options.after_cut else None
    policies = load.standard_policies(table, trace.block_size, options.threshold)
    policies += [load.NamedPolicy(name, parse_policy(name, table)) for name in options.policies]
    recorded = Recorded.of(trace)
    counts = sorted(set(options.requests)) or _doubling(max(1, table.max_rows // (trace.block_size + 1)))
    server = load.Server(options.slots or counts[-1], options.cache_tokens)
    served = recorded if arrivals is None else arrivals.served_by(recorded)
    prompt, answer = (float(tokens.double().mean()) for tokens in (served.prompt, served.answer))
    rates = options.rates or [load.rate_for(recorded, table, count, answer) for count in counts]
    points, budgets = load.simulate(
        trace,
        table,
        policies,
        sorted(set(rates)),
        server,
        sts=sts,
        effect=effect,
        arrivals=arrivals,
        requests=options.arriving,
    )
    study = load.LoadStudy(
        split=options.split,
        sampling_temperature=options.temperature,
        rounds=len(trace.request),
        block_size=trace.block_size,
        temperatures=None if sts is None else list(sts.temperatures),
        bias=0.0 if sts is None else sts.bias,
        context=table.context,
        machine=table.machine,
        measured_rows=table.max_rows,
        arrivals="poisson" if options.arrivals is None else options.arrivals.name,
        slots=server.slots,
        cache_tokens=server.cache_tokens,
        prompt_tokens=prompt,
        answer_tokens=answer,
        after_cut=effect,
        speeds=list(options.speeds) or load.promised(points),
        policies=points,
        budgets=budgets,
    )
    make_folders(run)
    picture = run.plots_path / "simulate.png"
    write_result(run.study_path("simulate"), study)
    save_png(picture, figures.load(study), figures.over(study))
    print_load(study)
    print(f"wrote {run.study_path('simulate')} and {picture}")


def _doubling(most: int) -> list[int]:
    """1, 2, 4, … and ``most``."""
    return sorted({most, *(2**power for power in range(most.bit_length()))} - {0})
