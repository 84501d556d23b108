"""Eagle3: a draft of one layer that writes token by token, trained on its own states.

K  steps of an unrolled pass (``ttt_length``); other letters: :mod:`dspark_train.structures`.

A row joins the token at ``t + 1`` with a state of position ``t``: the target's features first, later the layer's own
output. From there it predicts the token at ``t + 2``. Training unrolls K steps ("training-time test"): step k reads
what step k − 1 gave, and sees the true context up to its row plus its own earlier steps, as in decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark_train.draft.config import EVERYTHING, Sight
from dspark_train.draft.families import LAYER_FAMILIES
from dspark_train.draft.layers import DraftAttention, DraftMLP, RMSNorm
from dspark_train.draft.vocabulary import TargetBound
from dspark_train.errors import UserError
from dspark_train.structures import Blocks, DraftOutput
from dspark_train.target.frozen import FrozenTarget

ARCHITECTURE = "Qwen3Eagle3Model"
CHUNK = 128
"""Query rows whose scores are held at once."""


class Eagle3Config(Qwen3Config):
    """Configuration of an :class:`Eagle3Draft`: the target's Qwen3 fields, and these.

    Args:
        target_layer_ids: tapped layers of the target.
        num_target_layers: decoder layers of the target.
        ttt_length: K, steps of training and longest chain of decoding.
        step_loss_decay: of the reference's recipe, for its readers; training weighs by ``objective.decay``.
        embedding_scale: factor of the target's token embeddings.
        final_logit_softcapping: the target's; None caps nothing.
    """

    def __init__(
        self,
        target_layer_ids: Sequence[int] = (),
        num_target_layers: int | None = None,
        ttt_length: int = 7,
        step_loss_decay: float = 0.8,
        embedding_scale: float = 1.0,
        final_logit_softcapping: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.target_layer_ids = list(target_layer_ids)
        self.num_target_layers = num_target_layers
        self.ttt_length = ttt_length
        self.step_loss_decay = step_loss_decay
        self.embedding_scale = embedding_scale
        self.final_logit_softcapping = final_logit_softcapping
        super().__init__(**kwargs)

    mask_token_id = 0
    """No slot of its is masked; what a block is filled with is not read."""
    markov_rank = 0
    enable_confidence_head = False
    attention_k_eq_v = False
    family = LAYER_FAMILIES["qwen3"]

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Tapped layers."""
        return tuple(self.target_layer_ids)

    @property
    def block_size(self) -> int:
        """Tokens that a round proposes at most."""
        return self.ttt_length

    @property
    def draft_vocabulary(self) -> int:
        """U: rows of the draft's logits."""
        return int(self.vocab_size)

    @property
    def sights(self) -> tuple[Sight, ...]:
        """What rows see, layer by layer: everything before them."""
        return (EVERYTHING,)

    def check(self) -> None:
        """Refuse what cannot work.

        Raises:
            UserError: names every problem.
        """
        wrong = []
        if self.num_hidden_layers != 1:
            wrong.append(f"num_hidden_layers {self.num_hidden_layers} must be 1: its chain feeds one layer")
        if not self.target_layer_ids or min(self.target_layer_ids, default=0) < 0:
            wrong.append(f"target_layer_ids {self.target_layer_ids} must name decoder layers, from 0 on")
        if self.ttt_length < 1:
            wrong.append(f"ttt_length {self.ttt_length} must be at least 1")
        if not 0 < self.step_loss_decay <= 1:
            wrong.append(f"step_loss_decay {self.step_loss_decay} must be above 0 and at most 1")
        if wrong:
            raise UserError(f"draft: {'; '.join(wrong)}")


class Eagle3Layer(nn.Module):
    """The one decoder layer: attention over embeddings and states side by side, ``2d`` wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn = DraftAttention(config, inputs=2 * size)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(size, config.rms_norm_eps)

    def joined(self, embedded: Tensor, state: Tensor) -> Tensor:
        """``[.., d]`` embeddings and states to the attention's input ``[.., 2d]``."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], dim=-1)

    def finish(self, state: Tensor, mixed: Tensor) -> Tensor:
        """Add attention's output ``[.., H, h]`` to the states ``[.., d]``, and the feed-forward network's."""
        state = state + self.self_attn.o_proj(mixed.flatten(-2))
        return state + self.mlp(self.post_attention_layernorm(state))


class Eagle3Draft(TargetBound):
    """An Eagle3 draft for one target; embedding and LM head are the target's, frozen."""

    config: Eagle3Config
    layers: Any
    config_class = Eagle3Config
    base_model_prefix = ""
    main_input_name = "features"
    _no_split_modules = ["Eagle3Layer"]  # noqa: RUF012 (the base class declares it)

    confidence_head = None
    markov_head = None

    def __init__(self, config: Eagle3Config, target: FrozenTarget | None = None) -> None:
        super().__init__(config)
        config.check()
        size = config.hidden_size
        self.fc = nn.Linear(len(config.layer_ids) * size, size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)
        self.borrowed = None
        if target is None:
            self.make_copies()
        self.post_init()
        self._freeze_copies()
        if target is not None:
            self.borrow(target)

    @property
    def layer(self) -> Eagle3Layer:
        """The layer."""
        layer: Eagle3Layer = self.layers[0]
        return layer

    def forward(self, features: Tensor, blocks: Blocks, input_ids: Tensor) -> DraftOutput:
        """Training pass: every row is unrolled, and a block's slots are the K steps of the row before its anchor.

        Args:
            features: ``[B, T, m·d]`` of the target.
            blocks: N packed blocks; slot k of the block anchored at n is step k of row ``n − 1``.
            input_ids: ``[B, T]``, right-padded.
        """
        states = self.unroll(features, input_ids)
        hidden = states[:, blocks.sequence, blocks.anchor - 1].transpose(0, 1)
        return DraftOutput(self.norm(hidden), None, None)

    def unroll(self, features: Tensor, input_ids: Tensor) -> Tensor:
        """K unrolled steps over every row.

        Args:
            features: ``[B, T, m·d]`` of the target.
            input_ids: ``[B, T]``, right-padded.

        Returns:
            ``[K, B, T, d]`` states before the final norm. Row t of step k predicts the token at ``t + 2 + k``; rows
            whose tokens lie past the sequence mean nothing.
        """
        length = input_ids.shape[1]
        state, states = self.projected(features), []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        attention = self.layer.self_attn
        for step in range(self.config.ttt_length):
            ids = torch.zeros_like(input_ids)
            ids[:, : max(0, length - 1 - step)] = input_ids[:, 1 + step :]
            rotation = self.rotation(torch.arange(step, length + step, device=ids.device))
            joined = self.layer.joined(self.embed(ids), state)
            key, value = attention.keys_values(joined, rotation)
            keys.append(key)
            values.append(value)
            mixed = unrolled_attention(attention.queries(joined, rotation), keys, values, attention.scale)
            state = self.layer.finish(state, mixed)
            states.append(state)
        return torch.stack(states)

    def hidden(self, state: Tensor) -> Tensor:
        """States ``[.., d]`` as the LM head reads them."""
        return self.norm(state)


def unrolled_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float
) -> Tensor:
    """Attention of one unrolled step: the context up to the row, and the row's own later steps.

    Scores exist for a chunk of rows at a time, and are computed again for the gradient.

    Args:
        query: ``[B, T, H, h]`` of step k.
        keys: of steps 0 to k, ``[B, T, K, h]`` each. Those of step 0 are seen up to the row, later ones at the row.
        values: likewise.
        scale: factor of the scores.

    Returns:
        ``[B, T, H, h]``.
    """
    chunks = []
    for start in range(0, query.shape[1], CHUNK):
        rows = slice(start, min(start + CHUNK, query.shape[1]))
        own = [tensor[:, rows] for tensor in (query, *keys[1:], *values[1:])]
        context = (keys[0][:, : rows.stop], values[0][:, : rows.stop])
        chunks.append(checkpoint(_attend, start, scale, *context, *own, use_reentrant=False))
    return torch.cat(chunks, dim=1)


def _attend(start: int, scale: float, key: Tensor, value: Tensor, query: Tensor, *own: Tensor) -> Tensor:
    """Scores of ``query [B, S, H, h]`` (rows from ``start`` on) over the context and over its own later steps."""
    groups = query.shape[2] // key.shape[2]
    kind = torch.promote_types(query.dtype, torch.float32)

    def wide(tensor: Tensor) -> Tensor:  # [B, S, K, h] -> [B, H, S, h]
        return tensor.repeat_interleave(groups, dim=2).transpose(1, 2).to(kind)

    asked = query.transpose(1, 2).to(kind)
    with torch.autocast(query.device.type, enabled=False):
        scores = asked @ wide(key).transpose(-1, -2) * scale
        row = torch.arange(start, start + query.shape[1], device=query.device)
        later = torch.arange(key.shape[1], device=query.device) > row[:, None]
        scores = scores.masked_fill(later, float("-inf"))
        steps = len(own) // 2
        mine = [(asked * wide(k)).sum(-1, keepdim=True) * scale for k in own[:steps]]
        shares = torch.cat([scores, *mine], dim=-1).softmax(-1)
        mixed = shares[..., : key.shape[1]] @ wide(value)
        for place, v in enumerate(own[steps:], key.shape[1]):
            mixed = mixed + shares[..., place : place + 1] * wide(v)
    return mixed.transpose(1, 2).to(query.dtype)
