"""What a draft is measured against, decoded by the same decoder: its head switched off, and prompt lookup."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dspark_train.decoding.decoder import ActiveRun, Decoder
from dspark_train.decoding.draft_pass import Proposal
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.draft.model import DSparkDraft
from dspark_train.errors import UserError
from dspark_train.target.frozen import FrozenTarget


def without_head(draft: DSparkDraft) -> DSparkDraft:
    """Return the same draft with its sequential head switched off: latent 0, a purely parallel draft.

    The weights are shared, not copied. The confidence head goes too: it was trained for the tokens that the
    sequential head picks.

    Raises:
        UserError: the draft has no sequential head.
    """
    if draft.markov_head is None:
        raise UserError("head_off: this draft has no sequential head to switch off; leave the baseline out")
    twin = copy.copy(draft)
    twin.__dict__["_modules"] = {**draft._modules, "markov_head": None, "confidence_head": None}
    return twin


@dataclass
class SuffixIndex:
    """Finds the latest earlier occurrence of the last few tokens of a growing sequence.

    Every n-gram of length ``shortest..longest`` is remembered with the place after it, so that a look-up
    costs a few dictionary accesses, however long the sequence is.
    """

    longest: int = 3
    shortest: int = 1
    tokens: list[int] = field(default_factory=list)
    _places: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. The n-grams that end at the very last token are remembered only when more follow."""
        for token in tokens:
            end = len(self.tokens)
            for length in range(self.shortest, self.longest + 1):
                if length <= end:
                    self._places[tuple(self.tokens[end - length : end])] = end
            self.tokens.append(token)

    def propose(self, count: int) -> list[int]:
        """Return up to ``count`` tokens that followed the longest suffix seen before; none if it is new."""
        for length in range(min(self.longest, len(self.tokens)), self.shortest - 1, -1):
            place = self._places.get(tuple(self.tokens[-length:]))
            if place is not None:
                return self.tokens[place : place + count]
        return []


class PromptLookup(Decoder):
    """Decoder whose draft tokens are copied from earlier text: what followed the last few tokens before.

    Verified like any draft. When sampling, a copied token counts as drawn from a one-hot distribution.
    """

    def __init__(
        self,
        target: FrozenTarget,
        block_size: int,
        rule: SamplingRule | None = None,
        *,
        longest: int = 3,
        shortest: int = 1,
    ) -> None:
        """Prepare.

        Args:
            target: frozen target.
            block_size: draft tokens per round at most.
            rule: how the target's tokens are drawn; None is greedy.
            longest: tokens of the longest suffix that is looked up.
            shortest: and of the shortest.
        """
        if block_size < 1 or not 1 <= shortest <= longest:
            raise UserError(
                "prompt lookup needs block_size ≥ 1 and 1 ≤ shortest ≤ longest, "
                f"got {block_size}, {shortest} and {longest}"
            )
        super().__init__(target, rule=rule)
        self.block_size = self.depth = block_size
        self.longest, self.shortest = longest, shortest

    def start(self, slots: int, length: int, seed: int) -> ActiveRun:
        """Begin a run."""
        return _LookupRun(self, slots, length, seed)


class _LookupRun(ActiveRun):
    """A run that proposes from an index of each request's own text."""

    def __init__(self, decoder: PromptLookup, slots: int, length: int, seed: int) -> None:
        super().__init__(decoder, slots, length, seed)
        self.lookup = decoder
        self.indices: dict[int, SuffixIndex] = {}

    def _propose(self, anchors: torch.Tensor, positions: list[int]) -> tuple[Proposal | None, list[int]]:
        found = []
        with self.watch.part("draft"):
            for request in self.active:
                index = self.indices.setdefault(
                    request.index, SuffixIndex(self.lookup.longest, self.lookup.shortest)
                )
                index.extend([*request.prompt, *request.tokens][len(index.tokens) :])
                found.append(index.propose(min(self.lookup.block_size, request.remaining - 1)))
            slots = self.lookup.block_size
            padded = [tokens + [-1] * (slots - len(tokens)) for tokens in found]
            tokens = torch.tensor(padded, dtype=torch.int64, device=self.device)
            indices = tokens.clamp_min(0)
            probabilities = None
            if not self.rule.greedy:
                vocabulary = self.lookup.target.vocab_size
                probabilities = torch.nn.functional.one_hot(indices, vocabulary).float()
        return Proposal(tokens, indices, probabilities, None), [1 + len(copied) for copied in found]
