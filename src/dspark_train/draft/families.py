"""Families of draft layers as data, and the ``config.json`` of a Gemma 4 draft.

A family decides what differs between the decoder layers of two kinds of target. Everything else of a draft is the
same for all: :mod:`dspark_train.draft.layers` reads the facts below, and nothing else asks for a family's name.

A Gemma 4 draft has the configuration of a Gemma 4 *text* model (``Gemma4DSparkModel``), whose names differ from
Qwen3's. :func:`from_gemma4` and :func:`to_gemma4` translate between it and the project's own fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, get_args

import torch

from dspark_train.errors import UserError

Family = Literal["qwen3", "gemma4"]
FAMILIES = get_args(Family)


@dataclass(frozen=True)
class LayerFamily:
    """What differs between the decoder layers of drafts."""

    architecture: str
    """Name in ``architectures`` by which engines know the draft."""
    unit_scale: bool = False
    """Attention scores are plain products; otherwise they are divided by the root of the head size."""
    normed_values: bool = False
    """Values are normalised per head, without a weight."""
    norms_after: bool = False
    """Attention and feed-forward network have a norm after them, too, before they enter the residual stream."""
    layer_scalar: bool = False
    """A stored number, never trained, scales the residual stream after each layer."""
    root_scaled: bool = False
    """Engines scale the draft's own embedding by ``√d``; otherwise a scale is folded into it."""


LAYER_FAMILIES: dict[str, LayerFamily] = {
    "qwen3": LayerFamily("Qwen3DSparkModel"),
    "gemma4": LayerFamily(
        "Gemma4DSparkModel",
        unit_scale=True,
        normed_values=True,
        norms_after=True,
        layer_scalar=True,
        root_scaled=True,
    ),
}

TEXT_FIELDS = (
    "attention_dropout",
    "bos_token_id",
    "enable_moe_block",
    "eos_token_id",
    "head_dim",
    "hidden_size_per_layer_input",
    "model_type",
    "moe_intermediate_size",
    "num_experts",
    "num_global_key_value_heads",
    "num_key_value_heads",
    "num_kv_shared_layers",
    "pad_token_id",
    "rope_parameters",
    "sliding_window",
    "target_model_type",
    "target_text_model_type",
    "top_k_experts",
    "use_bidirectional_attention",
    "use_double_wide_mlp",
    "vocab_size_per_layer_input",
)
"""Fields of the target's text configuration that a Gemma 4 draft carries along, some without using them."""

OWN_FIELDS = (
    "embedding_scale",
    "hidden_act",
    "layer_family",
    "max_window_layers",
    "rope_theta",
    "sliding_window_non_causal",
    "target_text_config",
    "use_sliding_window",
)
"""Fields of the project's configuration that a Gemma 4 one says otherwise, or has not."""


def root_scale(hidden_size: int, dtype: torch.dtype) -> float:
    """``√d`` as an element of ``dtype``: the factor of Gemma's token embeddings."""
    return float(torch.tensor(math.sqrt(hidden_size)).to(dtype))


def is_gemma4_text(target: Any) -> bool:
    """Whether a Hugging Face text config is that of a Gemma 4 model, whose drafts have layers of their own."""
    return str(target.model_type).startswith("gemma4") and hasattr(target, "attention_k_eq_v")


def gemma4_problems(target: Mapping[str, Any]) -> list[str]:
    """Why a target with this text configuration can have no Gemma 4 draft."""
    unlike = {
        "enable_moe_block": target.get("enable_moe_block"),
        "hidden_size_per_layer_input": target.get("hidden_size_per_layer_input"),
        "use_double_wide_mlp": target.get("use_double_wide_mlp"),
    }
    return [f"{name} {value}" for name, value in unlike.items() if value]


def text_fields(target: Mapping[str, Any]) -> dict[str, Any]:
    """:data:`TEXT_FIELDS` of a target's text configuration, given as a dictionary."""
    kept = {name: target[name] for name in TEXT_FIELDS if name in target}
    own = str(target["model_type"])
    head_dim, heads = full_attention_sizes(target)
    return kept | {
        "num_global_key_value_heads": heads if target.get("attention_k_eq_v") else None,
        "global_head_dim": head_dim,
        "target_model_type": own.removesuffix("_text"),
        "target_text_model_type": own,
    }


def full_attention_sizes(text: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Head size, and heads of keys and values, of the full-attention layers of a Gemma 4 text configuration.

    Newer configurations say them in ``per_layer_config``, older ones in fields of their own.
    """
    layers = text.get("per_layer_config") or {}
    kinds = text.get("layer_types") or []
    full = [layers.get(i, layers.get(str(i))) for i, kind in enumerate(kinds) if kind == "full_attention"]
    own = next((dict(layer) for layer in full if layer), {})
    head_dim = text.get("global_head_dim") or own.get("head_dim")
    heads = text.get("num_key_value_heads")
    if text.get("attention_k_eq_v"):
        heads = text.get("num_global_key_value_heads") or own.get("num_key_value_heads") or heads
    return head_dim, heads


class FullAttention(SimpleNamespace):
    """A Gemma 4 text configuration whose head sizes are those of its full-attention layers."""

    attribute_map: ClassVar[dict[str, str]] = {}

    def to_dict(self) -> dict[str, Any]:
        """Its fields."""
        return dict(vars(self))


def full_attention_view(target: Any) -> Any:
    """A target's text config with one size of heads: drafts for Gemma 4 follow its full-attention layers."""
    if not is_gemma4_text(target):
        return target
    text = target.to_dict()
    head_dim, heads = full_attention_sizes(text)
    text.pop("per_layer_config", None)
    return FullAttention(**text | {"head_dim": head_dim, "num_key_value_heads": heads})


def from_gemma4(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The project's own fields of a Gemma 4 draft's ``config.json``; others pass as they are.

    What the file lacks stays missing, for the caller to complain about.
    """
    if LAYER_FAMILIES["gemma4"].architecture not in (raw.get("architectures") or []):
        return dict(raw)
    head_dim, heads = full_attention_sizes(raw)
    rope = raw.get("rope_parameters")
    dtype = getattr(torch, str(raw.get("dtype") or raw.get("torch_dtype")), torch.float32)
    size = raw.get("hidden_size")
    kept = {name: raw[name] for name in TEXT_FIELDS if name in raw}
    renamed = (*TEXT_FIELDS, "global_head_dim", "hidden_activation", "per_layer_config")
    return {name: value for name, value in raw.items() if name not in renamed} | {
        "model_type": "qwen3",
        "layer_family": "gemma4",
        "head_dim": head_dim,
        "num_key_value_heads": heads,
        "attention_k_eq_v": bool(raw.get("attention_k_eq_v")),
        "attention_dropout": raw.get("attention_dropout") or 0.0,
        "hidden_act": raw.get("hidden_activation", "gelu_pytorch_tanh"),
        "rope_parameters": rope.get("full_attention", rope) if isinstance(rope, dict) else rope,
        "embedding_scale": root_scale(size, dtype) if isinstance(size, int) and size > 0 else 1.0,
        "target_text_config": kept,
    }


def to_gemma4(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of a Gemma 4 draft from the project's own fields: the inverse of :func:`from_gemma4`.

    Raises:
        UserError: the target's embeddings are not scaled as Gemma's are.
    """
    text, root = dict(fields["target_text_config"] or {}), math.sqrt(fields["hidden_size"])
    if not 0.99 < fields["embedding_scale"] / root < 1.01:
        raise UserError(
            f"a Gemma 4 draft scales its token embeddings by {root:.6g}, the root of the hidden size; this target "
            f"scales by {fields['embedding_scale']:.6g}: set draft.layers: qwen3"
        )
    ropes = {
        name: rope for name, rope in (text.get("rope_parameters") or {}).items() if isinstance(rope, dict)
    }
    written = {name: value for name, value in fields.items() if name not in OWN_FIELDS} | text
    heads = "num_global_key_value_heads" if fields["attention_k_eq_v"] else "num_key_value_heads"
    return written | {
        heads: fields["num_key_value_heads"],
        "architectures": [LAYER_FAMILIES["gemma4"].architecture],
        "model_type": text.get("model_type", "gemma4_text"),
        "global_head_dim": fields["head_dim"],
        "head_dim": text.get("head_dim", fields["head_dim"]),
        "hidden_activation": fields["hidden_act"],
        "layer_types": ["full_attention"] * fields["num_hidden_layers"],
        "num_kv_shared_layers": 0,
        "rope_parameters": {**ropes, "full_attention": fields["rope_parameters"]},
        "tie_word_embeddings": False,
    }
