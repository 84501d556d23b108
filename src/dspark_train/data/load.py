"""How much one micro-batch holds, expected from mean lengths (letters: :mod:`dspark_train.structures`)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """What one micro-batch of one rank holds."""

    sequences: int
    tokens: int
    """Padded tokens."""
    blocks: int
    rows: int
    """Supervised slots."""
    positions: int
    """Distinct positions that they need the target's distribution of."""

    @property
    def length(self) -> float:
        """Tokens per sequence."""
        return self.tokens / max(1, self.sequences)


def expected_load(sequences: int, length: float, answer_share: float, anchors: int, block_size: int) -> Load:
    """A micro-batch of sequences as they are on average.

    Args:
        sequences: in the micro-batch.
        length: mean tokens of a sequence.
        answer_share: share of them that is supervised.
        anchors: most anchors, so draft blocks, per sequence.
        block_size: γ.
    """
    answer = length * answer_share
    blocks = min(float(anchors), max(answer - 1, 0.0))
    positions = distinct_positions(round(blocks * block_size), answer) * sequences
    return Load(
        sequences=sequences,
        tokens=round(sequences * length),
        blocks=round(sequences * blocks),
        rows=round(sequences * blocks * block_size),
        positions=positions,
    )


def distinct_positions(rows: int, answer_tokens: float) -> int:
    """Expected number of distinct positions that ``rows`` slots touch, spread over ``answer_tokens``."""
    return max(1, round(answer_tokens * -math.expm1(-rows / max(answer_tokens, 1.0))))
