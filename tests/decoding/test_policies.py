"""Verification policies: laws of the schedulers, brute force, and the paper's counterexample."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_traces import make_trace
from torch import Tensor

from dspark_train.decoding.cost import CostTable
from dspark_train.decoding.policies import (
    Filled,
    FixedLength,
    FollowingSts,
    OnlineThreshold,
    Scheduled,
    ScheduledAsync,
    Threshold,
    capacity,
    causal_lengths,
    convex_below,
    parse_policy,
    resampled,
    threshold_lengths,
    top_lengths,
)
from dspark_train.errors import UserError
from dspark_train.structures import DecodingTrace

MANY = settings(max_examples=60, deadline=None)


@st.composite
def confidences(draw: st.DrawFn, max_requests: int = 4, max_slots: int = 4, min_slots: int = 1) -> Tensor:
    """``[R, γ]``, with ties and ends of the range among them."""
    requests, slots = draw(st.integers(1, max_requests)), draw(st.integers(min_slots, max_slots))
    values = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]) | st.floats(0, 1, width=32)
    rows = draw(
        st.lists(st.lists(values, min_size=slots, max_size=slots), min_size=requests, max_size=requests)
    )
    return torch.tensor(rows, dtype=torch.float64)


@st.composite
def linear_costs(draw: st.DrawFn, rows: int = 64) -> Tensor:
    """SPS of passes that cost a constant plus something per row: throughput has one peak."""
    fixed, per_row = draw(st.floats(0.01, 10)), draw(st.floats(0.001, 3))
    return 1 / (fixed + per_row * torch.arange(rows + 1, dtype=torch.float64))


def throughput(survival: Tensor, lengths: Tensor, steps_per_second: Tensor) -> float:
    """Θ of verifying these prefixes, from its definition."""
    tokens, rows = float(survival.shape[0]), survival.shape[0]
    for request, length in enumerate(lengths.tolist()):
        tokens += float(survival[request, :length].sum())
        rows += length
    return tokens * float(steps_per_second[rows])


def twin_of_algorithm_1(survival: Tensor, steps_per_second: Tensor) -> list[int]:
    """Algorithm 1 as it is written: a loop."""
    requests, slots = survival.shape
    pairs = sorted(
        ((-float(survival[r, k]), r, k) for r in range(requests) for k in range(slots)),
    )
    lengths, rows, tokens = [0] * requests, requests, float(requests)
    best = tokens * float(steps_per_second[rows])
    for negative, request, slot in pairs:
        theta = (tokens - negative) * float(steps_per_second[rows + 1])
        if theta <= best:
            break
        assert lengths[request] == slot, "a prefix was left"
        best, rows, tokens = theta, rows + 1, tokens - negative
        lengths[request] += 1
    return lengths


@MANY
@given(confidences(), linear_costs())
def test_causal_lengths_equal_the_loop(confidence: Tensor, curve: Tensor) -> None:
    survival = confidence.cumprod(1)
    assert causal_lengths(survival, curve).tolist() == twin_of_algorithm_1(survival, curve)


@MANY
@given(confidences(3, 3), linear_costs())
def test_causal_lengths_equal_brute_force_where_throughput_has_one_peak(
    confidence: Tensor, curve: Tensor
) -> None:
    survival = confidence.cumprod(1)
    requests, slots = survival.shape
    every = itertools.product(range(slots + 1), repeat=requests)
    best = max(throughput(survival, torch.tensor(lengths), curve) for lengths in every)
    reached = throughput(survival, causal_lengths(survival, curve), curve)
    assert reached == pytest.approx(best, rel=1e-9)


@MANY
@given(confidences(), linear_costs())
def test_causal_equals_global_search_where_throughput_has_one_peak(confidence: Tensor, curve: Tensor) -> None:
    survival = confidence.cumprod(1)
    assert int(causal_lengths(survival, curve).sum()) == int(capacity(survival, curve))


@MANY
@given(confidences(), st.integers(0, 20))
def test_top_lengths_are_prefixes_of_the_best(confidence: Tensor, count: int) -> None:
    survival = confidence.cumprod(1)
    lengths = top_lengths(survival, count)
    assert int(lengths.sum()) == min(count, survival.numel())
    slots = torch.arange(survival.shape[1])
    inside = slots < lengths[:, None]
    if inside.any() and not inside.all():
        assert survival[inside].min() >= survival[~inside].max()


@MANY
@given(confidences(4, 4), confidences(1, 4), linear_costs())
def test_more_load_never_lengthens_a_block(confidence: Tensor, more: Tensor, curve: Tensor) -> None:
    slots = min(confidence.shape[1], more.shape[1])
    alone, joined = confidence[:, :slots], torch.cat([confidence[:, :slots], more[:, :slots]])
    before = causal_lengths(alone.cumprod(1), curve)
    after = causal_lengths(joined.cumprod(1), curve)[: len(alone)]
    assert bool((after <= before).all())


@MANY
@given(confidences(3, 4), linear_costs(), st.floats(1.0, 4.0))
def test_dearer_rows_never_lengthen_a_block(confidence: Tensor, curve: Tensor, factor: float) -> None:
    survival = confidence.cumprod(1)
    seconds = 1 / curve
    dearer = 1 / (seconds[0] + factor * (seconds - seconds[0]))
    assert bool((causal_lengths(survival, dearer) <= causal_lengths(survival, curve)).all())


@MANY
@given(confidences(), st.floats(0, 1))
def test_threshold_stops_at_the_first_doubt(confidence: Tensor, threshold: float) -> None:
    for row, length in zip(
        confidence.tolist(), threshold_lengths(confidence, threshold).tolist(), strict=True
    ):
        assert all(value >= threshold for value in row[:length])
        assert length == len(row) or row[length] < threshold
    assert threshold_lengths(confidence, 0.0).tolist() == [confidence.shape[1]] * confidence.shape[0]


@MANY
@given(st.lists(confidences(1, 3, min_slots=3), min_size=3, max_size=5), linear_costs())
def test_asynchronous_budget_is_two_steps_old(steps: list[Tensor], curve: Tensor) -> None:
    chosen = ScheduledAsync(curve).start()
    verified = [int(chosen(confidence).sum()) for confidence in steps]
    assert verified[:2] == [3, 3]
    for step in range(2, len(steps)):
        assert verified[step] == int(capacity(steps[step - 2].cumprod(1), curve))
        # other confidences in this step and the last: another choice of tokens, the same number
        changed = ScheduledAsync(curve).start()
        for confidence in steps[: step - 1]:
            changed(confidence)
        changed(1 - steps[step - 1])
        assert int(changed(1 - steps[step]).sum()) == verified[step]


def test_asynchronous_search_passes_a_dip_that_stops_the_causal_one() -> None:
    survival = torch.tensor([[0.9, 0.85, 0.8]], dtype=torch.float64)
    curve = torch.tensor([0, 1.0, 0.5, 0.45, 0.44], dtype=torch.float64)
    assert int(causal_lengths(survival, curve)) == 0
    assert int(capacity(survival, curve)) == 3


def stairs(steps: list[tuple[int, float]], rows: int = 400) -> CostTable:
    """Passes of 10 ms and 0.01 ms a row that cost a share more from each given row on."""
    points = sorted({1, rows, *(row - 1 for row, _ in steps), *(row for row, _ in steps)})
    seconds = tuple(
        (0.01 + 1e-5 * row) * math.prod(1 + share for start, share in steps if row >= start) for row in points
    )
    return CostTable(64, tuple(points), seconds, seconds, seconds)


def made_up(requests: int, seed: int) -> tuple[Tensor, Tensor]:
    """Confidences and survivals ``[R, 5]``."""
    confidence = torch.rand(requests, 5, generator=torch.Generator().manual_seed(seed)).double().sqrt()
    return confidence, confidence.cumprod(1)


JAGGED = stairs([(17, 0.05), (33, 0.29), (65, 0.12), (97, 0.2), (129, 0.29)])


@MANY
@given(st.integers(1, 30), st.integers(0, 2**31))
def test_asynchronous_capacity_is_the_best_of_the_measured_costs(requests: int, seed: int) -> None:
    """On a table with steps of 5 to 29 %: the K of a plain search over every K, steps included."""
    confidence, survival = made_up(requests, seed)
    chosen = ScheduledAsync(JAGGED).start()
    verified = [int(chosen(confidence).sum()) for _ in range(3)][-1]
    best = survival.flatten().sort(descending=True).values.tolist()
    rates = [
        (requests + sum(best[:k])) / float(JAGGED.seconds(torch.tensor(requests + k)))
        for k in range(len(best) + 1)
    ]
    assert rates[verified] == pytest.approx(max(rates), rel=1e-12)


def test_what_a_search_without_the_steps_loses() -> None:
    """Percent of throughput on the jagged table, at several loads; the causal form has to pay it."""
    lost = []
    for requests in (6, 12, 20, 28):
        confidence, survival = made_up(requests, 0)
        best = torch.cat([torch.zeros(1), survival.flatten().sort(descending=True).values]).cumsum(0)

        def throughput(count: int, best: Tensor = best, requests: int = requests) -> float:
            return float((requests + best[count]) / JAGGED.seconds(torch.tensor(requests + count)))

        chosen = ScheduledAsync(JAGGED).start()
        searched = [int(chosen(confidence).sum()) for _ in range(3)][-1]
        stopped = int(Scheduled(JAGGED).start()(confidence).sum())
        lost.append(1 - throughput(stopped) / throughput(searched))
    assert min(lost) >= 0
    assert max(lost) > 0.05


@MANY
@given(st.lists(st.integers(1, 12), min_size=3, max_size=8), st.integers(0, 2**31))
def test_asynchronous_capacity_follows_the_number_of_requests(counts: list[int], seed: int) -> None:
    """Where requests behave alike, K is what these requests would get, however many there were two steps before."""
    block = torch.rand(1, 4, generator=torch.Generator().manual_seed(seed)).double()
    curve = JAGGED
    chosen = ScheduledAsync(curve).start()
    for step, count in enumerate(counts):
        confidence = block.expand(count, -1)
        verified = int(chosen(confidence).sum())
        if step >= 2:
            sps = curve.rounds_per_second(count, 5 * count)
            assert verified == int(capacity(confidence.cumprod(1), sps))


@MANY
@given(confidences(), st.integers(1, 6))
def test_resampled_survivals_are_distributed_alike(confidence: Tensor, requests: int) -> None:
    survival = confidence.cumprod(1)
    other = resampled(survival, requests)
    assert other.shape == (requests, survival.shape[1])
    assert bool((other.flatten().diff() <= 0).all()) or requests == len(survival)
    assert bool(torch.isin(other, survival).all())
    whole = resampled(survival, requests * len(survival))
    torch.testing.assert_close(whole.mean(), survival.mean())


# -- the paper's counterexample -----------------------------------------------------------------------------


def first_token_distribution(lengths_of: object) -> list[float]:
    """Exact distribution of the first output token, γ = 2, over tokens A and B.

    Target (0.7, 0.3), draft (0.5, 0.5), both whatever came before; c_1 = 0.8; c_2 is 0.9 after A and 0 after B.
    """
    target, draft = torch.tensor([0.7, 0.3]).double(), torch.tensor([0.5, 0.5]).double()
    curve = torch.tensor([0, 1, 0.5, 0.45], dtype=torch.float64)
    residual = (target - draft).clamp_min(0)
    residual /= residual.sum()
    output = torch.zeros(2, dtype=torch.float64)
    for first in (0, 1):
        survival = torch.tensor([[0.8, 0.9 if first == 0 else 0.0]], dtype=torch.float64).cumprod(1)
        if int(lengths_of(survival, curve)) == 0:  # type: ignore[operator]
            output += draft[first] * target
            continue
        accept = min(1.0, float(target[first] / draft[first]))
        output[first] += draft[first] * accept
        output += draft[first] * (1 - accept) * residual
    return output.tolist()


def test_causal_scheduler_keeps_the_targets_distribution() -> None:
    assert first_token_distribution(causal_lengths) == pytest.approx([0.7, 0.3])


def test_global_search_on_the_current_step_does_not() -> None:
    """The control: what the stop rule protects from."""

    def unbounded(survival: Tensor, curve: Tensor) -> Tensor:
        return top_lengths(survival, capacity(survival, curve))

    assert first_token_distribution(unbounded) == pytest.approx([0.85, 0.15])


# -- policies -----------------------------------------------------------------------------------------------


def test_policies_as_the_command_line_writes_them() -> None:
    table = CostTable(8, (1, 2), (0.1, 0.2), (0.1, 0.2), (0.1, 0.2))
    assert parse_policy("fixed") == FixedLength(None)
    assert parse_policy("fixed:3") == FixedLength(3)
    assert parse_policy("threshold:0.4") == Threshold(0.4)
    assert isinstance(parse_policy("scheduled", table), Scheduled)
    assert isinstance(parse_policy("asynchronous", table), ScheduledAsync)
    for wrong in ("fixed:-1", "fixed:x", "threshold", "threshold:2", "scheduled:1", "fastest"):
        with pytest.raises(UserError):
            parse_policy(wrong, table)
    with pytest.raises(UserError, match="profile"):
        parse_policy("scheduled")


def test_fixed_length_is_bounded_by_the_block() -> None:
    confidence = torch.full((2, 3), float("nan"))
    for length, expected in ((None, 3), (0, 0), (2, 2), (9, 3)):
        assert FixedLength(length).start()(confidence).tolist() == [expected] * 2
        assert FixedLength(length).depth(3) == expected
    for tokens, expected in ((0, [0, 0]), (2, [2, 0]), (3, [3, 0]), (4, [3, 1]), (9, [3, 3])):
        assert Filled(tokens).start()(confidence).tolist() == expected


def test_a_curve_that_ends_too_early_is_refused() -> None:
    with pytest.raises(UserError, match="profile up to"):
        Scheduled(torch.ones(5)).start()(torch.ones(2, 3))


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12))
def test_the_convex_function_below_touches_and_never_exceeds(values: list[float]) -> None:
    hull = convex_below(torch.tensor(values, dtype=torch.float64))
    original = torch.tensor(values, dtype=torch.float64)
    assert bool((hull <= original + 1e-12).all())
    assert float(hull[0]) == values[0]
    assert float(hull[-1]) == pytest.approx(values[-1])
    if len(values) > 2:
        assert float(hull.diff().diff().min()) > -1e-9
    # it is the largest such: every corner is a point of the curve
    bends = [
        0,
        *(i + 1 for i, bend in enumerate(hull.diff().diff().tolist()) if bend > 1e-9),
        len(values) - 1,
    ]
    torch.testing.assert_close(hull[bends], original[bends])


def test_a_step_in_the_costs_does_not_stop_the_scheduler() -> None:
    """Rows 3 to 6 cost the same: the step to the third must not hide the rows behind it."""
    costs = CostTable(
        context=8, rows=(1, 2, 3, 6), seconds_median=(1.0, 1.05, 1.3, 1.3), seconds_p10=(1.0, 1.0, 1.2, 1.2),
        seconds_p90=(1.0, 1.1, 1.4, 1.4), rows_per_request=6,
    )  # fmt: skip
    confidence = torch.tensor([[0.5, 0.5, 0.9, 0.9, 0.9]])
    assert Scheduled(costs).start()(confidence).tolist() == [5]


# -- online policies ------------------------------------------------------------------------------------------

CODE = {"temperatures": [2.0] * 5, "centre": 1.5}
CHAT = {"temperatures": [0.8] * 5, "centre": 0.3}


def verify(rounds: DecodingTrace, policy: OnlineThreshold):
    kept = policy.start()(rounds.confidence_logits.sigmoid())
    return kept, rounds.accepted.minimum(kept)


def test_threshold_keeps_the_wanted_share_through_a_drift() -> None:
    online = OnlineThreshold(0.85, 0.6)
    shares = {}
    for phase, (kind, seed) in {"code": (CODE, 100), "chat": (CHAT, 200)}.items():
        counts = torch.zeros(2)
        for step in range(100):
            verified, accepted = verify(make_trace(100, seed=seed + step, **kind), online)
            online.update(verified, accepted)
            if step >= 50:
                counts += torch.tensor([float(accepted.sum()), float(verified.sum())])
        shares[phase] = float(counts[0] / counts[1])
    assert shares["code"] == pytest.approx(0.85, abs=0.02)
    assert shares["chat"] == pytest.approx(0.85, abs=0.02)


def logit(threshold):
    return math.log(threshold / (1 - threshold))


def test_threshold_by_hand():
    online = OnlineThreshold(0.8, rate=0.01)
    online.update(torch.tensor([4, 6]), torch.tensor([2, 4]))  # 6 of 10 accepted
    assert logit(online.threshold) == pytest.approx(0.01 * 2 * 0.2)
    online.update(torch.tensor([10, 0]), torch.tensor([10, 0]))
    assert online.threshold == pytest.approx(0.5)


def test_threshold_that_verifies_nothing_comes_down():
    online = OnlineThreshold(0.8, 0.9, rate=0.01)
    online.update(torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    assert logit(online.threshold) == pytest.approx(logit(0.9) - 0.01 * 4 * 0.2)


def test_threshold_stays_inside_its_limits():
    online = OnlineThreshold(0.8, 0.9, rate=100.0)
    online.update(torch.tensor([10]), torch.tensor([0]))
    assert online.threshold == pytest.approx(0.99)
    online.update(torch.tensor([10]), torch.tensor([10]))
    assert online.threshold == pytest.approx(0.01)


def test_bad_settings_of_an_online_threshold():
    with pytest.raises(UserError, match="wanted"):
        OnlineThreshold(1.5)


def test_online_policies_as_the_command_line_writes_them() -> None:
    table = CostTable(8, (1, 2), (0.1, 0.2), (0.1, 0.2), (0.1, 0.2))
    online = parse_policy("online:0.8")
    assert isinstance(online, OnlineThreshold)
    assert (online.wanted, online.threshold) == (0.8, pytest.approx(0.5))
    following = parse_policy("scheduled+online", table)
    assert isinstance(following, FollowingSts)
    assert isinstance(following.policy, Scheduled)
    both = parse_policy("online:0.8+online")
    assert isinstance(both, FollowingSts)
    assert both.learns
    both.update(torch.tensor([4]), torch.tensor([1]))
    assert isinstance(both.policy, OnlineThreshold)
    assert both.policy.threshold > 0.5
    with pytest.raises(UserError, match="reads no confidences"):
        parse_policy("fixed+online")
    for wrong in ("online", "online:2", "online:x", "+online", "threshold:0.5+offline"):
        with pytest.raises(UserError):
            parse_policy(wrong, table)


def test_what_cannot_survive_is_never_admitted() -> None:
    """However fast more rows are: a table may rise where a kernel likes them."""
    survival = torch.tensor([[0.9, 0.5, 0.0], [0.8, 0.0, 0.0]])
    faster = torch.linspace(1.0, 9.0, 10)
    assert int(capacity(survival, faster)) == 3
    assert causal_lengths(survival, faster).tolist() == [2, 1]
