"""Recorded rounds of a run: read from its folder, or decoded and kept there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dspark_train.calibration.report import trace_label
from dspark_train.errors import UserError
from dspark_train.structures import DecodingTrace

if TYPE_CHECKING:
    from dspark_train.run import Run

Split = Literal["calibration", "heldout"]
"""Splits that rounds are recorded on: temperatures are fitted on the first and judged on the second."""


@dataclass(frozen=True)
class Recording:
    """How rounds are made where a run has none yet.

    Args:
        prompts: Prompts of each split, of all domains in turn; fewer where the split is smaller.
        max_new_tokens: Longest answer, in tokens.
        batch_size: Requests decoded at once.
        seed: Of the sampling.
        dtype: Of target and draft; None is float32 on a CPU, else the run's.
    """

    prompts: int = 64
    max_new_tokens: int = 128
    batch_size: int = 8
    seed: int = 0
    dtype: Literal["auto", "bfloat16", "float32"] | None = None

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.max_new_tokens < 2 or self.batch_size < 1:
            raise UserError(
                f"prompts ({self.prompts}) and batch_size ({self.batch_size}) must be at least 1, max_new_tokens "
                f"({self.max_new_tokens}) at least 2"
            )


class RecordedRounds:
    """Traces of one run, verifying whole blocks; the models are loaded only if some trace is missing."""

    def __init__(self, run: Path, recording: Recording, *, refresh: bool = False) -> None:
        """Look at a run.

        Args:
            run: Folder of the run.
            recording: How missing rounds are made.
            refresh: Make them again even where they exist.
        """
        if not run.is_dir():
            raise UserError(f"run {run}: no such folder; runs are made by `fit`")
        self.run, self.recording, self.refresh = run, recording, refresh
        self._opened: Run | None = None

    def path(self, split: Split, temperature: float) -> Path:
        """Where the rounds of a split and a sampling temperature are kept."""
        return self.run / "traces" / f"{split}_{trace_label(temperature)}.safetensors"

    def trace(self, split: Split, temperature: float, say: Callable[[str], None] = print) -> DecodingTrace:
        """Return the rounds of a split at a sampling temperature, recording them first where needed.

        Args:
            split: Whose prompts.
            temperature: Of target and draft; 0 is greedy.
            say: Told what is being done.
        """
        path = self.path(split, temperature)
        if path.is_file() and not self.refresh:
            trace = DecodingTrace.load(path)
            known = f"{len(trace.request)} rounds of {len(trace.request.unique())} prompts"
            say(f"{split}: {known} are in {path} (--refresh true decodes)")
            return trace
        from dspark_train.decoding.decoder import generate
        from dspark_train.decoding.measure import interleave

        opened = self._open()
        prompts = interleave(opened.data.prompts(split))[: self.recording.prompts]
        if not prompts:
            raise UserError(
                f"run {self.run}: its data have no {split} prompts; give the split a share of them"
            )
        say(f"decoding {len(prompts)} {split} prompts ({trace_label(temperature)})")
        begun = time.monotonic()
        result = generate(
            opened.target,
            opened.draft,
            [prompt.ids for prompt in prompts],
            max_new_tokens=self.recording.max_new_tokens,
            temperature=temperature,
            batch_size=self.recording.batch_size,
            seed=self.recording.seed,
            domains=[prompt.domain for prompt in prompts],
        )
        seconds = time.monotonic() - begun
        say(f"  {len(result.trace.request)} rounds, τ {result.trace.accepted_length:.2f}, {seconds:.0f} s")
        path.parent.mkdir(parents=True, exist_ok=True)
        result.trace.save(path)
        return result.trace

    def _open(self) -> Run:
        if self._opened is None:
            from dspark_train.run import Run
            from dspark_train.target.frozen import default_device

            # on a CPU float32 is exact, and fast for few requests; elsewhere what will be served
            usual: Literal["float32"] | None = "float32" if default_device().type == "cpu" else None
            self._opened = Run(self.run, self.recording.dtype or usual)
        return self._opened
