"""What passes between the steps of the pipeline: small frozen dataclasses of tensors.

Shape legend, used by every docstring of the package:

    B  sequences of a batch            T  padded length of a batch, in tokens
    d  hidden size of the target       m  number of tapped target layers
    V  vocabulary of the target        U  vocabulary of the draft (U = V unless reduced)
    N  draft blocks of a batch         γ  block size: slots, and so draft tokens, per block
    r  rank of the sequential head     R  decoding rounds of a trace
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor


class TensorStruct:
    """Base of the dataclasses below: moves every tensor field, leaves the other fields alone."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return a copy whose tensors live on ``device``; dtypes are never changed."""
        moved = {
            field.name: value.to(device, non_blocking=non_blocking)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if isinstance(value := getattr(self, field.name), Tensor | TensorStruct)
        }
        return dataclasses.replace(self, **moved)  # type: ignore[type-var]

    def pin_memory(self) -> Self:
        """Return a copy whose tensors lie in page-locked memory of the host, from which copies need not wait."""
        pinned = {
            field.name: value.pin_memory()
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if isinstance(value := getattr(self, field.name), Tensor | TensorStruct)
        }
        return dataclasses.replace(self, **pinned)  # type: ignore[type-var]


@dataclass(frozen=True)
class TokenBatch(TensorStruct):
    """Right-padded sequences. Padding ids are arbitrary valid ids; nothing reads them."""

    input_ids: Tensor
    """``[B, T]`` int64."""
    lengths: Tensor
    """``[B]`` int64: tokens of each sequence."""
    loss_mask: Tensor
    """``[B, T]`` bool: tokens that the target generated (answers and their end token)."""
    sample_ids: Tensor
    """``[B]`` int64: index of each sequence in its data set; anchors are drawn from (seed, epoch, sample)."""


@dataclass(frozen=True)
class TargetStates(TensorStruct):
    """What the frozen target says about a batch."""

    features: Tensor
    """``[B, T, m·d]``: tapped residual streams, concatenated in the order of the layer ids."""
    last_hidden: Tensor
    """``[B, T, d]``: after the final norm; ``target.lm_head(last_hidden)`` are the target's logits."""
    logsumexp: Tensor | None = None
    """``[B, T]`` fp32: log-sum-exp of the full logits, NaN where no slot can ask for it; None where not known."""


@dataclass(frozen=True)
class Blocks(TensorStruct):
    """The packed draft blocks of a batch: N real ones, sorted by sequence then anchor; no dummies.

    Slot ``k`` (0-based) of a block with anchor position ``n`` sits at position ``n + k`` and predicts the token
    at ``n + k + 1``.
    """

    sequence: Tensor
    """``[N]`` int64: row of the batch."""
    anchor: Tensor
    """``[N]`` int64: anchor position ``n``; the block sees context positions ``< n`` only."""
    slot_ids: Tensor
    """``[N, γ]`` int64: the anchor token, then mask tokens."""
    labels: Tensor
    """``[N, γ]`` int64: the data token at ``n + k + 1`` (0 where unsupervised)."""
    previous: Tensor
    """``[N, γ]`` int64: the token before the predicted one: the anchor token, then ``labels`` shifted by one."""
    supervised: Tensor
    """``[N, γ]`` bool: a contiguous prefix of every block."""

    @property
    def positions(self) -> Tensor:
        """``[N, γ]`` int64: true positions of the slots."""
        return self.anchor[:, None] + torch.arange(self.slot_ids.shape[1], device=self.anchor.device)


@dataclass(frozen=True)
class TrainingBatch(TensorStruct):
    """A micro-batch and the denominator of the global batch that it belongs to."""

    tokens: TokenBatch
    blocks: Blocks
    global_weight: float
    """Σ w over the supervised slots of the whole global batch: all ranks, all accumulated micro-batches."""


@dataclass(frozen=True)
class DraftOutput(TensorStruct):
    """One parallel pass of the draft over its blocks."""

    hidden: Tensor
    """``[N, γ, d]``: after the final norm; base logits are ``lm_head(hidden)``."""
    latent: Tensor | None
    """``[N, γ, r]``: sequential head's latent z; its logit bias is ``W2 z``. None for a parallel draft."""
    confidence_logits: Tensor | None
    """``[N, γ]``: logit of "accepted, given that all earlier ones were". None without a confidence head."""


@dataclass(frozen=True)
class DecodingTrace(TensorStruct):
    """What speculative decoding did, round by round. Rounds of one request appear in order.

    A round counts up to the first end token that the draft proposed: what lies behind it was never trained, and
    nobody reads it. That is cut by what was proposed, not by what was accepted, so counting stays fair. ``committed``
    reached the output: ``accepted + 1``, or ``accepted`` where an accepted end token ended the answer.
    """

    request: Tensor
    """``[R]`` int64: index of the request in ``prompts``."""
    anchor: Tensor
    """``[R]`` int64: position of the anchor token."""
    proposed: Tensor
    """``[R, γ]`` int64: draft tokens (target vocabulary)."""
    confidence_logits: Tensor
    """``[R, γ]`` float32: raw, before any temperature; NaN where the draft has no confidence head."""
    verify_length: Tensor
    """``[R]`` int64 in 0..γ: how many draft tokens, up to an end token, were handed to the target."""
    accepted: Tensor
    """``[R]`` int64 in 0..verify_length."""
    committed: Tensor
    """``[R]`` int64 ≥ 1: tokens of this round that reached the output."""
    temperature: float = 0.0
    """Sampling temperature of target and draft; 0 is greedy."""
    domains: tuple[str, ...] = ()
    """Domain of each request (empty where unknown)."""
    raw_verify_length: Tensor | None = None
    """``[R]`` int64: ``verify_length`` with what lies behind an end token; None where nothing was cut."""
    raw_accepted: Tensor | None = None
    """``[R]`` int64: ``accepted`` with what lies behind an end token; None where nothing was cut."""

    @property
    def uncut(self) -> DecodingTrace:
        """The same rounds with what lies behind end tokens, as the counters of engines have them."""
        if self.raw_verify_length is None or self.raw_accepted is None:
            return self
        return dataclasses.replace(self, verify_length=self.raw_verify_length, accepted=self.raw_accepted)

    def cut(self, end_tokens: Tensor) -> DecodingTrace:
        """The same rounds, each up to the first of ``end_tokens`` ``[E]`` that was proposed; raw counts are kept."""
        whole = self.uncut
        ends = torch.isin(self.proposed, end_tokens)
        slots = torch.where(ends.any(1), ends.int().argmax(1) + 1, self.block_size)
        return dataclasses.replace(
            self,
            verify_length=whole.verify_length.minimum(slots),
            accepted=whole.accepted.minimum(slots),
            raw_verify_length=whole.verify_length,
            raw_accepted=whole.accepted,
        )

    @property
    def block_size(self) -> int:
        """γ."""
        return self.proposed.shape[1]

    @property
    def prefix_accepted(self) -> Tensor:
        """``[R, γ]`` bool: the prefix up to and including slot ``k`` was accepted."""
        slots = torch.arange(1, self.block_size + 1, device=self.accepted.device)
        return self.accepted[:, None] >= slots

    @property
    def observed(self) -> Tensor:
        """``[R, γ]`` bool: verification tells whether the prefix up to slot ``k`` is accepted.

        True for verified slots, and for slots after a rejection (their prefix is rejected for certain).
        """
        slots = torch.arange(1, self.block_size + 1, device=self.accepted.device)
        rejected = self.accepted < self.verify_length
        return (slots <= self.verify_length[:, None]) | rejected[:, None]

    @property
    def accepted_length(self) -> float:
        """τ: tokens committed per round, the target's own included."""
        return float(self.committed.sum()) / max(1, self.committed.numel())

    def save(self, path: str | Path) -> None:
        """Write the trace to a safetensors file (scalars and domains in its metadata)."""
        import json

        from safetensors.torch import save_file

        whole = self.uncut
        kept = dataclasses.replace(self, raw_verify_length=whole.verify_length, raw_accepted=whole.accepted)
        tensors = {
            field.name: value.detach().cpu().clone()
            for field in dataclasses.fields(kept)
            if isinstance(value := getattr(kept, field.name), Tensor)
        }
        metadata = {"temperature": repr(self.temperature), "domains": json.dumps(list(self.domains))}
        save_file(tensors, str(path), metadata=metadata)

    @classmethod
    def load(cls, path: str | Path) -> DecodingTrace:
        """Read what :meth:`save` wrote; rounds of earlier versions are cut at their end tokens."""
        import json

        from safetensors import safe_open

        with safe_open(str(path), framework="pt") as file:
            fields: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        loaded = cls(
            **fields,
            temperature=float(metadata["temperature"]),
            domains=tuple(json.loads(metadata["domains"])),
        )
        if loaded.raw_accepted is not None or not loaded.block_size:
            return loaded
        stopped = loaded.committed <= loaded.accepted  # by the end token that was committed last
        last = (loaded.committed[stopped] - 1)[:, None]
        return loaded.cut(loaded.proposed[stopped].gather(1, last).unique())

    @classmethod
    def concatenate(cls, traces: list[DecodingTrace]) -> DecodingTrace:
        """Join traces of one draft at one temperature; requests are renumbered in order."""
        if not traces:
            raise ValueError("concatenate needs at least one trace")
        offset, requests = 0, []
        domains: list[str] = []
        for trace in traces:
            requests.append(trace.request + offset)
            count = len(trace.domains) or (int(trace.request.max()) + 1 if trace.request.numel() else 0)
            offset += count
            domains.extend(trace.domains)
        names = ("anchor", "proposed", "confidence_logits", "verify_length", "accepted", "committed")
        joined = {name: torch.cat([getattr(trace, name) for trace in traces]) for name in names}
        whole = [trace.uncut for trace in traces]
        return cls(
            request=torch.cat(requests),
            temperature=traces[0].temperature,
            domains=tuple(domains),
            raw_verify_length=torch.cat([trace.verify_length for trace in whole]),
            raw_accepted=torch.cat([trace.accepted for trace in whole]),
            **joined,
        )
