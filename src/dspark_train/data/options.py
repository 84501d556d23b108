"""Options that several stages share; importing them costs nothing."""

from __future__ import annotations

from dataclasses import dataclass

from dspark_train.errors import UserError


@dataclass(frozen=True)
class SplitShares:
    """How conversations without a split of their own are divided."""

    calibration: float = 0.05
    """Share of conversations in the calibration split."""
    heldout: float = 0.05
    """Share of conversations in the held-out split."""
    seed: int = 0
    """Another seed gives another division."""

    def __post_init__(self) -> None:
        if min(self.calibration, self.heldout) < 0 or self.calibration + self.heldout >= 1:
            raise UserError(
                f"split shares calibration={self.calibration} and heldout={self.heldout}: each must be at least 0 and "
                "their sum below 1"
            )
