"""Baselines: a switched-off head is a parallel draft, and copied drafts change nothing in what comes out."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from tiny_models import tiny_draft, tiny_target

from dspark_train.decoding.decoder import Decoder, generate
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.errors import UserError
from dspark_train.evaluation.baselines import PromptLookup, SuffixIndex, without_head

PROMPTS = [[1, 5, 9, 14, 5, 9], [3], [1, 7, 8, 7, 8, 7], [40, 41, 42, 40, 41, 42, 40]]


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_head_switched_off_drafts_as_if_its_projection_were_zero(head: str) -> None:
    target = tiny_target()
    draft = tiny_draft(target, head=head)
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.mul_(20)  # type: ignore[union-attr]
    off = without_head(draft)
    before = generate(target, draft, PROMPTS, max_new_tokens=12, stop_token_ids=[])
    without = generate(target, off, PROMPTS, max_new_tokens=12, stop_token_ids=[])
    again = generate(target, draft, PROMPTS, max_new_tokens=12, stop_token_ids=[])
    assert torch.equal(before.trace.proposed, again.trace.proposed)  # the draft itself is as it was
    assert not torch.equal(before.trace.proposed[0], without.trace.proposed[0])
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.zero_()  # type: ignore[union-attr]
    zeroed = generate(target, draft, PROMPTS, max_new_tokens=12, stop_token_ids=[])
    assert torch.equal(without.trace.proposed, zeroed.trace.proposed)
    assert without.trace.confidence_logits.isnan().all()
    assert off.fc.weight is draft.fc.weight


def test_a_draft_without_a_head_has_none_to_switch_off() -> None:
    with pytest.raises(UserError, match="no sequential head"):
        without_head(tiny_draft(tiny_target(), head="none"))


def brute_force(tokens: list[int], count: int, longest: int, shortest: int) -> list[int]:
    for length in range(min(longest, len(tokens)), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return tokens[end : end + count]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 3),
    st.lists(st.integers(0, 39), max_size=3),
)
def test_the_index_finds_what_a_search_of_the_whole_text_finds(
    tokens: list[int], count: int, longest: int, drop: int, cuts: list[int]
) -> None:
    shortest = max(1, longest - drop)
    index = SuffixIndex(longest, shortest)
    places = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    for start, end in itertools.pairwise(places):
        index.extend(tokens[start:end])
    assert index.propose(count) == brute_force(tokens, count, longest, shortest)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_output_of_prompt_lookup_is_the_targets(batch_size: int) -> None:
    target = tiny_target()
    plain = generate(target, None, PROMPTS, max_new_tokens=40, stop_token_ids=[2], batch_size=batch_size)
    decoder = PromptLookup(target, 5)
    copied = decoder.run(decoder.requests(PROMPTS, 40, [2]), batch_size=batch_size)
    assert copied.tokens == plain.tokens
    assert copied.finished_by == plain.finished_by
    assert int(copied.trace.accepted.sum()) > 0  # a random model repeats itself soon
    assert (copied.trace.accepted <= copied.trace.verify_length).all()
    committed = [int(copied.trace.committed[copied.trace.request == i].sum()) for i in range(4)]
    assert committed == [len(tokens) - 1 for tokens in copied.tokens]


def test_rounds_of_prompt_lookup_are_those_of_a_search_by_hand() -> None:
    target = tiny_target()
    plain = generate(target, None, PROMPTS, max_new_tokens=60, stop_token_ids=[])
    decoder = PromptLookup(target, 4, longest=2)
    result = decoder.run(decoder.requests(PROMPTS, 60, []))
    for index, (prompt, output) in enumerate(zip(PROMPTS, plain.tokens, strict=True)):
        done, accepted = 1, []
        while done < len(output):
            copied = brute_force([*prompt, *output[:done]], min(4, len(output) - done - 1), 2, 1)
            right = itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(copied, output[done:], strict=False)
            )
            accepted.append(sum(1 for _ in right))
            done += accepted[-1] + 1
        assert result.trace.accepted[result.trace.request == index].tolist() == accepted


def test_sampled_output_of_prompt_lookup_follows_the_target() -> None:
    target = tiny_target(vocab_size=5, layer_ids=(0, 1))
    prompt, count = [1, 3, 4, 3, 4, 3], 1000
    decoder = PromptLookup(target, 3, SamplingRule(3.0))
    result = decoder.run(decoder.requests([prompt] * count, 3, []), batch_size=250, seed=5)
    assert int(result.trace.accepted.sum()) > 100
    outcomes = list(itertools.product(range(5), repeat=2))  # the second token is the one that copies propose
    batch = torch.tensor([[*prompt, *outcome] for outcome in outcomes])
    with torch.no_grad():
        log_probabilities = target.model(batch).logits.double().div(3.0).log_softmax(-1)
    steps = torch.arange(len(prompt), len(prompt) + 2)
    picked = log_probabilities[:, steps - 1].gather(-1, batch[:, steps, None])
    expected = (picked.sum((1, 2)).exp() * count).tolist()
    seen = Counter(tuple(tokens[:2]) for tokens in result.tokens)
    observed = [seen[outcome] for outcome in outcomes]
    assert min(expected) > 5
    assert chisquare(observed, expected).pvalue > 1e-3


def test_impossible_lookups_are_refused() -> None:
    with pytest.raises(UserError, match="prompt lookup needs"):
        PromptLookup(tiny_target(), 0)
    assert isinstance(PromptLookup(tiny_target(), 1), Decoder)
