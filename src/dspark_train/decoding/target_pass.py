"""Passes of the frozen target over flat rows of many requests (letters: :mod:`dspark_train.decoding.cache`).

The target stays a Hugging Face model. While a :class:`TargetPass` is open its layers call an attention
function of this project, which keeps the keys and values in a :class:`RaggedCache`; the model itself keeps
none.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AttentionInterface

from dspark_train.decoding.cache import RaggedCache, RaggedStep
from dspark_train.decoding.layout import FixedLayout, RowLayout
from dspark_train.decoding.programs import Programs, compiled
from dspark_train.errors import UserError
from dspark_train.target.frozen import FrozenTarget
from dspark_train.target.packed import packed_linears

ATTENTION = "dspark_ragged"
"""Name under which the attention function is registered with Hugging Face."""

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Neighbouring layers of Hugging Face decoders that read the same states."""


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    ragged: RaggedStep | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in the calling convention of Hugging Face layers.

    Args:
        module: attention module; its ``layer_idx`` names the buffers.
        query: ``[1, H, S, h]``.
        key: ``[1, K, S, h]``.
        value: ``[1, K, S, h]``.
        attention_mask: none is built for this attention.
        ragged: the pass, handed through the model's keyword arguments.
        scaling: factor of the scores; None is ``h ** -0.5``.
        sliding_window: positions that a row sees; None is all.
        softcap: of the scores.
        s_aux: ``[H]`` attention sinks.
        kwargs: whatever else the model hands over.

    Returns:
        ``[1, S, H, h]``, and no weights.
    """
    if ragged is None:
        raise UserError(
            f"{type(module).__name__} does not hand keyword arguments to its attention: this target's code cannot be "
            "decoded here"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    mixed = ragged.attend(layer, query[0], key[0], value[0], scale, sliding_window, softcap, sinks=s_aux)
    return mixed[None].contiguous(), None


AttentionInterface.register(ATTENTION, ragged_attention)


class TargetPass:
    """The target with a ragged cache of its own; a context manager that leaves the model as it was.

    Not an inference session: whoever owns it says which rows go where.
    """

    def __init__(
        self,
        target: FrozenTarget,
        slots: int,
        length: int,
        features: bool,
        programs: Programs | None = None,
        compile: bool = False,
    ) -> None:
        """Prepare.

        Args:
            target: frozen target.
            slots: requests that fit at once.
            length: positions that fit in each.
            features: whether tapped layers are collected (plain decoding needs none).
            programs: runs verification in fixed shapes; None runs every pass as it is.
            compile: compile what lies between the products.
        """
        self.target = target
        self.cache = RaggedCache(slots if programs is None else slots + 1, length)  # one for rows of padding
        self._features, self._programs, self._compile = features, programs, compile
        self._tapped: dict[int, Tensor] = {}
        self._packed = packed_linears(target.model, groups=_SAME_INPUT)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        config = self.target.decoder.config
        before = config._attn_implementation
        config._attn_implementation = ATTENTION
        self._stack.callback(setattr, config, "_attn_implementation", before)
        self._stack.enter_context(self._packed)
        if self._compile:
            self._stack.enter_context(compiled(self.target.decoder))
        if self._features:
            self._tapped = self._stack.enter_context(self.target.tap())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __call__(self, ids: Tensor, layout: RowLayout | FixedLayout) -> tuple[Tensor, Tensor | None]:
        """Run new rows.

        Args:
            ids: ``[S]`` int64 tokens.
            layout: where they belong.

        Returns:
            Last hidden states ``[S, d]`` and, where collected, features ``[S, m·d]``.
        """
        output = self.target.decoder(
            input_ids=ids[None],
            position_ids=layout.position[None],
            use_cache=False,
            ragged=RaggedStep(self.cache, layout),
        )
        features = self.target.concatenate(self._tapped)[0] if self._features else None
        return output.last_hidden_state[0], features

    def verify(self, ids: Tensor, layout: RowLayout, width: int) -> tuple[Tensor, Tensor | None]:
        """Run rows of a round, no request more than ``width``: as calling does, in fixed shapes where asked for."""
        programs = self._programs
        if programs is None:
            return self(ids, layout)
        fixed = programs.place(layout, width, self.cache.length)
        hidden, features = programs.run("target", id(fixed), lambda ids: self(ids, fixed), (ids, fixed.rows))
        assert hidden is not None
        rows = ids.shape[0]
        return hidden[:rows], None if features is None else features[:rows]
