import pytest
import torch

from dspark_train.errors import UserError
from dspark_train.structures import DecodingTrace
from dspark_train.studies.rounds import acceptance_by_position, drift_study, threshold_sweep, wilson


def by_hand(**changes):
    """Four rounds of γ = 3, two of each domain; logits ±3 mean confidences of 0.95 and 0.05."""
    fields = {
        "request": torch.tensor([0, 0, 1, 1]),
        "anchor": torch.tensor([5, 9, 4, 6]),
        "proposed": torch.zeros(4, 3, dtype=torch.int64),
        "confidence_logits": torch.tensor([[3.0, 3, 3], [3, -3, 3], [3, 3, -3], [-3, 3, 3]]),
        "verify_length": torch.tensor([3, 3, 3, 3]),
        "accepted": torch.tensor([3, 1, 1, 0]),
        "committed": torch.tensor([4, 2, 2, 1]),
        "domains": ("math", "chat"),
    }
    return DecodingTrace(**{**fields, **changes})


def test_sweep_by_hand():
    everything, chat, math = threshold_sweep(by_hand(), thresholds=[0.0, 0.5, 0.99])
    assert [sweep.group for sweep in (everything, chat, math)] == ["all", "chat", "math"]
    # θ = 0 verifies 12, accepts 5; θ = 0.5 verifies 3 + 1 + 2 + 0, accepts 3 + 1 + 1 + 0; 0.99 verifies none
    assert everything.acceptance_rate == [5 / 12, 5 / 6, None]
    assert everything.tokens_per_round == [9 / 4, 9 / 4, 1]
    assert everything.verified_per_round == [3, 6 / 4, 0]
    assert everything.rejected_per_round == [7 / 4, 1 / 4, 0]
    assert everything.tokens_per_row == [9 / 16, 9 / 10, 1]
    assert math.acceptance_rate == [4 / 6, 1, None]
    assert chat.acceptance_rate == [1 / 6, 1 / 2, None]


def test_json_leaves_out_thresholds_that_verify_nothing():
    points = threshold_sweep(by_hand(), thresholds=[0.0, 0.5, 0.99])[0].to_json()
    assert [point["threshold"] for point in points] == [0.0, 0.5]
    assert points[1]["acceptance_rate"] == 5 / 6
    assert points[1]["tokens_per_row"] == 9 / 10


def test_sweep_uses_the_temperatures():
    flat = threshold_sweep(by_hand(), sts=[100.0] * 3, thresholds=[0.6])[0]
    assert flat.verified_per_round == [0]


def test_sweep_never_verifies_beyond_the_record():
    short = by_hand(verify_length=torch.tensor([2, 3, 3, 3]), accepted=torch.tensor([2, 1, 1, 0]))
    assert threshold_sweep(short, thresholds=[0.0])[0].verified_per_round == [11 / 4]


def test_sweep_laws():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 5, generator=generator)
    accepted = (torch.rand(500, 5, generator=generator) < logits.sigmoid()).long().cumprod(1).sum(1)
    fields = {"request": torch.zeros(500, dtype=torch.int64), "anchor": torch.arange(500), "domains": ()}
    trace = by_hand(
        **fields,
        proposed=torch.zeros(500, 5, dtype=torch.int64),
        confidence_logits=logits,
        verify_length=torch.full((500,), 5),
        accepted=accepted,
        committed=accepted + 1,
    )
    (sweep,) = threshold_sweep(trace)
    for falling in (sweep.tokens_per_round, sweep.verified_per_round, sweep.rejected_per_round):
        assert falling == sorted(falling, reverse=True)
    assert sweep.tokens_per_round[0] == pytest.approx(trace.accepted_length)
    assert sweep.acceptance_rate[14] > sweep.acceptance_rate[0] + 0.2  # honest confidences sort good from bad


def test_acceptance_by_hand():
    everything, chat, math = acceptance_by_position(by_hand())
    assert everything.conditional == [3 / 4, 1 / 3, 1]
    assert everything.reached == [4, 3, 1]
    assert everything.cumulative == [3 / 4, 1 / 4, 1 / 4]
    assert everything.tau == 9 / 4
    assert chat.conditional == [1 / 2, 0, None]
    assert chat.low[2] is None
    assert math.rounds == 2


def test_acceptance_counts_verified_slots_only():
    cut = by_hand(verify_length=torch.tensor([3, 3, 1, 0]))
    assert acceptance_by_position(cut)[0].reached == [3, 2, 1]


def test_drift_goes_from_the_easy_domain_to_the_hard_one():
    drift = drift_study(by_hand(), by_hand())
    assert (drift.first, drift.second) == ("math", "chat")  # τ 3 and 1.5
    assert [point.phase for point in drift.points] == ["math", "chat"]
    assert drift_study(by_hand(domains=("math", "math")), by_hand()) is None


def test_wilson_interval():
    # a value from Wilson's formula worked out by hand: 8 of 10
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=2e-4)
    assert wilson(0, 5)[0] == 0
    assert wilson(5, 5)[1] == 1
    assert wilson(0, 0) is None


def test_unusable_traces_and_thresholds():
    with pytest.raises(UserError, match="no confidences"):
        threshold_sweep(by_hand(confidence_logits=torch.full((4, 3), torch.nan)))
    with pytest.raises(UserError, match=r"0..1, got \[1.5\]"):
        threshold_sweep(by_hand(), thresholds=[0.5, 1.5])
    empty = torch.zeros(0, dtype=torch.int64)
    nothing = by_hand(
        request=empty, anchor=empty, verify_length=empty, accepted=empty, committed=empty,
        proposed=empty.view(0, 3), confidence_logits=torch.zeros(0, 3),
    )  # fmt: skip
    with pytest.raises(UserError, match="no speculative rounds"):
        acceptance_by_position(nothing)
