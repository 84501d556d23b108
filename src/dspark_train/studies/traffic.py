"""Requests that arrive: when, with prompts and answers of which lengths, and what is accepted of their blocks.

    N  requests that arrive      R  of them at work      γ  block size

Lengths and rounds come from recorded requests: each that arrives goes through the rounds of a recorded one, in
order, until it has as many tokens. Verifying whole blocks repeats the record exactly. A policy that cuts blocks needs
more rounds for the same tokens than were recorded, and goes through them again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dspark_train.calibration.online import OnlineSts
from dspark_train.calibration.sts import Sts, conditional
from dspark_train.errors import UserError
from dspark_train.files import read_lines
from dspark_train.structures import DecodingTrace
from dspark_train.studies.cuts import CutEffect


@dataclass(frozen=True)
class Traffic:
    """Requests in the order in which they arrive; ``[N]`` each."""

    seconds: Tensor
    """float64: when, from 0, never falling."""
    recorded: Tensor
    """int64: the recorded request whose rounds it goes through."""
    prompt: Tensor
    """int64: tokens of its prompt."""
    answer: Tensor
    """int64: tokens of its answer; the first one is made by the prompt's pass."""

    @property
    def rate(self) -> float:
        """Requests per second; infinite where all arrive at once."""
        spent = float(self.seconds[-1])
        return (len(self.seconds) - 1) / spent if spent else math.inf


@dataclass(frozen=True)
class Recorded:
    """Recorded requests as a simulation reads them: rounds ``[R]`` sorted by request."""

    logits: Tensor
    """``[R, γ]`` float64."""
    accepted: Tensor
    verifiable: Tensor
    """``[R]``: draft tokens verified in the record, the whole block but at a request's end."""
    first: Tensor
    """First round of each request."""
    last: Tensor
    prompt: Tensor
    """Tokens of each request's prompt."""
    answer: Tensor
    """Tokens of each request's answer, the prompt's pass's included."""

    @classmethod
    def of(cls, trace: DecodingTrace) -> Recorded:
        """Sort a trace's rounds by request; requests without a round are left out."""
        request, order = trace.request.sort(stable=True)
        _, owner, rounds = request.unique_consecutive(return_inverse=True, return_counts=True)
        last = rounds.cumsum(0) - 1
        first = last - rounds + 1
        answer = torch.ones_like(rounds).index_add_(0, owner, trace.committed[order])
        return cls(
            trace.confidence_logits[order].to(torch.float64),
            trace.accepted[order],
            trace.uncut.verify_length[order],
            first,
            last,
            trace.anchor[order][first],
            answer,
        )

    def __len__(self) -> int:
        """Requests."""
        return len(self.first)

    def queue(self) -> Traffic:
        """Each of them once, all at the start, in recorded order."""
        count = len(self)
        return Traffic(torch.zeros(count).double(), torch.arange(count), self.prompt, self.answer)

    def poisson(self, rate: float, count: int, seed: int = 0) -> Traffic:
        """Draw ``count`` of them that arrive at random, ``rate`` a second on average."""
        generator = torch.Generator().manual_seed(seed)
        gaps = torch.rand(count, generator=generator, dtype=torch.float64).log().neg() / rate
        return self._drawn(gaps.cumsum(0) - gaps[0], generator)

    def arriving(self, arrivals: Arrivals, rate: float, count: int, seed: int = 0) -> Traffic:
        """Draw ``count`` requests for recorded arrivals, repeated as needed and stretched in time to a mean rate."""
        generator = torch.Generator().manual_seed(seed)
        known = torch.tensor(arrivals.seconds, dtype=torch.float64)
        known = known - known[0]
        period = float(known[-1]) * len(known) / max(1, len(known) - 1)
        turn = torch.arange(count) // len(known)
        place = torch.arange(count) % len(known)
        drawn = self._drawn((known[place] + turn * period) * (len(known) / period / rate), generator)
        lengths = {}
        for name, given in (("prompt", arrivals.prompt_tokens), ("answer", arrivals.answer_tokens)):
            stated = torch.tensor(given)[place]
            lengths[name] = torch.where(stated > 0, stated, getattr(drawn, name))
        return Traffic(drawn.seconds, drawn.recorded, **lengths)

    def _drawn(self, seconds: Tensor, generator: torch.Generator) -> Traffic:
        """Shuffled requests, all of them before any comes again."""
        turns = -(-len(seconds) // len(self))
        order = torch.cat([torch.randperm(len(self), generator=generator) for _ in range(turns)])
        chosen = order[: len(seconds)]
        return Traffic(seconds, chosen, self.prompt[chosen], self.answer[chosen])


@dataclass(frozen=True)
class Arrivals:
    """Arrivals of real traffic."""

    seconds: list[float]
    prompt_tokens: list[int]
    """0 where unknown: as the recorded request has."""
    answer_tokens: list[int]
    """0 where unknown."""

    def served_by(self, recorded: Recorded) -> Traffic:
        """Each of them once, at its own time."""
        spent = (self.seconds[-1] - self.seconds[0]) * len(self.seconds) / (len(self.seconds) - 1)
        return recorded.arriving(self, len(self.seconds) / spent, len(self.seconds))

    @classmethod
    def load(cls, path: Path) -> Arrivals:
        """Read a JSONL file: a line a request, with ``seconds`` and, if known, ``prompt_tokens``, ``answer_tokens``.

        Raises:
            UserError: no such file, fewer than two requests, a bad number, or times that fall.
        """
        seconds: list[float] = []
        lengths: dict[str, list[int]] = {"prompt_tokens": [], "answer_tokens": []}
        for line in read_lines(path):
            try:
                row = line.value()
            except ValueError as error:
                raise UserError(f"{error}; a line of arrivals is an object with `seconds`") from None
            at = row.get("seconds") if isinstance(row, dict) else None
            if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at):
                raise UserError(f"{line.where}: seconds is {at!r}; it must be the time of arrival, a number")
            if seconds and at < seconds[-1]:
                raise UserError(f"{line.where}: arrives at {at} s, before the line above ({seconds[-1]} s)")
            seconds.append(float(at))
            for name, values in lengths.items():
                count = row.get(name, 0)
                if isinstance(count, bool) or not isinstance(count, int) or (name in row and count < 1):
                    raise UserError(f"{line.where}: {name} is {count!r}; it must be a whole number above 0")
                values.append(count)
        if len(seconds) < 2 or seconds[0] == seconds[-1]:
            raise UserError(f"{path}: {len(seconds)} arrivals; at least two, at different times, are needed")
        return cls(seconds, **lengths)


@dataclass
class AtWork:
    """Requests that a simulated server works on; ``[R]`` each, in the order in which they joined."""

    recorded: Recorded
    sts: Sts | OnlineSts | None
    """Scalings of the confidences."""
    effect: CutEffect | None = None
    """What a cut changes; None: nothing."""
    seed: int = 0
    index: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Of each in the traffic."""
    owner: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """The recorded request of each."""
    round: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """The recorded round that each is in."""
    left: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Tokens that each has still to make."""
    position: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Of each one's anchor."""
    cut: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """Logit at which each one's last block was cut with all before it accepted; NaN where it was not."""

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def __len__(self) -> int:
        return len(self.index)

    def join(self, traffic: Traffic, start: int, end: int) -> None:
        """Take requests ``start`` to ``end`` of the traffic, whose prompts have run."""
        owner = traffic.recorded[start:end]
        fresh = {
            "index": torch.arange(start, end),
            "owner": owner,
            "round": self.recorded.first[owner],
            "left": traffic.answer[start:end] - 1,
            "position": traffic.prompt[start:end],
            "cut": torch.full((end - start,), torch.nan, dtype=torch.float64),
        }
        for name, values in fresh.items():
            setattr(self, name, torch.cat([getattr(self, name), values]))

    def outcomes(self) -> tuple[Tensor, Tensor]:
        """Confidence logits ``[R, γ]`` of the round that each is in, and draft tokens ``[R]`` that would be accepted.

        As recorded; after a cut, logits are shifted, and a slot's chance to be accepted with them: of the accepted
        ones a share is lost where it falls, of the rejected ones a share is won where it rises.
        """
        logits, accepted = self.recorded.logits[self.round], self.recorded.accepted[self.round]
        if self.effect is None or bool(self.cut.isnan().all()):
            return logits, accepted
        slots = torch.arange(logits.shape[1])
        moved = logits + self.effect.shift(self.cut)
        before, after = self.effect.acceptance(logits, cut=False), self.effect.acceptance(moved, cut=True)
        chance = torch.rand(logits.shape, generator=self._generator, dtype=torch.float64)
        rejected = (slots == accepted[:, None]) & (slots < self.recorded.verifiable[self.round][:, None])
        drawn = torch.where(slots < accepted[:, None], chance * before, chance)
        drawn = torch.where(rejected, before + chance * (1 - before), drawn)
        changed = (drawn < after).to(torch.int64).cumprod(1).sum(1)
        return moved, torch.where(self.cut.isnan(), accepted, changed)

    def confidence(self, logits: Tensor) -> Tensor:
        """Confidences ``[R, γ]`` by the scalings of this moment."""
        return conditional(logits, self.sts.sts if isinstance(self.sts, OnlineSts) else self.sts)

    def advance(self, tokens: Tensor, lengths: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Move on by up to ``tokens [R]`` after verifying ``lengths [R]`` of blocks with ``logits [R, γ]``.

        Returns:
            Tokens committed ``[R]``, fewer where a request ends; and the requests of the traffic that ended.
        """
        moved = tokens.minimum(self.left)
        whole = (lengths >= self.recorded.verifiable[self.round]) | (tokens <= lengths)
        at = logits.gather(1, lengths.clamp_max(logits.shape[1] - 1)[:, None]).squeeze(1)
        self.cut = at.masked_fill(whole, torch.nan)
        self.left, self.position = self.left - moved, self.position + moved
        following = self.round + 1
        self.round = torch.where(
            following > self.recorded.last[self.owner], self.recorded.first[self.owner], following
        )
        return moved, self.leave()

    def plain(self) -> tuple[Tensor, Tensor]:
        """Move on by a token each; returns as :meth:`advance`."""
        self.left, self.position = self.left - 1, self.position + 1
        return torch.ones_like(self.left), self.leave()

    def leave(self) -> Tensor:
        """Let requests go that have all their tokens; returns them."""
        done = self.left <= 0
        ended = self.index[done]
        if len(ended):
            for name in ("index", "owner", "round", "left", "position", "cut"):
                setattr(self, name, getattr(self, name)[~done])
        return ended
