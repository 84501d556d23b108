"""Passes of the frozen target over its own Hugging Face cache, one request at a time.

For every target whose state is more than the keys and values of softmax attention (linear attention, state spaces,
convolutions, compressed or selected keys), or whose attention is its own code. Nothing is known of the cache but that
it can be copied. A copy is kept at the first row of every pass; where rows are rejected, the next pass starts from the
copy and runs the accepted ones again, before its own.

Slower than the ragged pass: requests do not share products, and accepted rows are run twice after a rejection.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from dspark_train.decoding.layout import RowLayout
from dspark_train.errors import UserError
from dspark_train.target.frozen import FrozenTarget
from dspark_train.target.packed import packed_linears

REPLAY = 16
"""Accepted rows that are run again together with new ones, at most; more are run before them."""

_CACHES = ("cache", "past_key_values", "cache_params", "state")
"""Names by which Hugging Face decoders take a cache and give it back."""


@dataclass
class Slot:
    """What the target holds of one request."""

    tokens: list[int] = field(default_factory=list)
    """All that its cache has seen."""
    cache: Any = None
    """The model's own; None before the first token."""
    kept: dict[int, Any] = field(default_factory=dict)
    """Copies of the cache by the number of tokens that they have seen."""

    def back_to(self, start: int) -> list[int]:
        """Forget all but the first ``start`` tokens; returns those that the cache must be given again."""
        if start < len(self.tokens):
            place = max((at for at in self.kept if at <= start), default=0)
            self.cache = self.kept.get(place)
        else:
            place = len(self.tokens)
        again = self.tokens[place:start]
        # positions that were never given hold token 0: a profile measures a context that it does not compute
        again += [0] * (start - place - len(again))
        self.tokens, self.kept = self.tokens[:place], {}
        return again


class SlotCaches:
    """The slots of a :class:`GeneralPass`."""

    def __init__(self, slots: int, length: int) -> None:
        self.slots = [Slot() for _ in range(slots)]
        self.length = length

    def move(self, source: int, destination: int, length: int) -> None:
        """Give one slot's request to another; ``length`` is of the interface."""
        self.slots[destination], self.slots[source] = self.slots[source], Slot()


class GeneralPass:
    """The target with its own cache for each request; a context manager that leaves the model as it was."""

    def __init__(
        self, target: FrozenTarget, slots: int, length: int, features: bool, by_token: bool = False
    ) -> None:
        """Prepare.

        Args:
            target: frozen target.
            slots: requests that fit at once.
            length: positions that fit in each; its own cache grows as it needs.
            features: whether tapped layers are collected (plain decoding needs none).
            by_token: after a request's first pass run its rows one by one: for models that take several rows only
                into an empty cache.

        Raises:
            UserError: the model's decoder takes no cache.
        """
        self.target, self.by_token = target, by_token
        self.cache = SlotCaches(slots, length)
        self._features = features
        takes = inspect.signature(target.decoder.forward).parameters
        names = [name for name in _CACHES if name in takes]
        if not names:
            raise UserError(f"{target.name} takes no cache: it cannot be decoded here")
        self._name, self._positions = names[0], "position_ids" in takes
        self._tapped: dict[int, Tensor] = {}
        self._packed = packed_linears(target.model)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._packed)
        if self._features:
            self._tapped = self._stack.enter_context(self.target.tap())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __call__(self, ids: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor | None]:
        """Run new rows.

        Args:
            ids: ``[S]`` int64 tokens.
            layout: where they belong.

        Returns:
            Last hidden states ``[S, d]`` and, where collected, features ``[S, m·d]``.
        """
        hidden: list[Tensor] = []
        features: list[Tensor] = []
        rows = ids.tolist()
        for index, (count, start) in enumerate(zip(layout.counts, layout.starts, strict=True)):
            own, rows = rows[:count], rows[count:]
            slot = self.cache.slots[layout.first_slot + index]
            again = slot.back_to(start)
            if (
                len(again) > REPLAY
            ):  # a copy nearer to the end, or every rejection would lengthen the next replay
                self._run(slot, again, keep=False)
                again = []
            outputs = self._run(slot, again + own, keep=count > 1)
            hidden.append(outputs[0][-count:])
            if outputs[1] is not None:
                features.append(outputs[1][-count:])
        return torch.cat(hidden), torch.cat(features) if self._features else None

    def verify(self, ids: Tensor, layout: RowLayout, width: int) -> tuple[Tensor, Tensor | None]:
        """Run rows of a round, as calling does; ``width`` is of the interface."""
        return self(ids, layout)

    def _run(self, slot: Slot, tokens: list[int], keep: bool) -> tuple[Tensor, Tensor | None]:
        """Give tokens to a slot's cache: hidden states ``[S, d]`` and features; ``keep`` copies for a return."""
        step = 1 if self.by_token and slot.tokens else len(tokens)
        hidden: list[Tensor] = []
        features: list[Tensor] = []
        for at in range(0, len(tokens), step):
            part = tokens[at : at + step]
            if keep and slot.tokens:
                slot.kept[len(slot.tokens)] = copied(slot.cache)
            arguments: dict[str, Any] = {self._name: slot.cache}
            device, seen = self.target.device, len(slot.tokens)
            if self._positions:
                arguments["position_ids"] = torch.arange(seen, seen + len(part), device=device)[None]
            ids = torch.tensor([part], device=device)
            output = self.target.decoder(input_ids=ids, use_cache=True, **arguments)
            slot.cache = output.get(self._name)
            if slot.cache is None:
                raise UserError(
                    f"{self.target.name} gives no cache back: it keeps its state where it cannot be copied"
                )
            slot.tokens = slot.tokens + part
            hidden.append(output.last_hidden_state[0])
            if self._features:
                features.append(self.target.concatenate(self._tapped)[0])
        return torch.cat(hidden), torch.cat(features) if self._features else None


def copied(cache: Any) -> Any:
    """Copy of a cache that later passes leave alone; keys and values that are never written in place are shared."""
    layers = [one for one in getattr(cache, "layers", []) if isinstance(one, DynamicLayer)]
    shared = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return copy.deepcopy(cache, {id(tensor): tensor for tensor in shared if isinstance(tensor, Tensor)})
