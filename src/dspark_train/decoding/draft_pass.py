"""Draft side of a decoding round: cached context, one parallel pass, the walk of the sequential head.

R  requests      γ  block size      S  flat rows of a target pass      U  vocabulary of the draft
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from dspark_train.decoding.cache import RaggedCache, RaggedStep
from dspark_train.decoding.layout import FixedLayout, RowLayout
from dspark_train.decoding.programs import Outputs, Programs, compiled, padded_requests
from dspark_train.decoding.sampling import SamplingRule, best_token, draw
from dspark_train.draft.config import Sight
from dspark_train.draft.kinds import Draft
from dspark_train.draft.model import DSparkDraft
from dspark_train.target.packed import packed_linears

_SAME_INPUT = (("k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Neighbouring layers that read the same states; queries are not asked of the context."""


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one round; the first ``depth ≤ γ`` slots only, where later ones can never be verified."""

    tokens: Tensor
    """``[R, depth]`` int64, target ids."""
    indices: Tensor
    """``[R, depth]`` int64, draft ids (equal to ``tokens`` unless the draft's vocabulary is reduced)."""
    probabilities: Tensor | None
    """``[R, depth, U]`` float32: what each token was really drawn from. None when greedy (one-hot)."""
    confidence_logits: Tensor | None
    """``[R, depth]`` float32, raw. None without a confidence head."""


class CachedDraft:
    """A draft with the cached keys and values of every request's context.

    While entered, the draft's products use packed weights where that is faster.
    """

    def __init__(self, draft: Draft, slots: int, length: int, groups: Sequence[tuple[str, ...]] = ()) -> None:
        """Prepare.

        Args:
            draft: used as it is, on its device, in its dtype.
            slots: requests that the cache holds.
            length: positions that fit in each.
            groups: names of neighbouring layers that read the same states, for packing.
        """
        self.block_size = draft.config.block_size
        self.device = draft.fc.weight.device
        self.cache = RaggedCache(slots, length)
        self._packed = packed_linears(draft, draft.head_weight, groups)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._packed)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the context of one slot over another."""
        self.cache.move(source, destination, length)


class DraftPass(CachedDraft):
    """A draft that proposes a block in one pass. Block slots are never kept."""

    def __init__(
        self,
        draft: DSparkDraft,
        slots: int,
        length: int,
        programs: Programs | None = None,
        compile: bool = False,
    ) -> None:
        """Prepare.

        Args:
            draft: the draft; used as it is, on its device, in its dtype.
            slots: requests that fit at once.
            length: positions that fit in each, context and block together.
            programs: runs rounds in fixed shapes; None runs every pass as it is.
            compile: compile what lies between the products.
        """
        rows = slots if programs is None else slots + 1  # one for rows of padding
        super().__init__(draft, rows, length, _SAME_INPUT)
        self.draft = draft
        self._programs, self._compile = programs, compile
        self._token_ids = draft.draft_token_ids

    def __enter__(self) -> Self:
        super().__enter__()
        if self._compile:
            self._stack.enter_context(compiled(self.draft))
        return self

    def begin(self, features: Tensor, layout: RowLayout, following: Tensor) -> None:
        """Take the prompts of joining requests: :meth:`append`, whatever the tokens ``[S]`` after each row are."""
        self.append(features, layout)

    def follow(
        self,
        features: Tensor,
        layout: RowLayout,
        width: int,
        block: Tensor,
        accepted: Tensor,
        following: Tensor,
    ) -> None:
        """Take what a round has verified: :meth:`append_verified`, whatever was accepted."""
        self.append_verified(features, layout, width)

    def append(self, features: Tensor, layout: RowLayout | FixedLayout) -> None:
        """Add context: the target's features ``[S, m·d]`` at the rows of ``layout``.

        Rows of tokens that verification rejected may be among them: they lie at or after the next anchor,
        where no block looks, and are overwritten.
        """
        context = self.draft.context(features)
        rotation = self.draft.rotation(layout.position)
        step = RaggedStep(self.cache, layout)
        for index, layer in enumerate(self.draft.layers):
            key, value = layer.self_attn.keys_values(context, rotation)
            step.write(index, key.transpose(0, 1), value.transpose(0, 1))

    def append_verified(self, features: Tensor, layout: RowLayout, width: int) -> None:
        """Add the context of a round, no request more than ``width`` rows, in fixed shapes where asked for."""
        programs = self._programs
        if programs is None:
            return self.append(features, layout)
        fixed = programs.place(layout, width, self.cache.length)

        def run(features: Tensor) -> Outputs:
            self.append(features, fixed)
            return ()

        programs.run("context", id(fixed), run, (features, fixed.rows))

    def hidden(self, anchors: Tensor, positions: list[int]) -> Tensor:
        """Run the parallel pass.

        Args:
            anchors: ``[R]`` int64 last committed token of each request.
            positions: its position; the context before it has been appended.

        Returns:
            ``[R, γ, d]`` states after the final norm.
        """
        slots = self.block_size
        layout = RowLayout([slots] * len(positions), positions, self.device, block=True)
        if self._programs is None:
            return self._hidden(anchors, layout)
        fixed = self._programs.place(layout, slots, self.cache.length)
        (hidden,) = self._programs.run(
            "draft", id(fixed), lambda anchors: (self._hidden(anchors, fixed),), (anchors, fixed.requests)
        )
        assert hidden is not None
        return hidden[: anchors.shape[0]]

    def _hidden(self, anchors: Tensor, layout: RowLayout | FixedLayout) -> Tensor:
        ids = anchors.new_full((anchors.shape[0], self.block_size), self.draft.config.mask_token_id)
        ids[:, 0] = anchors
        rotation = self.draft.rotation(layout.position.view(ids.shape))
        step = RaggedStep(self.cache, layout)
        x = self.draft.embed(ids)
        for index, (layer, sight) in enumerate(zip(self.draft.layers, self.draft.config.sights, strict=True)):
            x = layer(x, rotation, partial(_attend, step, index, layer.self_attn.scale, sight))
        return self.draft.norm(x)

    def walk(
        self, hidden: Tensor, anchors: Tensor, rule: SamplingRule, generator: torch.Generator | None = None
    ) -> Proposal:
        """Draw the tokens of each block from left to right.

        Args:
            hidden: ``[R, depth, d]`` states of the first slots.
            anchors: ``[R]`` int64.
            rule: how tokens are drawn.
            generator: source of randomness.
        """
        programs, requests = self._programs, anchors.shape[0]
        hidden = hidden.contiguous()  # a CPU's plain product of rows that lie apart is far slower
        if programs is None:
            return self._walk(hidden, anchors, rule, generator)

        def run(hidden: Tensor, anchors: Tensor) -> Outputs:
            made = self._walk(hidden, anchors, rule, generator)
            return made.tokens, made.indices, made.probabilities, made.confidence_logits

        size = padded_requests(requests, programs.slots)
        outputs = programs.run("walk", rule, run, (hidden, size), (anchors, size))
        tokens, indices, *others = (None if output is None else output[:requests] for output in outputs)
        assert tokens is not None
        assert indices is not None
        return Proposal(tokens, indices, *others)

    def _walk(
        self, hidden: Tensor, anchors: Tensor, rule: SamplingRule, generator: torch.Generator | None
    ) -> Proposal:
        draft, head = self.draft, self.draft.markov_head
        base = draft.base_logits(hidden, self._packed.head)
        previous, state = anchors, None
        indices, tokens, distributions = [], [anchors], []
        for slot in range(hidden.shape[1]):
            logits = base[:, slot]
            if head is not None:
                latent, state = head.step(hidden[:, slot], previous, state)
                logits = logits + draft.bias(latent).to(logits.dtype)
            if rule.greedy:
                index = best_token(logits)
            else:
                distribution = rule.probabilities(logits)
                index = draw(distribution, generator)
                distributions.append(distribution)
            previous = index if self._token_ids is None else self._token_ids[index]
            indices.append(index)
            tokens.append(previous)
        drawn = torch.stack(tokens, dim=1)
        confidence = draft.confidence(hidden, drawn[:, :-1])
        return Proposal(
            tokens=drawn[:, 1:],
            indices=torch.stack(indices, dim=1) if indices else drawn[:, 1:],
            probabilities=torch.stack(distributions, dim=1) if distributions else None,
            confidence_logits=None if confidence is None else confidence.float(),
        )

    def propose(
        self,
        anchors: Tensor,
        positions: list[int],
        rule: SamplingRule,
        depth: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """Parallel pass and walk: draft tokens after ``anchors [R]`` at ``positions``."""
        hidden = self.hidden(anchors, positions)
        return self.walk(hidden[:, :depth], anchors, rule, generator)


def _attend(
    step: RaggedStep, layer: int, scale: float, sight: Sight, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    query_rows, key_rows, value_rows = (heads.flatten(0, 1).transpose(0, 1) for heads in (query, key, value))
    mixed = step.attend(
        layer, query_rows, key_rows, value_rows, scale, window=sight.window, causal=sight.causal
    )
    return mixed.view(query.shape)
