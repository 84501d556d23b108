"""The head's start from token pairs is the bigram model that it claims to be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_draft, tiny_target
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark_train.draft.heads import SequentialHead
from dspark_train.draft.markov_start import SMOOTHING, _leading, start_from_bigrams


def start(head: Any, previous: Tensor, following: Tensor) -> None:
    pairs, count = torch.stack([previous, following]).unique(dim=1, return_counts=True)
    start_from_bigrams(head, *pairs, count)


def bias_of(head: Any, token: Tensor) -> Tensor:
    size = tiny_target().hidden_size
    bias: Tensor = head.markov_w2(head.step(torch.randn(*token.shape, size), token, None)[0])
    return bias


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_with_enough_rank_it_is_the_smoothed_bigram_model(kind: str) -> None:
    torch.manual_seed(0)
    ids = torch.arange(3, 13)
    head = tiny_draft(tiny_target(), token_ids=ids, markov_rank=11, head=kind).markov_head
    previous, following = torch.randint(5, 9, (300,)), torch.randint(0, 10, (300,)).square() % 10
    start(head, previous, following)
    unigram = torch.bincount(following, minlength=10) + 0.5
    unigram = unigram / unigram.sum()
    for token in previous.unique():
        counts = torch.bincount(following[previous == token], minlength=10)
        smoothed = (counts + SMOOTHING * unigram) / (counts.sum() + SMOOTHING)
        got = bias_of(head, token).softmax(-1)
        torch.testing.assert_close(got, smoothed, rtol=1e-3, atol=1e-4)
    unseen = bias_of(head, torch.tensor(90)).softmax(-1)
    torch.testing.assert_close(unseen, unigram, rtol=1e-4, atol=1e-5)


def test_a_small_rank_still_beats_the_unigrams() -> None:
    torch.manual_seed(0)
    head = tiny_draft(tiny_target(), markov_rank=4).markov_head
    previous = torch.randint(3, 90, (2000,))
    following = (previous // 10) * 10 + torch.randint(0, 3, (2000,))
    start(head, previous, following)
    ce = float(torch.nn.functional.cross_entropy(bias_of(head, previous), following).detach())
    unigram = (torch.bincount(following, minlength=97) + 0.5) / (2000 + 0.5 * 97)
    assert ce < float(-unigram[following].log().mean()) - 0.5


class Largest(TorchDispatchMode):
    """Elements of the largest dense tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self.elements = max(self.elements, tensor.numel())
        return made


def test_no_table_of_all_pairs_is_made() -> None:
    """For a vocabulary of 151,936 it would take 92 GB."""
    torch.manual_seed(0)
    vocabulary, rank, pairs = 2_000, 8, 6_000
    shape = {"markov_rank": rank, "hidden_size": 4, "vocab_size": vocabulary, "draft_vocabulary": vocabulary}
    head = SequentialHead(SimpleNamespace(head_type="vanilla", **shape))  # type: ignore[arg-type]
    distinct, count = torch.randint(0, vocabulary, (2, pairs)).unique(dim=1, return_counts=True)
    with Largest() as largest:
        start_from_bigrams(head, *distinct, count)
    assert largest.elements <= max(vocabulary * rank, 2 * pairs)


def test_the_decomposition_is_that_of_the_dense_matrix() -> None:
    torch.manual_seed(0)
    constant, rest = torch.randn(30), torch.randn(30, 20) * (torch.rand(30, 20) < 0.2)
    left, values, right = _leading(constant, rest.to_sparse(), 20)
    dense = constant[:, None] + rest
    torch.testing.assert_close(left * values @ right.T, dense, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values, torch.linalg.svdvals(dense), rtol=1e-4, atol=1e-4)
