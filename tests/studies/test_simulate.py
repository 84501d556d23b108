import dataclasses
import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_draft, tiny_target

from dspark_train.decoding.cost import CostTable
from dspark_train.decoding.decoder import generate
from dspark_train.decoding.policies import FixedLength, Scheduled, Threshold, parse_policy
from dspark_train.errors import UserError
from dspark_train.files import read_result, write_result
from dspark_train.structures import DecodingTrace
from dspark_train.studies.cuts import CutEffect, fit_cuts
from dspark_train.studies.simulate import (
    BASELINE,
    BudgetPoint,
    LoadPoint,
    LoadStudy,
    NamedPolicy,
    Server,
    budget_points,
    budgets,
    load_point,
    play,
    promised,
    rate_for,
    simulate,
    speed_at,
    standard_policies,
    throughput_at,
)
from dspark_train.studies.traffic import Arrivals, AtWork, Recorded, Traffic

GAMMA = 4


def record(requests=12, rounds=40, seed=0, perfect=False):
    """Requests of ``rounds`` rounds each, with honest confidences."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.0 + 2 * torch.randn(requests, rounds, GAMMA, generator=generator)
    if perfect:
        logits = torch.full_like(logits, 30.0)
    accepted = (torch.rand(logits.shape, generator=generator) < logits.sigmoid()).long().cumprod(2).sum(2)
    committed = accepted + 1
    anchor = 10 + committed.cumsum(1) - committed
    return DecodingTrace(
        request=torch.arange(requests).repeat_interleave(rounds),
        anchor=anchor.flatten(),
        proposed=torch.zeros(requests * rounds, GAMMA, dtype=torch.int64),
        confidence_logits=logits.flatten(0, 1),
        verify_length=torch.full((requests * rounds,), GAMMA),
        accepted=accepted.flatten(),
        committed=committed.flatten(),
    )


def linear(base=10.0, per_row=0.5, **parts):
    """A machine on which a pass of B rows takes base + per_row·B milliseconds, and prompts nothing."""
    rows = (1, 2, 4096)
    seconds = tuple((base + per_row * count) / 1000 for count in rows)
    free = {"prompt_tokens": (1, 4096), "prompt_seconds_median": (1e-12, 1e-12)}
    return CostTable(100, rows, seconds, seconds, seconds, **(free | parts))


def queue(trace, policy, slots, costs=None, **settings):
    """All recorded requests at once, in the order of the record."""
    recorded = Recorded.of(trace)
    return play(recorded, recorded.queue(), Server(slots), policy, costs or linear(), **settings)


def rounds_of(played):
    """Rounds of single requests."""
    return sum(played.active)


# -- a queue: everything by hand ---------------------------------------------------------------------------------


def test_plain_decoding_is_the_table():
    """One request alone, and sixteen at once: one row each, a token a step."""
    trace = record(requests=16, perfect=True)
    alone = queue(record(requests=1), None, 1)
    assert alone.seconds == pytest.approx([0.0105] * len(alone.seconds))
    assert queue(trace, None, 16).seconds[0] == pytest.approx(0.018)
    costs = linear(requests=(1,), single_row_seconds_median=(0.02,), step_overhead_seconds_median=(0.005,))
    assert queue(record(requests=1), None, 1, costs).seconds[0] == pytest.approx(0.025)


def test_whole_blocks_replay_the_record_exactly():
    trace = record()
    played = queue(trace, FixedLength(), 5)
    assert sum(played.tokens) == int(trace.committed.sum())
    assert rounds_of(played) == len(trace.request)
    assert sum(played.accepted) == int(trace.accepted.sum())


def test_a_queue_by_hand():
    """Two requests, one at a time and both at once: whole blocks, so the steps are the recorded rounds."""
    trace = record(requests=2, rounds=10)
    one, both = (queue(trace, FixedLength(), slots) for slots in (1, 2))
    assert rounds_of(one) == 20
    assert one.end[-1] == pytest.approx(20 * (10 + 0.5 * 5) / 1000)
    assert both.end[-1] == pytest.approx(10 * (10 + 0.5 * 10) / 1000)
    assert one.finished.tolist() == pytest.approx([0.125, 0.25])
    assert one.started.tolist() == pytest.approx([0, 0.125], abs=1e-9)


def test_zero_verified_tokens_are_plain_decoding_without_a_draft_to_pay():
    trace = record()
    plain, nothing = queue(trace, None, 3), queue(trace, FixedLength(0), 3)
    assert sum(plain.tokens) == sum(nothing.tokens) == int(trace.committed.sum())
    assert plain.end[-1] == pytest.approx(nothing.end[-1])


def test_only_drawn_tokens_are_paid():
    """A policy that verifies one token stops the head's walk after it, and the draft does not run for none."""
    curves = {"draft_seconds_median": (0.02,), "short_draft_seconds_median": (0.01,)}
    costs = linear(requests=(1,), rows_per_request=GAMMA + 1, **curves)
    for length, draft in ((0, 0.0), (1, 0.01), (GAMMA, 0.02)):
        played = queue(record(requests=1), FixedLength(length), 1, costs)
        rows = float(costs.seconds(torch.tensor(length + 1)))
        assert played.end[-1] == pytest.approx(
            rounds_of(played) * (rows + draft), rel=0.02
        )  # the last may be short


def test_context_costs_what_was_measured():
    """Two milliseconds for each token beyond the table's 100; the draft's half on top, where one runs."""
    slopes = {
        "single_row_seconds_per_context": (0.002,),
        "block_seconds_per_context": (0.002,),
        "draft_seconds_per_context": (0.001,),
    }
    costs = linear(requests=(1,), rows_per_request=GAMMA + 1, single_row_seconds_median=(0.0105,), **slopes)
    trace = record(requests=1, rounds=5)
    plain, whole = (queue(trace, policy, 1, costs) for policy in (None, FixedLength()))
    for step in (0, 3):
        assert plain.seconds[step] == pytest.approx(0.0105 + 0.002 * (10 + step - 100), abs=1e-9)
        anchor = int(trace.anchor[step])
        assert whole.seconds[step] == pytest.approx(0.0125 + 0.003 * (anchor - 100), abs=1e-9)


def test_prompts_hold_up_everyone():
    """Two prompts of 10 tokens run as one pass of 20 rows before the first round; the third once a slot is free."""
    costs = linear(prompt_tokens=(1, 4096), prompt_seconds_median=(0.001, 4.096))
    trace = record(requests=3, rounds=6)
    played = queue(trace, FixedLength(), 2, costs)
    assert played.prompts[0] == pytest.approx(0.02)
    assert played.started.tolist()[:2] == pytest.approx([0.02, 0.02])
    assert sum(played.first) == 3
    third = next(step for step, count in enumerate(played.first[1:], 1) if count)
    assert played.prompts[third] == pytest.approx(0.01)
    assert float(played.started[2]) == pytest.approx(played.end[third - 1] + 0.01)
    assert played.end[-1] == pytest.approx(sum(played.seconds) + sum(played.prompts))


def test_requests_leave_when_the_traffic_is_over():
    active = queue(record(), FixedLength(2), 5).active
    assert active[0] == 5
    assert active == sorted(active, reverse=True)
    assert active[-1] >= 1


def test_a_short_policy_commits_the_same_text():
    """However a block is cut, a request ends where its record ends."""
    trace = record()
    whole = queue(trace, FixedLength(), 4)
    for policy in (FixedLength(1), FixedLength(3), Threshold(0.7)):
        cut = queue(trace, policy, 4)
        assert sum(cut.tokens) == sum(whole.tokens)
        assert rounds_of(cut) >= rounds_of(whole)


def test_a_cache_is_a_bound():
    """Each request reserves its prompt and the longest answer: a cache for three holds three, whatever the slots."""
    trace = record(requests=8, rounds=5)
    recorded = Recorded.of(trace)
    each = 10 + int(recorded.answer.max())
    played = play(recorded, recorded.queue(), Server(8, 3 * each), FixedLength(), linear())
    assert max(played.active) == 3
    assert sum(played.tokens) == int(trace.committed.sum())
    with pytest.raises(UserError, match="never holds a request"):
        play(recorded, recorded.queue(), Server(8, each - 1), FixedLength(), linear())


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_whole_blocks_take_the_steps_and_rows_of_the_real_decoder(batch_size):
    target = tiny_target()
    draft = tiny_draft(target)
    prompts = [[5 + i, 7, 9] for i in range(8)]
    limits = [6, 20, 11, 17, 9, 14, 20, 8]
    real = generate(
        target,
        draft,
        prompts,
        max_new_tokens=limits,
        temperature=1.5,
        batch_size=batch_size,
        stop_token_ids=[3],
        seed=1,
    )
    assert real.trace.accepted.sum() > 5  # a pair that accepts something
    played = queue(real.trace, FixedLength(), batch_size)
    rounds = [count for count in played.active if count]
    assert len(rounds) == real.timings.rounds
    assert rounds_of(played) + sum(played.verified) == real.timings.rows
    # the first token of each request comes from its prompt's pass
    assert sum(played.tokens) == real.timings.tokens - len(prompts)


# -- traffic -----------------------------------------------------------------------------------------------------


def test_poisson_arrivals():
    """Gaps whose mean is 1 / rate and whose standard deviation is their mean; each recorded request as often."""
    recorded = Recorded.of(record())
    traffic = recorded.poisson(20.0, 6000)
    gaps = traffic.seconds.diff()
    assert float(gaps.mean()) == pytest.approx(1 / 20, rel=0.05)
    assert float(gaps.std()) == pytest.approx(1 / 20, rel=0.05)
    assert traffic.rate == pytest.approx(20, rel=0.05)
    assert traffic.recorded.bincount().tolist() == [500] * 12
    assert torch.equal(traffic.answer, recorded.answer[traffic.recorded])


def test_recorded_arrivals_are_stretched_and_may_state_lengths(tmp_path):
    path = tmp_path / "arrivals.jsonl"
    path.write_text(
        '{"seconds": 100}\n{"seconds": 101, "prompt_tokens": 7, "answer_tokens": 3}\n{"seconds": 104}\n'
    )
    recorded = Recorded.of(record())
    traffic = recorded.arriving(Arrivals.load(path), 0.5, 7)
    assert traffic.seconds.tolist() == [0, 1, 4, 6, 7, 10, 12]
    assert traffic.prompt.tolist() == [10, 7, 10, 10, 7, 10, 10]
    assert [int(traffic.answer[place]) for place in (1, 4)] == [3, 3]
    assert Arrivals.load(path).served_by(recorded).seconds.tolist() == [0, 1, 4]
    played = play(recorded, traffic, Server(4), FixedLength(), linear())
    assert sum(played.tokens) + sum(played.first) == int(traffic.answer.sum())
    assert bool((played.started > traffic.seconds).all())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"seconds": 1}\n', "at least two"),
        ('{"seconds": 2}\n{"seconds": 1}\n', "jsonl:2: arrives at 1 s, before"),
        ('{"at": 2}\n', "seconds is None"),
        ('{"seconds": 1}\n{"seconds": 2, "answer_tokens": 0}\n', "answer_tokens is 0"),
        ("seconds,1\n", "an object with `seconds`"),
    ],
)
def test_bad_arrivals(tmp_path, text, message):
    path = tmp_path / "arrivals.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        Arrivals.load(path)


@settings(deadline=None, max_examples=25)
@given(st.floats(0.2, 50.0), st.integers(1, 9), st.sampled_from([None, FixedLength(), Threshold(0.6)]))
def test_every_request_is_served_once_and_time_goes_on(rate, slots, policy):
    recorded = Recorded.of(record(requests=4, rounds=5))
    traffic = recorded.poisson(rate, 20)
    played = play(recorded, traffic, Server(slots), policy, linear())
    assert sum(played.tokens) + sum(played.first) == int(traffic.answer.sum())
    assert sum(played.first) == 20
    assert max(played.active) <= slots
    assert bool((played.started >= traffic.seconds).all())
    assert bool((played.finished >= played.started).all())
    assert all(later >= earlier for earlier, later in itertools.pairwise(played.end))
    busy = sum(played.seconds) + sum(played.prompts)
    assert played.end[-1] >= busy - 1e-9


# -- a cut -------------------------------------------------------------------------------------------------------


def honest(*shift):
    """An effect whose confidences mean what they say, after a cut too."""
    return CutEffect(*shift, level=[0.0] * GAMMA, scale=[1.0] * GAMMA, gain=0.0)


def cut_rounds(shift, gain=0.0, requests=60, rounds=60, seed=5, threshold=0.6):
    """Rounds as of :func:`record`, cut by a threshold.

    After a cut all logits are lower by ``shift``, and acceptance has a higher log-odds than they say, by ``gain``.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 1.0 + 2 * torch.randn(requests, rounds, GAMMA, generator=generator)
    verified, accepted = torch.zeros(requests, rounds).long(), torch.zeros(requests, rounds).long()
    after = torch.zeros(requests, dtype=torch.bool)
    for place in range(rounds):
        logits[:, place] -= shift * after[:, None]
        confidence = logits[:, place].sigmoid()
        chance = (logits[:, place] + gain * after[:, None]).sigmoid()
        kept = (torch.rand(confidence.shape, generator=generator) < chance).long().cumprod(1).sum(1)
        verified[:, place] = (confidence >= threshold).long().cumprod(1).sum(1)
        accepted[:, place] = kept.minimum(verified[:, place])
        after = (verified[:, place] < GAMMA) & (kept >= verified[:, place])
    return dataclasses.replace(
        record(requests, rounds),
        confidence_logits=logits.flatten(0, 1),
        verify_length=verified.flatten(),
        accepted=accepted.flatten(),
        committed=accepted.flatten() + 1,
    )


@pytest.mark.parametrize("gain", [0.0, 0.7])
def test_what_a_cut_changes_is_found_and_predicts_the_cut_rounds(gain):
    """Where logits fall by 0.8 after a cut: shift and gain are found, and τ is met with them alone."""
    whole, real = record(60, 60), cut_rounds(0.8, gain)
    effect = fit_cuts(whole, real)
    assert effect is not None
    assert effect.rounds > 1000
    moved = effect.shift(torch.tensor([-1.0, 0.0, torch.nan]).double())
    torch.testing.assert_close(moved[:2], torch.full((2, GAMMA), -0.8).double(), atol=0.3, rtol=0)
    assert moved[2].tolist() == [0.0] * GAMMA
    assert effect.gain == pytest.approx(gain, abs=0.25)
    assert effect.level == pytest.approx([0.0] * GAMMA, abs=0.2)
    assert effect.scale == pytest.approx([1.0] * GAMMA, abs=0.2)
    tau, found = {}, real.accepted_length
    for name, given_effect in (("equal", None), ("fitted", effect)):
        played = queue(whole, Threshold(0.6), 16, effect=given_effect)
        tau[name] = sum(played.tokens) / rounds_of(played)
    assert tau["equal"] > 1.02 * found
    assert tau["fitted"] == pytest.approx(found, rel=0.02)


def test_nothing_changes_where_a_cut_changes_nothing():
    whole = record(60, 60)
    effect = fit_cuts(whole, cut_rounds(0.0))
    assert effect is not None
    torch.testing.assert_close(
        effect.shift(torch.zeros(1).double()), torch.zeros(1, GAMMA).double(), atol=0.2, rtol=0
    )
    assert fit_cuts(whole, whole) is None  # nothing was cut
    blind = dataclasses.replace(cut_rounds(0), confidence_logits=whole.confidence_logits * torch.nan)
    assert fit_cuts(whole, blind) is None


@settings(deadline=None, max_examples=20)
@given(st.floats(-2, 2), st.integers(0, 2**31))
def test_acceptance_after_a_cut_goes_with_the_confidence(shift, seed):
    """Honest confidences stay honest after any shift; without one, and without a cut, outcomes are the record's."""
    recorded = Recorded.of(record(200, 10, seed=seed % 7))
    work = AtWork(recorded, None, honest(99, [shift] * GAMMA, [0.0] * GAMMA, -3, 3), seed=seed)
    traffic = recorded.queue()
    work.join(traffic, 0, 200)
    work.round = torch.arange(2000)
    work.cut = torch.full((2000,), torch.nan).double()
    logits, accepted = work.outcomes()
    assert torch.equal(accepted, recorded.accepted)
    work.cut[:] = 0.0
    logits, accepted = work.outcomes()
    expected = logits.sigmoid().cumprod(1).sum(1).mean()
    assert float(accepted.double().mean()) == pytest.approx(float(expected), abs=0.15)
    if shift == 0:
        assert torch.equal(accepted, recorded.accepted)


# -- points and what is read from them -----------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 7, 64])
def test_a_perfect_draft_commits_every_token(requests):
    """Under a load that fills the server, throughput is that of full passes."""
    costs = linear(requests=(1, 64), draft_seconds_median=(0.002, 0.004))
    trace = record(perfect=True)
    recorded = Recorded.of(trace)
    rows, draft = requests * (GAMMA + 1), 2 + 2 * (requests - 1) / 63
    traffic = recorded.poisson(2 * rate_for(recorded, costs, requests), 40 * requests)
    point = load_point(play(recorded, traffic, Server(requests), FixedLength(), costs), traffic, costs)
    assert point.tau == pytest.approx(GAMMA + 1)
    assert point.acceptance_rate == 1
    assert point.budget == pytest.approx(GAMMA + 1)
    assert point.throughput == pytest.approx(rows / (10 + 0.5 * rows + draft) * 1000, rel=0.03)


def test_a_light_load_is_served_as_it_arrives():
    """Far below what is possible, a policy's throughput is the offered one, and its speed that of a request alone."""
    trace, costs = record(requests=40, rounds=4), linear()
    recorded = Recorded.of(trace)
    rate = 0.05 * rate_for(recorded, costs, 1)
    points, _ = simulate(trace, costs, standard_policies(costs, GAMMA, 0.5), [rate], Server(8), requests=200)
    offered = rate * float(recorded.answer.double().mean())
    for (point,) in points.values():
        assert point.throughput == pytest.approx(offered * point.rate / rate, rel=0.15)
        assert point.rate == pytest.approx(rate, rel=0.2)
        assert point.requests < 1.2
    assert points["plain"][0].per_user == pytest.approx(1000 / 10.5, rel=0.05)


def test_more_load_gives_less_speed_each_and_the_scheduler_gives_up_verification():
    costs = linear(base=20.0, per_row=0.5)
    trace = record(requests=40, rounds=6)
    policies = standard_policies(costs, GAMMA, 0.5)
    recorded = Recorded.of(trace)
    rates = [rate_for(recorded, costs, count) for count in (1, 8, 32, 128)]
    points, found = simulate(trace, costs, policies, rates, Server(128), requests=400)
    for mine in points.values():
        for fewer, more in itertools.pairwise(mine):
            assert more.per_user < 1.02 * fewer.per_user
            assert more.throughput > fewer.throughput - 4 * (more.throughput_error + fewer.throughput_error)
    budget = [point.budget for point in found["scheduled"] if point.rounds > 20]
    assert budget[0] > budget[-1] + 0.5
    assert {round(point.budget, 6) for point in found["plain"]} == {1.0}
    assert all(point.budget <= GAMMA + 1 for point in found[f"fixed {GAMMA}"])
    fastest = max(point.throughput for point in points["scheduled"])
    for other in ("plain", BASELINE, f"fixed {GAMMA}"):
        assert fastest > 0.97 * max(point.throughput for point in points[other])


def test_every_policy_serves_the_same_arrivals_and_begins_anew():
    wanted = [NamedPolicy(name, parse_policy("online:0.8")) for name in ("one", "two")]
    points, _ = simulate(record(), linear(), wanted, [1.0, 100.0], Server(16), requests=20)
    assert points["one"] == points["two"]


def test_a_threshold_that_wants_four_of_five_tokens_accepted_gets_them():
    played = queue(record(200), parse_policy("online:0.8"), 16)
    half = len(played.active) // 2
    share = sum(played.accepted[half:]) / sum(played.verified[half:])
    assert share == pytest.approx(0.8, abs=0.03)


def test_scalings_that_follow_mend_overconfident_ones():
    trace = record(requests=40)
    frozen, followed = (
        queue(trace, parse_policy(name), 16, sts=[0.25] * GAMMA)
        for name in ("threshold:0.7", "threshold:0.7+online")
    )
    honest = queue(trace, parse_policy("threshold:0.7"), 16)
    frozen, followed, honest = (sum(one.verified) / rounds_of(one) for one in (frozen, followed, honest))
    assert frozen > honest + 0.1
    assert abs(followed - honest) < 0.5 * (frozen - honest)


@pytest.mark.parametrize(
    "online", ["online:0.8", "scheduled+online", "asynchronous+online", "online:0.8+online"]
)
def test_online_policies_serve_any_load(online):
    costs = linear()
    points, found = simulate(
        record(),
        costs,
        [NamedPolicy(online, parse_policy(online, costs))],
        [0.5, 5.0],
        Server(8),
        requests=40,
    )
    assert [point.tau > 1 for point in points[online]] == [True, True]
    assert found[online]


def test_temperatures_reach_the_policy():
    played = queue(record(), Threshold(0.6), 4, sts=[1000.0] * GAMMA)
    assert sum(played.verified) == 0
    assert sum(played.tokens) == rounds_of(played)


def test_rows_beyond_the_table_are_marked():
    small = dataclasses.replace(linear(), rows=(1, 2, 8))
    trace = record(requests=8)
    recorded = Recorded.of(trace)
    for policy, slots, beyond in ((None, 8, False), (FixedLength(), 1, False), (FixedLength(), 2, True)):
        traffic = recorded.queue()
        point = load_point(play(recorded, traffic, Server(slots), policy, small), traffic, small)
        assert point.extrapolated is beyond
        assert point.rate is None


def at(per_user, throughput):
    point = LoadPoint(1, throughput, 0.0, per_user, 1.0, 0.0, None, 1.0, 0.1, False, 1.0)
    return point


def test_read_outs_by_hand():
    points = [at(100, 100), at(80, 400), at(40, 600), at(30, 590)]
    assert throughput_at(points, 90) == pytest.approx(250)
    assert throughput_at(points, 40) == 600
    assert throughput_at(points, 20) == 600
    assert throughput_at(points, 101) is None
    assert speed_at(points, 250) == pytest.approx(90)
    assert speed_at(points, 500) == pytest.approx(60)
    assert speed_at(points, 700) is None
    speeds = promised({BASELINE: [at(20, 5)], "other": points})
    assert len(speeds) == 4
    assert 20 < speeds[0] < speeds[-1] < 100


def test_budgets_by_requests_at_work():
    """Groups 1, 2, 3 to 4, … of the requests at work in a round, each with its rows per request."""
    played = queue(record(requests=5, rounds=4), FixedLength(2), 5)
    played.active, played.verified = [1, 2, 3, 4, 0, 5], [2, 4, 3, 4, 0, 10]
    assert budgets([played]) == [
        BudgetPoint(1.0, 3.0, 1),
        BudgetPoint(2.0, 3.0, 1),
        BudgetPoint(3.5, 2.0, 2),
        BudgetPoint(5.0, 3.0, 1),
    ]


def test_a_stored_study_is_the_computed_one_with_a_list_per_policy(tmp_path):
    points, found = simulate(
        record(), linear(), standard_policies(linear(), GAMMA, 0.5), [1, 2], Server(2), requests=9
    )
    effect = honest(70, [0.1] * GAMMA, [0.2] * GAMMA, -1.0, 1.0)
    study = LoadStudy(policies=points, budgets=found, after_cut=effect, slots=2, arrivals="poisson")
    write_result(tmp_path / "simulate.json", study)
    content = json.loads((tmp_path / "simulate.json").read_text())["policies"]
    assert list(content) == [
        "plain",
        "one draft token",
        "fixed 4",
        "threshold 0.5",
        "scheduled",
        "asynchronous",
    ]
    assert content["plain"][0]["acceptance_rate"] is None
    assert read_result(tmp_path / "simulate.json", LoadStudy) == study


def test_a_study_of_an_earlier_version_has_the_budgets_of_its_points():
    old = LoadStudy(policies={"plain": [dataclasses.replace(at(10, 40), requests=4, rate=None)]})
    assert budget_points(old) == {"plain": [BudgetPoint(4, 1.0, 0)]}


def test_bad_requests_and_traces():
    plain = [NamedPolicy("plain", None)]
    with pytest.raises(UserError, match="at least 1, got 0"):
        Server(0)
    with pytest.raises(UserError, match="above 0"):
        simulate(record(), linear(), plain, [0.0], Server(1))
    blind = dataclasses.replace(record(), confidence_logits=torch.full((480, GAMMA), torch.nan))
    with pytest.raises(UserError, match="no confidences"):
        simulate(blind, linear(), [NamedPolicy("threshold", Threshold(0.5))], [1.0], Server(1))
    assert simulate(blind, linear(), [NamedPolicy("fixed", FixedLength())], [1.0], Server(1), requests=9)[0][
        "fixed"
    ]
    assert math.isinf(Traffic(torch.zeros(2), *torch.zeros(3, 2).long()).rate)
    scheduled = Scheduled(linear())
    assert sum(queue(record(), scheduled, 4).verified) > 0
