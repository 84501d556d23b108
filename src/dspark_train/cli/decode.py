"""The commands ``decode`` and ``profile``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dspark_train.errors import UserError

if TYPE_CHECKING:
    from dspark_train.decoding.cost import CostTable
    from dspark_train.decoding.measure import ExampleResult, ModeResult
    from dspark_train.decoding.policies import Policy
    from dspark_train.run import Run


def decode(
    run: Path,
    policy: str = "auto",
    temperatures: tuple[float, ...] = (0.0, 1.0),
    prompts: int | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 1,
    top_k: int = 0,
    top_p: float = 1.0,
    seconds: float = 120.0,
    split: Literal["heldout", "calibration", "train"] = "heldout",
    dtype: Literal["auto", "bfloat16", "float32"] | None = None,
    costs: Path | None = None,
    seed: int = 0,
    graphs: bool = False,
    compile: bool = False,
) -> None:
    """Decode prompts plainly and speculatively, and compare speed, acceptance and output.

    Both decode the same prompts in this process, in turns. Writes decode.json, and the rounds to
    traces/decode_LABEL.safetensors.

    Args:
        run: folder of a finished run.
        policy: fixed, fixed:K, threshold:P, online:SHARE (a threshold that follows a wanted accepted share), scheduled
            or asynchronous. auto: scheduled by costs measured on the spot where the draft has a confidence head, else
            fixed. With +online behind a policy that reads confidences, their scalings follow what is accepted.
        temperatures: sampling temperatures; 0 is greedy.
        prompts: prompts at most; left out, as many as fit into the time.
        max_new_tokens: longest answer, in tokens.
        batch_size: requests decoded at once.
        top_k: tokens kept by sampling; 0 keeps all.
        top_p: nucleus kept by sampling; 1 keeps all.
        seconds: time for each sampling temperature; prompts of all domains take turns until it is over.
        split: whose prompts.
        dtype: of target and draft. Left out: the run's, which is bfloat16 where the hardware computes in it.
        costs: cost table for the schedulers; left out, the run's own, else measured on the spot.
        seed: of sampling and bootstrap.
        graphs: run rounds in a few fixed shapes, captured as CUDA graphs; on a CPU the same shapes, uncaptured.
        compile: compile the norms and MLPs of target and draft (needs a C++ compiler).
    """
    from dspark_train.calibration.io import read_sts
    from dspark_train.decoding.measure import (
        DecodeResult,
        Settings,
        compare,
        examples,
        interleave,
        mode_result,
    )
    from dspark_train.decoding.sampling import SamplingRule
    from dspark_train.files import write_result
    from dspark_train.run import Run

    if not temperatures or (prompts is not None and prompts < 1) or max_new_tokens < 2 or seconds <= 0:
        raise UserError(
            f"decode: temperatures {list(temperatures)} must not be empty, prompts ({prompts}) at least 1, "
            f"max_new_tokens ({max_new_tokens}) at least 2, seconds ({seconds}) above 0"
        )
    rules = [SamplingRule(temperature, top_k, top_p) for temperature in temperatures]
    opened = Run(run, dtype)
    chosen = interleave(opened.data.prompts(split))[:prompts]
    if not chosen:
        raise UserError(f"run {run}: its data have no {split} prompts; name another split")
    picked, named = _policy(opened, policy, costs, batch_size)
    modes: dict[str, ModeResult] = {}
    answers: list[ExampleResult] = []
    identical = None
    (run / "traces").mkdir(exist_ok=True)
    for rule in rules:
        label = rule.label
        sts = None
        if opened.draft.confidence_head is not None:
            sts = read_sts(opened, label, opened.draft.config.block_size)
        settings = Settings(max_new_tokens, batch_size, picked, sts, seed, graphs, compile)
        found = compare(opened.target, opened.draft, chosen, rule, settings, seconds)
        found.trace.save(opened.trace_path("decode", label))
        modes[label] = mode_result(found, seed, sts)
        if rule.greedy:
            identical = not found.divergences
        if rule.greedy or len(rules) == 1:
            answers = examples(found, opened.target.tokenizer, 12)
        print_mode(label, modes[label])
    result = DecodeResult(
        policy=named,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        split=split,
        dtype=str(opened.target.dtype).removeprefix("torch."),
        seed=seed,
        graphs=graphs,
        compile=compile,
        modes=modes,
        identical=identical,
        examples=answers,
    )
    write_result(opened.decode_path, result)
    print(f"wrote {opened.decode_path}")


def _policy(opened: Run, text: str, costs: Path | None, batch_size: int) -> tuple[Policy, str]:
    """The policy that ``text`` names, and its full name."""
    from dspark_train.decoding.policies import ONLINE, FixedLength, parse_policy

    name = text.removesuffix(ONLINE)
    if name == "auto":
        if opened.draft.confidence_head is None:
            return FixedLength(), "fixed"
        name, text = "scheduled", text.replace("auto", "scheduled")
    if name not in ("scheduled", "asynchronous"):
        return parse_policy(text), text
    return parse_policy(text, costs or costs_now(opened, batch_size)), text


def costs_now(opened: Run, batch_size: int) -> CostTable:
    """Costs measured on the spot, as far as a batch of this size needs them."""
    from dspark_train.studies.profile import measure_costs

    rows = batch_size * (opened.draft.config.block_size + 1)
    room = opened.target.context_length or 1024
    table = measure_costs(
        opened.target,
        opened.draft,
        max_rows=rows,
        requests=(batch_size,),
        context=min(128, room // 4),
        repetitions=10,
    )
    return table.monotone()


def print_mode(label: str, mode: ModeResult) -> None:
    """Print one mode as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{label}: {mode.prompts} prompts", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("", "tokens/s", "rounds", "rows", "ms", "draft", "head", "verify"):
        table.add_column(name, justify="left" if not name else "right")
    for name, side in (("plain", mode.plain), ("speculative", mode.speculative)):
        assert side is not None
        parts = side.milliseconds
        shown = (parts["draft"], parts["head"], parts["verify"] + parts["target_head"])
        table.add_row(
            name,
            f"{side.tokens_per_second:.1f}",
            f"{side.rounds:,}",
            f"{side.rows / max(1, side.rounds):.1f}",
            f"{side.round_milliseconds:.1f}",
            *(f"{value:.1f}" for value in shown),
        )
    table.caption = "rows and milliseconds of a round, and of its parts"
    console = Console()
    console.print(table)
    line = f"τ {mode.tau:.2f}"
    if (speedup := mode.speedup) is not None:
        line += f", speedup {speedup.value:.2f}× ({speedup.low:.2f} to {speedup.high:.2f} {speedup.spread})"
    if mode.identical is not None:
        line += f", identical output {mode.identical.prompts}/{mode.identical.of}"
    console.print(line)
    accepted = " ".join("–" if v is None else f"{v:.2f}" for v in mode.acceptance.conditional)
    console.print(f"accepted, given that all earlier were: {accepted}")


def profile(
    run: Path,
    out: Path | None = None,
    max_rows: int = 128,
    requests: tuple[int, ...] = (1, 2, 4, 8, 16),
    context: int = 256,
    repetitions: int = 20,
    dtype: Literal["auto", "bfloat16", "float32"] | None = None,
) -> None:
    """Measure what a target pass costs against its rows, and a round's other parts against concurrent requests.

    Writes a cost table (JSON) for the schedulers and simulate, and a plot beside it.

    Args:
        run: folder of a run, whose target and draft are measured.
        out: where to write the table; left out, RUN/studies/cost_table.json.
        max_rows: rows (tokens) of the largest verification pass.
        requests: concurrent requests at which draft and overheads are measured.
        context: tokens of context of every request. In a batch, attention reads as far as the longest one.
        repetitions: rounds timed at each point.
        dtype: of target and draft. Left out: the run's.
    """
    from dspark_train.report import figures
    from dspark_train.report.drawing import save_png
    from dspark_train.run import Run
    from dspark_train.studies.profile import measure_costs

    opened = Run(run, dtype)
    table = measure_costs(
        opened.target,
        opened.draft,
        max_rows=max_rows,
        requests=requests,
        context=context,
        repetitions=repetitions,
    )
    path = out or run / "studies" / "cost_table.json"
    table.save(path)
    save_png(path.with_suffix(".png"), figures.costs(table))
    print_costs(table)
    print(f"wrote {path} and {path.with_suffix('.png')}")


def print_costs(table: CostTable) -> None:
    """Print a cost table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(
        title=f"Target pass, {table.context} tokens of context ({table.machine})", box=box.SIMPLE_HEAD
    )
    for name in ("rows", "median ms", "p10", "p90", "steps/s"):
        shown.add_column(name, justify="right")
    for rows, middle, low, high in zip(
        table.rows, table.seconds_median, table.seconds_p10, table.seconds_p90, strict=True
    ):
        values = (1000 * middle, 1000 * low, 1000 * high, 1 / middle)
        shown.add_row(str(rows), *(f"{value:.1f}" for value in values))
    Console().print(shown)
