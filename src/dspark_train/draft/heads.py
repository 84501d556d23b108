"""Sequential heads and the confidence head (shape legend: :mod:`dspark_train.structures`).

Every sequential head is a latent ``z`` of rank ``r`` and one shared projection: the bias of a slot's logits is
``W2 z``. With ``E = W1[previous token]``:

    vanilla   z = E
    gated     z = σ(W_g [h ; E] + b_g) ⊙ E
    rnn       [g, c, o] = W [s ; E ; h] + b;  s ← σ(g) ⊙ s + (1 − σ(g)) ⊙ tanh(c);  z = tanh(o)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark_train.draft.config import DSparkConfig


class SequentialHead(nn.Module):
    """The part of the draft that makes each token depend on the one before."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, size = config.markov_rank, config.hidden_size
        self.rank, self.kind = rank, config.head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocabulary, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def step(self, hidden: Tensor, previous: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Advance by one slot.

        Args:
            hidden: ``[.., d]`` states of the slot.
            previous: ``[..]`` token before the one that the slot predicts.
            state: ``[.., r]`` recurrent state; None at the first slot and for heads without one.

        Returns:
            Latent ``[.., r]`` and the next state.
        """
        return self._advance(hidden, self.markov_w1(previous), state)

    def _advance(
        self, hidden: Tensor, embedded: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.kind == "vanilla":
            return embedded, None
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat([hidden.to(embedded.dtype), embedded], dim=-1))
            return torch.sigmoid(gate) * embedded, None
        if state is None:
            state = torch.zeros_like(embedded)
        joint = self.joint_proj(torch.cat([state, embedded, hidden.to(embedded.dtype)], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Latents of whole blocks under teacher forcing.

        Args:
            hidden: ``[N, γ, d]`` states of the slots.
            embedded: ``[N, γ, r]`` Markov embeddings of the tokens before.

        Returns:
            ``[N, γ, r]``.
        """
        if self.kind != "rnn":
            return self._advance(hidden, embedded, None)[0]
        state, latents = None, []
        for slot in range(hidden.shape[1]):
            latent, state = self._advance(hidden[:, slot], embedded[:, slot], state)
            latents.append(latent)
        return torch.stack(latents, dim=1)


class ConfidenceHead(nn.Module):
    """Probability that a draft token is accepted, given that all before it were."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """Logits ``[..]`` from states ``[.., d]`` and, where wired, the Markov embedding ``[.., r]``."""
        if self.with_markov and embedded is not None:
            hidden = torch.cat([hidden, embedded.to(hidden.dtype)], dim=-1)
        return self.proj(hidden).squeeze(-1)
