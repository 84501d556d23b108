"""Sampling rules and verification against plain twins and hand-checkable cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark_train.decoding.sampling import (
    SamplingRule,
    best_token,
    draw,
    verify_greedy,
    verify_sampled,
    widen,
)
from dspark_train.errors import UserError


def plain_probabilities(logits: list[float], rule: SamplingRule) -> list[float]:
    """The rule's distribution, token by token in float64."""
    values = [value / rule.temperature for value in logits]
    order = sorted(range(len(values)), key=lambda i: -values[i])
    kept = set(order)
    if 0 < rule.top_k < len(values):
        kept = {i for i in order if values[i] >= values[order[rule.top_k - 1]]}
    weights = (
        torch.tensor([values[i] if i in kept else -torch.inf for i in range(len(values))]).double().softmax(0)
    )
    nucleus, reached = [], 0.0
    for i in order:
        if i not in kept or reached >= rule.top_p:
            break
        nucleus.append(i)
        reached += float(weights[i])
    total = sum(float(weights[i]) for i in nucleus)
    return [float(weights[i]) / total if i in nucleus else 0.0 for i in range(len(values))]


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.sampled_from([1, 7, 128, 130, 256, 640]),
    rows=st.integers(1, 5),
    spread=st.sampled_from([1, 3, 1000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_best_token_is_the_first_of_the_largest(
    vocabulary: int, rows: int, spread: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-spread, spread, (rows, 2, vocabulary), generator=generator).to(dtype)
    expected = [[line.index(max(line)) for line in pair] for pair in logits.tolist()]
    assert best_token(logits).tolist() == expected
    assert best_token(logits[:, 0]).tolist() == [pair[0] for pair in expected]  # rows that lie apart


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=9, unique=True),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.integers(0, 9),
    st.sampled_from([0.05, 0.5, 0.83, 1.0]),
)
def test_probabilities_equal_the_plain_rule(
    tenths: list[int], temperature: float, top_k: int, top_p: float
) -> None:
    rule = SamplingRule(temperature, top_k, top_p)
    logits = [value / 10 for value in tenths]
    mine = rule.probabilities(torch.tensor([logits]))[0]
    assert mine.tolist() == pytest.approx(plain_probabilities(logits, rule), abs=1e-5)


def test_greedy_is_one_hot_on_the_lowest_of_the_best() -> None:
    assert SamplingRule().probabilities(torch.tensor([1.0, 3.0, 3.0])).tolist() == [0, 1, 0]


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_impossible_rules_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        SamplingRule(**wrong)  # type: ignore[arg-type]


def test_draw_follows_its_probabilities_and_never_draws_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.tensor([0.0, 0.1, 0.6, 0.3, 0.0])
    drawn = draw(probabilities.expand(40_000, 5), generator)
    shares = torch.bincount(drawn, minlength=5) / 40_000
    # five standard errors of a share of 0.6
    assert (shares - probabilities).abs().max() < 5 * (0.6 * 0.4 / 40_000) ** 0.5
    assert shares[0] == shares[4] == 0


def test_widen_puts_draft_ids_at_their_target_ids() -> None:
    wide = widen(torch.tensor([[0.25, 0.75]]), torch.tensor([1, 3]), 5)
    assert wide.tolist() == [[0, 0.25, 0, 0.75, 0]]


def test_greedy_verification_by_hand() -> None:
    proposed = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [1, 6, 7]])
    best = torch.tensor([[5, 6, 7, 8], [5, 9, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    accepted, following = verify_greedy(best, proposed, torch.tensor([3, 3, 1, 3]))
    assert accepted.tolist() == [3, 1, 1, 0]
    assert following.tolist() == [8, 9, 6, 5]


def sampled(
    target: Tensor, draft: Tensor, tokens: Tensor, lengths: Tensor, seed: int = 0
) -> tuple[Tensor, Tensor]:
    requests, slots = tokens.shape
    rows = torch.arange(requests * (slots + 1)).view(requests, slots + 1)
    generator = torch.Generator().manual_seed(seed)
    return verify_sampled(target, rows, tokens, draft, tokens, None, lengths, generator)


def test_equal_distributions_accept_everything() -> None:
    requests = 2000
    p = torch.tensor([0.2, 0.5, 0.3])
    tokens = draw(p.expand(requests, 2, 3), torch.Generator().manual_seed(1))
    accepted, _ = sampled(
        p.expand(requests * 3, 3), p.expand(requests, 2, 3), tokens, torch.full((requests,), 2)
    )
    assert bool((accepted == 2).all())


def test_disjoint_distributions_accept_nothing_and_draw_from_the_target() -> None:
    requests = 2000
    target, draft = torch.tensor([0.0, 0.4, 0.6]), torch.tensor([1.0, 0.0, 0.0])
    tokens = torch.zeros(requests, 2, dtype=torch.int64)
    accepted, following = sampled(
        target.expand(requests * 3, 3), draft.expand(requests, 2, 3), tokens, torch.full((requests,), 2)
    )
    assert bool((accepted == 0).all())
    assert float((following == 1).double().mean()) == pytest.approx(0.4, abs=5 * (0.24 / requests) ** 0.5)


def test_acceptance_is_one_minus_half_the_l1_distance() -> None:
    requests = 40_000
    target, draft = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    tokens = draw(draft.expand(requests, 1, 3), torch.Generator().manual_seed(2))
    accepted, following = sampled(
        target.expand(requests * 2, 3), draft.expand(requests, 1, 3), tokens, torch.ones(requests).long()
    )
    expected = 1 - 0.5 * float((target - draft).abs().sum())
    assert float(accepted.double().mean()) == pytest.approx(expected, abs=5 * 0.5 / requests**0.5)
    first = torch.where(accepted > 0, tokens[:, 0], following)
    shares = torch.bincount(first, minlength=3) / requests
    assert (shares - target).abs().max() < 5 * (0.25 / requests) ** 0.5


def test_unverified_tokens_are_never_accepted() -> None:
    p = torch.tensor([0.5, 0.5])
    tokens = torch.zeros(3, 2, dtype=torch.int64)
    accepted, _ = sampled(p.expand(9, 2), p.expand(3, 2, 2), tokens, torch.tensor([0, 1, 2]))
    assert accepted.tolist() == [0, 1, 2]
