"""Parameters, memory and FLOPs of a training step, from shapes (letters: :mod:`dspark_train.structures`)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The numbers of a recipe that its cost follows from."""

    d: int
    target_layers: int
    target_intermediate: int
    target_heads: int
    target_kv_heads: int
    head_dim: int
    vocabulary: int
    taps: int
    layers: int
    intermediate: int
    block: int
    rank: int
    head: str
    draft_vocabulary: int
    confidence: bool
    confidence_with_markov: bool
    tied: bool
    cpu: bool = False

    @property
    def layer_parameters(self) -> int:
        """Of one draft layer."""
        width, kv = self.target_heads * self.head_dim, self.target_kv_heads * self.head_dim
        return self.d * (2 * width + 2 * kv) + 3 * self.d * self.intermediate + 2 * self.d + 2 * self.head_dim

    @property
    def head_parameters(self) -> int:
        """Of the sequential and confidence heads."""
        r, d = self.rank, self.d
        total = (self.vocabulary + self.draft_vocabulary) * r
        total += {"gated": (d + r) * r + r, "rnn": (2 * r + d) * 3 * r + 3 * r}.get(self.head, 0)
        if self.confidence:
            total += d + 1 + (r if self.confidence_with_markov else 0)
        return total

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return (
            self.taps * self.d * self.d
            + 2 * self.d
            + self.layers * self.layer_parameters
            + self.head_parameters
        )

    @property
    def target_backbone(self) -> int:
        """Parameters of the target's layers."""
        width, kv = self.target_heads * self.head_dim, self.target_kv_heads * self.head_dim
        layer = self.d * (2 * width + 2 * kv) + 3 * self.d * self.target_intermediate + 2 * self.d
        return self.target_layers * layer + self.d

    @property
    def frozen(self) -> int:
        """Parameters of the target."""
        return self.target_backbone + self.vocabulary * self.d * (1 if self.tied else 2)


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


def distinct_positions(rows: int, answer_tokens: float) -> int:
    """Expected number of distinct positions that ``rows`` slots touch, spread over ``answer_tokens``."""
    return max(1, round(answer_tokens * -math.expm1(-rows / max(answer_tokens, 1.0))))


def load_of(shape: Shape, sequences: int, length: float, answer_share: float, anchors: int) -> Load:
    """A micro-batch of sequences of mean ``length`` tokens of which ``answer_share`` are supervised."""
    answer = length * answer_share
    blocks = min(float(anchors), max(answer - 1, 0.0))
    rows = round(sequences * blocks * shape.block)
    positions = distinct_positions(round(blocks * shape.block), answer) * sequences
    return Load(sequences, round(sequences * length), round(sequences * blocks), rows, positions)


def memory_of(
    shape: Shape, load: Load, stage: int, ranks: int, budget: int, *, mixed: bool, offload: bool = False
) -> dict[str, int]:
    """Bytes per GPU by part.

    Args:
        shape: of the recipe.
        load: of one micro-batch.
        stage: 0 for none (fp32 weights, autocast), else ZeRO's (bf16 weights and sharded fp32 masters).
        ranks: number of GPUs.
        budget: most bytes for one chunk of logits.
        mixed: bf16 compute.
        offload: the optimiser's state and masters are in the host's memory.
    """
    n, item = shape.trained, 2 if mixed else 4
    shard = {
        part: ranks if stage >= least else 1 for part, least in (("state", 1), ("grads", 2), ("weights", 3))
    }
    zero_mixed = stage > 0 and mixed
    weights = n * (item if zero_mixed else 4) // shard["weights"]
    grads = n * (item if zero_mixed else 4) // shard["grads"]
    state = n * (12 if zero_mixed else 8) // shard["state"]
    width = shape.target_heads * shape.head_dim
    kv = shape.target_kv_heads * shape.head_dim
    slots, tokens, keys = load.blocks * shape.block, load.tokens, load.tokens / max(1, load.sequences)
    per_slot = 12 * shape.d + 4 * width + 4 * kv + 4 * shape.intermediate
    attention = 3 * slots * shape.target_heads * (keys + shape.block) if shape.cpu else 0
    w2 = shape.draft_vocabulary * shape.rank
    chunk = min(budget, 2 * min(load.rows, 1024) * shape.draft_vocabulary * item)
    return {
        "target": shape.frozen * item,
        "weights": weights,
        "gradients": grads,
        "optimiser": 0 if offload else state,
        "target states": int(
            tokens * (2 * shape.taps + 1) * shape.d * item + tokens * 3 * shape.target_intermediate * item
        ),
        "activations": int(
            shape.layers * (slots * per_slot * item + attention * 4 + tokens * 4 * kv * item)
            + tokens * 3 * shape.d * item
            + slots * 6 * shape.d * 4
        ),
        "objective": int(chunk + w2 * (item + 4) + load.rows * (shape.d + shape.rank) * 3 * item),
    }


def flops_of(shape: Shape, load: Load, cached: bool = False) -> dict[str, float]:
    """Floating-point operations of one micro-batch by part (a multiply and an add are two)."""
    slots, tokens = load.blocks * shape.block, load.tokens
    keys = tokens / max(1, load.sequences)
    width, kv = shape.target_heads * shape.head_dim, shape.target_kv_heads * shape.head_dim
    target = 2.0 * tokens * shape.target_backbone + 2.0 * shape.target_layers * tokens * keys * width
    context = 2.0 * tokens * (shape.taps * shape.d**2 + shape.layers * 2 * shape.d * kv)
    layer = 2.0 * slots * shape.layer_parameters + 4.0 * slots * (keys / 2 + shape.block) * width
    fold = shape.d + shape.rank
    objective = 2.0 * load.rows * shape.draft_vocabulary * (2 * fold + shape.rank)
    objective += 2.0 * load.positions * shape.d * (shape.vocabulary if not cached else shape.draft_vocabulary)
    return {
        "target": 0.0 if cached else target,
        "draft": 3 * (context + shape.layers * layer),
        "objective": objective,
    }
