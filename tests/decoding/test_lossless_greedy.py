"""Greedy speculative decoding gives the target's own tokens, whatever the batch, the policy and the draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, tiny_draft, tiny_target
from torch import Tensor

from dspark_train.calibration.online import OnlineSts
from dspark_train.decoding.decoder import ActiveRun, Decoder, GenerationResult, generate
from dspark_train.decoding.draft_pass import Proposal
from dspark_train.decoding.policies import (
    FixedLength,
    Policy,
    Scheduled,
    ScheduledAsync,
    Threshold,
    parse_policy,
)
from dspark_train.errors import UserError
from dspark_train.target.frozen import FrozenTarget

CURVE = 1 / (1 + 0.05 * torch.arange(200, dtype=torch.float64))
POLICIES: dict[str, Policy] = {
    "fixed": FixedLength(),
    "none": FixedLength(0),
    "two": FixedLength(2),
    "threshold": Threshold(0.5),
    "scheduled": Scheduled(CURVE),
    "asynchronous": ScheduledAsync(CURVE),
}
STOP = 5


class Foresight(Decoder):
    """A decoder whose draft knows the target's continuations, and is wrong where a seeded coin says so.

    Real tiny drafts are hardly ever accepted; this one is, so that rounds end everywhere: after a rejection, after a
    whole block, inside an accepted prefix.
    """

    def __init__(
        self,
        target: FrozenTarget,
        answers: Sequence[Sequence[int]],
        policy: Policy,
        wrong: float,
        slots: int = 5,
        graphs: bool = False,
    ) -> None:
        super().__init__(target, policy=policy, graphs=graphs)
        self.answers, self.wrong, self.block_size = answers, wrong, slots
        self.depth = policy.depth(slots)

    def start(self, slots: int, length: int, seed: int) -> ActiveRun:
        return _ForesightRun(self, slots, length, seed)


class _ForesightRun(ActiveRun):
    def __init__(self, decoder: Foresight, slots: int, length: int, seed: int) -> None:
        super().__init__(decoder, slots, length, seed)
        self.foresight = decoder

    def _draft(self, anchors: Tensor, positions: list[int]) -> Proposal:
        depth = self.foresight.depth
        rows = []
        for request in self.active:
            known = self.foresight.answers[request.index][len(request.tokens) :][:depth]
            rows.append(list(known) + [0] * (depth - len(known)))
        tokens = torch.tensor(rows, dtype=torch.int64).view(len(rows), depth)
        coin = torch.rand(tokens.shape, generator=self.generator)
        tokens = torch.where(coin < self.foresight.wrong, (tokens + 1) % 97, tokens)
        return Proposal(tokens, tokens, None, torch.randn(tokens.shape, generator=self.generator) * 2 + 1)


@cache
def target_of(family: str) -> FrozenTarget:
    return tiny_target(family, max_position_embeddings=64)


def prompts_of(count: int, longest: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(1, longest, (count,), generator=generator).tolist()
    sizes[0] = 1
    return [torch.randint(6, 97, (size,), generator=generator).tolist() for size in sizes]


def whole_answers(target: FrozenTarget, prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
    """Greedy answers by running the whole sequence anew for every token: no cache, no decoder."""
    answers = []
    for prompt, limit in zip(prompts, limits, strict=True):
        ids = list(prompt)
        while len(ids) - len(prompt) < limit and len(ids) < 64:
            logits = target.lm_head(target.states(torch.tensor([ids])).last_hidden[0, -1])
            ids.append(int(logits.argmax()))
            if ids[-1] == STOP:
                break
        answers.append(ids[len(prompt) :])
    return answers


@cache
def case(family: str) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Prompts, their limits (one of them 1), and their true answers."""
    prompts = prompts_of(12)
    limits = [1 + (7 * index) % 24 for index in range(12)]
    return prompts, limits, whole_answers(target_of(family), prompts, limits)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_equals_whole_passes(family: str) -> None:
    prompts, limits, answers = case(family)
    for batch_size in (1, 5):
        result = generate(
            target_of(family),
            None,
            prompts,
            max_new_tokens=limits,
            stop_token_ids=[STOP],
            batch_size=batch_size,
        )
        assert result.tokens == answers
        assert result.trace.block_size == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("wrong", "batch_size"), [(0.3, 1), (0.3, 4), (0.3, 16), (0.0, 3), (1.0, 3)])
@pytest.mark.parametrize("graphs", [False, True])
def test_every_policy_and_batch(policy: str, batch_size: int, wrong: float, graphs: bool) -> None:
    prompts, limits, answers = case("llama")
    decoder = Foresight(target_of("llama"), answers, POLICIES[policy], wrong, graphs=graphs)
    result = decoder.run(decoder.requests(prompts, limits, [STOP]), batch_size=batch_size)
    assert result.tokens == answers
    check_trace(result, prompts, wrong)


def check_trace(result: GenerationResult, prompts: list[list[int]], wrong: float) -> None:
    """The trace adds up to the output."""
    trace = result.trace
    assert result.timings.rows == int(trace.uncut.verify_length.sum()) + len(trace.request)
    for index, (prompt, tokens) in enumerate(zip(prompts, result.tokens, strict=True)):
        mine = trace.request == index
        assert int(trace.committed[mine].sum()) == len(tokens) - 1
        ends = torch.tensor([len(prompt)]) + trace.committed[mine].cumsum(0)
        assert trace.anchor[mine].tolist() == [len(prompt), *ends[:-1].tolist()] if mine.any() else True
    assert bool((trace.accepted <= trace.verify_length).all())
    assert bool((trace.committed <= trace.accepted + 1).all())
    if wrong == 0.0:
        assert bool((trace.accepted == trace.verify_length).all())
    if wrong == 1.0:
        assert bool((trace.accepted == 0).all())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("graphs", [False, True])
def test_real_drafts_of_every_family(family: str, head: str, graphs: bool) -> None:
    prompts, limits, answers = case(family)
    draft = tiny_draft(target_of(family), head=head)
    result = generate(
        target_of(family),
        draft,
        prompts,
        max_new_tokens=limits,
        stop_token_ids=[STOP],
        batch_size=4,
        graphs=graphs,
    )
    assert result.tokens == answers


@pytest.mark.parametrize("policy", POLICIES)
def test_a_reduced_draft_vocabulary(policy: str) -> None:
    prompts, limits, answers = case("llama")
    draft = tiny_draft(target_of("llama"), token_ids=torch.arange(2, 97, 3))
    result = generate(
        target_of("llama"),
        draft,
        prompts,
        max_new_tokens=limits,
        stop_token_ids=[STOP],
        policy=POLICIES[policy],
        batch_size=3,
        sts=[0.5, 1.0, 2.0, 3.0],
    )
    assert result.tokens == answers
    proposed = result.trace.proposed[result.trace.proposed >= 0]
    assert bool((proposed % 3 == 2).all())


def test_online_scalings_follow_and_change_no_token() -> None:
    prompts, limits, answers = case("llama")
    online = OnlineSts([1.0] * 4, window=64, refit_every=8)
    settings: dict[str, Any] = {"policy": Threshold(0.3), "stop_token_ids": [STOP], "batch_size": 3}
    draft = tiny_draft(target_of("llama"))
    result = generate(target_of("llama"), draft, prompts, max_new_tokens=limits, sts=online, **settings)
    assert result.tokens == answers
    assert online.sts.temperatures != (1.0,) * 4
    with pytest.raises(UserError, match="whole blocks"):
        generate(target_of("llama"), draft, [[4]], sts=online, policy=FixedLength(2))


@pytest.mark.parametrize("policy", ["online:0.8", "threshold:0.3+online", "online:0.8+online"])
def test_online_policies_change_no_token(policy: str) -> None:
    """What they learn reaches the next rounds, and the next requests of the same decoder, but no token."""
    prompts, limits, answers = case("llama")
    decoder = Decoder(target_of("llama"), tiny_draft(target_of("llama")), parse_policy(policy))
    lengths = []
    for _ in range(2):
        result = decoder.run(decoder.requests(prompts, limits, [STOP]), batch_size=3)
        assert result.tokens == answers
        lengths.append(result.trace.verify_length.tolist())
    assert lengths[0] != lengths[1]


def test_requests_join_and_leave_without_touching_each_other() -> None:
    """Fewer rounds than one after the other, the same tokens, and slots that are refilled and compacted."""
    prompts, limits, answers = case("llama")
    alone = Foresight(target_of("llama"), answers, FixedLength(), 0.3)
    one = alone.run(alone.requests(prompts, limits, [STOP]), batch_size=1)
    five = alone.run(alone.requests(prompts, limits, [STOP]), batch_size=5)
    assert one.tokens == five.tokens == answers
    assert five.timings.rounds < one.timings.rounds / 2


def test_stop_token_inside_an_accepted_block() -> None:
    target, prompts = target_of("llama"), prompts_of(4)
    free = generate(target, None, prompts, max_new_tokens=20, stop_token_ids=[]).tokens
    stops = [[answer[4]] for answer in free]
    expected = [answer[: answer.index(stop[0]) + 1] for answer, stop in zip(free, stops, strict=True)]
    decoder = Foresight(target, free, FixedLength(), wrong=0.0)
    result = decoder.run(decoder.requests(prompts, 20, stops), batch_size=4)
    assert result.tokens == expected
    assert result.finished_by == ["stop"] * 4
    assert bool((result.trace.committed < result.trace.accepted + 1).any())


def test_context_limit() -> None:
    """Decoding goes on to the last position that the target has, and no further."""
    target, prompt = target_of("llama"), prompts_of(3)[1][:2] * 29
    expected = whole_answers(target, [prompt], [50])
    for wrong in (0.0, 0.5):
        decoder = Foresight(target, expected, FixedLength(), wrong)
        result = decoder.run(decoder.requests([prompt], 50, [STOP]))
        assert result.tokens == expected
        assert len(prompt) + len(result.tokens[0]) == 64
        assert result.finished_by == ["length"]


def test_what_the_decoder_refuses() -> None:
    target = target_of("llama")
    draft = tiny_draft(target, confidence_head=False, confidence_with_markov=False)
    other = tiny_target("llama", layer_ids=(0, 2), max_position_embeddings=64)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("prompt 1 is empty", lambda: generate(target, None, [[4], []])),
        ("context of 64 is full", lambda: generate(target, None, [[4] * 64])),
        ("outside 0..96", lambda: generate(target, None, [[97]])),
        ("max_new_tokens 0", lambda: generate(target, None, [[4]], max_new_tokens=0)),
        ("do not match", lambda: generate(target, None, [[4]], max_new_tokens=[3, 4])),
        ("batch_size 0", lambda: generate(target, None, [[4]], batch_size=0)),
        ("confidence head", lambda: generate(target, draft, [[4]], policy=Threshold(0.5))),
        ("tapped layers", lambda: generate(other, draft, [[4]])),
        ("block size of 4", lambda: generate(target, draft, [[4]], sts=[1.0])),
    ]
    for message, call in cases:
        with pytest.raises(UserError, match=message):
            call()


def test_no_prompts_give_no_tokens() -> None:
    assert generate(target_of("llama"), None, []).tokens == []
