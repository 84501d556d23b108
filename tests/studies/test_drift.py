import pytest

from dspark_train.calibration.online import OnlineSts
from dspark_train.calibration.reliability import measure_reliability
from dspark_train.calibration.sts import fit_sts
from dspark_train.studies.drift import replay_drift

CODE = {"temperatures": [2.0] * 5, "centre": 1.5}
CHAT = {"temperatures": [0.8] * 5, "centre": 0.3}


def test_online_stays_low_where_frozen_temperatures_drift(trace):
    past = trace(6000, seed=0, **CODE)
    frozen = fit_sts(past.confidence_logits, past.prefix_accepted, past.observed)
    phases = [("code", trace(3000, seed=1, **CODE)), ("chat", trace(6000, seed=2, **CHAT))]
    points = replay_drift(phases, OnlineSts(frozen.tolist()), stretch=1500)
    assert [point.phase for point in points] == ["code"] * 2 + ["chat"] * 4
    assert [point.rounds for point in points] == [1504, 3000, 4504, 6008, 7512, 9000]
    for point in points[:2]:
        assert point.online < point.noise + 0.012
    for point in points[3:]:  # after the stretch in which it learns
        assert point.frozen > point.noise + 0.03
        assert point.online < point.noise + 0.012


def test_frozen_side_is_the_plain_measurement(trace):
    rounds = trace(1000, seed=3, **CODE)
    (point,) = replay_drift([("code", rounds)], OnlineSts([1.5] * 5), stretch=1000)
    reliability = measure_reliability(rounds, [1.5] * 5)
    assert point.frozen == pytest.approx(reliability.mean_ece)


def test_a_round_is_judged_before_the_correction_sees_it(trace):
    """One step of rounds only: nothing is learnt yet, so both sides are the same."""
    rounds = trace(16, seed=4, **CODE)
    online = OnlineSts([1.0] * 5, refit_every=1, prior_rounds=0)
    (point,) = replay_drift([("code", rounds)], online, stretch=16)
    assert point.frozen == point.online
    assert online.sts.temperatures != tuple(online.start.tolist())


def test_short_phases_make_one_stretch(trace):
    points = replay_drift([("a", trace(50, seed=5, **CODE))], OnlineSts([1.0] * 5), stretch=400)
    assert [point.rounds for point in points] == [50]
