import dataclasses
import itertools
import json

import pytest
import torch
from tiny_models import tiny_draft, tiny_target

from dspark_train.decoding.cost import CostTable
from dspark_train.decoding.decoder import generate
from dspark_train.decoding.policies import FixedLength, Scheduled, Threshold, parse_policy
from dspark_train.errors import UserError
from dspark_train.files import read_result, write_result
from dspark_train.structures import DecodingTrace
from dspark_train.studies.simulate import (
    LoadStudy,
    NamedPolicy,
    Replay,
    play,
    simulate,
    simulate_point,
    simulate_queue,
    standard_policies,
)

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
    """A machine on which a pass of B rows takes base + per_row·B milliseconds."""
    rows = (1, 2, 4096)
    seconds = tuple((base + per_row * count) / 1000 for count in rows)
    return CostTable(100, rows, seconds, seconds, seconds, **parts)


def test_plain_decoding_of_one_request_is_the_table():
    point = simulate_point(record(), linear(), NamedPolicy("plain", None), 1)
    assert point.per_user == point.throughput == pytest.approx(1000 / 10.5)
    assert simulate_point(record(), linear(), NamedPolicy("plain", None), 16).throughput == pytest.approx(
        16e3 / 18
    )


def test_plain_decoding_pays_its_own_overhead():
    costs = linear(requests=(1,), single_row_seconds_median=(0.02,), step_overhead_seconds_median=(0.005,))
    assert simulate_point(record(), costs, NamedPolicy("plain", None), 1).per_user == pytest.approx(40)


def test_whole_blocks_replay_the_record_exactly():
    trace = record()
    played = play(Replay(trace, None, 5, endless=False), FixedLength())
    assert int(played.tokens.sum()) == int(trace.committed.sum())
    assert int(played.active.sum()) == len(trace.request)
    assert int(played.accepted.sum()) == int(trace.accepted.sum())
    point = simulate_point(trace, linear(), NamedPolicy("fixed", FixedLength()), 1, steps=len(trace.request))
    assert point.tau == pytest.approx(trace.accepted_length)


@pytest.mark.parametrize("requests", [1, 7, 64])
def test_a_perfect_draft_commits_every_token(requests):
    costs = linear(requests=(1, 64), draft_seconds_median=(0.002, 0.004))
    point = simulate_point(record(perfect=True), costs, NamedPolicy("fixed", FixedLength()), requests)
    assert point.tau == GAMMA + 1
    assert point.acceptance_rate == 1
    rows, draft = requests * (GAMMA + 1), 2 + 2 * (requests - 1) / 63
    assert point.throughput == pytest.approx(rows / (10 + 0.5 * rows + draft) * 1000)
    assert point.throughput_error == pytest.approx(0, abs=1e-9)


def test_zero_verified_tokens_are_plain_decoding_without_a_draft_to_pay():
    trace, costs = record(), linear()
    plain = simulate_queue(trace, costs, None, 3)
    nothing = simulate_queue(trace, costs, FixedLength(0), 3)
    assert plain[0] == nothing[0] == int(trace.committed.sum())
    assert plain[1] == pytest.approx(nothing[1])


def test_only_drawn_tokens_are_paid():
    """A policy that verifies one token stops the head's walk after it, and the draft does not run for none."""
    curves = {"draft_seconds_median": (0.02,), "short_draft_seconds_median": (0.01,)}
    costs = linear(requests=(1,), rows_per_request=GAMMA + 1, **curves)
    for length, draft in ((0, 0.0), (1, 0.01), (GAMMA, 0.02)):
        _, seconds, rounds = simulate_queue(record(requests=1), costs, FixedLength(length), 1)
        rows = float(costs.seconds(torch.tensor(length + 1)))
        assert seconds == pytest.approx(rounds * (rows + draft), rel=0.02)  # a last round may verify less


def test_a_queue_by_hand():
    """Two requests, one at a time and both at once: whole blocks, so the steps are the recorded rounds."""
    trace = record(requests=2, rounds=10)
    tokens, seconds, rounds = simulate_queue(trace, linear(), FixedLength(), 1)
    assert rounds == 20
    assert tokens == int(trace.committed.sum())
    assert seconds == pytest.approx(20 * (10 + 0.5 * 5) / 1000)
    assert simulate_queue(trace, linear(), FixedLength(), 2)[1] == pytest.approx(10 * (10 + 0.5 * 10) / 1000)


def test_requests_leave_when_the_record_is_used_up():
    active = play(Replay(record(), None, 5, endless=False), FixedLength(2)).active.tolist()
    assert active[0] == 5
    assert active == sorted(active, reverse=True)
    assert active[-1] >= 1


def test_an_endless_replay_never_runs_dry():
    active = play(Replay(record(requests=2, rounds=3), None, 50), FixedLength(1), steps=100).active
    assert (active == 50).all()


def test_more_requests_give_more_throughput_and_less_speed_each():
    costs = linear()
    policies = standard_policies(costs, GAMMA, 0.5)
    points = simulate(record(), costs, policies, (1, 4, 16, 64))
    for named in policies:
        mine = points[named.name]
        for fewer, more in itertools.pairwise(mine):
            slack = 4 * (fewer.throughput_error + more.throughput_error)
            assert more.throughput > fewer.throughput - slack
            assert more.per_user < fewer.per_user + slack / fewer.requests


def test_the_scheduler_gives_up_verification_as_load_grows_and_never_loses_to_it():
    costs = linear(base=20.0, per_row=0.5)
    trace = record(requests=40)
    scheduled = NamedPolicy("scheduled", Scheduled(costs))
    budgets = []
    for requests in (1, 16, 128, 512):
        point = simulate_point(trace, costs, scheduled, requests)
        budgets.append(point.verified_per_request)
        for other in (NamedPolicy("plain", None), NamedPolicy("fixed", FixedLength())):
            rival = simulate_point(trace, costs, other, requests)
            assert point.throughput > 0.97 * rival.throughput
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > budgets[-1] + 0.5


def test_online_policies_follow_the_record_and_every_point_begins_anew():
    """A threshold that wants four of five verified tokens accepted gets them; overconfident scalings are mended."""
    wanted = NamedPolicy("online:0.8", parse_policy("online:0.8"))
    first, again = (simulate_point(record(), linear(), wanted, 16, steps=2000) for _ in range(2))
    assert first == again
    assert first.acceptance_rate == pytest.approx(0.8, abs=0.03)
    overconfident = [0.25] * GAMMA
    frozen, followed = (
        simulate_point(record(), linear(), NamedPolicy(name, parse_policy(name)), 16, sts=overconfident)
        for name in ("threshold:0.7", "threshold:0.7+online")
    )
    honest = simulate_point(record(), linear(), NamedPolicy("honest", parse_policy("threshold:0.7")), 16)
    assert frozen.verified_per_request > honest.verified_per_request + 0.1
    gap = abs(followed.verified_per_request - honest.verified_per_request)
    assert gap < 0.5 * (frozen.verified_per_request - honest.verified_per_request)


def test_temperatures_reach_the_policy():
    policy = NamedPolicy("threshold", Threshold(0.6))
    flat = simulate_point(record(), linear(), policy, 4, sts=[1000.0] * GAMMA)
    assert flat.verified_per_request == 0
    assert flat.tau == 1
    assert flat.acceptance_rate is None


def test_a_short_policy_commits_the_same_text():
    """However a block is cut, a request ends where its record ends."""
    trace = record()
    whole = play(Replay(trace, None, 4, endless=False), FixedLength())
    for policy in (FixedLength(1), FixedLength(3), Threshold(0.7)):
        cut = play(Replay(trace, None, 4, endless=False), policy)
        assert int(cut.tokens.sum()) == int(whole.tokens.sum())
        assert int(cut.active.sum()) >= int(whole.active.sum())


def test_rows_beyond_the_table_are_marked():
    small = dataclasses.replace(linear(), rows=(1, 2, 8))
    assert not simulate_point(record(), small, NamedPolicy("plain", None), 8).extrapolated
    assert simulate_point(record(), small, NamedPolicy("fixed", FixedLength()), 2).extrapolated


def test_a_stored_study_is_the_computed_one_with_a_list_per_policy(tmp_path):
    points = simulate(record(), linear(), standard_policies(linear(), GAMMA, 0.5), (1, 2), steps=5)
    study = LoadStudy(policies=points)
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
    assert all([point["requests"] for point in content[name]] == [1, 2] for name in content)
    assert content["plain"][0]["acceptance_rate"] is None
    assert read_result(tmp_path / "simulate.json", LoadStudy) == study


def test_bad_requests_and_traces():
    with pytest.raises(UserError, match="at least 1, got 0"):
        simulate_point(record(), linear(), NamedPolicy("plain", None), 0)
    blind = dataclasses.replace(record(), confidence_logits=torch.full((480, GAMMA), torch.nan))
    with pytest.raises(UserError, match="no confidences"):
        simulate_point(blind, linear(), NamedPolicy("threshold", Threshold(0.5)), 2)
    assert simulate_point(blind, linear(), NamedPolicy("fixed", FixedLength()), 2).tau > 1


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
    played = play(Replay(real.trace, None, batch_size, endless=False), FixedLength())
    assert len(played.active) == real.timings.rounds
    assert int((played.active + played.verified).sum()) == real.timings.rows
    # the first token of each request comes from its prompt's pass
    assert int(played.tokens.sum()) == real.timings.tokens - len(prompts)
