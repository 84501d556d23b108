"""Recorded rounds of a run: read from its folder, or decoded and kept there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dspark_train.decoding.policies import Policy
from dspark_train.decoding.requests import Request
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.errors import UserError
from dspark_train.progress import stage
from dspark_train.run import Dtype, Run
from dspark_train.structures import DecodingTrace

Split = Literal["calibration", "validation", "test"]
"""Splits that rounds are recorded on: scalings are fitted on the first, what is tuned by hand is tuned on the second,
what is reported is measured on the third.
"""


@dataclass(frozen=True)
class Recording:
    """How rounds are made where a run has none yet."""

    prompts: int = 64
    """Prompts of each split, of all domains in turn; fewer where the split is smaller."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    batch_size: int = 8
    """Requests decoded at once."""
    seed: int = 0
    """Of the sampling."""
    refresh: bool = False
    """Make them again even where they exist."""
    seconds: float = float("inf")
    """No further prompt of a split is begun after this time."""

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.max_new_tokens < 2 or self.batch_size < 1 or self.seconds <= 0:
            raise UserError(
                f"prompts ({self.prompts}) and batch_size ({self.batch_size}) must be at least 1, max_new_tokens "
                f"({self.max_new_tokens}) at least 2, seconds ({self.seconds:g}) above 0"
            )


def run_to_record(path: Path, dtype: Dtype | None = None) -> Run:
    """A run whose missing rounds can be decoded; its models are loaded only if some are missing.

    Args:
        path: the run's folder.
        dtype: of target and draft; None is float32 on a CPU, where it is exact, and fast for few requests; elsewhere
            the run's, which will be served.

    Raises:
        UserError: the folder does not exist, or holds nothing of a run.
    """
    from dspark_train.target.frozen import default_device

    return Run.existing(path, dtype or ("float32" if default_device().type == "cpu" else None))


def recorded_rounds(
    run: Run,
    split: Split,
    rule: SamplingRule,
    recording: Recording,
    say: Callable[[str], None] = print,
    cutting: Policy | None = None,
) -> DecodingTrace:
    """Rounds of a run that verified whole blocks, or were cut by a policy; decoded and kept first where needed.

    Args:
        run: whose target, draft and prompts.
        split: whose prompts.
        rule: sampling of target and draft.
        recording: how missing rounds are made.
        say: told what is being done.
        cutting: picks what is verified; its rounds are kept apart. None verifies whole blocks.

    Raises:
        UserError: there are neither rounds nor prompts to decode, or the run holds no draft.
    """
    kept = split if cutting is None else f"{split}_cut"
    path = run.trace_path(kept, rule.label)
    trace = None if recording.refresh else run.trace(kept, rule.label)
    if trace is not None:
        known = f"{len(trace.request)} rounds of {len(trace.request.unique())} prompts"
        say(f"{split}: {known} are in {run.recorded_path(split, rule.label)} (--refresh true decodes)")
        return trace
    from dspark_train.decoding.decoder import Decoder
    from dspark_train.decoding.measure import interleave

    prompts = interleave(run.data.prompts(split))[: recording.prompts]
    if not prompts:
        raise UserError(f"run {run.path}: its data have no {split} prompts; give the split a share of them")
    decoder = Decoder(run.target, run.draft, cutting, rule)
    requests = decoder.requests([prompt.ids for prompt in prompts], recording.max_new_tokens, None)
    begun = time.monotonic()
    with stage(f"decoding {split} prompts ({rule.label})", len(prompts), "prompts") as shown:

        def watch(waiting: deque[Request]) -> None:
            if time.monotonic() - begun > recording.seconds:
                waiting.clear()
            done = sum(bool(request.finished_by) for request in requests)
            if done != shown.done:
                shown.update(done)

        result = decoder.run(
            requests,
            batch_size=recording.batch_size,
            seed=recording.seed,
            domains=[prompt.domain for prompt in prompts],
            watch=watch,
        )
    seconds, answered = time.monotonic() - begun, sum(bool(tokens) for tokens in result.tokens)
    say(
        f"  {answered} of {len(prompts)} {split} prompts, {len(result.trace.request)} rounds, "
        f"τ {result.trace.accepted_length:.2f}, {seconds:.0f} s"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    result.trace.save(path)
    return result.trace
