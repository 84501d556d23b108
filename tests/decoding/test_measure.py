"""Comparisons of plain and speculative decoding: speedup, divergences, examples; profile; callback."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_draft, tiny_target
from tiny_traces import make_trace

from dspark_train.calibration.metrics import expected_calibration_error
from dspark_train.calibration.reliability import measure_reliability
from dspark_train.calibration.sts import survival
from dspark_train.data.conversations import Prompt
from dspark_train.decoding.callback import DecodeValidation, metrics, snapshot
from dspark_train.decoding.cost import CURVES
from dspark_train.decoding.decoder import GenerationResult, generate
from dspark_train.decoding.measure import (
    Comparison,
    Settings,
    compare,
    divergences,
    examples,
    failures,
    interleave,
    mode_result,
    pieces,
)
from dspark_train.decoding.policies import FixedLength, OnlineThreshold
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.decoding.target_pass import TargetPass
from dspark_train.decoding.timing import Timings
from dspark_train.errors import UserError
from dspark_train.studies.profile import CostProfiler, RoundCost, measure_costs, time_rounds
from dspark_train.target.config import TargetConfig

PROMPTS = [Prompt(str(i), "code" if i % 2 else "math", (3 + i, 5, 7 + i)) for i in range(4)]


def result_of(seconds: float, tokens: list[list[int]]) -> GenerationResult:
    empty = generate(tiny_target(), None, [])
    timings = Timings(total=seconds, tokens=sum(map(len, tokens)))
    return GenerationResult(tokens, ["length"] * len(tokens), empty.trace, timings)


def test_speedup_by_hand() -> None:
    found = Comparison(1.0, list(PROMPTS[:2]), [1, 1])
    found.plain = [result_of(2.0, [[1] * 10]), result_of(4.0, [[1] * 20])]
    found.speculative = [result_of(1.0, [[1] * 10]), result_of(2.0, [[1] * 20])]
    assert found.speedup == pytest.approx(2.0)
    assert found.interval() == pytest.approx((2.0, 2.0))


def test_every_comparison_begins_with_a_policy_that_has_learnt_nothing() -> None:
    target, policy = tiny_target(), OnlineThreshold(0.99)
    for _ in range(2):
        settings = Settings(max_new_tokens=12, batch_size=2, policy=policy)
        found = compare(target, tiny_draft(target), PROMPTS, SamplingRule(), settings)
        assert len(found.trace.request) > 4
        assert policy.threshold == pytest.approx(0.5)


def test_comparison_of_a_tiny_pair() -> None:
    target = tiny_target()
    draft = tiny_draft(target)
    found = compare(target, draft, PROMPTS, SamplingRule(), Settings(max_new_tokens=12, batch_size=2))
    mode = mode_result(found)
    assert mode.identical is not None
    assert mode.identical.prompts == mode.identical.of == 4
    assert mode.plain is not None
    assert mode.speculative is not None
    assert mode.plain.tokens == mode.speculative.tokens
    assert mode.tau == pytest.approx(found.trace.accepted_length)
    assert set(mode.domains) == {"math", "code"}
    assert mode.speedup is not None
    assert mode.speedup.low <= mode.speedup.value <= mode.speedup.high
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(chr(97 + i % 26) for i in ids))
    for example, tokens in zip(
        examples(found, tokenizer, 4), (t for r in found.plain for t in r.tokens), strict=True
    ):
        assert len(example.origin) == len(example.tokens) == len(tokens)
        assert example.origin[0] == "target"


def test_the_time_budget_keeps_one_group() -> None:
    target = tiny_target()
    found = compare(
        target, tiny_draft(target), PROMPTS, SamplingRule(1.0), Settings(max_new_tokens=4), seconds=0.0
    )
    assert found.groups == [1]


def test_divergences_carry_the_logit_gap() -> None:
    target = tiny_target()
    plain = generate(target, None, [PROMPTS[0].ids], max_new_tokens=6, stop_token_ids=[]).tokens[0]
    wrong = [*plain[:3], (plain[3] + 1) % 97, *plain[4:]]
    found = Comparison(0.0, [PROMPTS[0]], [1], [result_of(1, [plain])], [result_of(1, [wrong])])
    found.divergences = divergences(target, found)
    (one,) = found.divergences
    prefix = torch.tensor([[*PROMPTS[0].ids, *plain[:3]]])
    logits = target.lm_head(target.states(prefix).last_hidden[0, -1])
    assert (one.position, one.plain, one.speculative) == (3, plain[3], wrong[3])
    assert one.gap == pytest.approx(float(logits[plain[3]] - logits[wrong[3]]), abs=1e-5)
    assert failures(found) == [one]
    found.exact = False
    assert bool(failures(found)) == (one.gap > one.rounding)


def test_an_answer_that_stops_elsewhere_is_a_failure() -> None:
    found = Comparison(
        0.0, [PROMPTS[0]], [1], [result_of(1, [[4, 5]])], [result_of(1, [[4, 5, 6]])], exact=False
    )
    found.divergences = divergences(tiny_target(), found)
    assert len(failures(found)) == 1


def test_prompts_of_all_domains_take_turns() -> None:
    names = [prompt.domain for prompt in interleave(sorted(PROMPTS, key=lambda prompt: prompt.domain))]
    assert names == ["code", "math", "code", "math"]
    many = [replace(PROMPTS[0], domain=name) for name in ["code"] * 3 + ["math"] * 9]
    names = [prompt.domain for prompt in interleave(many)]
    assert [names[start : start + 4].count("code") for start in (0, 4, 8)] == [1, 1, 1]


def test_pieces_join_to_the_text() -> None:
    text = "aé😀b".encode()
    tokenizer = SimpleNamespace(decode=lambda ids: bytes(ids).decode("utf-8", errors="replace"))
    assert "".join(pieces(tokenizer, list(text))) == "aé😀b"
    assert len(pieces(tokenizer, list(text))) == len(text)


def test_costs_of_a_tiny_pair(tmp_path: Path) -> None:
    target = tiny_target()
    table = measure_costs(target, tiny_draft(target), max_rows=12, requests=(2,), context=8, repetitions=2)
    assert table.rows == (1, 2, 3, 4, 5, 10, 15)
    assert table.requests == (1, 2)
    assert all(len(getattr(table, name)) == 2 for name in CURVES)
    table.save(tmp_path / "table.json")
    with pytest.raises(UserError, match="do not fit"):
        measure_costs(target, None, max_rows=1, context=250, repetitions=20)


def test_every_part_of_a_round_counts_once() -> None:
    cost = RoundCost()
    parts = ("prefill", "draft", "head", "schedule", "verify", "target_head", "sampling", "bookkeeping")
    cost.add({part: float(2**index) for index, part in enumerate(parts)})
    assert cost.draft == [2 + 4]
    assert cost.target == [16 + 32 + 64]
    assert cost.overhead == [1 + 8 + 128]


def test_sweeps_add_up_and_means_count_what_is_rare() -> None:
    target = tiny_target()
    profiler = CostProfiler(target, tiny_draft(target), max_rows=4, requests=(2,), context=8)
    profiler.sweep(2, warm_up=0)
    profiler.sweep(1, warm_up=0)
    shapes = profiler._found
    assert {len(found.target) for found in shapes.values()} == {3}
    for found in shapes.values():
        found.target[:] = [1.0, 1.0, 7.0]
    assert set(profiler.table().seconds_median) == {1.0}
    assert set(profiler.table(fmean).seconds_median) == {3.0}
    for found in shapes.values():
        found.target[:] = [1.0] * 30 + [61.0]
    means = profiler.table(fmean)  # above their own 90 % quantile
    assert means.seconds_p90 == means.seconds_median
    profiler.reset()
    assert not any(found.samples for found in shapes.values())


def test_rounds_are_timed_at_the_rows_asked_for() -> None:
    target = tiny_target()
    cost = time_rounds(
        target, tiny_draft(target), requests=3, policy=FixedLength(2), context=8, repetitions=3, warm_up=1
    )
    assert len(cost.target) == len(cost.draft) == len(cost.overhead) == 3
    assert all(value > 0 for value in (*cost.target, *cost.draft))


class Module:
    """What the callback needs of a training module."""

    def __init__(self) -> None:
        self.target = tiny_target()
        self.target_config = TargetConfig()
        self.draft = tiny_draft(self.target).train()
        self.logged: dict[str, float] = {}

    def log(self, name: str, value: float, **_: Any) -> None:
        self.logged[name] = value


def test_callback_logs_and_leaves_the_draft_alone() -> None:
    module = Module()
    data = SimpleNamespace(prompts=lambda split: PROMPTS if split == "validation" else [])
    trainer: Any = SimpleNamespace(sanity_checking=False, datamodule=data, global_rank=0, world_size=1)
    before = {name: value.clone() for name, value in module.draft.state_dict().items()}
    callback = DecodeValidation(prompts=2, max_new_tokens=8, every=2)
    callback.on_validation_epoch_end(trainer, module)  # type: ignore[arg-type]
    assert {"decode/tau", "decode/speedup", "decode/accept_1", "decode/ece", "decode/divergences"} <= set(
        module.logged
    )
    assert module.logged["decode/divergences"] == 0
    assert module.draft.training
    assert all(parameter.requires_grad for parameter in module.draft.parameters())
    for name, value in module.draft.state_dict().items():
        assert torch.equal(value, before[name])
    module.logged.clear()
    callback.on_validation_epoch_end(trainer, module)  # type: ignore[arg-type]
    assert not module.logged, "every second validation only"
    with pytest.raises(UserError, match="no train prompts"):
        DecodeValidation(split="train").on_validation_epoch_end(trainer, module)  # type: ignore[arg-type]
    with pytest.raises(UserError):
        DecodeValidation(prompts=0)


def test_a_snapshot_drafts_like_its_source_and_follows_it() -> None:
    target = tiny_target()
    draft = tiny_draft(target, token_ids=torch.arange(0, 97, 2))
    copy = snapshot(draft, target)
    prompts = [prompt.ids for prompt in PROMPTS]
    one, other = (generate(target, d, prompts, max_new_tokens=8).trace.proposed for d in (draft, copy))
    assert torch.equal(one, other)
    with torch.no_grad():
        draft.fc.weight.mul_(-1)
    assert snapshot(draft, target, copy) is copy
    assert torch.equal(copy.fc.weight, draft.fc.weight)
    assert not any(parameter.requires_grad for parameter in copy.parameters())


def test_the_callback_counts_the_slots_that_calibration_counts() -> None:
    """Where a policy cuts blocks, slots behind a cut are known only where they were rejected: those are left out."""
    trace = make_trace(400, [1.0, 1.0, 1.0], 3, shift=0.7)
    lengths = torch.arange(400) % 4
    cut = replace(trace, verify_length=lengths, accepted=trace.accepted.minimum(lengths))
    assert metrics(cut)["ece"] == pytest.approx(measure_reliability(cut).mean_ece, abs=1e-12)
    whole = expected_calibration_error(
        survival(cut.confidence_logits.double()), cut.prefix_accepted, cut.observed
    )
    assert abs(metrics(cut)["ece"] - float(whole.nanmean())) > 0.01


def test_plain_decoding_is_held_against_the_target_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that plain and speculative decoding share: both lose the prompt."""
    target = tiny_target()
    draft = tiny_draft(target)
    prompts = [Prompt("0", "chat", tuple(range(5, 25)))]
    compare(target, draft, prompts, SamplingRule(), Settings(max_new_tokens=12))
    call = TargetPass.__call__

    def forgetful(self, ids, layout):
        if min(layout.starts) == 0:
            ids = torch.full_like(ids, 7)
        return call(self, ids, layout)

    monkeypatch.setattr(TargetPass, "__call__", forgetful)
    with pytest.raises(UserError, match="without a cache puts token"):
        compare(target, draft, prompts, SamplingRule(), Settings(max_new_tokens=12))
