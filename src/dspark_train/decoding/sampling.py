"""Sampling rules and verification by rejection sampling.

    S  slots or rows      V  vocabulary of the target      U  vocabulary of the draft
    R  requests           γ  block size

Draft and target are sampled by the same rule, and verification is given the draft's distribution as it was
really sampled from, so that the output follows the target's distribution exactly: a draft token ``x`` is
accepted with probability ``min(1, p_t(x) / p_d(x))``, and the first rejected one is replaced by a draw from
``max(0, p_t − p_d)``, normalised. At temperature 0 both distributions are one-hot and nothing is normalised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_train.errors import UserError
from dspark_train.run import sampling_label

BLOCK = 128
"""Logits whose maximum is taken first on a CPU: maxima vectorise there, a search for their places does not."""


@dataclass(frozen=True)
class SamplingRule:
    """How logits become a distribution: temperature first, then the ``top_k`` best, then nucleus ``top_p``.

    Args:
        temperature: 0 is greedy.
        top_k: tokens kept; 0 keeps all.
        top_p: the smallest set of best tokens whose probability reaches this is kept; 1 keeps all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature {self.temperature} must be at least 0 (0 is greedy)")
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k} must be at least 0 (0 keeps every token)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} must lie above 0 and at most 1 (1 keeps every token)")

    @property
    def label(self) -> str:
        """Its name in file names: ``greedy``, ``t1.0``, ``t0.7_k20``."""
        return sampling_label(self.temperature, self.top_k, self.top_p)

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken always."""
        return self.temperature == 0.0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Distribution that is sampled from: ``[.., V]`` logits to ``[.., V]`` float32.

        Tokens that tie with the last one kept by ``top_k`` are kept too. One-hot (lowest id first) when
        greedy.
        """
        if self.greedy:
            return torch.nn.functional.one_hot(best_token(logits), logits.shape[-1]).float()
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            lowest = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < lowest, float("-inf"))
        if self.top_p < 1:
            ranked, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
            before = ranked.cumsum(-1) - ranked
            dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= self.top_p)
            logits = logits.masked_fill(dropped, float("-inf"))
        return logits.softmax(-1)


def best_token(logits: Tensor) -> Tensor:
    """Index of the largest of ``[.., V]`` logits, the lowest of several: ``[..]`` int64."""
    if logits.device.type != "cpu" or logits.shape[-1] % BLOCK:
        return logits.argmax(-1)
    blocks = logits.unflatten(-1, (-1, BLOCK))
    block = blocks.amax(-1).argmax(-1)
    inside = blocks.take_along_dim(block[..., None, None], dim=-2).squeeze(-2)
    return block * BLOCK + inside.argmax(-1)


def draw(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one index per row without asking the device anything back.

    The minimum of exponential clocks of rates ``p`` is index ``i`` with probability ``p_i / Σ p``.

    Args:
        probabilities: ``[.., V]``, not negative; need not be normalised.
        generator: source of randomness, on the same device.

    Returns:
        ``[..]`` int64.
    """
    clocks = torch.empty_like(probabilities).exponential_(generator=generator)
    return best_token(probabilities / clocks.clamp_min_(torch.finfo(clocks.dtype).tiny))


def widen(probabilities: Tensor, draft_token_ids: Tensor | None, vocabulary: int) -> Tensor:
    """Draft distributions ``[.., U]`` over the target's vocabulary ``[.., V]``: zero outside the draft's."""
    if draft_token_ids is None:
        return probabilities
    wide = probabilities.new_zeros(*probabilities.shape[:-1], vocabulary)
    return wide.index_copy_(-1, draft_token_ids, probabilities)


def verify_greedy(best: Tensor, proposed: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Accept draft tokens while they are the target's own choice.

    Args:
        best: ``[R, γ + 1]`` target's best token after the anchor and after each draft token (anything beyond
            ``lengths``).
        proposed: ``[R, γ]`` draft tokens.
        lengths: ``[R]`` how many of them were verified.

    Returns:
        Accepted draft tokens ``[R]``, and the target's token after them ``[R]``.
    """
    verified = torch.arange(proposed.shape[1], device=lengths.device) < lengths[:, None]
    accepted = ((best[:, :-1] == proposed) & verified).to(torch.int64).cumprod(1).sum(1)
    return accepted, best.gather(1, accepted[:, None]).squeeze(1)


def verify_sampled(
    target: Tensor,
    rows: Tensor,
    proposed: Tensor,
    draft: Tensor,
    draft_index: Tensor,
    draft_token_ids: Tensor | None,
    lengths: Tensor,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Rejection sampling, left to right, over all requests at once.

    Args:
        target: ``[S, V]`` target's distributions, rows of all requests one after the other.
        rows: ``[R, γ + 1]`` int64: row of ``target`` that follows the anchor and each draft token (any valid
            row beyond ``lengths``).
        proposed: ``[R, γ]`` draft tokens, target ids.
        draft: ``[R, γ, U]`` distributions that they were drawn from.
        draft_index: ``[R, γ]`` draft tokens, draft ids.
        draft_token_ids: ``[U]`` target id of each draft id; None where they are the same.
        lengths: ``[R]`` how many draft tokens are verified.
        generator: source of randomness.

    Returns:
        Accepted draft tokens ``[R]``, and the token after them ``[R]``: a draw from the residual after a
        rejection, from the target after none.
    """
    requests, slots = proposed.shape
    p_target = target[rows[:, :-1], proposed]
    p_draft = draft.gather(-1, draft_index[..., None]).squeeze(-1)
    uniform = torch.rand(requests, slots, device=target.device, generator=generator)
    verified = torch.arange(slots, device=target.device) < lengths[:, None]
    accepted = ((uniform * p_draft < p_target) & verified).to(torch.int64).cumprod(1).sum(1)

    request = torch.arange(requests, device=target.device)
    final = target[rows[request, accepted]]
    rejected = (accepted < lengths)[:, None]
    own = widen(draft[request, accepted.clamp_max(slots - 1)], draft_token_ids, target.shape[1])
    residual = (final - own).clamp_min(0)
    # a residual of exactly zero mass means equal distributions, which reject with probability zero
    usable = rejected & (residual.sum(-1, keepdim=True) > 0)
    return accepted, draw(torch.where(usable, residual, final), generator)
