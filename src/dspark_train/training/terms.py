"""From a forward pass to a loss: the terms, their sums, and the metrics that divide them.

Every term is a weighted sum and a weight, so that sums add up over micro-batches, ranks and evaluation batches
alike; :class:`ObjectiveMetrics` is the one place that divides. Shapes: :mod:`dspark_train.structures`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics import Metric

from dspark_train.structures import Blocks, DraftOutput, TensorStruct
from dspark_train.training.objective import ObjectiveSums
from dspark_train.training.row_kernel import SMALLEST, OtherCoefficients


@dataclass
class ObjectiveConfig:
    """Coefficients of the paper's loss ``ce · L_ce + tv · L_tv + confidence · L_conf``, and of terms beside it.

    Args:
        ce: coefficient of the cross entropy with the data token.
        tv: coefficient of the full L1 distance between draft and target distributions.
        confidence: coefficient of the confidence head's binary cross entropy.
        soft_ce: coefficient of the cross entropy with the target's distribution (forward KL; Eagle3's loss).
        reverse_kl: coefficient of the KL divergence of the draft from the target.
        lk: coefficient of −log of the probability of acceptance.
        decay: slot k (0-based) weighs ``exp(-k / decay)``.
        memory_budget_mib: memory that one chunk of logits may take, in MiB; left out, 192 on a CPU and 2048 on a GPU.
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    soft_ce: float = 0.0
    reverse_kl: float = 0.0
    lk: float = 0.0
    decay: float = 4.0
    memory_budget_mib: int | None = None

    @property
    def others(self) -> OtherCoefficients:
        """Those of the terms beside the paper's."""
        return OtherCoefficients(self.soft_ce, self.reverse_kl, self.lk)

    @property
    def memory_budget(self) -> int | None:
        """Bytes, or None."""
        return None if self.memory_budget_mib is None else self.memory_budget_mib * 2**20


@dataclass(frozen=True)
class SupervisedRows(TensorStruct):
    """The supervised slots of a batch as rows, and the distinct positions whose target distribution they need.

    Made on the CPU with the batch, so that a training step never waits for the device to learn a size.
    """

    slot: Tensor
    """``[rows]`` int64: index into the flattened ``[N, γ]`` slots, ordered by position."""
    position: Tensor
    """``[P]`` int64: distinct positions, as indices into the flattened ``[B, T]``, ascending."""
    target_row: Tensor
    """``[rows]`` int64, ascending, kept on the CPU: index into ``position``."""

    @classmethod
    def of(cls, blocks: Blocks, length: int) -> SupervisedRows:
        """Index the supervised slots of ``blocks`` (on the CPU) over sequences padded to ``length`` tokens."""
        slot = blocks.supervised.flatten().nonzero(as_tuple=True)[0]
        where = (blocks.sequence[:, None] * length + blocks.positions).flatten()[slot]
        order = torch.argsort(where, stable=True)
        position, target_row = torch.unique_consecutive(where[order], return_inverse=True)
        return cls(slot[order], position, target_row)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SupervisedRows:
        """Move what the device reads."""
        return SupervisedRows(
            self.slot.to(device, non_blocking=non_blocking),
            self.position.to(device, non_blocking=non_blocking),
            self.target_row,
        )


@dataclass(frozen=True)
class ObjectiveTerms(TensorStruct):
    """Detached sums over the supervised slots of a batch, float32; per-slot entries are ``[γ]``."""

    weight: Tensor
    """Σ w."""
    ce: Tensor
    """Σ w · cross entropy, nats."""
    tv: Tensor
    """Σ w · L1 distance."""
    confidence: Tensor
    """Σ w · binary cross entropy of the confidence head."""
    soft_ce: Tensor
    """Σ w · cross entropy with the target's distribution; 0 where its coefficient is."""
    reverse_kl: Tensor
    """Σ w · KL divergence of the draft from the target; 0 where its coefficient is."""
    lk: Tensor
    """Σ w · −log c*."""
    slots: Tensor
    """``[γ]``: number of supervised slots."""
    accept: Tensor
    """``[γ]``: Σ c*."""
    blocks: Tensor
    """N."""
    survival: Tensor
    """Σ over blocks and slots of Π c*: expected accepted draft tokens."""
    confidence_error: Tensor
    """Σ |c − c*|."""
    confidence_bias: Tensor
    """Σ (c − c*)."""
    survival_bias: Tensor
    """Σ (Π c − Π c*)."""


def confidence_rows(output: DraftOutput, rows: SupervisedRows, accept: Tensor) -> Tensor:
    """Binary cross entropy of the confidence head against the detached labels ``c*``: ``[rows]`` float32."""
    if output.confidence_logits is None:
        return torch.zeros_like(accept)
    logits = output.confidence_logits.flatten()[rows.slot].float()
    return binary_cross_entropy_with_logits(logits, accept.clamp(0.0, 1.0), reduction="none")


@torch.no_grad()
def collect_terms(
    output: DraftOutput, rows: SupervisedRows, sums: ObjectiveSums, confidence: Tensor, weights: Tensor
) -> ObjectiveTerms:
    """Sum the rows' terms.

    Args:
        output: of the draft.
        rows: supervised slots.
        sums: terms of every row.
        confidence: ``[rows]`` losses of the confidence head.
        weights: ``[rows]`` slot weights.
    """
    count, slots = output.hidden.shape[:2]
    place = rows.slot % slots
    accept = sums.accept

    def weighted(term: Tensor | None) -> Tensor:
        return weights.new_zeros(()) if term is None else (weights * term).sum()

    def grid(values: Tensor) -> Tensor:
        return values.new_zeros(count * slots).index_copy(0, rows.slot, values).view(count, slots)

    survival = grid(accept).cumprod(1)
    if output.confidence_logits is None:
        predicted = accept
    else:
        predicted = output.confidence_logits.flatten()[rows.slot].float().sigmoid()
    ones = torch.ones_like(accept)
    per_slot = accept.new_zeros(slots)
    return ObjectiveTerms(
        weight=weights.sum(),
        ce=weighted(sums.ce),
        tv=weighted(sums.l1),
        confidence=weighted(confidence.detach()),
        soft_ce=weighted(sums.soft_ce),
        reverse_kl=weighted(sums.reverse_kl),
        lk=weighted(-accept.clamp_min(SMALLEST).log()),
        slots=per_slot.index_add(0, place, ones),
        accept=per_slot.index_add(0, place, accept),
        blocks=(grid(ones)[:, 0]).sum(),
        survival=survival.sum(),
        confidence_error=(predicted - accept).abs().sum(),
        confidence_bias=(predicted - accept).sum(),
        survival_bias=(grid(predicted).cumprod(1) - survival).sum(),
    )


class ObjectiveMetrics(Metric):
    """Adds :class:`ObjectiveTerms` up over batches and ranks, and divides once, in :meth:`compute`."""

    full_state_update = False
    weight: Tensor
    ce: Tensor
    tv: Tensor
    confidence: Tensor
    soft_ce: Tensor
    reverse_kl: Tensor
    lk: Tensor
    slots: Tensor
    accept: Tensor
    blocks: Tensor
    survival: Tensor
    confidence_error: Tensor
    confidence_bias: Tensor
    survival_bias: Tensor

    def __init__(self, block_size: int, objective: ObjectiveConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.objective = objective
        self.has_confidence = True
        for name in ObjectiveTerms.__dataclass_fields__:
            size = block_size if name in ("slots", "accept") else ()
            self.add_state(name, torch.zeros(size), dist_reduce_fx="sum", persistent=True)

    def update(self, terms: ObjectiveTerms) -> None:
        """Add one batch."""
        for name in ObjectiveTerms.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(terms, name))

    def compute(self) -> dict[str, Tensor]:
        """Return means by name: losses, expected τ, mean confidence error, biases, ``c*`` per position."""
        weight, slots = self.weight.clamp(min=1e-12), self.slots.sum().clamp(min=1)
        ce, tv, confidence = self.ce / weight, self.tv / weight, self.confidence / weight
        coefficients = self.objective
        loss = coefficients.ce * ce + coefficients.tv * tv + coefficients.confidence * confidence
        others = {
            name: getattr(self, name) / weight
            for name, coefficient in asdict(coefficients.others).items()
            if coefficient
        }
        for name, term in others.items():
            loss = loss + getattr(coefficients, name) * term
        result: dict[str, Tensor] = {
            "loss": loss,
            "ce": ce,
            "tv": tv,
            "tau": 1 + self.survival / self.blocks.clamp(min=1),
            "accept": self.accept.sum() / slots,
            **others,
        }
        if self.has_confidence:
            result |= {
                "confidence": confidence,
                "confidence_error": self.confidence_error / slots,
                "confidence_bias": self.confidence_bias / slots,
                "survival_bias": self.survival_bias / slots,
            }
        per_slot = self.accept / self.slots.clamp(min=1)
        return result | {f"accept_{slot}": value for slot, value in enumerate(per_slot, 1)}
