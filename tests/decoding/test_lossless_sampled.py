"""Sampled speculative decoding follows the target's exact distribution over whole continuations.

A vocabulary of 5 and continuations of 3 tokens can be enumerated: 125 outcomes, each with its exact probability
from the target. N = 4,000 samples are compared with them by Pearson's χ² statistic; outcomes that are expected fewer
than 5 times are pooled. A test fails below p = 1e-6 (all seeds are fixed, so it fails always or never).

Power: a sampler whose distribution q differs from the target's p by Σ (q − p)² / p ≥ 0.045 is caught with
probability above 0.99 (non-centrality N · 0.045 = 180 against at most 124 degrees of freedom;
``test_stated_power`` checks the arithmetic). A shift of 0.11 in total variation, spread evenly, is that large.
The seeded biased sampler at the end, which replaces a rejected token by a plain draw from the target instead of the
residual, a classic mistake, has to fail.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cache

import pytest
import torch
from tiny_models import tiny_draft, tiny_target
from torch import Tensor

from dspark_train.decoding import decoder as decoder_module
from dspark_train.decoding.decoder import generate
from dspark_train.decoding.policies import FixedLength, Policy, Scheduled, ScheduledAsync, Threshold
from dspark_train.decoding.sampling import SamplingRule, verify_sampled
from dspark_train.draft.model import DSparkDraft
from dspark_train.target.frozen import FrozenTarget

VOCABULARY, LENGTH, SAMPLES, LEVEL = 5, 3, 4000, 1e-6
PROMPT = [1, 3, 2]
CURVE = 1 / (60 + 0.02 * torch.arange(4000, dtype=torch.float64))
POLICIES: dict[str, Policy] = {
    "fixed": FixedLength(),
    "threshold": Threshold(0.45),
    "scheduled": Scheduled(CURVE),
    "asynchronous": ScheduledAsync(CURVE),
}
RULES = {
    "warm": SamplingRule(1.0),
    "cool": SamplingRule(0.6),
    "top_k": SamplingRule(1.0, top_k=3),
    "top_p": SamplingRule(1.3, top_p=0.8),
}


@cache
def pair(head: str, reduced: bool = False) -> tuple[FrozenTarget, DSparkDraft]:
    """A target and a draft that disagree, but not about everything."""
    target = tiny_target("llama", vocab_size=VOCABULARY, max_position_embeddings=32)
    with torch.no_grad():
        target.model.lm_head.weight.mul_(0.8)
    recipe = {"head": head, "block_size": 3, "mask_token_id": 4, "num_layers": 1}
    token_ids = torch.tensor([0, 2, 3]) if reduced else None
    return target, tiny_draft(target, token_ids=token_ids, **recipe)


def exact(target: FrozenTarget, rule: SamplingRule, stop: int | None = None) -> dict[tuple[int, ...], float]:
    """Probability of every continuation, from the target alone."""
    prefixes = list(itertools.product(range(VOCABULARY), repeat=LENGTH - 1))
    ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
    hidden = target.states(ids).last_hidden[:, len(PROMPT) - 1 :]
    steps = rule.probabilities(target.lm_head(hidden)).double()
    found: dict[tuple[int, ...], float] = {}
    for row, prefix in enumerate(prefixes):
        for last in range(VOCABULARY):
            tokens = (*prefix, last)
            end = tokens.index(stop) + 1 if stop in tokens else LENGTH
            probability = math.prod(float(steps[row, i, token]) for i, token in enumerate(tokens[:end]))
            found[tokens[:end]] = probability
    return found


def sample(
    target: FrozenTarget,
    draft: DSparkDraft | None,
    rule: SamplingRule,
    policy: Policy,
    stops: list[int],
    graphs: bool = False,
):
    """Counts of continuations; limits differ, so that requests leave and join out of step."""
    result = generate(
        target,
        draft,
        [PROMPT] * SAMPLES,
        max_new_tokens=LENGTH,
        temperature=rule.temperature,
        top_k=rule.top_k,
        top_p=rule.top_p,
        policy=policy,
        stop_token_ids=stops,
        batch_size=500,
        seed=7,
        graphs=graphs,
    )
    return Counter(map(tuple, result.tokens)), result.trace


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Upper tail of Pearson's χ²; outcomes that cannot happen must not have happened."""
    assert math.isclose(sum(expected.values()), 1, abs_tol=1e-5)
    assert all(expected.get(outcome, 0.0) > 0 for outcome in counts)
    statistic, pooled_seen, pooled_expected, cells = 0.0, 0, 0.0, 0
    for outcome, probability in expected.items():
        mean = SAMPLES * probability
        if mean < 5:
            pooled_seen, pooled_expected = pooled_seen + counts[outcome], pooled_expected + mean
            continue
        statistic += (counts[outcome] - mean) ** 2 / mean
        cells += 1
    if pooled_expected >= 5:
        statistic += (pooled_seen - pooled_expected) ** 2 / pooled_expected
        cells += 1
    return chi_square_tail(statistic, cells - 1)


def chi_square_tail(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_head_and_policy(head: str, policy: str) -> None:
    target, draft = pair(head)
    counts, trace = sample(target, draft, RULES["warm"], POLICIES[policy], [])
    assert p_value(counts, exact(target, RULES["warm"])) > LEVEL
    checked = int(trace.verify_length.sum())
    # the test means nothing unless tokens are both accepted and rejected
    assert 0.1 * checked < int(trace.accepted.sum()) < 0.95 * checked


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
@pytest.mark.parametrize("policy", ["fixed", "scheduled"])
def test_fixed_shapes(head: str, policy: str) -> None:
    target, draft = pair(head)
    counts, _ = sample(target, draft, RULES["warm"], POLICIES[policy], [], graphs=True)
    assert p_value(counts, exact(target, RULES["warm"])) > LEVEL


@pytest.mark.parametrize("rule", ["cool", "top_k", "top_p"])
@pytest.mark.parametrize("policy", ["fixed", "scheduled"])
def test_every_rule(rule: str, policy: str) -> None:
    target, draft = pair("vanilla")
    counts, _ = sample(target, draft, RULES[rule], POLICIES[policy], [])
    assert p_value(counts, exact(target, RULES[rule])) > LEVEL


@pytest.mark.parametrize("rule", ["warm", "top_k"])
def test_a_reduced_draft_vocabulary(rule: str) -> None:
    target, draft = pair("vanilla", reduced=True)
    counts, trace = sample(target, draft, RULES[rule], FixedLength(), [])
    assert p_value(counts, exact(target, RULES[rule])) > LEVEL
    assert set(trace.proposed.unique().tolist()) <= {0, 2, 3}


def test_stop_tokens() -> None:
    target, draft = pair("rnn")
    counts, _ = sample(target, draft, RULES["warm"], FixedLength(), [2])
    assert p_value(counts, exact(target, RULES["warm"], stop=2)) > LEVEL


def test_plain_sampling() -> None:
    target, _ = pair("vanilla")
    counts, _ = sample(target, None, RULES["warm"], FixedLength(), [])
    assert p_value(counts, exact(target, RULES["warm"])) > LEVEL


def test_the_seed_decides() -> None:
    target, draft = pair("vanilla")
    settings = {"max_new_tokens": 8, "temperature": 1.0, "stop_token_ids": [], "batch_size": 3}
    one, same, other = (generate(target, draft, [PROMPT] * 8, seed=s, **settings).tokens for s in (1, 1, 2))
    assert one == same != other


# -- controls -----------------------------------------------------------------------------------------------


def draw_from_target_after_rejection(
    target: Tensor, rows: Tensor, proposed: Tensor, draft: Tensor, *rest: Tensor
) -> tuple[Tensor, Tensor]:
    """The mistake: a rejected token is replaced by a draw from the target, not from the residual."""
    accepted, following = verify_sampled(target, rows, proposed, draft, *rest)
    generator = torch.Generator().manual_seed(int(accepted.sum()))
    final = target[rows.gather(1, accepted[:, None]).squeeze(1)]
    fresh = decoder_module.draw(final, generator)
    return accepted, torch.where(accepted < rest[2], fresh, following)


def test_a_biased_sampler_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair("vanilla")
    monkeypatch.setattr(decoder_module, "verify_sampled", draw_from_target_after_rejection)
    counts, _ = sample(target, draft, RULES["warm"], FixedLength(), [])
    assert p_value(counts, exact(target, RULES["warm"])) < LEVEL


def test_stated_power() -> None:
    """P(noncentral χ² > critical value) by its normal approximation, at the worst number of cells."""
    freedom, shift = VOCABULARY**LENGTH - 1, SAMPLES * 0.045
    low, high = 0.0, 2000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, freedom) > LEVEL else (low, middle)
    deviation = (freedom + shift - high) / math.sqrt(2 * (freedom + 2 * shift))
    assert 0.5 * math.erfc(-deviation / math.sqrt(2)) > 0.99
