"""What a draft's training pass costs: FLOPs and bytes (letters: :mod:`dspark_train.structures`).

Everything is counted from the modules; their weights may lie on the ``meta`` device.
"""

from __future__ import annotations

from torch import nn

from dspark_train.data.load import Load
from dspark_train.draft.eagle3 import Eagle3Draft
from dspark_train.draft.kinds import Draft


def trained_parameters(module: nn.Module | None) -> int:
    """Parameters that training changes."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad) if module is not None else 0


def head_parameters(draft: Draft) -> int:
    """Trained parameters of the sequential and the confidence head."""
    return trained_parameters(draft.markov_head) + trained_parameters(draft.confidence_head)


def rows_of(draft: Draft, load: Load) -> int:
    """Rows that go through the layers: the slots of all blocks, or every position in each step of a chain."""
    if isinstance(draft, Eagle3Draft):
        return load.tokens * draft.config.block_size
    return load.blocks * draft.config.block_size


def pass_flops(draft: Draft, load: Load) -> float:
    """FLOPs of one forward and backward pass, ``W2`` and the LM head left out (a multiply and an add are two)."""
    return matrix_flops(draft, load) + attention_flops(draft, load)


def matrix_flops(draft: Draft, load: Load) -> float:
    """FLOPs of the linear layers.

    A backward pass multiplies twice as much as the forward pass, but for ``fc``, whose inputs need no gradient.
    """
    context = (
        0
        if isinstance(draft, Eagle3Draft)
        else sum(
            projection.weight.numel()
            for layer in draft.layers
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj)
            if projection is not None
        )
    )
    slots = sum(
        module.weight.numel()
        for name, module in draft.named_modules()
        if isinstance(module, nn.Linear) and name not in ("fc", "lm_head", "markov_head.markov_w2")
    )
    fused = 2 * 2.0 * load.tokens * draft.fc.weight.numel()
    return fused + 3 * 2.0 * (load.tokens * context + rows_of(draft, load) * slots)


def attention_flops(draft: Draft, load: Load) -> float:
    """FLOPs of what slots see: half of their sequence on average, or a window of it, and their own block.

    Fused attention computes its scores once more in the backward pass: five products after two.
    """
    config, half = draft.config, load.length / 2
    context = sum(half if sight.window is None else min(half, sight.window) for sight in config.sights)
    pairs = rows_of(draft, load) * (context + len(draft.layers) * config.block_size)
    return 7 * 2.0 * pairs * config.num_attention_heads * config.head_dim


def activation_bytes(draft: Draft, load: Load, item: int) -> int:
    """Bytes that the forward pass keeps for the backward pass.

    Args:
        draft: whose pass it is.
        load: of the micro-batch.
        item: bytes of an element in the matrix products.
    """
    config, slots = draft.config, rows_of(draft, load)
    width = config.num_attention_heads * config.head_dim
    keys = (config.num_key_value_heads or config.num_attention_heads) * config.head_dim
    size = config.hidden_size
    per_slot = 12 * size + 4 * width + 4 * keys + 4 * config.intermediate_size
    layers = len(draft.layers) * (slots * per_slot + load.tokens * 4 * keys)
    return (layers + load.tokens * 3 * size) * item + slots * 6 * size * 4
