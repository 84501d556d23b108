"""Acceptance by position, by hand."""

import pytest
import torch

from dspark_train.decoding.acceptance import acceptance_by_position, wilson
from dspark_train.errors import UserError
from dspark_train.structures import DecodingTrace


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


def test_wilson_interval():
    # a value from Wilson's formula worked out by hand: 8 of 10
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=2e-4)
    assert wilson(0, 5)[0] == 0
    assert wilson(5, 5)[1] == 1
    assert wilson(0, 0) is None


def test_a_trace_without_rounds_is_refused():
    empty = torch.zeros(0, dtype=torch.int64)
    nothing = by_hand(
        request=empty, anchor=empty, verify_length=empty, accepted=empty, committed=empty,
        proposed=empty.view(0, 3), confidence_logits=torch.zeros(0, 3),
    )  # fmt: skip
    with pytest.raises(UserError, match="no speculative rounds"):
        acceptance_by_position(nothing)
