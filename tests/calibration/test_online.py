import dataclasses

import pytest
import torch

from dspark_train.calibration.online import OnlineSts
from dspark_train.calibration.reliability import measure_reliability
from dspark_train.calibration.sts import Scalings, fit_sts
from dspark_train.errors import UserError

CODE = {"temperatures": [2.0] * 5, "centre": 1.5}
CHAT = {"temperatures": [0.8] * 5, "centre": 0.3}


def feed(online, rounds):
    online.update(rounds.confidence_logits, rounds.verify_length, rounds.accepted)


def test_follows_a_drift_that_frozen_temperatures_do_not(trace):
    past = trace(8000, seed=0, **CODE)
    frozen = fit_sts(past.confidence_logits, past.prefix_accepted, past.observed)
    online = OnlineSts(frozen.tolist(), window=1024)
    traffic = [trace(200, seed=10 + step, **(CODE if step < 15 else CHAT)) for step in range(50)]
    errors = {"code": [], "chat": []}
    for step, rounds in enumerate(traffic):
        if step < 15 or step >= 25:  # the ten steps after the change are the time to learn
            # on a large sample of the same traffic, so that the error of a small one is not measured instead
            fresh = trace(4000, seed=1000 + step, **(CODE if step < 15 else CHAT))
            pair = (
                measure_reliability(fresh, online.sts),
                measure_reliability(fresh, frozen.tolist()),
            )
            errors["code" if step < 15 else "chat"].append([side.mean_ece for side in pair])
        feed(online, rounds)
    online_code, frozen_code = torch.tensor(errors["code"]).mean(0)
    online_chat, frozen_chat = torch.tensor(errors["chat"]).mean(0)
    assert frozen_code < 0.03
    assert online_code < frozen_code + 0.005
    assert frozen_chat > 0.05
    assert online_chat < 0.03


def test_memory_is_bounded_and_holds_the_last_rounds(trace):
    online = OnlineSts([1.0] * 5, window=100, refit_every=10)
    shapes = [value.shape for value in vars(online).values() if isinstance(value, torch.Tensor)]
    rounds = trace(730, seed=1, **CODE)
    for start in range(0, 730, 73):
        part = slice(start, start + 73)
        online.update(rounds.confidence_logits[part], rounds.verify_length[part], rounds.accepted[part])
    assert [value.shape for value in vars(online).values() if isinstance(value, torch.Tensor)] == shapes
    last = {tuple(row) for row in rounds.confidence_logits[-100:].tolist()}
    assert {tuple(row) for row in online._logits.tolist()} == last


def test_more_rounds_at_once_than_the_window_holds(trace):
    rounds = trace(500, seed=2, **CODE)
    whole, tail = OnlineSts([1.0] * 5, window=100), OnlineSts([1.0] * 5, window=100)
    feed(whole, rounds)
    tail.update(rounds.confidence_logits[-100:], rounds.verify_length[-100:], rounds.accepted[-100:])
    assert whole.sts == tail.sts


def test_unverified_slots_teach_nothing(trace):
    """The first slot alone is verified: the other temperatures must stay."""
    rounds = trace(2000, seed=3, **CODE)
    one = torch.ones_like(rounds.verify_length)
    online = OnlineSts([1.0] * 5, window=2000)
    online.update(rounds.confidence_logits, one, rounds.accepted.minimum(one))
    assert online.sts.temperatures[0] > 1.7
    # expected is σ at the start, but running starts from a fitted first slot: later ones may only follow that
    assert all(0.5 < value < 2 for value in online.sts.temperatures[1:])


def test_few_rounds_change_little(trace):
    rounds = trace(20, seed=4, **CODE)
    online = OnlineSts([1.0] * 5, refit_every=1, prior_rounds=2000)
    feed(online, rounds)
    assert all(0.8 < value < 1.25 for value in online.sts.temperatures)


def test_bad_settings():
    with pytest.raises(UserError, match="window"):
        OnlineSts([1.0], window=0)
    with pytest.raises(UserError, match="above 0"):
        OnlineSts([0.0])


def test_a_bias_goes_along(trace):
    """Temperatures that follow are those of the shifted logits; the bias itself stays."""
    rounds = trace(2000, seed=6, **CODE)
    plain, biased = OnlineSts([1.0] * 5), OnlineSts(Scalings((1.0,) * 5, -0.5))
    for online, shift in ((plain, 0.0), (biased, 0.5)):
        feed(online, dataclasses.replace(rounds, confidence_logits=rounds.confidence_logits + shift))
    assert biased.sts.temperatures == pytest.approx(plain.sts.temperatures, rel=0.1)
    assert biased.sts.bias == -0.5
