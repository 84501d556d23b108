"""Benchmark suites: prompts of one or several turns, from JSONL files or from the Hugging Face hub."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark_train.errors import UserError
from dspark_train.files import BadLine, read_lines

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class SuitePrompt:
    """One prompt: what the user says, turn by turn."""

    index: int
    """Place in the whole suite."""
    turns: tuple[str, ...]
    domain: str


@dataclass(frozen=True)
class Suite:
    """The prompts that are decoded of one suite."""

    name: str
    domain: str
    prompts: tuple[SuitePrompt, ...]
    whole: int = 0
    """Prompts that the suite has."""


@dataclass(frozen=True)
class HubSuite:
    """Where a suite lies on the hub, and how a row of it becomes a prompt."""

    repository: str
    domain: str
    turns: Callable[[Mapping[str, Any]], Sequence[str]]
    subset: str | None = None
    split: str = "test"
    files: str | None = None
    """Pattern of JSONL files, for repositories that ``datasets`` cannot read by themselves."""


def _math(field: str) -> Callable[[Mapping[str, Any]], Sequence[str]]:
    return lambda row: [f"{row[field]}\n{BOXED}"]


def _humaneval(row: Mapping[str, Any]) -> Sequence[str]:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{task}\n```python\n{row['prompt']}\n```"]


def _livecodebench(row: Mapping[str, Any]) -> Sequence[str]:
    """The benchmark's own prompt: https://github.com/LiveCodeBench/LiveCodeBench."""
    starter = row.get("starter_code")
    form = "Use the following code structure" if starter else "Write your code in the following format"
    parts = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything "
        "except for the program",
        f"### Question:\n{row['question_content']}",
        f"### Format: {form}:\n```python\n{starter or '# YOUR CODE HERE'}\n```",
        "### Answer: (use the provided format with backticks)",
    )
    return ["\n\n".join(parts)]


def _alpaca(row: Mapping[str, Any]) -> Sequence[str]:
    return [
        f"{row['instruction']}\n\nInput:\n{row['input']}" if row.get("input") else str(row["instruction"])
    ]


HUB = {
    "gsm8k": HubSuite("openai/gsm8k", "math", _math("question"), "main"),
    "math500": HubSuite("HuggingFaceH4/MATH-500", "math", _math("problem")),
    "aime25": HubSuite("MathArena/aime_2025", "math", _math("problem"), split="train"),
    "humaneval": HubSuite("openai/openai_humaneval", "code", _humaneval),
    "mbpp": HubSuite("google-research-datasets/mbpp", "code", lambda row: [row["prompt"]], "sanitized"),
    "livecodebench": HubSuite(
        "livecodebench/code_generation_lite", "code", _livecodebench, files="test*.jsonl"
    ),
    "mt-bench": HubSuite("HuggingFaceH4/mt_bench_prompts", "chat", lambda row: row["prompt"], split="train"),
    "alpaca": HubSuite("tatsu-lab/alpaca", "chat", _alpaca, split="train"),
    "arena-hard-v2": HubSuite(
        "lmarena-ai/arena-hard-auto",
        "chat",
        lambda row: [row["prompt"]],
        files="data/arena-hard-v2.0/question.jsonl",
    ),
}
"""Suites by the paper's names, in the wording of the reference implementation."""


def load_suite(
    spec: str, *, folder: Path | None = None, limit: int | None = None, seed: int = 0, turns: int = 1
) -> Suite:
    """Read a suite and choose its prompts.

    Args:
        spec: ``name`` (a file ``name.jsonl`` in ``folder``, else the hub), a JSONL file, or ``name=file``.
        folder: where JSONL files of suites lie.
        limit: number of prompts, drawn without replacement; None takes all.
        seed: of the draw. The choice depends on the seed and the suite's name only.
        turns: what a user says in a row is cut after so many.

    Raises:
        UserError: unknown suite, unreadable file or row, or no network.
    """
    name, _, given = spec.partition("=")
    path = Path(given) if given else Path(spec) if spec.endswith(".jsonl") else None
    if path is None and folder is not None and (folder / f"{name}.jsonl").is_file():
        path = folder / f"{name}.jsonl"
    elif path is not None and not given:
        name = path.stem
    if limit is not None and limit < 1:
        raise UserError(f"prompts {limit} must be at least 1 per suite")
    domain = HUB[name].domain if name in HUB else "unknown"
    prompts = read_suite(path, domain) if path is not None else _from_hub(name, folder)
    if not prompts:
        raise UserError(f"suite {name} has no prompts ({path or HUB[name].repository})")
    whole = len(prompts)
    prompts = [replace(prompt, turns=prompt.turns[:turns]) for prompt in prompts]
    if limit is not None and limit < whole:
        chosen = random.Random(f"{seed}/{name}").sample(range(whole), limit)
        prompts = [prompts[index] for index in sorted(chosen)]
    domains = {prompt.domain for prompt in prompts}
    return Suite(name, domains.pop() if len(domains) == 1 else "mixed", tuple(prompts), whole)


def read_suite(path: Path, domain: str = "unknown") -> list[SuitePrompt]:
    """Read prompts from JSONL: ``turns`` (list of texts), ``prompt`` (one text) or ``messages`` per row.

    Of ``messages`` only what users say is kept: the target writes its own answers. ``domain`` in a row wins
    over the argument.

    Raises:
        UserError: names the file and the line.
    """
    if not path.is_file():
        raise UserError(f"suite file {path} does not exist")
    prompts: list[SuitePrompt] = []
    for line in read_lines(path):
        try:
            row = line.value()
            turns = _turns(row)
        except (BadLine, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path}, line {line.number}: expected an object with turns, prompt or messages ({error!r})"
            ) from error
        if not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise UserError(f"{path}, line {line.number}: turns must be non-empty texts")
        prompts.append(SuitePrompt(len(prompts), tuple(turns), str(row.get("domain", domain))))
    return prompts


def _turns(row: Mapping[str, Any]) -> list[str]:
    if "turns" in row:
        return list(row["turns"])
    if "messages" in row:
        return [message["content"] for message in row["messages"] if message["role"] == "user"]
    return [row["prompt"]]


def _from_hub(name: str, folder: Path | None) -> list[SuitePrompt]:
    if name not in HUB:
        beside = f" and there is no {folder / name}.jsonl" if folder is not None else ""
        raise UserError(
            f"unknown suite {name!r}{beside}: known are {', '.join(HUB)}; or give name=file.jsonl with a "
            "list `turns` per line"
        )
    suite = HUB[name]
    from datasets import load_dataset

    try:
        if suite.files:
            files = f"hf://datasets/{suite.repository}/{suite.files}"
            rows = load_dataset("json", data_files=files, split="train")
        else:
            rows = load_dataset(suite.repository, suite.subset, split=suite.split)
    except Exception as error:  # whatever a network, a proxy or the hub may answer
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"suite {name} could not be read from the hub ({suite.repository}: {reason}); without a network "
            f"give {name}=file.jsonl, or --suites_dir with {name}.jsonl in it"
        ) from error
    return [SuitePrompt(i, tuple(suite.turns(row)), suite.domain) for i, row in enumerate(rows)]
