"""Where a profile places its points, on machines whose costs are known."""

import pytest
import torch
from tiny_models import tiny_draft, tiny_target

from dspark_train.decoding.policies import Filled, FixedLength
from dspark_train.errors import UserError
from dspark_train.studies import profile
from dspark_train.studies.profile import CostProfiler, RoundCost, measure_costs, time_rounds

STEPS = ((7, 0.05), (23, 0.29), (41, 0.12), (58, 0.2))
"""Rows from which a pass costs a share more."""


def seconds(rows):
    return 0.01 * torch.tensor([1 + share for start, share in STEPS if rows >= start]).prod().item()


@pytest.fixture
def pair():
    target = tiny_target()
    return target, tiny_draft(target)


@pytest.fixture
def stairs(monkeypatch):
    """A machine on which only the rows of a pass cost time; returns the passes that were timed."""
    timed = []

    def timing(target, draft, *, requests, policy, context, repetitions, warm_up=2, found=None):
        slots = draft.config.block_size if draft is not None else 1
        rows = requests + int(policy.start()(torch.full((requests, slots), float("nan"))).sum())
        timed.append(rows)
        found = found or RoundCost()
        parts = dict.fromkeys(("draft", "head", "schedule", "target_head", "sampling", "bookkeeping"), 1e-4)
        for _ in range(repetitions):
            found.add({**parts, "verify": seconds(rows)})
        return found

    monkeypatch.setattr(profile, "time_rounds", timing)
    monkeypatch.setattr(profile, "time_prompts", lambda *_, repetitions, **__: [0.02] * repetitions)
    return timed


def test_points_lie_on_both_sides_of_every_step(pair, stairs, tmp_path):
    """γ + 1 is 5 rows: the steps at 7, 23, 41 and 58 rows lie between the coarse points 5, 10, 20, 40, 65."""
    target, draft = pair
    table = measure_costs(target, draft, max_rows=65, context=8, repetitions=3, seconds=60)
    assert {row for start, _ in STEPS for row in (start - 1, start)} <= set(table.rows)
    every = torch.arange(1, 66)
    expected = torch.tensor([seconds(int(rows)) + 2e-4 for rows in every], dtype=torch.float64)
    torch.testing.assert_close(table.seconds(every), expected)
    table.save(tmp_path / "costs.json")
    assert profile.CostTable.load(tmp_path / "costs.json") == table
    passes = {rows: stairs.count(rows) for rows in table.rows if rows > 5}
    assert set(passes.values()) >= {3}  # refined ones are measured as often as the others


def test_without_a_budget_or_with_a_small_one_the_grid_is_coarse(pair, stairs):
    target, draft = pair
    whole = measure_costs(target, draft, max_rows=65, context=8, repetitions=3)
    assert whole.rows == (1, 2, 3, 4, 5, 10, 20, 40, 65)
    turns = stairs.count(65)
    stairs.clear()
    hurried = measure_costs(target, draft, max_rows=65, context=8, repetitions=3, seconds=1e-9)
    assert hurried.rows == whole.rows
    assert (turns, stairs.count(65)) == (3, 1)


def test_noise_is_not_refined(pair, stairs):
    target, draft = pair
    profiler = CostProfiler(target, draft, max_rows=20, context=8)
    generator = torch.Generator().manual_seed(0)
    for found in profiler._found.values():
        found.target[:] = (0.01 * (1 + 0.1 * torch.randn(30, generator=generator))).tolist()
    assert profiler.refine() is None
    profiler._found[profiler._pass(20)].target[:] = [0.02] * 30
    assert profiler.refine() == profiler._pass(15)


def test_a_pass_of_any_rows_is_run(pair):
    """Seven rows of a draft with γ = 4: a whole block, and two rows of the next request."""
    target, draft = pair
    profiler = CostProfiler(target, draft, max_rows=10, context=8)
    assert profiler._pass(7) == (2, Filled(5))
    assert profiler._pass(10) == (2, FixedLength(4))
    assert profiler._pass(3) == (1, FixedLength(2))
    cost = time_rounds(target, draft, requests=2, policy=Filled(5), context=8, repetitions=2, warm_up=0)
    assert len(cost.target) == 2


def test_a_budget_of_no_time(pair):
    with pytest.raises(UserError, match="seconds"):
        measure_costs(*pair, max_rows=5, context=8, seconds=0)


def test_prompts_and_more_context_are_measured(pair, tmp_path):
    """A tiny pair: its context of 256 allows prompts of 16 and 64 tokens, and 32 tokens beside 8."""
    target, draft = pair
    table = measure_costs(target, draft, max_rows=5, requests=(2,), context=8, repetitions=2)
    assert table.prompt_tokens == (16, 64)
    assert all(seconds > 0 for seconds in table.prompt_seconds_median)
    assert len(table.single_row_seconds_per_context) == len(table.draft_seconds_per_context) == 2
    table.save(tmp_path / "costs.json")
    assert profile.CostTable.load(tmp_path / "costs.json") == table
    bare = measure_costs(target, draft, max_rows=5, context=8, repetitions=1, lengths=False)
    assert (bare.prompt_tokens, bare.block_seconds_per_context) == ((), ())
