"""Where the time of decoding goes, part by part."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

PARTS = ("prefill", "draft", "head", "schedule", "verify", "target_head", "sampling")
"""Timed parts: the target's pass over prompts (and the draft's context of them); the draft's context and parallel
pass; the walk of its sequential head; the policy; the target's pass over the rows to verify; the target's LM
head; acceptance and drawing. What is left of the total is bookkeeping."""


@dataclass
class Timings:
    """Seconds of one run of the decoder."""

    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each of :data:`PARTS`."""
    total: float = 0.0
    """Wall time from the first prompt to the last token."""
    rounds: int = 0
    """Verification passes, each over all requests that were active."""
    rows: int = 0
    """Token rows that these passes verified, anchors included."""
    tokens: int = 0
    """Tokens that reached the output."""

    @property
    def bookkeeping(self) -> float:
        """Seconds in none of the parts."""
        return max(0.0, self.total - sum(self.parts.values()))

    @property
    def decoding(self) -> float:
        """Seconds without the prompts' passes."""
        return self.total - self.parts.get("prefill", 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of wall time, prompts' passes included."""
        return self.tokens / self.total if self.total else 0.0


class Stopwatch:
    """Adds up the time of named parts: wall time on the CPU, CUDA events (read at the end) on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what happens inside the block."""
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started

    def read(self) -> dict[str, float]:
        """Seconds of every part so far."""
        if self._cuda:
            torch.cuda.synchronize()
            for name, begin, end in self._events:
                self._seconds[name] += begin.elapsed_time(end) / 1000
            self._events.clear()
        return dict(self._seconds)
