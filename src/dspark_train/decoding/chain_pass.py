"""Draft side of a decoding round for drafts that write token by token (Eagle3).

R  requests      S  flat rows of a target pass      V  vocabulary

A row of the cache belongs to a position that the target has read: its features, joined with the token after it. The
output of the last row starts the chain; the chain's own rows lie behind, and are overwritten by true ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_train.decoding.cache import RaggedStep
from dspark_train.decoding.draft_pass import CachedDraft, Proposal
from dspark_train.decoding.layout import RowLayout
from dspark_train.decoding.sampling import SamplingRule, best_token, draw
from dspark_train.draft.eagle3 import Eagle3Draft


class ChainPass(CachedDraft):
    """An Eagle3 draft, which proposes a token at a time.

    As :class:`~dspark_train.decoding.draft_pass.DraftPass`; its rounds always run as they come, since a chain's shapes
    are fixed but for the context.
    """

    def __init__(self, draft: Eagle3Draft, slots: int, length: int) -> None:
        """Prepare; arguments as of :class:`~dspark_train.decoding.draft_pass.DraftPass`."""
        super().__init__(draft, slots, length)
        self.draft = draft
        self.state = draft.fc.weight.new_zeros(slots, draft.config.hidden_size)
        """``[slots, d]``: output of each request's last row."""

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the context of one slot over another."""
        super().move(source, destination, length)
        self.state[destination] = self.state[source]

    def begin(self, features: Tensor, layout: RowLayout, following: Tensor) -> None:
        """Take the prompts of joining requests.

        Args:
            features: ``[S, m·d]`` of the target.
            layout: of the rows.
            following: ``[S]`` int64: the token after each row.
        """
        rows = self._run(self.draft.projected(features), layout, following)
        last = torch.tensor(layout.counts, device=self.device).cumsum(0) - 1
        self._keep(rows[last], layout.first_slot)

    def follow(
        self,
        features: Tensor,
        layout: RowLayout,
        width: int,
        block: Tensor,
        accepted: Tensor,
        following: Tensor,
    ) -> None:
        """Take what a round has verified.

        Args:
            features: ``[S, m·d]`` of the target.
            layout: of the verified rows.
            width: most rows of a request.
            block: ``[R, most rows]`` int64: anchors and the tokens that were verified behind them.
            accepted: ``[R]`` how many of these were accepted.
            following: ``[R]`` int64: the target's own token after them.
        """
        after = torch.cat([block[:, 1:], following[:, None]], dim=1)
        after = after.scatter(1, accepted[:, None], following[:, None])
        tokens = after[layout.slot, layout.offset]
        rows = self._run(self.draft.projected(features), layout, tokens)
        self._keep(rows[layout.grid.gather(1, accepted[:, None])[:, 0]], 0)

    def _keep(self, state: Tensor, first: int) -> None:
        self.state[first : first + state.shape[0]] = state

    def _run(self, state: Tensor, layout: RowLayout, tokens: Tensor) -> Tensor:
        """One pass of the layer over rows with states ``[S, d]`` and tokens ``[S]``: ``[S, d]``."""
        layer, rotation = self.draft.layer, self.draft.rotation(layout.position)
        joined = layer.joined(self.draft.embed(tokens), state)
        key, value = layer.self_attn.keys_values(joined, rotation)
        query = layer.self_attn.queries(joined, rotation)
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        mixed = RaggedStep(self.cache, layout).attend(0, query, key, value, layer.self_attn.scale)
        return layer.finish(state, mixed)

    def propose(
        self,
        anchors: Tensor,
        positions: list[int],
        rule: SamplingRule,
        depth: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """Draw a chain of draft tokens.

        Args:
            anchors: ``[R]`` int64; the rows before them have been taken, and end in a state each.
            positions: of the anchors.
            rule: how tokens are drawn.
            depth: tokens; None is as many as training unrolled.
            generator: source of randomness.
        """
        depth = self.block_size if depth is None else depth
        state, tokens, distributions = self.state[: anchors.shape[0]], [], []
        for step in range(depth):
            logits = self.draft.base_logits(self.draft.hidden(state), self._packed.head)
            if rule.greedy:
                token = best_token(logits)
            else:
                distribution = rule.probabilities(logits)
                token = draw(distribution, generator)
                distributions.append(distribution)
            tokens.append(token)
            if step + 1 < depth:
                starts = [position + step for position in positions]
                layout = RowLayout([1] * len(starts), starts, self.device)
                state = self._run(state, layout, token)
        drawn = torch.stack(tokens, dim=1) if tokens else anchors.new_zeros(anchors.shape[0], 0)
        chances = torch.stack(distributions, dim=1) if distributions else None
        return Proposal(drawn, drawn, chances, None)
