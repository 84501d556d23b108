"""Serving under load, simulated: recorded rounds for what is accepted, a cost table for what it costs.

    R  concurrent requests      γ  block size

A round of the simulation picks verify lengths by the decoder's own policies from recorded confidences, takes the
accepted prefix from the record, and adds up the measured cost of the draft, of the target's pass over the picked rows
and of the rest of the round. Prompts' passes are not part of it: numbers are for decoding alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_train.calibration.online import OnlineSts
from dspark_train.calibration.sts import Sts, conditional
from dspark_train.decoding.acceptance import require_rounds
from dspark_train.decoding.cost import CostTable
from dspark_train.decoding.policies import FixedLength, Policy, Scheduled, ScheduledAsync, Threshold
from dspark_train.errors import UserError
from dspark_train.structures import DecodingTrace
from dspark_train.studies.rounds import OfRounds

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of concurrent requests of the study."""
LEAST_ROUNDS = 3000
"""Rounds (of single requests) behind a point, at least."""
LEAST_STEPS = 60
"""Steps (rounds of all requests together) behind a point, at least."""
BATCHES = 10
"""Stretches of a simulation whose differences give its standard error."""


@dataclass(frozen=True)
class NamedPolicy:
    """A policy under its name in tables and plots; None decodes plainly, without a draft."""

    name: str
    policy: Policy | None


def standard_policies(costs: CostTable, block_size: int, threshold: float) -> list[NamedPolicy]:
    """The policies that the study compares.

    Args:
        costs: What the schedulers believe about the machine.
        block_size: γ.
        threshold: Of the threshold policy.
    """
    return [
        NamedPolicy("plain", None),
        NamedPolicy("one draft token", FixedLength(1)),
        NamedPolicy(f"fixed {block_size}", FixedLength()),
        NamedPolicy(f"threshold {threshold:g}", Threshold(threshold)),
        NamedPolicy("scheduled", Scheduled(costs)),
        NamedPolicy("asynchronous", ScheduledAsync(costs)),
    ]


@dataclass(frozen=True)
class LoadPoint:
    """One policy at one number of concurrent requests."""

    requests: int
    throughput: float
    """Tokens per second, all requests together."""
    throughput_error: float
    """Its standard error, from the choice of recorded rounds alone."""
    per_user: float
    """Tokens per second of one request."""
    tau: float
    """Tokens per round and request."""
    verified_per_request: float
    """Draft tokens verified per round and request: the budget."""
    acceptance_rate: float | None
    """Accepted share of the verified draft tokens; None where none were verified."""
    tokens_per_row: float
    """Tokens per verified row, the anchor's row included."""
    seconds_per_round: float
    extrapolated: bool
    """Some pass had more rows than the cost table's largest."""


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
    policies: dict[str, list[LoadPoint]]
    """Points by the policy's name, in the order of concurrent requests."""


class Replay:
    """Recorded requests, from which concurrent ones are made.

    A concurrent request goes through the rounds of a recorded one, in order, until it has as many tokens.
    Verifying whole blocks repeats the record exactly. A policy that cuts blocks needs more rounds for the
    same tokens than were recorded, and goes through them again: the difficulty of a round is taken as
    independent of where the round before it was cut.
    """

    def __init__(
        self,
        trace: DecodingTrace,
        sts: Sts | OnlineSts | None,
        slots: int,
        *,
        endless: bool = True,
    ) -> None:
        """Make the first ``slots`` requests.

        Args:
            trace: The record.
            sts: ``[γ]`` scalings of the confidences; None for raw ones.
            slots: Concurrent requests.
            endless: Start at evenly spread rounds of shuffled requests and replace each request that ends; or
                else decode each recorded request once, from its start, in recorded order.
        """
        count = int(trace.request.max()) + 1
        shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        request, order = (shuffled[trace.request] if endless else trace.request).sort(stable=True)
        self.logits, self.sts = trace.confidence_logits[order].to(torch.float64), sts
        self.accepted, self.counted = trace.accepted[order], trace.verify_length[order]
        self.verifiable = trace.uncut.verify_length[order]
        """Draft tokens that cost a row; those up to an end token, ``counted``, say something."""
        _, owner, rounds = request.unique_consecutive(return_inverse=True, return_counts=True)
        self.last = rounds.cumsum(0) - 1
        """Last round of each recorded request."""
        self.first = self.last - rounds + 1
        tokens = trace.committed[order]
        done_before = tokens.cumsum(0) - tokens
        self.length = torch.zeros_like(rounds).index_add_(0, owner, tokens)
        """Tokens of each recorded request."""
        self.endless = endless
        places = torch.arange(slots) * len(order) // slots if endless else self.first[:slots]
        self.round = places.clone()
        """``[R]`` the recorded round that each request is in; R shrinks when the record is used up."""
        self.recorded = owner[places]
        self.left = (self.length + done_before[self.first])[self.recorded] - done_before[places]
        self.upcoming = int(self.recorded[-1]) + 1

    def confidence(self, rounds: Tensor) -> Tensor:
        """Confidences ``[R, γ]`` of recorded rounds ``[R]``, by the scalings of this moment."""
        return conditional(self.logits[rounds], self.sts.sts if isinstance(self.sts, OnlineSts) else self.sts)

    def advance(self, tokens: Tensor) -> Tensor:
        """Move on by up to ``[R]`` tokens, and give the places of requests that ended to the next ones.

        Returns:
            ``[R]`` tokens committed: fewer where the request ends.
        """
        moved = tokens.minimum(self.left)
        self.left = self.left - moved
        following = self.round + 1
        self.round = torch.where(following > self.last[self.recorded], self.first[self.recorded], following)
        done = (self.left == 0).nonzero().flatten()
        if len(done):
            fresh = self.upcoming + torch.arange(len(done))
            self.upcoming += len(done)
            fresh = fresh % len(self.length) if self.endless else fresh[fresh < len(self.length)]
            joined = done[: len(fresh)]
            self.recorded[joined], self.round[joined] = fresh, self.first[fresh]
            self.left[joined] = self.length[fresh]
            active = self.left > 0
            self.recorded, self.round, self.left = (
                self.recorded[active],
                self.round[active],
                self.left[active],
            )
        return moved


@dataclass(frozen=True)
class Steps:
    """What a simulation did, step by step; ``[S]`` int64 each but the last."""

    active: Tensor
    """Requests."""
    verified: Tensor
    """Draft tokens verified, all requests together."""
    tokens: Tensor
    """Tokens committed, all requests together."""
    accepted: Tensor
    """Draft tokens accepted, all requests together."""
    width: Tensor
    """Rows of the widest request."""
    depth: int
    """Draft tokens drawn for each request."""

    def seconds(self, costs: CostTable) -> Tensor:
        """``[S]`` what each step costs: draft, verification, and the rest of the round."""
        fixed = costs.draft_seconds(self.active, self.depth) + costs.round_overhead_seconds(self.active)
        return fixed + costs.verify_seconds(self.active + self.verified, self.active, self.width)


def play(replay: Replay, policy: Policy, steps: int | None = None) -> Steps:
    """Run a policy over a replay.

    Args:
        replay: The requests.
        policy: Picks verify lengths.
        steps: Rounds of all requests together; None until a replay that is not endless is used up.
    """
    if policy.follows_sts and not isinstance(replay.sts, OnlineSts):
        replay.sts = OnlineSts(replay.sts or [1.0] * replay.logits.shape[1])
    choose = policy.start()
    counts: list[tuple[int, int, int, int, int]] = []
    while len(replay.round) and (steps is None or len(counts) < steps):
        rounds = replay.round
        lengths = choose(replay.confidence(rounds)).minimum(replay.verifiable[rounds])
        accepted = lengths.minimum(replay.accepted[rounds])
        counted = lengths.minimum(replay.counted[rounds])
        policy.update(counted, accepted)
        if isinstance(replay.sts, OnlineSts):
            replay.sts.update(replay.logits[rounds], counted, accepted)
        moved = replay.advance(accepted + 1)
        sums = (int(lengths.sum()), int(moved.sum()), int(accepted.sum()))
        counts.append((len(rounds), *sums, int(lengths.max()) + 1))
    active, verified, tokens, found, width = torch.tensor(counts, dtype=torch.int64).view(-1, 5).unbind(1)
    return Steps(active, verified, tokens, found, width, policy.depth(replay.logits.shape[1]))


def simulate_point(
    trace: DecodingTrace,
    costs: CostTable,
    named: NamedPolicy,
    requests: int,
    *,
    sts: Sts | None = None,
    steps: int | None = None,
) -> LoadPoint:
    """Simulate ``requests`` concurrent requests under one policy; a request that ends is replaced at once.

    Args:
        trace: Rounds that verified whole blocks, from the draft and the sampling temperature to be served.
        costs: Measured costs; what is paid. (What a scheduler believes is in its policy.)
        named: The policy.
        requests: R ≥ 1.
        sts: ``[γ]`` scalings of the confidences; None for raw ones.
        steps: Rounds of all requests together; None for enough.

    Raises:
        UserError: no rounds, no confidences where the policy reads them, or fewer than one request.
    """
    if requests < 1:
        raise UserError(f"simulate: the number of concurrent requests must be at least 1, got {requests}")
    if named.policy is None:
        return _plain_point(costs, requests)
    require_rounds(trace, confidences=named.policy.needs_confidence)
    steps = steps or max(LEAST_STEPS, math.ceil(LEAST_ROUNDS / requests))
    policy = copy.deepcopy(named.policy)  # one that has learnt nothing yet
    played = play(Replay(trace, sts, requests), policy, steps)
    return _point(costs, requests, played)


def simulate_queue(
    trace: DecodingTrace,
    costs: CostTable,
    policy: Policy | None,
    batch_size: int,
    *,
    sts: Sts | None = None,
) -> tuple[int, float, int]:
    """Predict the decoding of just the recorded requests, ``batch_size`` at once.

    The real decoder can do the same, and check the prediction.

    Args:
        trace: Rounds that verified whole blocks.
        costs: Measured costs.
        policy: The policy; None decodes plainly.
        batch_size: Requests at once; fewer when none are left to join.
        sts: ``[γ]`` scalings of the confidences; None for raw ones.

    Returns:
        Tokens (each request's first one, which its prompt's pass makes, is not among them), seconds, and
        rounds of single requests.
    """
    replay = Replay(trace, sts, batch_size, endless=False)
    if policy is not None:
        played = play(replay, policy)
        return int(played.tokens.sum()), float(played.seconds(costs).sum()), int(played.active.sum())
    tokens, seconds = 0, 0.0
    while len(replay.round):
        active = len(replay.round)
        replay.advance(torch.ones(active, dtype=torch.int64))
        tokens, seconds = tokens + active, seconds + _plain_seconds(costs, active)
    return tokens, seconds, tokens


def _point(costs: CostTable, requests: int, played: Steps) -> LoadPoint:
    seconds, rows = played.seconds(costs), played.verified + played.active
    throughput, error = _ratio(played.tokens, seconds)
    total, checked, rounds = int(played.tokens.sum()), int(played.verified.sum()), int(played.active.sum())
    return LoadPoint(
        requests=requests,
        throughput=throughput,
        throughput_error=error,
        per_user=throughput / requests,
        tau=total / rounds,
        verified_per_request=checked / rounds,
        acceptance_rate=int(played.accepted.sum()) / checked if checked else None,
        tokens_per_row=total / int(rows.sum()),
        seconds_per_round=float(seconds.mean()),
        extrapolated=int(rows.max()) > costs.max_rows,
    )


def _plain_seconds(costs: CostTable, requests: int) -> float:
    count = torch.tensor(requests)
    return float(costs.single_row_seconds(count) + costs.step_overhead_seconds(count))


def _plain_point(costs: CostTable, requests: int) -> LoadPoint:
    seconds = _plain_seconds(costs, requests)
    largest = costs.requests[-1] if costs.single_row_seconds_median else costs.max_rows
    return LoadPoint(
        requests=requests,
        throughput=requests / seconds,
        throughput_error=0.0,
        per_user=1 / seconds,
        tau=1.0,
        verified_per_request=0.0,
        acceptance_rate=None,
        tokens_per_row=1.0,
        seconds_per_round=seconds,
        extrapolated=requests > largest,
    )


def _ratio(tokens: Tensor, seconds: Tensor) -> tuple[float, float]:
    """Σ tokens / Σ seconds, and its standard error from the means of consecutive stretches."""
    whole = float(tokens.sum() / seconds.sum())
    pairs = zip(tokens.tensor_split(BATCHES), seconds.tensor_split(BATCHES), strict=True)
    parts = torch.stack([part.sum() / time.sum() for part, time in pairs if len(part)])
    return whole, float(parts.std() / math.sqrt(len(parts))) if len(parts) > 1 else 0.0


def simulate(
    trace: DecodingTrace,
    costs: CostTable,
    policies: Sequence[NamedPolicy],
    requests: Sequence[int] = REQUESTS,
    *,
    sts: Sts | None = None,
    steps: int | None = None,
) -> dict[str, list[LoadPoint]]:
    """Simulate every policy at every number of concurrent requests; arguments as :func:`simulate_point`.

    Returns:
        The points of each policy by its name, in the order of ``requests``.
    """
    return {
        named.name: [simulate_point(trace, costs, named, count, sts=sts, steps=steps) for count in requests]
        for named in policies
    }
