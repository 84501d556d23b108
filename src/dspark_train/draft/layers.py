"""One decoder layer of the draft's backbone, whose attention reads the target's context.

What differs between Qwen3's layers and Gemma 4's is data (:class:`~dspark_train.draft.families.LayerFamily`).

H is the number of query heads, K of key-value heads, h the head size (other letters:
:mod:`dspark_train.structures`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import rotate_half

from dspark_train.draft.config import DSparkConfig

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of positions, ``[.., h]`` each."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries ``[N, γ, H, h]`` and the block's own keys and values ``[N, γ, K, h]`` to ``[N, γ, H, h]``."""


class RMSNorm(nn.Module):
    """Root-mean-square norm in the dtype of its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Apply rotary positions ``[.., h]`` to heads ``[.., H, h]``."""
    cos, sin = (part.unsqueeze(-2).to(x.dtype) for part in rotation)
    return x * cos + rotate_half(x) * sin


class DraftAttention(nn.Module):
    """Projections of one layer; who attends to what is the caller's business (training or decoding)."""

    def __init__(self, config: Any, inputs: int | None = None) -> None:
        """``inputs`` is the width of what is projected; None is the hidden size."""
        super().__init__()
        inputs = config.hidden_size if inputs is None else inputs
        self.head_dim = config.head_dim
        self.scale = 1.0 if config.family.unit_scale else config.head_dim**-0.5
        queries, keys = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        bias = config.attention_bias
        self.q_proj = nn.Linear(inputs, queries * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(inputs, keys * config.head_dim, bias=bias)
        self.v_proj = (
            None if config.attention_k_eq_v else nn.Linear(inputs, keys * config.head_dim, bias=bias)
        )
        self.o_proj = nn.Linear(queries * config.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.value_eps = config.rms_norm_eps if config.family.normed_values else None

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Project layer-normed states ``[.., d]`` to rotated queries ``[.., H, h]``."""
        heads = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(self.q_norm(heads).to(heads.dtype), rotation)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Project layer-normed block states or the context ``[.., d]`` to keys and values ``[.., K, h]``."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        values = keys if self.v_proj is None else self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.value_eps is not None:
            values = F.rms_norm(values, (self.head_dim,), eps=self.value_eps)
        return rotate(self.k_norm(keys).to(keys.dtype), rotation), values


class DraftMLP(nn.Module):
    """Gated feed-forward network (SwiGLU with Qwen3's activation, GeGLU with Gemma 4's)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """``[.., d] -> [.., d]``."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Decoder layer over block states, with norms before its parts and, in Gemma 4's form, after them."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norms_after = config.family.norms_after
        if self.norms_after:
            self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layer_scalar: Tensor | None
        self.register_buffer("layer_scalar", torch.ones(1) if config.family.layer_scalar else None)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Update block states.

        Args:
            x: ``[N, γ, d]`` residual stream of the slots.
            rotation: of the slots' true positions, ``[N, γ, h]`` each.
            attend: attention of this layer, context included.

        Returns:
            ``[N, γ, d]``.
        """
        normed = self.input_layernorm(x)
        keys, values = self.self_attn.keys_values(normed, rotation)
        mixed = attend(self.self_attn.queries(normed, rotation), keys, values)
        mixed = self.self_attn.o_proj(mixed.flatten(-2))
        if self.norms_after:
            x = x + self.post_attention_layernorm(mixed)
            x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        else:
            x = x + mixed
            x = x + self.mlp(self.post_attention_layernorm(x))
        return x if self.layer_scalar is None else x * self.layer_scalar.to(x.dtype)
