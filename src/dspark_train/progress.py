"""What a long piece of work shows: a bar on a terminal, plain lines anywhere else; never silence.

``with stage("calibrating", 200, "prompts") as shown:`` names the work; ``shown.advance(1)`` counts. Off a terminal a
line comes at once, then whenever the count has moved and some seconds have passed, and at least every twenty seconds
while nothing moves. Only the first rank shows anything.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LINE_EVERY = 10.0
"""Seconds between two plain lines while work advances."""
SILENCE = 20.0
"""Longest time without a plain line, in seconds."""
_STARTED = time.monotonic()


class Stage:
    """One piece of work that is shown."""

    def __init__(self, name: str, total: int | None = None, unit: str = "", done: int = 0) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done, self.note = done, ""
        self.remaining: float | None = None
        """Seconds that the rest takes, where someone knows better than the pace so far."""
        self._first = done
        self._began = time.monotonic()

    def advance(self, count: int = 1, note: str | None = None) -> None:
        """Count ``count`` more, and say what there is to say beside it."""
        self.update(self.done + count, note)

    def update(self, done: int, note: str | None = None, total: int | None = None) -> None:
        """Set the count, the words beside it, and the total where it has changed."""
        self.done = done
        self.note = self.note if note is None else note
        self.total = self.total if total is None else total
        _display.show(self)

    def left(self) -> float | None:
        """Seconds that the rest takes, at the pace so far unless it was told; None where that is not known yet."""
        if self.remaining is not None:
            return self.remaining
        counted, spent = self.done - self._first, time.monotonic() - self._began
        if self.total is None or counted <= 0:
            return None
        return spent / counted * max(0, self.total - self.done)

    def describe(self) -> str:
        """As a plain line: name, count, pace, time left, words."""
        parts = [self.name]
        if self.total is not None:
            parts.append(f"{self.done:,} of {self.total:,} {self.unit}".rstrip())
        elif self.done:
            parts.append(f"{self.done:,} {self.unit}".rstrip())
        spent = time.monotonic() - self._began
        counted = self.done - self._first
        if counted > 0 and spent > 1:
            pace = counted / spent
            one = self.unit.removesuffix("es" if self.unit.endswith("ches") else "s") or "one"
            parts.append(
                f"{pace:,.1f} {self.unit or 'done'} a second" if pace >= 1 else f"{1 / pace:.1f} s a {one}"
            )
        elif spent > 1:
            parts.append(f"for {duration(spent)}")
        if (left := self.left()) is not None and self.done < (self.total or 0):
            parts.append(f"{duration(left)} left")
        if self.note:
            parts.append(self.note)
        return "  ".join(parts)


class _Display:
    """The stages under way, outermost first."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._bar: Any = None
        self._tasks: dict[int, Any] = {}
        self._printed = 0.0
        self._said = ""
        self._lock = threading.RLock()
        self._ticker: threading.Thread | None = None

    @property
    def speaks(self) -> bool:
        """Whether this process is the one that shows."""
        return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0" and (
            os.environ.get("LOCAL_RANK", "0") == "0"
        )

    @property
    def lively(self) -> bool:
        """Whether a bar can be drawn."""
        return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"

    def begin(self, shown: Stage) -> None:
        """Show one more stage."""
        with self._lock:
            self.stages.append(shown)
            if not self.speaks:
                return
            if self.lively:
                self._begin_bar(shown)
                return
            self._line(shown)
            if self._ticker is None:
                self._ticker = threading.Thread(target=self._tick, daemon=True)
                self._ticker.start()

    def end(self, shown: Stage, failed: bool) -> None:
        """Take a stage away; off a terminal its last line says how it ended."""
        with self._lock:
            self.stages.remove(shown)
            if not self.speaks:
                return
            if self._bar is not None:
                self._bar.remove_task(self._tasks.pop(id(shown)))
                if not self.stages:
                    self._bar.stop()
                    self._bar = None
            elif not failed and shown.describe() != self._said:
                self._line(shown)

    def show(self, shown: Stage) -> None:
        """The stage has moved."""
        if not self.speaks:
            return
        with self._lock:
            if self._bar is not None and id(shown) in self._tasks:
                left = shown.left()
                self._bar.update(
                    self._tasks[id(shown)],
                    completed=shown.done,
                    total=shown.total,
                    words=f"{'' if left is None else duration(left) + ' left  '}{shown.note}",
                )
            elif self._bar is None and time.monotonic() - self._printed >= LINE_EVERY:
                self._line(shown)

    def say(self, text: str) -> None:
        """A line of its own: above the bar, or among the plain lines."""
        with self._lock:
            if self.speaks:
                if self._bar is not None:
                    self._bar.console.print(text, highlight=False, markup=False)
                else:
                    print(text, flush=True)
                self._printed = time.monotonic()

    def _line(self, shown: Stage) -> None:
        self._said = shown.describe()
        print(f"[{clock(time.monotonic() - _STARTED)}] {self._said}", flush=True)
        self._printed = time.monotonic()

    def _tick(self) -> None:
        while True:
            time.sleep(1.0)
            with self._lock:
                if self.stages and self._bar is None and time.monotonic() - self._printed >= SILENCE:
                    self._line(self.stages[-1])

    def _begin_bar(self, shown: Stage) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[words]}"),
                refresh_per_second=2,
                transient=True,
            )
            self._bar.start()
        self._tasks[id(shown)] = self._bar.add_task(
            shown.name, total=shown.total, completed=shown.done, words=shown.note
        )


_display = _Display()


@contextmanager
def stage(name: str, total: int | None = None, unit: str = "", done: int = 0) -> Iterator[Stage]:
    """Show a piece of work while it lasts.

    Args:
        name: of the work, a few words.
        total: how much there is; None where nobody knows.
        unit: of the count, in the plural.
        done: what was done before.
    """
    shown = Stage(name, total, unit, done)
    _display.begin(shown)
    failed = True
    try:
        yield shown
        failed = False
    finally:
        _display.end(shown, failed)


def say(text: str) -> None:
    """Print a line without breaking a bar; on the first rank only."""
    _display.say(text)


def duration(seconds: float) -> str:
    """``48 s``, ``3.2 min`` or ``1.5 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def clock(seconds: float) -> str:
    """``04:10`` or ``1:04:10``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def quiet_libraries() -> None:
    """Keep bars and notices of other libraries, which the user can do nothing about, off the terminal."""
    import logging
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed looks for others, and warns
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    for module in (r"lightning\.", r"torch\.", r"deepspeed\."):
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=module)
    from datasets.utils.logging import disable_progress_bar
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    disable_progress_bar()
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
