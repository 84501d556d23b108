"""What the parts of a decoding step cost on this machine: measured with the decoder's own code.

The cache is filled up to a given context, then whole rounds are timed part by part. Tokens and weights' values do
not matter for time, so requests are made up.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dspark_train.decoding.cost import CostTable
from dspark_train.decoding.decoder import ActiveRun, Decoder
from dspark_train.decoding.policies import ONLINE, Filled, FixedLength, Policy, parse_policy
from dspark_train.decoding.timing import PARTS
from dspark_train.draft.kinds import Draft
from dspark_train.errors import UserError
from dspark_train.progress import Stage, stage
from dspark_train.target.frozen import FrozenTarget

DRAFT_PARTS = ("draft", "head")
TARGET_PARTS = ("verify", "target_head", "sampling")
"""What grows with the rows of a target pass: drawing or comparing reads every row's logits."""
SWEEPS = 3
"""Times that all points of a cost table are gone through: a machine that slows down bends no curve then."""
RESOLUTION = 0.02
"""Relative difference of neighbouring passes below which no further point is placed between them."""
Shape = tuple[int, Policy]
"""Concurrent requests, and what is verified of them; a fixed length of 0 is plain decoding."""
PLAIN = FixedLength(0)
PROMPTS = (16, 64, 256, 1024)
"""Tokens of the prompts that are timed, as far as the target's context and the largest pass over prompts reach."""
FURTHER = 4
"""The context that shows what more of it costs is so many times longer, or as long as the target allows."""


@dataclass
class RoundCost:
    """Seconds of repeated rounds of one shape (lists over repetitions)."""

    target: list[float] = field(default_factory=list)
    """Target's pass, LM head and sampling."""
    draft: list[float] = field(default_factory=list)
    """Draft's context, parallel pass and walk."""
    overhead: list[float] = field(default_factory=list)
    """Everything else."""
    samples: list[dict[str, float]] = field(default_factory=list)
    """Every timed part, and ``bookkeeping``."""

    def add(self, sample: dict[str, float]) -> None:
        """Take one more round, as seconds of its parts."""
        self.samples.append(sample)
        self.target.append(sum(sample[part] for part in TARGET_PARTS))
        self.draft.append(sum(sample[part] for part in DRAFT_PARTS))
        rest = sample.keys() - {*DRAFT_PARTS, *TARGET_PARTS}
        self.overhead.append(sum(sample[part] for part in rest))

    def clear(self) -> None:
        """Forget all rounds."""
        for values in (self.target, self.draft, self.overhead, self.samples):
            values.clear()

    @property
    def parts(self) -> dict[str, float]:
        """Median of each part."""
        return {part: statistics.median(sample[part] for sample in self.samples) for part in self.samples[0]}


@torch.inference_mode()
def time_rounds(
    target: FrozenTarget,
    draft: Draft | None,
    *,
    requests: int,
    policy: Policy,
    context: int,
    repetitions: int,
    warm_up: int = 2,
    found: RoundCost | None = None,
) -> RoundCost:
    """Time rounds of ``requests`` requests.

    Args:
        target: frozen target.
        draft: None times plain decoding.
        requests: concurrent requests.
        policy: picks the draft tokens verified.
        context: positions before each anchor; grows by what is accepted.
        repetitions: rounds timed.
        warm_up: rounds before that.
        found: earlier rounds of the same shape, to which these are added.

    Returns:
        ``found``, or a new one.
    """
    found = found or RoundCost()
    decoder = Decoder(target, draft, policy)
    rounds, most = repetitions + warm_up, decoder.depth + 1
    growth = rounds * most + 1
    room = target.context_length
    if room is not None and context + growth > room:
        raise UserError(
            f"profile: {context} tokens of context and {rounds} rounds of up to {most} tokens do not fit into "
            f"the target's {room}: lower context or repetitions"
        )
    run = decoder.start(requests, context + growth, seed=0)
    with run:
        _fill(run, requests, context, growth)
        before = run.watch.read()
        for index in range(rounds):
            started = time.perf_counter()
            run.round()
            after = run.watch.read()
            total = time.perf_counter() - started
            sample = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in PARTS}
            sample["bookkeeping"] = max(0.0, total - sum(sample.values()))
            before = after
            if index >= warm_up:
                found.add(sample)
    return found


@torch.inference_mode()
def time_prompts(
    target: FrozenTarget, draft: Draft | None, *, tokens: int, repetitions: int, warm_up: int = 1
) -> list[float]:
    """Seconds of passes over a prompt of so many tokens, which joins alone."""
    run = Decoder(target, draft).start(1, tokens + 1, seed=0)
    prompt = [(7 * i) % target.vocab_size for i in range(tokens)]
    seconds = []
    with run:
        for _ in range(warm_up + repetitions):
            before = run.watch.read().get("prefill", 0.0)
            run.join(run.decoder.requests([prompt], 1, [[]]))
            run.leave()
            seconds.append(run.watch.read()["prefill"] - before)
    return seconds[warm_up:]


def _fill(run: ActiveRun, requests: int, context: int, growth: int) -> None:
    """Make up requests whose prompts end at ``context``; only the last token of each prompt is really run."""
    vocabulary = run.decoder.target.vocab_size
    prompts = [[(7 * i + r) % vocabulary for i in range(context)] for r in range(requests)]
    for request in run.decoder.requests(prompts, growth, [[] for _ in prompts]):
        run.join([request], known=context - 1)


class CostProfiler:
    """Measures a cost table, a little of every point at a time."""

    def __init__(
        self,
        target: FrozenTarget,
        draft: Draft | None,
        *,
        max_rows: int,
        requests: Sequence[int] = (1,),
        context: int = 256,
        prompts: Sequence[int] = PROMPTS,
    ) -> None:
        """Lay out what is measured; arguments as in :func:`measure_costs`, and the tokens of the prompts timed."""
        if max_rows < 1 or context < 1 or not requests or min(requests) < 1:
            raise UserError(
                f"profile: max_rows ({max_rows}), context ({context}) and every number of requests "
                f"({list(requests)}) must be at least 1"
            )
        self.target, self.draft, self.context = target, draft, context
        self.slots = draft.config.block_size + 1 if draft is not None else 1
        self.requests = sorted(set(requests) | {1})
        self.rows = _coarse(max_rows, self.slots)
        """Rows of the passes of the table."""
        shapes: list[Shape] = [*map(self._pass, self.rows), *((count, PLAIN) for count in self.requests)]
        if draft is not None:
            lengths = (Filled(self.slots - 1), FixedLength(1), FixedLength(self.slots - 1))
            shapes += [(count, policy) for count in self.requests for policy in lengths]
        self._found = {shape: RoundCost() for shape in shapes}
        room = target.context_length or 2 * FURTHER * context
        self.longer = min(FURTHER * context, (context + room) // 2)
        """Context that is compared with ``context``."""
        self._longer: dict[Shape, RoundCost] = {}
        self._prompts: dict[int, list[float]] = {tokens: [] for tokens in prompts if tokens < room}
        self.seconds: dict[Shape, float] = {}
        """What each point took the last time."""

    def _pass(self, rows: int) -> Shape:
        """A pass of so many rows: whole blocks, and what is left for one more request."""
        requests = -(-rows // self.slots)
        even = requests == 1 or rows % self.slots == 0
        return requests, FixedLength(rows // requests - 1) if even else Filled(rows - requests)

    @property
    def points(self) -> int:
        """How many there are."""
        return len(self._found)

    @property
    def extras(self) -> int:
        """How many :meth:`lengths` goes through."""
        return len(self._prompts) + len(self.requests) * len({PLAIN, FixedLength(self.slots - 1)})

    def sweep(
        self,
        repetitions: int,
        warm_up: int = 2,
        context: int | None = None,
        shapes: Iterable[Shape] | None = None,
        shown: Stage | None = None,
    ) -> None:
        """Time ``repetitions`` more rounds at every point, each after ``warm_up`` others.

        Args:
            repetitions: rounds timed.
            warm_up: rounds before that.
            context: positions before each anchor this time; None: as everywhere.
            shapes: points to go through; None: all.
            shown: counts the points.
        """
        for shape in list(self._found if shapes is None else shapes):
            began = time.monotonic()
            count, policy = shape
            time_rounds(
                self.target,
                None if policy == PLAIN else self.draft,
                requests=count,
                policy=policy,
                context=context or self.context,
                repetitions=repetitions,
                warm_up=warm_up,
                found=self._found[shape],
            )
            self.seconds[shape] = time.monotonic() - began
            if shown is not None:
                shown.advance(1)

    def lengths(self, repetitions: int, warm_up: int = 2, shown: Stage | None = None) -> None:
        """Time ``repetitions`` more rounds in a longer context, and prompts of several lengths."""
        for tokens, seconds in self._prompts.items():
            seconds += time_prompts(
                self.target, self.draft, tokens=tokens, repetitions=max(1, repetitions // 2)
            )
            if shown is not None:
                shown.advance(1, f"prompts of {tokens} tokens")
        room = self.target.context_length
        if room is not None and self.longer + (repetitions + warm_up) * self.slots + 1 > room:
            return
        for count, policy in itertools.product(self.requests, {PLAIN, FixedLength(self.slots - 1)}):
            self._longer[count, policy] = time_rounds(
                self.target,
                None if policy == PLAIN else self.draft,
                requests=count,
                policy=policy,
                context=self.longer,
                repetitions=repetitions,
                warm_up=warm_up,
                found=self._longer.get((count, policy)),
            )
            if shown is not None:
                shown.advance(1, f"{self.longer} tokens of context")

    def refine(self) -> Shape | None:
        """Add a point half-way between the neighbouring passes that differ most, to be timed next.

        Returns:
            None where all neighbours are next to each other, or differ by less than :data:`RESOLUTION` or their noise.
        """
        most, place = 0.0, None
        for low, high in itertools.pairwise(self.rows):
            one, two = (self._found[self._pass(rows)].target for rows in (low, high))
            gap = abs(statistics.median(two) - statistics.median(one))
            share = gap / statistics.median(one)
            if (
                high - low > 1
                and share > max(most, RESOLUTION)
                and gap > 3 * math.hypot(_error(one), _error(two))
            ):
                most, place = share, (low + high) // 2
        if place is None:
            return None
        bisect.insort(self.rows, place)
        shape = self._pass(place)
        self._found.setdefault(shape, RoundCost())
        return shape

    def reset(self) -> None:
        """Forget what was found so far."""
        for found in (*self._found.values(), *self._longer.values()):
            found.clear()
        for seconds in self._prompts.values():
            seconds.clear()

    def table(self, average: Callable[[list[float]], float] = statistics.median) -> CostTable:
        """Return what was found so far; what more context and prompts cost only where :meth:`lengths` has run.

        Args:
            average: of the repetitions of a point. The median leaves out what a shared machine does now and then;
                the mean counts it, as throughput does.
        """
        passes = [self._found[self._pass(rows)].target for rows in self.rows]
        centre = tuple(map(average, passes))
        plain = [self._found[count, PLAIN] for count in self.requests]
        whole, single, uneven = (
            [] if self.draft is None else [self._found[count, policy] for count in self.requests]
            for policy in (FixedLength(self.slots - 1), FixedLength(1), Filled(self.slots - 1))
        )

        def slope(policy: Policy, part: Callable[[RoundCost], list[float]]) -> tuple[float, ...]:
            """Seconds per token of context between the two contexts, never below 0; empty where one is missing."""
            pairs = [
                (self._found[count, policy], self._longer.get((count, policy))) for count in self.requests
            ]
            if any(long is None or not long.samples for _, long in pairs):
                return ()
            more = self.longer - self.context
            return tuple(
                max(0.0, average(part(long)) - average(part(short))) / more for short, long in pairs if long
            )

        block = FixedLength(self.slots - 1)
        prompts = {tokens: average(seconds) for tokens, seconds in self._prompts.items() if seconds}
        return CostTable(
            context=self.context,
            rows=tuple(self.rows),
            seconds_median=centre,
            seconds_p10=tuple(
                min(_quantile(one, 0.1), middle) for one, middle in zip(passes, centre, strict=True)
            ),
            seconds_p90=tuple(
                max(_quantile(one, 0.9), middle) for one, middle in zip(passes, centre, strict=True)
            ),
            rows_per_request=self.slots,
            requests=tuple(self.requests),
            single_row_seconds_median=tuple(average(cost.target) for cost in plain),
            two_row_seconds_median=tuple(average(cost.target) for cost in single),
            uneven_seconds_median=tuple(average(cost.target) for cost in uneven),
            draft_seconds_median=tuple(average(cost.draft) for cost in whole),
            short_draft_seconds_median=tuple(average(cost.draft) for cost in single),
            round_overhead_seconds_median=tuple(average(cost.overhead) for cost in whole),
            step_overhead_seconds_median=tuple(average(cost.overhead) for cost in plain),
            single_row_seconds_per_context=slope(PLAIN, lambda cost: cost.target),
            block_seconds_per_context=slope(block, lambda cost: cost.target),
            draft_seconds_per_context=slope(block, lambda cost: cost.draft) if self.draft else (),
            prompt_tokens=tuple(prompts),
            prompt_seconds_median=tuple(prompts.values()),
            machine=machine(self.target.device),
        )


def measure_costs(
    target: FrozenTarget,
    draft: Draft | None,
    *,
    max_rows: int,
    requests: Sequence[int] = (1,),
    context: int = 256,
    repetitions: int = 20,
    seconds: float | None = None,
    lengths: bool = True,
) -> CostTable:
    """Measure a cost table of a target and, where given, its draft.

    The passes begin as a coarse grid: every number of rows of one request, then 2, 4, 8, … whole blocks. Within the
    budget of time, points are added between the neighbours that differ most (:meth:`CostProfiler.refine`), so steps
    of the curve are found wherever they are.

    Args:
        target: frozen target.
        draft: None measures the target alone.
        max_rows: rows of the largest verification pass.
        requests: concurrent requests to measure the draft and the overheads at.
        context: positions before each anchor.
        repetitions: rounds timed at each point, in :data:`SWEEPS` turns.
        seconds: budget of time. The first turn over the coarse grid is always finished; further points and turns come
            while there is time. None: all turns over the coarse grid.
        lengths: measure too what prompts and more context cost.

    Raises:
        UserError: nothing to measure, or a context that the target cannot hold.
    """
    if repetitions < 1 or (seconds is not None and seconds <= 0):
        raise UserError(
            f"profile: repetitions ({repetitions}) must be at least 1, seconds ({seconds}) above 0"
        )
    profiler = CostProfiler(target, draft, max_rows=max_rows, requests=requests, context=context)
    turns = min(SWEEPS, repetitions)
    counts = [repetitions // turns + (turn < repetitions % turns) for turn in range(turns)]
    began = time.monotonic()

    def fits(more: float) -> bool:
        return seconds is None or time.monotonic() - began + more <= seconds

    def total() -> int:
        return turns * (profiler.points + (profiler.extras if lengths else 0))

    with stage("measuring costs", total(), "points") as shown:
        for turn, count in enumerate(counts):
            if turn and not fits(sum(profiler.seconds.values())):
                shown.update(shown.done, f"out of time after {turn} of {turns} turns", shown.done)
                break
            profiler.sweep(count, shown=shown)
            if lengths:
                profiler.lengths(count, shown=shown)
            slowest = max(profiler.seconds.values())
            while (
                turn == 0
                and seconds is not None
                and fits((turns - 1) * (time.monotonic() - began) + turns * slowest)
            ):
                shape = profiler.refine()
                if shape is None:
                    break
                shown.update(shown.done, f"{len(profiler.rows)} passes", total())
                profiler.sweep(count, shapes=[shape], shown=shown)
    return profiler.table()


def measured_policy(
    target: FrozenTarget, draft: Draft, text: str, costs: Path | None, batch_size: int
) -> tuple[Policy, str]:
    """The policy that ``text`` names, and its full name; a scheduler measures its costs where there are none.

    Args:
        target: frozen target.
        draft: its draft; ``auto`` schedules where it has a confidence head, else verifies whole blocks.
        text: ``auto``, or as for :func:`parse_policy`.
        costs: cost table of a scheduler; None measures it on the spot.
        batch_size: requests decoded at once.
    """
    name = text.removesuffix(ONLINE)
    if name == "auto":
        if draft.confidence_head is None:
            return FixedLength(), "fixed"
        name, text = "scheduled", text.replace("auto", "scheduled")
    if name not in ("scheduled", "asynchronous"):
        return parse_policy(text), text
    return parse_policy(text, costs or costs_now(target, draft, batch_size)), text


def costs_now(target: FrozenTarget, draft: Draft, batch_size: int) -> CostTable:
    """Costs measured on the spot, as far as a batch of this size needs them."""
    table = measure_costs(
        target,
        draft,
        max_rows=batch_size * (draft.config.block_size + 1),
        requests=(batch_size,),
        context=min(128, (target.context_length or 1024) // 4),
        repetitions=10,
        lengths=False,
    )
    return table.monotone()


def _coarse(max_rows: int, slots: int) -> list[int]:
    """Rows 1, 2, …, ``slots``, then of 2, 4, 8, … whole requests, up to the first that holds ``max_rows``."""
    rows = list(range(1, min(slots, max_rows) + 1))
    most = -(-max_rows // slots)
    count = 2
    while count < most:
        rows.append(count * slots)
        count *= 2
    return [*rows, most * slots] if most > 1 else rows


def _error(sample: list[float]) -> float:
    """Standard error of a median, from the 10 and 90 % quantiles of what it is of, as if they were normal."""
    return 1.25 * (_quantile(sample, 0.9) - _quantile(sample, 0.1)) / 2.56 / math.sqrt(len(sample))


def _quantile(sample: list[float], share: float) -> float:
    return float(torch.tensor(sample, dtype=torch.float64).quantile(share))


def machine(device: torch.device) -> str:
    """Device and threads, for the reader of a table."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
