"""Where training takes the target's states from: the target itself, or a cache of them."""

from __future__ import annotations

from typing import Protocol

import torch

from dspark_train.structures import TargetStates, TokenBatch
from dspark_train.target.frozen import FrozenTarget


class StateSource(Protocol):
    """What the target says about a batch."""

    def states(
        self, tokens: TokenBatch, device: torch.device, host: TokenBatch | None = None
    ) -> TargetStates:
        """States of a batch on ``device``; ``host`` is the same batch on the CPU, where there is one."""


class LiveStates:
    """Runs the target in every step."""

    def __init__(self, target: FrozenTarget) -> None:
        self.target = target

    def states(
        self, tokens: TokenBatch, device: torch.device, host: TokenBatch | None = None
    ) -> TargetStates:
        """Of one pass of the target."""
        return self.target.states(tokens.input_ids.to(device))
