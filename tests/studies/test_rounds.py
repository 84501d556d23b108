import json

import pytest
import torch

from dspark_train.decoding.acceptance import acceptance_by_position
from dspark_train.errors import UserError
from dspark_train.files import read_result, write_result
from dspark_train.structures import DecodingTrace
from dspark_train.studies.rounds import ThresholdStudy, drift_study, threshold_sweep


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


def column(points, name):
    return [getattr(point, name) for point in points]


def test_sweep_by_hand():
    sweep = threshold_sweep(by_hand(), thresholds=[0.0, 0.5, 0.99])
    assert list(sweep) == ["all", "chat", "math"]
    # θ = 0 verifies 12, accepts 5; θ = 0.5 verifies 3 + 1 + 2 + 0, accepts 3 + 1 + 1 + 0; 0.99 verifies none
    assert column(sweep["all"], "threshold") == [0.0, 0.5]
    assert column(sweep["all"], "draft_acceptance_rate") == [5 / 12, 5 / 6]
    assert column(sweep["all"], "tokens_per_round") == [9 / 4, 9 / 4]
    assert column(sweep["all"], "verified_per_round") == [3, 6 / 4]
    assert column(sweep["all"], "rejected_per_round") == [7 / 4, 1 / 4]
    assert column(sweep["all"], "acceptance_rate_with_bonus") == [9 / 16, 9 / 10]
    assert column(sweep["math"], "draft_acceptance_rate") == [4 / 6, 1]
    assert column(sweep["chat"], "draft_acceptance_rate") == [1 / 6, 1 / 2]


def test_a_stored_sweep_is_the_computed_one(tmp_path):
    study = ThresholdStudy(split="heldout", rounds=4, groups=threshold_sweep(by_hand()))
    write_result(tmp_path / "sweep.json", study)
    assert read_result(tmp_path / "sweep.json", ThresholdStudy) == study


def test_sweep_uses_the_temperatures():
    assert threshold_sweep(by_hand(), sts=[100.0] * 3, thresholds=[0.6])["all"] == []


def test_sweep_never_verifies_beyond_the_record():
    short = by_hand(verify_length=torch.tensor([2, 3, 3, 3]), accepted=torch.tensor([2, 1, 1, 0]))
    assert threshold_sweep(short, thresholds=[0.0])["all"][0].verified_per_round == 11 / 4


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
    (points,) = threshold_sweep(trace).values()
    for name in ("tokens_per_round", "verified_per_round", "rejected_per_round"):
        assert column(points, name) == sorted(column(points, name), reverse=True)
    assert points[0].tokens_per_round == pytest.approx(trace.accepted_length)
    # honest confidences sort good from bad
    assert points[14].draft_acceptance_rate > points[0].draft_acceptance_rate + 0.2
    assert points[0].acceptance_rate_with_bonus == pytest.approx(trace.accepted_length / 6)


def test_an_accepted_end_token_is_the_last_token_of_its_round():
    """The first round ends with an end token in slot 2: it makes two tokens, not the target's own besides."""
    ended = by_hand(
        verify_length=torch.tensor([2, 3, 3, 3]), accepted=torch.tensor([2, 1, 1, 0]),
        committed=torch.tensor([2, 2, 2, 1]),
    )  # fmt: skip
    point = threshold_sweep(ended, thresholds=[0.0])["all"][0]
    assert point.tokens_per_round == ended.accepted_length == acceptance_by_position(ended)[0].tau == 7 / 4
    assert point.acceptance_rate_with_bonus == 7 / 15


def test_sweeps_of_earlier_versions_are_read_under_their_new_names(tmp_path):
    point = {
        "threshold": 0.0, "acceptance_rate": 0.377, "tokens_per_round": 2.0, "verified_per_round": 5.0,
        "rejected_per_round": 3.1, "tokens_per_row": 0.455,
    }  # fmt: skip
    (tmp_path / "sweep.json").write_text(json.dumps({"groups": {"all": [point]}}))
    (read,) = read_result(tmp_path / "sweep.json", ThresholdStudy).groups["all"]
    assert (read.draft_acceptance_rate, read.acceptance_rate_with_bonus) == (0.377, 0.455)


def test_drift_goes_from_the_easy_domain_to_the_hard_one():
    drift = drift_study(by_hand(), by_hand())
    assert (drift.first, drift.second) == ("math", "chat")  # τ 3 and 1.5
    assert [point.phase for point in drift.points] == ["math", "chat"]
    assert drift_study(by_hand(domains=("math", "math")), by_hand()) is None


def test_unusable_traces_and_thresholds():
    with pytest.raises(UserError, match="no confidences"):
        threshold_sweep(by_hand(confidence_logits=torch.full((4, 3), torch.nan)))
    with pytest.raises(UserError, match=r"0..1, got \[1.5\]"):
        threshold_sweep(by_hand(), thresholds=[0.5, 1.5])
