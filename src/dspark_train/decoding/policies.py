"""How long a prefix of each draft block is verified: decided before verification, from confidences alone.

    R  concurrent requests      γ  block size      B  rows (tokens) of one verification pass

The functions are pure, on whatever device their tensors live: sort, cumulative sum, compare; nothing is read
back. With ``c_k`` the probability that draft token ``k`` is accepted given that all before it were, the
survival probability ``a_k = Π_{i≤k} c_i`` never rises along a block, so the best ``(request, k)`` pairs
always form prefixes.

Decoding stays lossless because whether token ``k`` is verified depends on nothing that was known only after
token ``k`` was drawn: :func:`causal_lengths` stops at the first pair that does not pay, :func:`capacity`
looks at a step that is over, and the online policies learn from finished rounds only.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from dspark_train.decoding.cost import CostTable
from dspark_train.errors import UserError

Choose = Callable[[Tensor], Tensor]
"""Confidences ``[R, γ]`` of one step to verify lengths ``[R]`` int64 in 0..γ."""

POLICIES = "fixed, fixed:K, threshold:P, online:SHARE, scheduled, asynchronous"
"""What :func:`parse_policy` reads."""
ONLINE = "+online"
"""Behind a policy's name: the scalings of its confidences follow what is accepted."""

# -- pure functions --------------------------------------------------------------------------------------------


def _ranked(survival: Tensor) -> tuple[Tensor, Tensor]:
    """All (request, slot) pairs by falling survival: values ``[R·γ]`` and the request of each.

    The sort is stable over the row-major order, so equal survivals of one request keep their slots in order.
    """
    values, order = survival.flatten().to(torch.float64).sort(descending=True, stable=True)
    return values, order.div(survival.shape[1], rounding_mode="floor")


def _throughput(survival: Tensor, ranked: Tensor, steps_per_second: Tensor) -> Tensor:
    """Θ = τ·SPS(B) ``[R·γ + 1]`` after admitting the first 0, 1, 2, … ranked pairs."""
    requests, pairs = survival.shape[0], ranked.numel()
    tokens = torch.cat([ranked.new_zeros(1), ranked.cumsum(0)]) + requests
    return tokens * steps_per_second[requests : requests + pairs + 1].to(ranked)


def top_lengths(survival: Tensor, count: Tensor | int) -> Tensor:
    """Prefix lengths that verify the ``count`` draft tokens most likely to survive, over all requests.

    Args:
        survival: ``[R, γ]``, never rising along a row.
        count: how many draft tokens, 0-dim or int; more than R·γ means all.

    Returns:
        ``[R]`` int64.
    """
    _, request = _ranked(survival)
    return _prefixes(request, count, survival.shape[0])


def _prefixes(request: Tensor, count: Tensor | int, requests: int) -> Tensor:
    """Lengths ``[R]`` that hold the first ``count`` of the ranked pairs, given the request ``[R·γ]`` of each."""
    admitted = torch.arange(request.numel(), device=request.device) < count
    return request.new_zeros(requests).index_add_(0, request, admitted.to(torch.int64))


def causal_lengths(survival: Tensor, steps_per_second: Tensor) -> Tensor:
    """Hardware-aware prefix scheduler (Algorithm 1 of the paper).

    Starting from one token per request, pairs are admitted by falling survival while the expected throughput
    ``Θ = τ·SPS(B)`` strictly rises, and no further than the first that does not raise it.

    Args:
        survival: ``[R, γ]``, never rising along a row.
        steps_per_second: ``[≥ R + R·γ + 1]``: entry ``B`` is SPS(B).

    Returns:
        ``[R]`` int64.
    """
    values, request = _ranked(survival)
    theta = _throughput(survival, values, steps_per_second)
    rising = (theta[1:] > theta[:-1]) & (values > 0)
    return _prefixes(request, rising.to(torch.int64).cumprod(0).sum(), survival.shape[0])


def capacity(survival: Tensor, steps_per_second: Tensor) -> Tensor:
    """Number of draft tokens whose verification gives the most throughput (K): global search over the whole curve.

    Not causal: a decoder may use it for a *later* step only.

    Args:
        survival: ``[R, γ]``, never rising along a row.
        steps_per_second: ``[≥ R + R·γ + 1]``: entry ``B`` is SPS(B).

    Returns:
        0-dim int64 in 0..R·γ (the smallest, where several are best).
    """
    values, _ = _ranked(survival)
    theta = _throughput(survival, values, steps_per_second)
    return torch.cat([theta[:1], theta[1:].masked_fill(values <= 0, 0.0)]).argmax()


def resampled(survival: Tensor, requests: int) -> Tensor:
    """Survivals of as many requests as are asked for, distributed as those of the given ones.

    Args:
        survival: ``[R, γ]``, never rising along a row.
        requests: R'.

    Returns:
        ``[R', γ]``: quantiles of all R·γ values, falling in row-major order; ``survival`` itself where R' is R.
    """
    if requests == len(survival):
        return survival
    values, _ = _ranked(survival)
    pairs = requests * survival.shape[1]
    middle = torch.arange(pairs, device=survival.device) * 2 + 1
    place = (middle * len(values)).div(2 * pairs, rounding_mode="floor")
    return values[place].view(requests, -1)


def threshold_lengths(confidence: Tensor, threshold: float) -> Tensor:
    """Verify while every confidence so far is at least ``threshold``; 0 verifies the whole block.

    Args:
        confidence: ``[R, γ]`` conditional confidences ``c_k``.
        threshold: in 0..1.

    Returns:
        ``[R]`` int64.
    """
    return (confidence >= threshold).to(torch.int64).cumprod(1).sum(1)


# -- policies --------------------------------------------------------------------------------------------------


class Policy:
    """A rule of verification. Most are frozen descriptions; the online ones change as rounds are finished."""

    needs_confidence: ClassVar[bool] = True
    """Whether lengths depend on confidences."""
    follows_sts: ClassVar[bool] = False
    """Whether the scalings of the confidences follow what is accepted."""
    learns: ClassVar[bool] = False
    """Whether later lengths depend on what was accepted before."""

    def depth(self, block_size: int) -> int:
        """Draft tokens that can ever be verified: later ones need not be drawn."""
        return block_size

    def start(self) -> Choose:
        """What picks the lengths of one run."""
        raise NotImplementedError

    def update(self, verify_length: Tensor, accepted: Tensor) -> None:
        """Take note of finished rounds: ``[N]`` verified and ``[N]`` accepted draft tokens."""


@dataclass(frozen=True)
class FixedLength(Policy):
    """Verify the same number of draft tokens always.

    Args:
        length: draft tokens; None is the whole block, 0 plain decoding with a draft that is ignored.
    """

    length: int | None = None
    needs_confidence: ClassVar[bool] = False

    def depth(self, block_size: int) -> int:
        """The fixed length, or the whole block where that is shorter."""
        return block_size if self.length is None else min(self.length, block_size)

    def start(self) -> Choose:
        """The fixed length, always."""
        return lambda confidence: confidence.new_full(
            (confidence.shape[0],), self.depth(confidence.shape[1]), dtype=torch.int64
        )


@dataclass(frozen=True)
class Filled(Policy):
    """Verify the same number of draft tokens in all: whole blocks of the first requests, the rest of the next one's.

    Args:
        tokens: draft tokens of all requests together.
    """

    tokens: int
    needs_confidence: ClassVar[bool] = False

    def start(self) -> Choose:
        """γ for the first requests, what is left for the next, 0 for the others."""

        def choose(confidence: Tensor) -> Tensor:
            requests, slots = confidence.shape
            before = slots * torch.arange(requests, device=confidence.device)
            return (self.tokens - before).clamp(0, slots)

        return choose


@dataclass(frozen=True)
class Threshold(Policy):
    """Verify while ``c_k ≥ threshold``: the diagnostic policy, blind to load.

    Args:
        threshold: in 0..1.
    """

    threshold: float

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise UserError(f"policy threshold {self.threshold} must lie in 0..1")

    def start(self) -> Choose:
        """The slots before the first confidence below the threshold."""
        return lambda confidence: threshold_lengths(confidence, self.threshold)


def convex_below(values: Tensor) -> Tensor:
    """Largest convex function below ``values [n]`` at 0, 1, …, n − 1.

    Costs rise in steps, where a kernel pads its rows. A scheduler that stops at the first row that does not pay would
    stop before every step, however cheap the rows behind it; below the steps each row costs its share.
    """
    points = values.tolist()
    corners: list[int] = []
    for place, value in enumerate(points):
        while len(corners) > 1:
            first, second = corners[-2:]
            if (points[second] - points[first]) * (place - first) < (value - points[first]) * (
                second - first
            ):
                break
            corners.pop()
        corners.append(place)
    hull = [points[0]] * len(points)
    for first, second in itertools.pairwise(corners):
        for place in range(first, second + 1):
            share = (place - first) / (second - first)
            hull[place] = points[first] + share * (points[second] - points[first])
    return values.new_tensor(hull)


class _Curves:
    """SPS curves by number of requests, made once each.

    Args:
        source: a table, or one curve for any number of requests, which is taken as it is.
        convex: read the largest convex cost below a table's, without its steps.
    """

    def __init__(self, source: CostTable | Tensor, *, convex: bool) -> None:
        self.source, self.convex = source, convex
        self.known: dict[tuple[int, int, torch.device], Tensor] = {}

    def __call__(self, survival: Tensor) -> Tensor:
        """SPS ``[R + R·γ + 1]`` for a step with these survivals."""
        requests, rows = survival.shape[0], survival.shape[0] * (survival.shape[1] + 1)
        key = (requests, rows, survival.device)
        if key not in self.known:
            curve = self.source
            if isinstance(curve, CostTable):
                curve = curve.rounds_per_second(requests, rows)
                if self.convex:
                    curve = torch.cat([curve[:requests], 1 / convex_below(1 / curve[requests:])])
            if curve.numel() <= rows:
                raise UserError(
                    f"the policy's throughput curve ends at {curve.numel() - 1} rows; {requests} requests of "
                    f"{survival.shape[1]} draft tokens can ask for {rows}: profile up to that many rows"
                )
            self.known[key] = curve.to(survival.device)
        return self.known[key]


@dataclass(frozen=True, eq=False)
class Scheduled(Policy):
    """Algorithm 1: the causal hardware-aware scheduler.

    It stops at the first token that does not pay, so it reads a table's costs without their steps
    (:func:`convex_below`).

    Args:
        costs: measured costs of this machine, or an SPS curve ``[B]`` over verified rows.
    """

    costs: CostTable | Tensor

    def start(self) -> Choose:
        """Algorithm 1 on the confidences of each step."""
        curves = _Curves(self.costs, convex=True)

        def choose(confidence: Tensor) -> Tensor:
            survival = confidence.cumprod(1)
            return causal_lengths(survival, curves(survival))

        return choose


@dataclass(frozen=True, eq=False)
class ScheduledAsync(Policy):
    """Scheduler of production form: capacity from two steps before, spent on the current best tokens.

    The search runs over the costs as they were measured, steps included. Where the number of requests has changed
    since, the survivals of two steps before stand for those of the present requests (:func:`resampled`), and the
    costs are those of the present number. The first two steps, about which nothing is known yet, verify everything.

    Args:
        costs: measured costs of this machine, or an SPS curve ``[B]`` over verified rows.
    """

    costs: CostTable | Tensor

    def start(self) -> Choose:
        """The best tokens of each step, as many as the capacity two steps before."""
        curves = _Curves(self.costs, convex=False)
        pending: deque[Tensor] = deque()

        def choose(confidence: Tensor) -> Tensor:
            survival = confidence.cumprod(1)
            budget: Tensor | int = survival.numel()
            if len(pending) == 2:
                known = resampled(pending.popleft(), len(survival))
                budget = capacity(known, curves(known))
            pending.append(survival)
            return top_lengths(survival, budget)

        return choose


class OnlineThreshold(Policy):
    """A threshold that moves until the wanted share of verified draft tokens is accepted.

    After each round of N requests, ``logit(θ) += rate · N · (wanted − accepted share of the verified tokens)``:
    below the wanted share it rises, above it falls, and where nothing was verified the share counts as 1,
    so that a threshold too high for new traffic comes down. Summing the updates telescopes: over any
    stretch in which θ stays inside its limits, the mean share over rounds differs from the wanted one by at
    most ``range of logit(θ) / (rate · rounds)``, whatever the traffic does. Memory: one number, which runs of one
    decoder share.
    """

    learns: ClassVar[bool] = True

    def __init__(
        self,
        wanted: float,
        threshold: float = 0.5,
        *,
        rate: float = 5e-3,
        low: float = 0.01,
        high: float = 0.99,
    ) -> None:
        """Start from a threshold.

        Args:
            wanted: share of the verified draft tokens that should be accepted, in (0, 1).
            threshold: starting value, in [low, high].
            rate: change of the threshold's logit per round and unit of share.
            low: smallest threshold, above 0.
            high: largest threshold, below 1, so that some tokens are verified and the share stays measurable.
        """
        if not (0 < wanted < 1 and rate > 0 and 0 < low <= threshold <= high < 1):
            raise UserError(
                f"online threshold: need 0 < wanted < 1, rate > 0 and 0 < low ≤ threshold ≤ high < 1, got "
                f"wanted={wanted}, rate={rate}, low={low}, threshold={threshold}, high={high}"
            )
        self.wanted, self.rate = wanted, rate
        self._low, self._logit, self._high = map(_logit, (low, threshold, high))

    @property
    def threshold(self) -> float:
        """To use from now on."""
        return 1 / (1 + math.exp(-self._logit))

    def start(self) -> Choose:
        """The slots before the first confidence below the threshold of that moment."""
        return lambda confidence: threshold_lengths(confidence, self.threshold)

    def update(self, verify_length: Tensor, accepted: Tensor) -> None:
        """Move the threshold by the accepted share of ``[N]`` verified and ``[N]`` accepted draft tokens."""
        verified = float(verify_length.sum())
        share = float(accepted.sum()) / verified if verified else 1.0
        moved = self._logit + self.rate * len(accepted) * (self.wanted - share)
        self._logit = min(self._high, max(self._low, moved))


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


@dataclass(frozen=True, eq=False)
class FollowingSts(Policy):
    """Another policy, given confidences whose scalings follow what is accepted (:class:`OnlineSts`)."""

    policy: Policy
    """Picks the lengths; it reads confidences, and may verify whole blocks."""
    follows_sts: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.policy.needs_confidence:
            raise UserError(
                f"policy {type(self.policy).__name__} reads no confidences, whose scalings could follow: "
                f"leave {ONLINE} out"
            )

    def start(self) -> Choose:
        """What the other policy picks."""
        return self.policy.start()

    def update(self, verify_length: Tensor, accepted: Tensor) -> None:
        """Let the other policy take note."""
        self.policy.update(verify_length, accepted)


def parse_policy(text: str, costs: CostTable | Path | None = None) -> Policy:
    """Read a policy as the command line writes it.

    Args:
        text: ``fixed``, ``fixed:K``, ``threshold:P``, ``online:SHARE`` (a threshold that follows a wanted accepted
            share), ``scheduled`` or ``asynchronous``; the last four also with ``+online`` behind.
        costs: measured costs (or their file) for the schedulers.

    Raises:
        UserError: unknown policy, a bad number, or a scheduler without costs.
    """
    if text.endswith(ONLINE):
        return FollowingSts(parse_policy(text.removesuffix(ONLINE), costs))
    name, _, value = text.partition(":")
    try:
        if name == "fixed" and not (value and int(value) < 0):
            return FixedLength(int(value) if value else None)
        if name == "threshold" and value:
            return Threshold(float(value))
        if name == "online" and value:
            return OnlineThreshold(float(value))
    except ValueError:
        raise UserError(f"policy {text!r}: {value!r} is not a number") from None
    if name in ("scheduled", "asynchronous") and not value:
        if costs is None:
            raise UserError(
                f"policy {text!r} needs a cost table: run `dspark-train profile` on this machine first"
            )
        table = CostTable.load(costs) if isinstance(costs, Path) else costs
        return Scheduled(table) if name == "scheduled" else ScheduledAsync(table)
    raise UserError(f"policy {text!r} is none of: {POLICIES}")
