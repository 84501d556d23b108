"""Serving under load, simulated: requests arrive, their prompts run, and rounds follow as a policy picks them.

    R  requests at work      S  steps      γ  block size

The simulated server does what the decoder does. Requests that have arrived join as soon as there is a free slot and
room in the cache; the pass over their prompts holds up everyone's rounds. In a round the decoder's own policy picks
verify lengths from recorded confidences, the accepted prefix comes from the record (:mod:`.traffic`, :mod:`.cuts`),
and the clock moves by the measured cost of the draft, of the target's pass in the context of that moment, and of
the rest. Every policy serves the same requests at the same times.
"""

from __future__ import annotations

import copy
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from dspark_train.calibration.online import OnlineSts
from dspark_train.calibration.sts import Sts
from dspark_train.decoding.acceptance import require_rounds
from dspark_train.decoding.cost import CostTable
from dspark_train.decoding.policies import FixedLength, Policy, Scheduled, ScheduledAsync, Threshold
from dspark_train.decoding.requests import PREFILL_ROWS
from dspark_train.errors import UserError
from dspark_train.progress import stage
from dspark_train.structures import DecodingTrace
from dspark_train.studies.cuts import CutEffect
from dspark_train.studies.rounds import OfRounds
from dspark_train.studies.traffic import Arrivals, AtWork, Recorded, Traffic

LEAST_REQUESTS = 100
"""Requests that arrive at a point, at least."""
TURNOVER = 6
"""Requests that arrive at a point for each that is at work at once."""
WARM_UP = 0.2
"""Share of the requests whose arrivals come before anything counts."""
BATCHES = 10
"""Stretches of a simulation whose differences give its standard error."""
SPEEDS = 4
"""Promised speeds that are read out where none are given."""


@dataclass(frozen=True)
class NamedPolicy:
    """A policy under its name in tables and plots; None decodes plainly, without a draft."""

    name: str
    policy: Policy | None


BASELINE = "one draft token"
"""The policy that others are compared with: one draft token a round, as the paper's MTP-1 verifies."""


def standard_policies(costs: CostTable, block_size: int, threshold: float) -> list[NamedPolicy]:
    """The policies that the study compares.

    Args:
        costs: What the schedulers believe about the machine.
        block_size: γ.
        threshold: Of the threshold policy.
    """
    return [
        NamedPolicy("plain", None),
        NamedPolicy(BASELINE, FixedLength(1)),
        NamedPolicy(f"fixed {block_size}", FixedLength()),
        NamedPolicy(f"threshold {threshold:g}", Threshold(threshold)),
        NamedPolicy("scheduled", Scheduled(costs)),
        NamedPolicy("asynchronous", ScheduledAsync(costs)),
    ]


@dataclass(frozen=True)
class Server:
    """What bounds the requests at work."""

    slots: int
    """Requests at once."""
    cache_tokens: int | None = None
    """Positions that the cache holds, all requests together; None: enough. A request reserves its prompt and the
    longest answer of the traffic when it joins, and waits until they are free."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise UserError(
                f"simulate: the number of concurrent requests must be at least 1, got {self.slots}"
            )


# -- one simulation --------------------------------------------------------------------------------------------


@dataclass
class Played:
    """What a simulation did, step by step (``[S]`` lists) and request by request (``[N]`` tensors)."""

    arrived: Tensor
    """Seconds, as in the traffic."""
    answer: Tensor
    """Tokens."""
    started: Tensor
    """When the first token was there."""
    finished: Tensor
    end: list[float] = field(default_factory=list)
    """When each step was over."""
    seconds: list[float] = field(default_factory=list)
    """Of each step's round, without prompts."""
    prompts: list[float] = field(default_factory=list)
    """Seconds of prompts before each step's round."""
    first: list[int] = field(default_factory=list)
    """First tokens that these made."""
    active: list[int] = field(default_factory=list)
    """Requests in each round; 0 in a step that ran prompts only."""
    verified: list[int] = field(default_factory=list)
    """Draft tokens, all requests together."""
    tokens: list[int] = field(default_factory=list)
    """Tokens committed by the rounds."""
    accepted: list[int] = field(default_factory=list)
    """Draft tokens."""


class StepCosts:
    """Seconds of rounds and prompts, looked up in what is computed once for each number of requests."""

    def __init__(self, costs: CostTable, depth: int | None) -> None:
        """Take costs; ``depth`` draft tokens are drawn a round, None decodes plainly."""
        self.costs, self.depth = costs, depth
        self._rounds: dict[int, tuple[Tensor, list[float]]] = {}

    def prompts(self, tokens: int) -> float:
        """Seconds of a pass over prompts of so many tokens together."""
        return float(self.costs.prompt_seconds(torch.tensor(tokens)))

    def round(self, active: int, rows: int, width: int, context: int) -> float:
        """Seconds of a round: ``rows`` of ``active`` requests, ``width`` of the widest, ``context`` of the longest."""
        if active not in self._rounds:
            self._rounds[active] = self._table(active)
        table, slopes = self._rounds[active]
        beyond = max(-self.costs.context, context - self.costs.context)
        return float(table[rows - active, width - 1]) + slopes[width - 1] * beyond

    def _table(self, active: int) -> tuple[Tensor, list[float]]:
        """Seconds ``[R·γ + 1, γ + 1]`` by draft tokens and width, and by width what a token of context costs."""
        costs, count = self.costs, torch.tensor(active)
        if self.depth is None:
            fixed, slots = costs.step_overhead_seconds(count), 0
            table = costs.single_row_seconds(count)[None, None]
        else:
            slots = self.depth
            fixed = costs.round_overhead_seconds(count) + costs.draft_seconds(count, self.depth)
            rows = active + torch.arange(active * slots + 1)[:, None]
            table = costs.verify_seconds(rows, count, torch.arange(1, slots + 2)).expand(-1, slots + 1)
        slopes = costs.context_seconds(count, torch.arange(1, slots + 2), plain=self.depth in (None, 0))
        return table + fixed, slopes.tolist()


def play(
    recorded: Recorded,
    traffic: Traffic,
    server: Server,
    policy: Policy | None,
    costs: CostTable,
    *,
    sts: Sts | None = None,
    effect: CutEffect | None = None,
) -> Played:
    """Serve a traffic to its end.

    Args:
        recorded: Whose rounds the requests go through.
        traffic: The requests.
        server: How many at once.
        policy: Picks verify lengths; None decodes plainly.
        costs: Measured costs; what is paid. (What a scheduler believes is in its policy.)
        sts: ``[γ]`` scalings of the confidences; None for raw ones.
        effect: What a cut changes; None: nothing.

    Raises:
        UserError: a request that the cache can never hold.
    """
    count, block_size = len(traffic.seconds), recorded.logits.shape[1]
    work = AtWork(recorded, sts, effect)
    if policy is not None and policy.follows_sts:
        work.sts = OnlineSts(sts or [1.0] * block_size)
    choose = None if policy is None else policy.start()
    paid = StepCosts(costs, None if policy is None else policy.depth(block_size))
    arrivals, prompts = traffic.seconds.tolist(), traffic.prompt.tolist()
    reserved = [tokens + int(traffic.answer.max()) for tokens in prompts]
    if server.cache_tokens is not None and max(reserved) > server.cache_tokens:
        raise UserError(
            f"simulate: a cache of {server.cache_tokens} tokens never holds a request of {max(reserved)} "
            "(its prompt and the longest answer): give it more (cache_tokens)"
        )
    nothing = torch.full((count,), math.nan, dtype=torch.float64)
    played = Played(traffic.seconds, traffic.answer, nothing, nothing.clone())
    clock, joined, held = 0.0, 0, 0

    def fit(arrived: int) -> int:
        """How many waiting requests join in the next pass."""
        longest = space = 0
        for index in range(joined, arrived):
            taken = index - joined
            longest, space = max(longest, prompts[index]), space + reserved[index]
            full = len(work) + taken == server.slots or (taken and longest * (taken + 1) > PREFILL_ROWS)
            if full or (server.cache_tokens is not None and held + space > server.cache_tokens):
                return taken
        return arrived - joined

    while joined < count or len(work):
        if not len(work):
            clock = max(clock, arrivals[joined])
        ran, firsts = 0.0, 0
        while taken := fit(bisect_right(arrivals, clock, lo=joined)):
            end = joined + taken
            seconds = paid.prompts(taken * max(prompts[joined:end]))
            clock, ran, firsts = clock + seconds, ran + seconds, firsts + taken
            played.started[joined:end] = clock
            work.join(traffic, joined, end)
            held += sum(reserved[joined:end])
            joined = end
            ended = work.leave()
            played.finished[ended] = clock
            held -= sum(reserved[index] for index in ended.tolist())
        active = len(work)
        seconds, sums = 0.0, (0, 0, 0)
        if active:
            context = int(work.position.max())
            if choose is None or policy is None:
                moved, ended = work.plain()
                sums, width = (0, active, 0), 1
            else:
                logits, accepted = work.outcomes()
                lengths = choose(work.confidence(logits)).minimum(recorded.verifiable[work.round])
                accepted = lengths.minimum(accepted)
                policy.update(lengths, accepted)
                if isinstance(work.sts, OnlineSts):
                    work.sts.update(logits, lengths, accepted)
                moved, ended = work.advance(accepted + 1, lengths, logits)
                sums = (int(lengths.sum()), int(moved.sum()), int(accepted.sum()))
                width = int(lengths.max()) + 1
            seconds = paid.round(active, active + sums[0], width, context)
            clock += seconds
            played.finished[ended] = clock
            held -= sum(reserved[index] for index in ended.tolist())
        for name, value in zip(
            ("end", "seconds", "prompts", "first", "active", "verified", "tokens", "accepted"),
            (clock, seconds, ran, firsts, active, *sums),
            strict=True,
        ):
            getattr(played, name).append(value)
    return played


# -- what is read from it ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadPoint:
    """One policy at one rate of arrivals."""

    requests: float
    """Requests at work, on average over the rounds' time."""
    throughput: float
    """Tokens per second, all requests together."""
    throughput_error: float
    """Its standard error, from the choice of recorded rounds and arrivals alone."""
    per_user: float
    """Tokens per second of one request, from its first token to its last."""
    tau: float
    """Tokens per round and request."""
    verified_per_request: float
    """Draft tokens verified per round and request."""
    acceptance_rate: float | None
    """Accepted share of the verified draft tokens; None where none were verified."""
    tokens_per_row: float
    """Tokens per verified row, the anchor's row included."""
    seconds_per_round: float
    extrapolated: bool
    """Some pass had more rows than the cost table's largest."""
    rate: float | None = None
    """Requests that arrive per second; None where a request that ended was replaced at once."""
    first_token_seconds: float | None = None
    """From arrival to first token: median."""
    prompt_share: float = 0.0
    """Share of the busy time that prompts' passes took."""

    @property
    def budget(self) -> float:
        """Rows verified per round and request: the anchor, and the draft tokens (the paper's Figure 8)."""
        return self.verified_per_request + 1


@dataclass(frozen=True)
class BudgetPoint:
    """Rounds with about as many requests at work."""

    requests: float
    """On average."""
    budget: float
    """Rows verified per round and request, the anchor's included."""
    rounds: int


@dataclass(frozen=True, kw_only=True)
class LoadStudy(OfRounds):
    """Throughput against per-user speed, by verification policy."""

    block_size: int = 0
    """γ."""
    context: int = 0
    """Tokens of context at which costs were measured."""
    machine: str = ""
    """That costs were measured on."""
    measured_rows: int = 0
    """Largest pass of the cost table."""
    arrivals: str = ""
    """``poisson``, or the name of the file of arrivals; empty: a request that ended was replaced at once."""
    slots: int | None = None
    """Requests at once, at most."""
    cache_tokens: int | None = None
    """Positions that the cache holds; None: enough."""
    prompt_tokens: float | None = None
    """Mean length of the prompts."""
    answer_tokens: float | None = None
    """Mean length of the answers."""
    after_cut: CutEffect | None = None
    """What a cut was found to change; None: taken to change nothing."""
    speeds: list[float] = field(default_factory=list)
    """Promised speeds per user that are read out, in tokens per second."""
    policies: dict[str, list[LoadPoint]]
    """Points by the policy's name, in the order of the rates."""
    budgets: dict[str, list[BudgetPoint]] = field(default_factory=dict)
    """Verified rows by requests at work, over the rounds of all rates; by the policy's name."""


def load_point(played: Played, traffic: Traffic, costs: CostTable) -> LoadPoint:
    """Sum up a simulation between the end of its warm-up and the last arrival.

    Before, the server fills; after, it drains. Speed and first tokens are those of requests that arrived between.
    """
    count = len(traffic.seconds)
    begun = min(math.floor(WARM_UP * count), count - 1)
    low, high = float(traffic.seconds[begun]), float(traffic.seconds[-1])
    end = torch.tensor(played.end, dtype=torch.float64)
    inside = (end > low) & (end <= high)
    if int(inside.sum()) < BATCHES:  # all arrive at once, or all is over in a few steps
        begun, low, inside = 0, float(traffic.seconds[0]), torch.ones_like(inside)
    columns = ("seconds", "prompts", "first", "active", "verified", "tokens", "accepted")
    seconds, prompts, first, active, verified, tokens, accepted = (
        torch.tensor(getattr(played, name), dtype=torch.float64)[inside] for name in columns
    )
    elapsed = end[inside].diff(prepend=torch.tensor([low], dtype=torch.float64))
    throughput, error = _ratio(tokens + first, elapsed)
    rounds, checked = float(active.sum()), float(verified.sum())
    own = (played.answer - 1)[begun:]
    spent = (played.finished - played.started)[begun:]
    rows = active + verified
    return LoadPoint(
        requests=float((active * (seconds + prompts)).sum() / (seconds + prompts).sum()),
        throughput=throughput,
        throughput_error=error,
        per_user=float(own.sum() / spent.sum()),
        tau=float(tokens.sum()) / rounds,
        verified_per_request=checked / rounds,
        acceptance_rate=float(accepted.sum()) / checked if checked else None,
        tokens_per_row=float(tokens.sum() / rows.sum()),
        seconds_per_round=float(seconds[active > 0].mean()),
        extrapolated=int(rows.max()) > _largest(costs, checked > 0),
        rate=traffic.rate if math.isfinite(traffic.rate) else None,
        first_token_seconds=median((played.started - played.arrived)[begun:].tolist()),
        prompt_share=float(prompts.sum() / (seconds + prompts).sum()),
    )


def _largest(costs: CostTable, drafts: bool) -> int:
    """Rows of the largest pass that was measured; in plain decoding, requests."""
    plain = not drafts and costs.single_row_seconds_median
    return costs.requests[-1] if plain else costs.max_rows


def _ratio(tokens: Tensor, seconds: Tensor) -> tuple[float, float]:
    """Σ tokens / Σ seconds, and its standard error from the means of consecutive stretches."""
    whole = float(tokens.sum() / seconds.sum())
    pairs = zip(tokens.tensor_split(BATCHES), seconds.tensor_split(BATCHES), strict=True)
    parts = torch.stack([part.sum() / time.sum() for part, time in pairs if len(part)])
    return whole, float(parts.std() / math.sqrt(len(parts))) if len(parts) > 1 else 0.0


def budgets(played: Sequence[Played]) -> list[BudgetPoint]:
    """Verified rows per request by requests at work: 1, 2, 3 to 4, 5 to 8, … (the paper's Figure 8)."""
    active = torch.tensor([count for one in played for count in one.active], dtype=torch.float64)
    verified = torch.tensor([count for one in played for count in one.verified], dtype=torch.float64)
    group = active.clamp_min(1).log2().ceil()
    found = []
    for place in group[active > 0].unique():
        here = (group == place) & (active > 0)
        rows = float((active + verified)[here].sum() / active[here].sum())
        found.append(BudgetPoint(float(active[here].mean()), rows, int(here.sum())))
    return found


def _crossing(
    points: Sequence[LoadPoint], at: float, x: Callable[[LoadPoint], float], y: Callable[[LoadPoint], float]
) -> float | None:
    """Best ``y`` where ``x`` is at least ``at``: at a point, or on the line between two rates; None: nowhere."""
    found = [y(point) for point in points if x(point) >= at]
    for one, two in itertools.pairwise(points):
        if min(x(one), x(two)) < at <= max(x(one), x(two)):
            share = (at - x(one)) / (x(two) - x(one))
            found.append(y(one) + share * (y(two) - y(one)))
    return max(found, default=None)


def throughput_at(points: Sequence[LoadPoint], speed: float) -> float | None:
    """Most tokens per second of all while each user gets at least ``speed`` (Figure 7); None: never reached."""
    return _crossing(points, speed, lambda point: point.per_user, lambda point: point.throughput)


def speed_at(points: Sequence[LoadPoint], throughput: float) -> float | None:
    """Fastest speed per user while all together get at least ``throughput`` tokens per second; None: never reached."""
    return _crossing(points, throughput, lambda point: point.throughput, lambda point: point.per_user)


def promised(policies: dict[str, list[LoadPoint]]) -> list[float]:
    """Speeds to read out: from the slowest of the baseline's to the fastest of any policy, evenly spaced in their logs.

    At the last ones the baseline may hardly run, or not at all.
    """
    every = [point.per_user for points in policies.values() for point in points]
    low = min((point.per_user for point in policies.get(BASELINE, [])), default=min(every))
    steps = torch.linspace(0, 1, SPEEDS + 2)[1:-1]
    return [float(f"{low * (max(every) / low) ** float(step):.2g}") for step in steps]


def budget_points(study: LoadStudy) -> dict[str, list[BudgetPoint]]:
    """Verified rows by requests at work; of a study without arrivals, those of its points."""
    return study.budgets or {
        name: [BudgetPoint(point.requests, point.budget, 0) for point in points]
        for name, points in study.policies.items()
    }


def equal_throughputs(study: LoadStudy) -> list[float]:
    """Throughputs to read speeds at: shares of the most that the baseline gives."""
    most = max((point.throughput for point in study.policies.get(BASELINE, [])), default=0.0)
    return [share * most for share in (0.25, 0.5, 0.75, 0.95) if most]


def read(
    study: LoadStudy, how: Callable[[Sequence[LoadPoint], float], float | None], at: float
) -> dict[str, float | None]:
    """:func:`throughput_at` or :func:`speed_at`, by policy."""
    return {name: how(points, at) for name, points in study.policies.items()}


# -- the study -----------------------------------------------------------------------------------------------------


def rate_for(recorded: Recorded, costs: CostTable, requests: int, answer: float | None = None) -> float:
    """Arrivals per second that keep about ``requests`` at work: what the best of three fixed policies serves.

    Plain decoding, one draft token and whole blocks, without prompts: a first guess, the same for all policies. Answers
    have ``answer`` tokens on average; None: as recorded.
    """
    count = torch.tensor(requests)
    plain = float(costs.single_row_seconds(count) + costs.step_overhead_seconds(count))
    speeds = [requests / plain]
    block_size = recorded.logits.shape[1]
    for length in sorted({1, block_size}):
        fixed = costs.draft_seconds(count, length) + costs.round_overhead_seconds(count)
        rows = count * (length + 1)
        seconds = fixed + costs.verify_seconds(rows, count, torch.tensor(length + 1))
        tokens = float(recorded.accepted.clamp_max(length).double().mean()) + 1
        speeds.append(requests * tokens / float(seconds))
    return max(speeds) / (answer or float(recorded.answer.double().mean()))


def simulate(
    trace: DecodingTrace,
    costs: CostTable,
    policies: Sequence[NamedPolicy],
    rates: Sequence[float],
    server: Server,
    *,
    sts: Sts | None = None,
    effect: CutEffect | None = None,
    arrivals: Arrivals | None = None,
    requests: int | None = None,
    seed: int = 0,
) -> tuple[dict[str, list[LoadPoint]], dict[str, list[BudgetPoint]]]:
    """Serve the same requests with every policy, at every rate of arrivals.

    Args:
        trace: Rounds that verified whole blocks, from the draft and the sampling to be served.
        costs: Measured costs.
        policies: What is compared; each begins anew at each rate.
        rates: Requests per second.
        server: How many at once.
        sts: ``[γ]`` scalings of the confidences; None for raw ones.
        effect: What a cut changes; None: nothing.
        arrivals: Times (and lengths, where known) of real traffic, stretched to each rate; None: Poisson.
        requests: How many arrive; None: enough.
        seed: Of arrivals, and of which recorded requests arrive.

    Returns:
        Points of each policy by its name, in the order of ``rates``; and its budget by requests at work.

    Raises:
        UserError: no rounds, no confidences where a policy reads them, or no rates.
    """
    if not rates or min(rates) <= 0:
        raise UserError(f"simulate: rates of arrivals must be above 0, got {list(rates)}")
    for named in policies:
        require_rounds(trace, confidences=named.policy is not None and named.policy.needs_confidence)
    recorded = Recorded.of(trace)
    count = requests or max(LEAST_REQUESTS, TURNOVER * server.slots)
    points: dict[str, list[LoadPoint]] = {named.name: [] for named in policies}
    all_played: dict[str, list[Played]] = {named.name: [] for named in policies}
    with stage("simulating load", len(rates) * len(policies), "runs") as shown:
        for rate in rates:
            if arrivals is None:
                traffic = recorded.poisson(rate, count, seed)
            else:
                traffic = recorded.arriving(arrivals, rate, count, seed)
            for named in policies:
                policy = copy.deepcopy(named.policy)  # one that has learnt nothing yet
                played = play(recorded, traffic, server, policy, costs, sts=sts, effect=effect)
                points[named.name].append(load_point(played, traffic, costs))
                all_played[named.name].append(played)
                shown.advance(1, f"{named.name}, {rate:.3g} requests a second")
    return points, {name: budgets(played) for name, played in all_played.items()}
