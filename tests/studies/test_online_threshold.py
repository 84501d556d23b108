import pytest
import torch

from dspark_train.decoding.policies import threshold_lengths
from dspark_train.errors import UserError
from dspark_train.files import read_result, write_result
from dspark_train.structures import DecodingTrace
from dspark_train.studies.online_threshold import ThresholdDriftStudy, threshold_drift

CODE = {"temperatures": [2.0] * 5, "centre": 1.5, "domain": "code"}
CHAT = {"temperatures": [0.8] * 5, "centre": 0.3, "domain": "chat"}


@pytest.fixture
def traffic(trace):
    """Rounds to fit on, and traffic: over-confident code, then chat."""
    return (
        DecodingTrace.concatenate([trace(3000, seed=seed, **CODE), trace(6000, seed=seed + 1, **CHAT)])
        for seed in (0, 2)
    )


def test_the_online_threshold_keeps_the_share_that_the_frozen_one_loses(traffic):
    found = threshold_drift(*traffic, 0.8, stretch=1500)
    assert (found.first, found.second) == ("code", "chat")
    assert [point.phase for point in found.points] == ["code"] * 2 + ["chat"] * 4
    assert [point.rounds for point in found.points] == [1504, 3000, 4504, 6008, 7512, 9000]
    for point in found.points[:2]:
        assert point.frozen == pytest.approx(0.8, abs=0.03)
        assert point.online == pytest.approx(0.8, abs=0.03)
    for point in found.points[3:]:  # after the stretch in which it learns
        assert abs(point.frozen - 0.8) > 2 * abs(point.online - 0.8)
        assert point.online == pytest.approx(0.8, abs=0.03)
    assert found.points[-1].threshold != pytest.approx(found.start, abs=0.02)


def test_the_frozen_side_is_the_plain_count(traffic, tmp_path):
    fit, heldout = traffic
    found = threshold_drift(fit, heldout, 0.8, stretch=10_000)
    code = torch.tensor([domain == "code" for domain in heldout.domains])[heldout.request]
    lengths = threshold_lengths(heldout.confidence_logits.double().sigmoid(), found.start)[code]
    assert found.points[0].frozen_verified == pytest.approx(float(lengths.double().mean()), abs=1e-4)
    kept = lengths.minimum(heldout.accepted[code]).sum() / lengths.sum()
    assert found.points[0].frozen == pytest.approx(float(kept), abs=1e-4)
    write_result(tmp_path / "moving.json", found)
    assert read_result(tmp_path / "moving.json", ThresholdDriftStudy) == found


def test_one_domain_has_no_drift_and_a_share_is_a_share(trace):
    rounds = trace(50, seed=1, **CODE)
    assert threshold_drift(rounds, rounds, 0.8) is None
    with pytest.raises(UserError, match=r"wanted=1\.5"):
        threshold_drift(rounds, rounds, 1.5)
