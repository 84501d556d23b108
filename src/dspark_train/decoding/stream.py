"""One answer, round by round: what a chat shows while it is being written."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dspark_train.decoding.decoder import Decoder


@dataclass(frozen=True)
class Chunk:
    """Tokens that one round committed; the first chunk of an answer is the token that the prompt's pass drew."""

    tokens: list[int]
    drafted: int
    """How many of them, from the first, the draft had proposed. The rest is the target's own."""
    verified: int
    """Draft tokens that the target looked at."""
    finished_by: str
    """``stop``, ``length``, or empty while the answer goes on."""


@dataclass
class Pace:
    """Counts over answers of one kind, the prompts' passes left out."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    reached: list[int] = field(default_factory=list)
    """By position: rounds in which it was verified and all before it were accepted."""
    accepted: list[int] = field(default_factory=list)
    """By position: those in which it was accepted."""

    def add(self, chunk: Chunk, seconds: float) -> None:
        """Count a round."""
        self.tokens += len(chunk.tokens)
        self.rounds += 1
        self.seconds += seconds
        grow = max(0, chunk.verified - len(self.reached))
        self.reached += [0] * grow
        self.accepted += [0] * grow
        # positions behind an accepted end token were never looked at
        reached = chunk.drafted if chunk.drafted == len(chunk.tokens) else chunk.drafted + 1
        for position in range(min(reached, chunk.verified)):
            self.reached[position] += 1
            self.accepted[position] += position < chunk.drafted

    @property
    def tokens_per_second(self) -> float:
        """0 before the first round."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def accepted_length(self) -> float:
        """τ: tokens a round; 0 before the first round."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """By position: share accepted of those reached."""
        return [hit / seen for hit, seen in zip(self.accepted, self.reached, strict=True) if seen]


@torch.inference_mode()
def stream(
    decoder: Decoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    seed: int = 0,
    pace: Pace | None = None,
) -> Iterator[Chunk]:
    """Decode one answer and yield each round's tokens as they are committed.

    Args:
        decoder: plain or speculative.
        prompt: token ids, at least one.
        max_new_tokens: longest answer.
        seed: of the sampling.
        pace: counts the rounds; the reader's own time between two rounds is not in it.

    Raises:
        UserError: a prompt that is empty, too long for the target's context, or has unknown ids.
    """
    (request,) = decoder.requests([prompt], max_new_tokens, None)
    waiting = deque([request])
    with decoder.start(1, len(request.prompt) + request.limit, seed) as run:
        run.join([waiting.popleft()])
        run.leave()
        yield Chunk(list(request.tokens), 0, 0, request.finished_by)
        while run.active:
            before = len(request.tokens)
            begun = time.perf_counter()
            run.round()
            run.leave()
            taken = request.tokens[before:]
            accepted, verified = run.rounds.accepted[-1], run.rounds.lengths[-1]
            chunk = Chunk(taken, min(accepted, len(taken)), verified, request.finished_by)
            if pace is not None:
                pace.add(chunk, time.perf_counter() - begun)
            yield chunk


class Detokenizer:
    """Turns tokens into text as they come: what it returns, joined, is the whole text.

    A token may end inside a character, and its text may depend on the tokens before it; so a few of these are
    decoded along.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0
        """Tokens whose text was returned."""
        self._from = 0
        """First token that is decoded along."""

    def add(self, token: int) -> str:
        """Text that ``token`` adds; empty while a character is incomplete."""
        self._ids.append(token)
        known = self._text(self._ids[self._from : self._shown])
        whole = self._text(self._ids[self._from :])
        if whole.endswith("\N{REPLACEMENT CHARACTER}") or len(whole) <= len(known):
            return ""
        self._from, self._shown = self._shown, len(self._ids)
        return whole[len(known) :]

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
