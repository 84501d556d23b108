"""A start of the sequential head from counted token pairs: a bigram model from the first step on.

The vanilla head's logit bias ``W2 W1[previous]`` is a bigram model of rank r. Its best start is known in closed form
from the training answers, so nothing of the run's time goes into learning it by gradient. The other heads begin as the
vanilla one: what else they read counts for nothing at first. Letters as in :mod:`dspark_train.structures`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_train.draft.heads import SequentialHead

SMOOTHING = 2.0
"""Pseudo-observations of the unigram distribution behind every previous token."""
_STRAIGHT = 0.5
"""Largest argument of the recurrent head's last tanh, which changes it by a twelfth."""


@torch.no_grad()
def start_from_bigrams(head: SequentialHead, previous: Tensor, following: Tensor, count: Tensor) -> None:
    """Set ``W1`` and ``W2`` so that the head's bias is the smoothed log-probability of the next token.

    One rank holds the unigram log-probabilities; the others a weighted singular value decomposition of the log
    ratios of bigram to unigram probabilities, rows weighted by the square root of their counts. Pairs that never
    occurred share one log ratio per previous token, so the matrix is a constant per row and a sparse rest: nothing of
    size ``[V, U]`` is made.

    Args:
        head: changed in place; previous tokens that were never seen fall back to the unigrams.
        previous: ``[pairs]`` int64 target ids of distinct pairs.
        following: ``[pairs]`` int64 draft ids (indices into the draft's vocabulary).
        count: ``[pairs]`` int64, how often each occurs.
    """
    rank, vocabulary = head.rank, head.markov_w2.weight.shape[0]
    seen, row = previous.unique(return_inverse=True)
    often = count.float()
    unigram = torch.zeros(vocabulary).index_add(0, following, often) + 0.5
    unigram /= unigram.sum()
    total = torch.zeros(seen.numel()).index_add(0, row, often)
    share = total.sqrt()
    constant = share * (SMOOTHING / (total + SMOOTHING)).log()
    rest = share[row] * (often / (SMOOTHING * unigram[following])).log1p()
    kept = min(rank - 1, seen.numel(), vocabulary)
    w1 = torch.zeros(head.markov_w1.num_embeddings, rank)
    w2 = torch.zeros(vocabulary, rank)
    w1[:, -1], w2[:, -1] = 1.0, unigram.log()
    if kept:
        place, size = torch.stack([row, following]), (seen.numel(), vocabulary)
        sparse = torch.sparse_coo_tensor(place, rest, size, check_invariants=True).coalesce()
        left, values, right = _leading(constant, sparse, kept)
        w1[seen, :kept] = left * values / share[:, None]
        w2[:, :kept] = right
    set_factors(head, w1, w2, w1)


def _leading(constant: Tensor, rest: Tensor, rank: int, rounds: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Leading singular triplets of ``constant 1ᵀ + rest``, by subspace iteration (Halko et al. 2011).

    Args:
        constant: ``[s]``, of each row.
        rest: ``[s, u]``, sparse and coalesced.
        rank: k.
        rounds: iterations.

    Returns:
        ``[s, k]``, ``[k]`` and ``[u, k]``.
    """
    turned = rest.t().coalesce()

    def times(block: Tensor) -> Tensor:  # [u, k] -> [s, k]
        return torch.sparse.mm(rest, block).addr_(constant, block.sum(0))

    def turned_times(block: Tensor) -> Tensor:  # [s, k] -> [u, k]
        return torch.sparse.mm(turned, block).add_(constant @ block)

    start = torch.randn(rest.shape[1], rank, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(times(start)).Q
    for _ in range(rounds):
        basis = torch.linalg.qr(turned_times(basis)).Q
        basis = torch.linalg.qr(times(basis)).Q
    right, values, left = torch.linalg.svd(turned_times(basis), full_matrices=False)
    return basis @ left.T, values, right


def set_factors(head: SequentialHead, w1: Tensor, w2: Tensor, seen: Tensor) -> None:
    """Set both factors, so that the head's bias is ``W2 W1[previous]``.

    Each rank of both gets the same size, so that an optimiser treats them alike. A gate begins half open for every
    input; the recurrent head's output begins as the embedding alone, small enough for its tanh, while its state
    develops as initialised and is not read yet.

    Args:
        head: changed in place.
        w1: ``[V, r]``.
        w2: ``[U, r]``.
        seen: rows of ``w1`` whose size counts.
    """
    size = (seen.square().mean(0) / w2.square().mean(0).clamp(min=1e-12)).clamp(min=1e-12).pow(0.25)
    w1, w2 = w1 / size, w2 * size
    if head.kind == "gated":
        head.gate_proj.weight.zero_()
        head.gate_proj.bias.zero_()
        w1, w2 = w1 * 2**0.5, w2 * 2**0.5
    elif head.kind == "rnn":
        scale = _STRAIGHT / (seen / size).abs().amax(0).clamp(min=1e-12)
        rank = head.rank
        output = head.joint_proj.weight[2 * rank :]
        output.zero_()
        output[:, rank : 2 * rank] = scale.diag()
        head.joint_proj.bias[2 * rank :] = 0.0
        w2 = w2 / scale
    head.markov_w1.weight.copy_(w1)
    head.markov_w2.weight.copy_(w2)
