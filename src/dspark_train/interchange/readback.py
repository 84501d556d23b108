"""An independent reader: rebuilds a written draft from its files alone and runs it plainly.

Nothing here is shared with the writers or with the draft model: JSON and safetensors are read straight, and
each layout is interpreted as a serving engine does. An export counts as done when this reader agrees with
the draft it was made from. Shape legend: :mod:`dspark_train.structures`; S is the number of context
positions, H query heads, K key-value heads, h the head size.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dspark_train.errors import UserError


@dataclass(frozen=True)
class GreedyBlock:
    """One greedy round of a draft."""

    hidden: Tensor
    """``[γ, d]``."""
    logits: Tensor
    """``[γ, V]``: -inf outside a reduced vocabulary; base logits soft-capped where the folder says so."""
    tokens: Tensor
    """``[γ]`` int64: target ids."""
    confidence_logits: Tensor | None
    """``[γ]``, along the greedy tokens."""


class PlainDraft:
    """A draft read back from a native, speculators or DFlash folder, evaluated in float32."""

    def __init__(self, folder: Path, embedding: Tensor | None = None, head: Tensor | None = None) -> None:
        """Read the folder.

        Args:
            folder: the checkpoint.
            embedding: ``[V, d]`` of the target, used where the folder has none.
            head: ``[V, d]`` of the target, used where the folder has none.

        Raises:
            UserError: fields that an engine needs are missing, or the slot layout is not this project's.
        """
        self.weights = _read_all(folder)
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "speculators_model_type" in raw:
            layer, taps = (
                raw["transformer_layer_config"],
                [tap - 1 for tap in raw["aux_hidden_state_layer_ids"]],
            )
            top, from_anchor = raw, raw.get("sample_from_anchor", False)
        else:
            nested = raw.get("dflash_config") or {}
            layer, top = _gemma4_layer(raw) or raw, {**raw, **nested}
            taps, default = top["target_layer_ids"], not nested or "DSparkDraftModel" in raw["architectures"]
            from_anchor = top.get("sample_from_anchor", default)
        if not from_anchor:
            raise UserError(
                f"{folder}: its slots predict their own positions (sample_from_anchor is not true)"
            )
        self.block_size, self.mask_token_id, self.taps = (
            int(top["block_size"]),
            int(top["mask_token_id"]),
            taps,
        )
        self.rank = int(top.get("markov_rank") or 0)
        self.kind = top.get("markov_head_type", "vanilla") if self.rank else "none"
        self.with_markov = bool(top.get("confidence_head_with_markov", False))
        self.has_confidence = bool(top.get("enable_confidence_head", False))
        self.gemma4 = "Gemma4DSparkModel" in (raw.get("architectures") or [])
        self.scale = float(layer.get("embedding_scale") or 1.0)
        self.cap = top.get("final_logit_softcapping")
        self.head_dim, self.eps = int(layer["head_dim"]), float(layer.get("rms_norm_eps", 1e-6))
        self.layer_count = int(layer["num_hidden_layers"])
        self.windows = _windows(layer, top)
        self.activation = _activation(layer.get("hidden_act", "silu"))
        self.inverse_frequencies, self.rope_factor = rope_frequencies(
            {
                **(layer.get("rope_scaling") or {}),
                "rope_theta": layer.get("rope_theta"),
                **(layer.get("rope_parameters") or {}),
            },
            self.head_dim,
        )
        vocabulary = int(layer["vocab_size"])
        reduced = int(top.get("draft_vocab_size") or vocabulary)
        self.vocabulary = vocabulary
        self.targets = torch.arange(reduced)
        if reduced < vocabulary:
            self.targets = self.targets + self.weights["d2t"].long()
        self.embedding = self._copy("embed_tokens.weight", embedding)
        self.head = self._copy("lm_head.weight", head)
        if self.head.shape[0] != reduced:
            self.head = self.head[self.targets]

    def _copy(self, name: str, fallback: Tensor | None) -> Tensor:
        if name in self.weights:
            return self.weights[name]
        if fallback is None:
            raise UserError(f"{name} is neither in the folder nor given from the target")
        return fallback.float()

    def propose(self, features: Tensor, anchor_token: int, anchor_position: int) -> GreedyBlock:
        """Draft one block greedily.

        Args:
            features: ``[S, m·d]`` of the context positions ``0..S-1``; S ≤ ``anchor_position``.
            anchor_token: the last committed token.
            anchor_position: its position n.
        """
        ids = torch.tensor([anchor_token, *[self.mask_token_id] * (self.block_size - 1)])
        slots = torch.arange(anchor_position, anchor_position + self.block_size)
        context = self._norm(features.float() @ self.weights["fc.weight"].T, "hidden_norm.weight")
        x = self.embedding[ids] * self.scale
        for index in range(self.layer_count):
            x = self._layer(f"layers.{index}.", x, slots, context, *self.windows[index])
        hidden = self._norm(x, "norm.weight")
        return self._walk(hidden, anchor_token)

    def _layer(
        self, prefix: str, x: Tensor, slots: Tensor, context: Tensor, window: float, causal: bool
    ) -> Tensor:
        """One decoder layer: ``[γ, d] -> [γ, d]``, keys and values from ``[context ; normed block]``."""
        normed = self._norm(x, prefix + "input_layernorm.weight")
        source = torch.cat([context, normed])
        positions = torch.cat([torch.arange(context.shape[0]), slots])
        query = self._heads(prefix + "self_attn.q_", normed, slots)
        key = self._heads(prefix + "self_attn.k_", source, positions)
        values = "v" if prefix + "self_attn.v_proj.weight" in self.weights else "k"
        value = self._linear(source, f"{prefix}self_attn.{values}_proj").unflatten(-1, (-1, self.head_dim))
        value = self._unit(value) if self.gemma4 else value
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhe,khe->hqk", query, key) / (1.0 if self.gemma4 else math.sqrt(self.head_dim))
        ahead = positions - slots[:, None]
        scores = scores.masked_fill((ahead <= -window) | (causal & (ahead > 0)), -math.inf)
        mixed = torch.einsum("hqk,khe->qhe", scores.softmax(-1), value).flatten(1)
        mixed = self._linear(mixed, prefix + "self_attn.o_proj")
        if self.gemma4:
            x = x + self._norm(mixed, prefix + "post_attention_layernorm.weight")
            wide = self._feed_forward(prefix, self._norm(x, prefix + "pre_feedforward_layernorm.weight"))
            x = x + self._norm(wide, prefix + "post_feedforward_layernorm.weight")
            return x * self.weights[prefix + "layer_scalar"]
        x = x + mixed
        return x + self._feed_forward(prefix, self._norm(x, prefix + "post_attention_layernorm.weight"))

    def _feed_forward(self, prefix: str, x: Tensor) -> Tensor:
        gate = self.activation(self._linear(x, prefix + "mlp.gate_proj"))
        return self._linear(gate * self._linear(x, prefix + "mlp.up_proj"), prefix + "mlp.down_proj")

    def _walk(self, hidden: Tensor, anchor_token: int) -> GreedyBlock:
        """Walk the slots ``[γ, d]`` left to right through the sequential and confidence heads."""
        base = hidden @ self.head.T
        if self.cap:
            base = self.cap * torch.tanh(base / self.cap)
        tokens, rows, confidences = [], [], []
        previous, state = anchor_token, torch.zeros(self.rank)
        for slot in range(self.block_size):
            embedded, latent, state = self._latent(hidden[slot], previous, state)
            if latent is not None:
                base[slot] += self.weights["markov_head.markov_w2.weight"] @ latent
            if self.has_confidence:
                parts = [hidden[slot], embedded] if self.with_markov else [hidden[slot]]
                confidences.append(self._linear(torch.cat(parts), "confidence_head.proj"))  # type: ignore[arg-type]
            previous = int(self.targets[base[slot].argmax()])
            tokens.append(previous)
            rows.append(torch.full((self.vocabulary,), -math.inf).index_copy(0, self.targets, base[slot]))
        confidence = torch.cat(confidences) if confidences else None
        return GreedyBlock(hidden, torch.stack(rows), torch.tensor(tokens), confidence)

    def _latent(
        self, hidden: Tensor, previous: int, state: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Embedding, latent and next state (``[r]`` each) of one slot."""
        if self.kind == "none":
            return None, None, state
        embedded = self.weights["markov_head.markov_w1.weight"][previous]
        if self.kind == "vanilla":
            return embedded, embedded, state
        if self.kind == "gated":
            gate = self._linear(torch.cat([hidden, embedded]), "markov_head.gate_proj")
            return embedded, gate.sigmoid() * embedded, state
        joint = self._linear(torch.cat([state, embedded, hidden]), "markov_head.joint_proj")
        keep, candidate, output = joint.chunk(3)
        keep = keep.sigmoid()
        return embedded, output.tanh(), keep * state + (1 - keep) * candidate.tanh()

    def _heads(self, prefix: str, x: Tensor, positions: Tensor) -> Tensor:
        """Project, norm and rotate: ``[S, d] -> [S, H, h]``."""
        heads = self._norm(
            self._linear(x, prefix + "proj").unflatten(-1, (-1, self.head_dim)), prefix + "norm.weight"
        )
        angles = positions[:, None].float() * self.inverse_frequencies
        cos, sin = (angles.cos() * self.rope_factor)[:, None], (angles.sin() * self.rope_factor)[:, None]
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        product = x @ self.weights[name + ".weight"].T
        bias = self.weights.get(name + ".bias")
        return product if bias is None else product + bias

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self._unit(x) * self.weights[name]

    def _unit(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def _read_all(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, floating ones in float32."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: t.float() if t.dtype.is_floating_point else t for name, t in tensors.items()}


def _windows(layer: dict[str, Any], top: dict[str, Any]) -> list[tuple[float, bool]]:
    """Window (infinite without one) of each layer, and whether its slots see their block up to themselves only.

    As in vLLM: layers with a window are causal unless ``dflash_config.causal`` (``sliding_window_non_causal`` in the
    speculators layout) says otherwise.
    """
    causal = top.get("causal", not top.get("sliding_window_non_causal", False))
    types = layer.get("layer_types") or ["full_attention"] * int(layer["num_hidden_layers"])
    window = float(top.get("swa_window_size", layer.get("sliding_window")) or math.inf)
    if top.get("use_swa") and "sliding_attention" not in types:
        types, causal = ["sliding_attention"] * len(types), top.get("causal", False)
    return [(window, bool(causal)) if kind == "sliding_attention" else (math.inf, False) for kind in types]


def _gemma4_layer(raw: dict[str, Any]) -> dict[str, Any] | None:
    """What a Gemma 4 draft's configuration says of its layers, in Qwen3's names; None for other drafts."""
    if "Gemma4DSparkModel" not in (raw.get("architectures") or []):
        return None
    dtype = getattr(torch, raw["dtype"])
    return raw | {
        "embedding_scale": torch.tensor(float(raw["hidden_size"])).sqrt().to(dtype).item(),
        "head_dim": raw["global_head_dim"],
        "hidden_act": raw["hidden_activation"],
        "rope_parameters": raw["rope_parameters"]["full_attention"],
    }


def _activation(name: str) -> Any:
    """Activation of the feed-forward networks by its name in configurations."""
    if name == "gelu_pytorch_tanh":
        return partial(torch.nn.functional.gelu, approximate="tanh")
    return getattr(torch.nn.functional, name)


def rope_frequencies(settings: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Return inverse frequencies ``[h/2]`` and the factor of cosines and sines.

    Kinds: default; linear; llama3 (Llama 3.1); yarn (Peng et al., 2023); proportional (Gemma 4). Others depend on the
    sequence's length while it grows, which a cached context cannot follow.

    Raises:
        UserError: another kind.
    """
    kind, theta = settings.get("rope_type", "default"), float(settings["rope_theta"])
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / theta**exponents
    if kind == "default":
        return plain, 1.0
    factor = float(settings.get("factor", 1.0))
    if kind == "proportional":
        turned = torch.arange(head_dim // 2) < int(settings.get("partial_rotary_factor", 1.0) * head_dim // 2)
        return plain / factor * turned, 1.0
    if kind == "linear":
        return plain / factor, 1.0
    original = float(settings.get("original_max_position_embeddings") or 0)
    if kind == "llama3":
        low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
        smooth = (original * plain / (2 * math.pi) - low) / (high - low)
        smooth = smooth.clamp(0.0, 1.0)
        return (1 - smooth) * plain / factor + smooth * plain, 1.0
    if kind == "yarn":
        fast, slow = float(settings.get("beta_fast") or 32), float(settings.get("beta_slow") or 1)

        def dimension(rotations: float) -> float:
            return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        ends = dimension(fast), dimension(slow)
        if settings.get("truncate", True):
            ends = math.floor(ends[0]), math.ceil(ends[1])
        low, high = max(ends[0], 0), min(ends[1], head_dim - 1)
        ramp = ((torch.arange(head_dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)

        def magnitude(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        scale, every = settings.get("mscale"), settings.get("mscale_all_dim")
        scale = magnitude(scale) / magnitude(every) if scale and every else magnitude(1.0)
        scale = float(settings.get("attention_factor") or scale)
        return plain / factor * ramp + plain * (1 - ramp), scale
    raise UserError(f"rope_type {kind!r}: a draft supports default, linear, llama3 and yarn")
