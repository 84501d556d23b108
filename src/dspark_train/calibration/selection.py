"""Which rounds and slots of a trace count.

R  decoding rounds      γ  block size
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dspark_train.structures import DecodingTrace


def verified_slots(trace: DecodingTrace) -> Tensor:
    """``[R, γ]`` bool: slots that the target really verified; what calibration counts.

    Narrower than ``trace.observed``, which also knows the fate of unverified slots behind a rejection. Where
    a policy cut the block, counting those would see the rejections of unverified slots and never their
    acceptances; whether a slot is verified depends on confidences alone, so counting verified slots is fair.
    """
    slots = torch.arange(1, trace.block_size + 1, device=trace.verify_length.device)
    return slots <= trace.verify_length[:, None]


def reached_slots(trace: DecodingTrace) -> Tensor:
    """``[R, γ]`` bool: verified slots whose whole prefix was accepted; what conditional acceptance counts."""
    slots = torch.arange(trace.block_size, device=trace.accepted.device)
    return verified_slots(trace) & (trace.accepted[:, None] >= slots)


def split_by_domain(trace: DecodingTrace) -> dict[str, DecodingTrace]:
    """Rounds of each named domain, in order of the names; empty where the trace names none."""
    names = sorted(set(trace.domains) - {""})
    return {
        name: select_rounds(trace, torch.tensor([domain == name for domain in trace.domains])[trace.request])
        for name in names
    }


def select_rounds(trace: DecodingTrace, rounds: Tensor) -> DecodingTrace:
    """The rounds chosen by a mask or by indices ``[R]``; requests keep their numbers."""
    chosen: dict[str, Any] = {
        field.name: value[rounds]
        for field in dataclasses.fields(trace)
        if isinstance(value := getattr(trace, field.name), Tensor)
    }
    return dataclasses.replace(trace, **chosen)
