"""Requests of a decoder: their state, the order in which they join, and the record of their rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark_train.structures import DecodingTrace
from dspark_train.target.frozen import FrozenTarget

PREFILL_ROWS = 4096
"""Rows, padding included, of one pass over the prompts of joining requests; a longer prompt runs alone."""


@dataclass
class Request:
    """State of one request."""

    index: int
    prompt: list[int]
    limit: int
    """Tokens that it may generate."""
    stops: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    finished_by: str = ""

    @property
    def position(self) -> int:
        """Of the anchor: the last committed token, which the target has not run yet."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """Tokens that it may still generate."""
        return self.limit - len(self.tokens)

    def commit(self, tokens: list[int]) -> int:
        """Take tokens until one stops the request or the limit is reached; returns how many were taken."""
        taken = 0
        for token in tokens:
            self.tokens.append(token)
            taken += 1
            if token in self.stops:
                self.finished_by = "stop"
                break
            if self.remaining == 0:
                self.finished_by = "length"
                break
        return taken

    def counted(self, proposed: list[int]) -> int:
        """Draft tokens of a round that count: those up to the first end token that was proposed."""
        return next((slot for slot, token in enumerate(proposed, 1) if token in self.stops), len(proposed))


@dataclass
class RoundLog:
    """Rounds as they happen, joined into a trace at the end."""

    block_size: int
    requests: list[int] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)
    proposed: list[list[int]] = field(default_factory=list)
    confidence: list[Tensor] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    raw_lengths: list[int] = field(default_factory=list)
    raw_accepted: list[int] = field(default_factory=list)

    def trace(self, temperature: float, domains: Sequence[str]) -> DecodingTrace:
        """Join them; slots that were not drawn hold token -1 and confidence NaN."""
        count, slots = len(self.requests), self.block_size
        padded = [row + [-1] * (slots - len(row)) for row in self.proposed]
        logits = torch.full((count, slots), float("nan"))
        known = torch.cat(self.confidence).cpu() if self.confidence else logits[:, :0]
        logits[:, : known.shape[1]] = known
        counts = (self.requests, self.anchors, self.lengths, self.accepted, self.committed)
        integers = (
            torch.tensor(v, dtype=torch.int64) for v in (*counts, self.raw_lengths, self.raw_accepted)
        )
        request, anchor, lengths, accepted, committed, raw_lengths, raw_accepted = integers
        return DecodingTrace(
            request=request,
            anchor=anchor,
            proposed=torch.tensor(padded, dtype=torch.int64).view(count, slots),
            confidence_logits=logits,
            verify_length=lengths,
            accepted=accepted,
            committed=committed,
            temperature=temperature,
            domains=tuple(domains),
            raw_verify_length=raw_lengths,
            raw_accepted=raw_accepted,
        )


def take(waiting: deque[Request], free: int) -> list[Request]:
    """Next requests whose prompts run in one pass: as many as fit, padded to the longest, into a bounded one."""
    taken = [waiting.popleft()]
    longest = len(taken[0].prompt)
    while waiting and len(taken) < free:
        longest = max(longest, len(waiting[0].prompt))
        if longest * (len(taken) + 1) > PREFILL_ROWS:
            break
        taken.append(waiting.popleft())
    return taken


def stop_sets(
    target: FrozenTarget, stop_token_ids: Sequence[int] | Sequence[Sequence[int]] | None, count: int
) -> list[frozenset[int]]:
    """Stop tokens of each of ``count`` requests; None stands for the end tokens that the target declares."""
    if stop_token_ids is None:
        return [frozenset(end_token_ids(target))] * count
    per_request = [ids for ids in stop_token_ids if not isinstance(ids, int)]
    if per_request:
        return [frozenset(ids) for ids in per_request]
    return [frozenset(ids for ids in stop_token_ids if isinstance(ids, int))] * count


def end_token_ids(target: FrozenTarget) -> list[int]:
    """End tokens that the target's generation settings, config and tokenizer declare."""
    found: set[int] = set()
    generation = getattr(target.model, "generation_config", None)
    for source in (generation, target.config, target.tokenizer):
        declared = getattr(source, "eos_token_id", None)
        if declared is not None:
            found.update([declared] if isinstance(declared, int) else declared)
    return sorted(found)
