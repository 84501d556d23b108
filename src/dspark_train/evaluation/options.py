"""What ``evaluate`` is asked for; importing this costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dspark_train.errors import UserError
from dspark_train.lists import Names, Numbers

BASELINES = ("plain", "head_off", "prompt_lookup")


@dataclass(frozen=True)
class Protocol:
    """What an evaluation decodes where its options do not say."""

    prompts: int | None
    """Per suite; None for all."""
    max_new_tokens: int
    temperatures: Numbers


PROTOCOLS = {
    "short": Protocol(20, 256, Numbers((0.0, 1.0))),
    "paper": Protocol(None, 2048, Numbers((1.0,))),
}


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of ``evaluate``."""

    run: Path
    """The run's folder."""
    suites: Names
    """With commas between: gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mt-bench, alpaca or
    arena-hard-v2 (from the hub), or name=file.jsonl with a list ``turns`` per line."""
    suites_dir: Path | None = None
    """Folder where name.jsonl is looked for before the hub is asked."""
    protocol: Literal["short", "paper"] = "short"
    """What the next three are where they are left out. short: 20 prompts, 256 tokens, temperatures 0 and 1. paper:
    whole suites, 2,048 tokens, temperature 1, as the paper's Table 1. What still differs from it stands above the
    table, the paper's numbers below."""
    prompts: int | Literal["all"] | None = None
    """Prompts per suite, drawn by the seed; left out, as the protocol says."""
    max_new_tokens: int = 0
    """Limit of every answer; 0 is what the protocol says."""
    temperatures: Numbers = Numbers()
    """Sampling temperatures, with commas between; 0 is greedy. Left out, as the protocol says."""
    turns: int = 1
    """What a user says in a row, up to this many turns, each after the method's own earlier answers. The paper takes
    the first of MT-Bench's two."""
    drafts: Names = Names()
    """Further drafts for the same target, as name=folder (a run's or a draft's) or name=hub id, with commas between; a
    separately trained parallel draft is one of them."""
    baselines: Names = Names(BASELINES)
    """Of plain, head_off (the run's draft without its sequential head) and prompt_lookup."""
    top_k: int = 0
    """Tokens kept by sampling; 0 keeps all."""
    top_p: float = 1.0
    """Nucleus kept by sampling; 1 keeps all."""
    policy: str = "fixed"
    """How much of a block is verified: fixed, fixed:K, threshold:P, scheduled or asynchronous."""
    costs: Path | None = None
    """Cost table for the schedulers, as ``profile`` writes it."""
    by_context: Names = Names()
    """Report τ by the position of the anchor too, between these positions: 1k,4k,16k. Needs no new decoding; for
    prompts that are long enough, give files of them as suites."""
    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Of target and drafts; left out, the run's own."""
    template: dict[str, Any] | None = None
    """Chat-template arguments, such as ``{enable_thinking: true}``; left out, those that the run was trained with.
    Others are named above the table."""
    seed: int = 0
    """Of the choice of prompts and of the sampling."""
    name: str = "suites"
    """Of the evaluation, for its files."""
    restart: bool = False
    """Forget what this evaluation measured before."""
    confidence: float = 0.95
    """Of the bootstrap intervals."""
    resamples: int = 2000
    """Of the bootstrap."""

    @property
    def limit(self) -> int | None:
        """Prompts per suite; None for all."""
        return None if self.prompts in ("all", None) else int(self.prompts)

    def __post_init__(self) -> None:
        protocol = PROTOCOLS[self.protocol]
        for name in ("prompts", "max_new_tokens", "temperatures"):
            if getattr(self, name) in (None, 0, (), []):
                object.__setattr__(self, name, getattr(protocol, name))
        for baseline in self.baselines:
            if baseline not in BASELINES:
                raise UserError(f"baselines: {baseline!r} is none of {', '.join(BASELINES)}")
        if not self.suites:
            raise UserError("suites: name at least one, such as gsm8k,humaneval,mt-bench")
        if self.turns < 1:
            raise UserError(f"turns {self.turns} must be at least 1")
        if min(self.temperatures) < 0:
            raise UserError(f"temperatures {list(self.temperatures)} must be numbers ≥ 0")
        if not 0 < self.confidence < 1:
            raise UserError(f"confidence {self.confidence} must lie between 0 and 1")
        if self.max_new_tokens < 2:
            raise UserError(f"max_new_tokens {self.max_new_tokens} must be at least 2, or no round happens")
        if not self.name or Path(self.name).name != self.name:
            raise UserError(f"name {self.name!r} must be a plain file name without folders")
