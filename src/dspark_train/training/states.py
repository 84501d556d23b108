"""Where training takes the target's states from: the target itself, or a cache of them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dspark_train.structures import TargetStates, TokenBatch
from dspark_train.target.frozen import FrozenTarget


class StateSource(Protocol):
    """What the target says about a batch."""

    def states(self, tokens: TokenBatch, device: torch.device) -> TargetStates:
        """Features ``[B, T, m·d]`` and last hidden states ``[B, T, d]``, on ``device``."""

    def logsumexp(self, tokens: TokenBatch, device: torch.device) -> Tensor | None:
        """``[B, T]`` fp32 log-sum-exp of the target's logits where a slot can ask for it; None: not known."""


class LiveStates:
    """Runs the target in every step."""

    def __init__(self, target: FrozenTarget) -> None:
        self.target = target

    def states(self, tokens: TokenBatch, device: torch.device) -> TargetStates:
        """Of one pass of the target."""
        return self.target.states(tokens.input_ids.to(device))

    def logsumexp(self, tokens: TokenBatch, device: torch.device) -> None:
        """Not known: the objective computes it."""
