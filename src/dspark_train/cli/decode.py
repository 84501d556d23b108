"""The ``decode`` command: plain against speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dspark_train.data.conversations import Prompt, Split
from dspark_train.errors import UserError
from dspark_train.lists import Numbers

if TYPE_CHECKING:
    from dspark_train.run import Run


@dataclass(frozen=True)
class DecodeOptions:
    """Options of ``decode``."""

    run: Path
    """Folder of a finished run."""
    policy: str = "auto"
    """fixed, fixed:K, threshold:P, online:SHARE (a threshold that follows a wanted accepted share), scheduled or
    asynchronous. auto: scheduled by costs measured on the spot where the draft has a confidence head, else fixed.
    With +online behind a policy that reads confidences, their scalings follow what is accepted."""
    temperatures: Numbers = Numbers((0.0, 1.0))
    """Sampling temperatures, with commas between; 0 is greedy."""
    prompts: int | None = None
    """Prompts at most; left out, as many as fit into the time."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    batch_size: int = 1
    """Requests decoded at once."""
    top_k: int = 0
    """Tokens kept by sampling; 0 keeps all."""
    top_p: float = 1.0
    """Nucleus kept by sampling; 1 keeps all."""
    seconds: float = 240.0
    """Time for all sampling temperatures together, equal parts; prompts of all domains take turns until it is over."""
    split: Split = "test"
    """Whose prompts. What is chosen by them (trials) reads validation."""
    prompts_file: Path | None = None
    """JSONL file with ``turns``, ``prompt`` or ``messages`` a line, decoded instead of the run's own prompts (first
    turns), and rendered with the chat-template arguments that the run was trained with."""
    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Of target and draft. Left out: the run's, which is bfloat16 where the hardware computes in it."""
    costs: Path | None = None
    """Cost table for the schedulers; left out, costs are measured on the spot."""
    seed: int = 0
    """Of sampling and bootstrap."""
    graphs: bool = False
    """Run rounds in a few fixed shapes, captured as CUDA graphs; on a CPU the same shapes, uncaptured."""
    compile: bool = False
    """Compile the norms and MLPs of target and draft (needs a C++ compiler)."""

    def __post_init__(self) -> None:
        few = self.prompts is not None and self.prompts < 1
        if not self.temperatures or few or self.max_new_tokens < 2 or self.seconds <= 0:
            raise UserError(
                f"decode: temperatures {list(self.temperatures)} must not be empty, prompts ({self.prompts}) at least "
                f"1, max_new_tokens ({self.max_new_tokens}) at least 2, seconds ({self.seconds}) above 0"
            )


def decode(options: DecodeOptions) -> None:
    """Decode prompts plainly and speculatively, and compare speed, acceptance and output.

    Both decode the same prompts in this process, in turns. Writes decode.json, and the rounds to
    traces/decode_LABEL.safetensors.
    """
    from dspark_train.calibration.io import read_sts
    from dspark_train.cli.tables import print_mode
    from dspark_train.decoding.measure import (
        DecodeResult,
        ExampleResult,
        ModeResult,
        Settings,
        compare,
        examples,
        interleave,
        mode_result,
    )
    from dspark_train.decoding.sampling import SamplingRule
    from dspark_train.files import write_result
    from dspark_train.run import Run
    from dspark_train.studies.profile import measured_policy

    rules = [SamplingRule(temperature, options.top_k, options.top_p) for temperature in options.temperatures]
    run = Run(options.run, options.dtype)
    if options.prompts_file is None:
        chosen = interleave(run.data.prompts(options.split))[: options.prompts]
    else:
        chosen = interleave(new_prompts(run, options.prompts_file))[: options.prompts]
    if not chosen:
        raise UserError(f"decode: there are no prompts in {options.prompts_file or options.split}")
    policy, named = measured_policy(run.target, run.draft, options.policy, options.costs, options.batch_size)
    modes: dict[str, ModeResult] = {}
    answers: list[ExampleResult] = []
    identical = None
    for rule in rules:
        sts = None
        if run.draft.confidence_head is not None:
            sts = read_sts(run, rule.label, run.draft.config.block_size)
        settings = Settings(
            max_new_tokens=options.max_new_tokens,
            batch_size=options.batch_size,
            policy=policy,
            sts=sts,
            seed=options.seed,
            graphs=options.graphs,
            compile=options.compile,
        )
        found = compare(run.target, run.draft, chosen, rule, settings, options.seconds / len(rules))
        trace_path = run.trace_path("decode", rule.label)
        trace_path.parent.mkdir(exist_ok=True)
        found.trace.save(trace_path)
        modes[rule.label] = mode_result(found, options.seed, sts)
        if rule.greedy:
            identical = not found.divergences
        if rule.greedy or len(rules) == 1:
            answers = examples(found, run.target.tokenizer, 12)
        print_mode(rule.label, modes[rule.label])
    result = DecodeResult(
        policy=named,
        batch_size=options.batch_size,
        max_new_tokens=options.max_new_tokens,
        split=options.split if options.prompts_file is None else options.prompts_file.name,
        dtype=str(run.target.dtype).removeprefix("torch."),
        seed=options.seed,
        graphs=options.graphs,
        compile=options.compile,
        modes=modes,
        identical=identical,
        examples=answers,
    )
    write_result(run.decode_path, result)
    print(f"wrote {run.decode_path}")


def new_prompts(run: Run, path: Path) -> list[Prompt]:
    """The first turns of a file's prompts, as the run's target reads them."""
    from dspark_train.evaluation.suites import read_suite

    encoder = run.encoder
    return [
        Prompt(
            f"{path.name}:{prompt.index}",
            prompt.domain,
            tuple(encoder.prompt_ids([{"role": "user", "content": prompt.turns[0]}])),
        )
        for prompt in read_suite(path)
    ]
