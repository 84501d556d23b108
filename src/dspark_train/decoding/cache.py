"""Ragged key-value cache: static buffers per request, new rows of all requests in one flat pass.

    R  requests (slots of the cache)     S  rows (tokens) of a pass, of all requests, flattened
    H  query heads                       K  key-value heads          h  head size
    C  positions that a slot can hold

A pass brings rows of any number of requests, any number each. Linear layers see the S rows and nothing else;
attention writes each row's key and value at its position of its request's buffer and reads that request's
buffer up to a limit. Nothing is concatenated, and a rejected token is forgotten by being overwritten.

The limit moves in tiles: a row verified among others then adds up the same numbers in the same order as the row that
plain decoding brings alone, and gets the same bits where the products do (in :mod:`dspark_train.target.packed`
those of AMX).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_train.decoding.layout import FixedLayout, RowLayout, whole_tiles


class RaggedCache:
    """Buffers ``[R, K, C, h]`` of keys and of values for every layer, made when a layer first writes."""

    def __init__(self, slots: int, length: int) -> None:
        """Make an empty cache.

        Args:
            slots: requests that fit at once.
            length: positions that must fit in each; rounded up to whole tiles.
        """
        self.slots, self.length = slots, whole_tiles(length)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def buffers(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers of a layer, shaped for keys and values ``[K, .., h]``.

        Zeros, not uninitialised: masked positions are multiplied by zero, and must be finite.
        """
        if layer not in self.keys:
            for store, like in ((self.keys, key), (self.values, value)):
                store[layer] = like.new_zeros(self.slots, like.shape[0], self.length, like.shape[-1])
        return self.keys[layer], self.values[layer]

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot over another."""
        for store in (self.keys, self.values):
            for buffer in store.values():
                buffer[destination, :, :length] = buffer[source, :, :length]

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(b.numel() * b.element_size() for s in (self.keys, self.values) for b in s.values())


class RaggedStep:
    """Attention of one pass: a cache, and where the pass's rows go. Masks are built once and shared by all layers."""

    def __init__(self, cache: RaggedCache, layout: RowLayout | FixedLayout) -> None:
        self.cache, self.layout = cache, layout
        self._masks: dict[tuple[int | None, bool, int], Tensor | None] = {}

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store keys and values ``[K, S, h]`` of all rows."""
        layout = self.layout
        for buffer, new in zip(self.cache.buffers(layer, key, value), (key, value), strict=True):
            if layout.single:
                start = layout.starts[0]
                buffer[layout.first_slot, :, start : start + layout.counts[0]] = new
            else:
                buffer[layout.slot, :, layout.position] = new.transpose(0, 1)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        causal: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store the rows' keys and values, then attend from every row to its own request.

        Args:
            layer: whose buffers.
            query: ``[H, S, h]``, rotated.
            key: ``[K, S, h]``, rotated.
            value: ``[K, S, h]``.
            scale: factor of the scores.
            window: positions that a row sees, its own included; None is all.
            softcap: scores are squashed to ``cap · tanh(score / cap)``.
            causal: rows of a block see it up to themselves only; other rows always do.
            sinks: ``[H]`` scores of a position of each head that has no value: they take their part of the weights.

        Returns:
            ``[S, H, h]``.
        """
        self.write(layer, key, value)
        layout, reach = self.layout, self.layout.reach
        slots = slice(layout.first_slot, layout.first_slot + layout.requests)
        keys = self.cache.keys[layer][slots, :, :reach]
        values = self.cache.values[layer][slots, :, :reach]
        heads, groups = query.shape[0], query.shape[0] // key.shape[0]
        if layout.single:
            if sinks is None and self._is_prefill(window, softcap):
                own = layout.counts[0]
                mixed = F.scaled_dot_product_attention(
                    query[None],
                    keys[:, :, :own],
                    values[:, :, :own],
                    is_causal=True,
                    scale=scale,
                    enable_gqa=groups > 1,
                )
                return mixed[0].transpose(0, 1)
            grid = query[None]
        else:
            grid = query[:, layout.grid].transpose(0, 1)
        width = grid.shape[2]
        folded = grid.reshape(layout.requests, -1, groups * width, grid.shape[-1])
        mask = self._mask(window, causal, groups, query.dtype)
        if sinks is not None:  # [H] -> [1, K, groups · width, 1], as the queries are folded
            sinks = sinks.view(1, -1, groups, 1).expand(-1, -1, -1, width).reshape(1, -1, groups * width, 1)
        mixed = _attention(folded, keys, values, mask, scale, softcap, sinks)
        mixed = mixed.view(layout.requests, heads, width, -1)
        if layout.single:
            return mixed[0].transpose(0, 1)
        return mixed.transpose(1, 2).flatten(0, 1)[layout.cell]

    def _is_prefill(self, window: int | None, softcap: float | None) -> bool:
        layout = self.layout
        whole = window is None or window >= layout.counts[0]
        fresh = layout.starts[0] == 0 and layout.counts[0] > 1 and not layout.block
        return fresh and whole and softcap is None

    def _mask(self, window: int | None, causal: bool, groups: int, dtype: torch.dtype) -> Tensor | None:
        """``[R, 1, groups · max count, reach]``."""
        key = (window, causal, groups)
        if key not in self._masks:
            mask = self.layout.mask(window, dtype, causal)
            self._masks[key] = mask if mask is None else mask.repeat(1, groups, 1)[:, None]
        return self._masks[key]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores if mask is None else scores + mask).float()
    if sinks is not None:
        sink = sinks.float().expand(scores.shape[0], -1, -1, -1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[-2]].to(query.dtype)
    return weights @ value
