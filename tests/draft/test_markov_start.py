"""The head's start from token pairs is the bigram model that it claims to be."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_draft, tiny_target
from torch import Tensor

from dspark_train.draft.markov_start import SMOOTHING, start_from_bigrams


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_with_enough_rank_it_is_the_smoothed_bigram_model(kind: str) -> None:
    torch.manual_seed(0)
    ids = torch.arange(3, 13)
    head = tiny_draft(tiny_target(), token_ids=ids, markov_rank=11, head=kind).markov_head

    def bias(token: Tensor) -> Tensor:
        return head.markov_w2(head.step(torch.randn(tiny_target().hidden_size), token, None)[0])

    previous, following = torch.randint(5, 9, (300,)), torch.randint(0, 10, (300,)).square() % 10
    ce = start_from_bigrams(head, previous, following)
    unigram = torch.bincount(following, minlength=10) + 0.5
    unigram = unigram / unigram.sum()
    expected = 0.0
    for token in previous.unique():
        counts = torch.bincount(following[previous == token], minlength=10)
        smoothed = (counts + SMOOTHING * unigram) / (counts.sum() + SMOOTHING)
        got = bias(token).softmax(-1)
        torch.testing.assert_close(got, smoothed, rtol=1e-3, atol=1e-4)
        expected -= float((counts * smoothed.log()).sum()) / 300
    assert abs(ce - expected) < 1e-3
    unseen = bias(torch.tensor(90)).softmax(-1)
    torch.testing.assert_close(unseen, unigram, rtol=1e-4, atol=1e-5)


def test_a_small_rank_still_beats_the_unigrams() -> None:
    torch.manual_seed(0)
    head = tiny_draft(tiny_target(), markov_rank=4).markov_head
    previous = torch.randint(3, 90, (2000,))
    following = (previous // 10) * 10 + torch.randint(0, 3, (2000,))
    ce = start_from_bigrams(head, previous, following)
    unigram = (torch.bincount(following, minlength=97) + 0.5) / (2000 + 0.5 * 97)
    assert ce < float(-unigram[following].log().mean()) - 0.5
