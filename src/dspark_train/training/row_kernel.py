"""Elementwise part of the objective: a chunk's logits become their own gradient (letters: :mod:`.objective`).

Two forms of the same formulas: short in-place passes through buffers that stay in the cache (CPU), and plain
expressions that the compiler fuses (GPU). The tests hold them against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

_CACHE_ELEMENTS = 2**18
"""Elements of one fp32 scratch buffer on the CPU: three of them fit in a second-level cache."""


@dataclass(frozen=True)
class OtherCoefficients:
    """Coefficients of the terms beside the paper's; 0 computes nothing."""

    soft_ce: float = 0.0
    """Cross entropy with the target's distribution: forward KL, up to the target's own entropy."""
    reverse_kl: float = 0.0
    """KL divergence of the draft from the target, Σ p log(p / q)."""
    lk: float = 0.0
    """−log c*, the negative logarithm of the probability of acceptance."""


SMALLEST = 1e-6
"""Least probability of acceptance whose logarithm is taken."""


@dataclass(frozen=True)
class ObjectiveSettings:
    """What does not change from row to row."""

    dtype: torch.dtype
    accurate: torch.dtype
    softcap: float | None
    ce_coef: float
    tv_coef: float
    budget: int
    gradient: bool
    others: OtherCoefficients


@dataclass(frozen=True)
class FrozenInputs:
    """Frozen operands, all of the matmul dtype, rows sorted by position."""

    head: Tensor
    target_head: Tensor
    target_hidden: Tensor
    normaliser: Tensor | None
    first_position: list[int]
    target_row: Tensor
    column: Tensor
    ce_weight: Tensor
    tv_weight: Tensor
    weight: Tensor
    inside: Tensor
    reduced: bool


def rows_in_cache(chunk: int, vocabulary: int, device: torch.device) -> int:
    """Rows that elementwise passes treat at once: what the cache holds on a CPU, the whole chunk on a GPU."""
    return min(chunk, max(4, _CACHE_ELEMENTS // vocabulary)) if device.type == "cpu" else chunk


def soften(logits: Tensor, softcap: float | None) -> Tensor:
    """Apply the soft-cap in place."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


class RowKernel:
    """Elementwise part: turns a chunk of draft logits into the gradient of its rows.

    On the CPU through reused buffers that stay in the cache; on a GPU through one compiled function.
    """

    def __init__(
        self, chunk: int, vocabulary: int, settings: ObjectiveSettings, device: torch.device
    ) -> None:
        self.settings = settings
        self.on_cpu = device.type == "cpu"
        self.inner = rows_in_cache(chunk, vocabulary, device)
        if self.on_cpu:
            size = (self.inner, vocabulary)
            self.draft, self.target, self.delta = (
                torch.empty(size, dtype=settings.accurate, device=device) for _ in range(3)
            )

    def rows_to_gradients(
        self,
        logits: Tensor,
        target: Tensor,
        part: slice,
        low: int,
        inputs: FrozenInputs,
        ce: Tensor,
        l1: Tensor,
        soft_ce: Tensor | None = None,
        reverse_kl: Tensor | None = None,
    ) -> None:
        """Overwrite ``logits [n, U]`` with the loss's gradient with respect to them; fill the rows' terms ``[n]``.

        ``target [q, U]`` are the target logits of positions ``low .. low + q``.
        """
        for begin in range(0, logits.shape[0], self.inner):
            block = logits[begin : begin + self.inner]
            here = slice(part.start + begin, part.start + begin + block.shape[0])
            first, last = inputs.first_position[here.start], inputs.first_position[here.stop - 1]
            normaliser = None if inputs.normaliser is None else inputs.normaliser[first : last + 1]
            arguments = (
                block,
                target[first - low : last - low + 1],
                normaliser,
                inputs.target_row[here] - first,
                inputs.column[here],
                inputs.ce_weight[here],
                inputs.tv_weight[here],
                inputs.weight[here],
                inputs.inside[here],
                inputs.reduced,
            )
            others = self.settings.others
            if self.on_cpu and not others.reverse_kl:
                run: Any = self._in_cache
            else:
                form = _formula if self.on_cpu else _compiled
                run = form(self.settings.gradient, self.settings.softcap, others)
            *terms, gradient = run(*arguments)
            for kept, found in zip((ce, l1, soft_ce, reverse_kl), terms, strict=True):
                if kept is not None:
                    kept[here.start - part.start : here.stop - part.start] = found
            if gradient is not None:
                block.copy_(gradient)

    def _in_cache(
        self,
        logits: Tensor,
        target: Tensor,
        normaliser: Tensor | None,
        row: Tensor,
        column: Tensor,
        ce_weight: Tensor,
        tv_weight: Tensor,
        weight: Tensor,
        inside: Tensor,
        reduced: bool,
    ) -> Terms:
        """:func:`row_terms` without the reverse KL, in place: short passes over data that is already in the cache."""
        n, others = logits.shape[0], self.settings.others
        draft, delta = self.draft[:n], self.delta[:n]
        wide = soften(self.target[: target.shape[0]].copy_(target), self.settings.softcap)
        distribution = (
            torch.softmax(wide, -1, out=wide) if normaliser is None else wide.sub_(normaliser[:, None]).exp_()
        )
        mass = distribution.sum(-1) if reduced else None
        draft.copy_(logits)
        peak, at_label = draft.amax(-1), draft.gather(1, column[:, None])[:, 0]
        torch.softmax(draft, -1, out=draft)
        level = peak - draft.amax(-1).log()
        ce = (level - at_label) * inside

        torch.index_select(distribution, 0, row, out=delta)
        inner = torch.ones_like(level) if mass is None else mass[row]
        soft_ce = None
        if others.soft_ce:  # nobody reads the target's buffer any more
            soft_ce = level * inner - torch.mul(delta, logits, out=self.target[:n]).sum(-1)
        torch.sub(draft, delta, out=delta)
        l1 = self.absolute_sum(delta)
        if mass is not None:
            l1 = l1 + (1.0 - inner)
        if not self.settings.gradient:
            return ce, l1, soft_ce, None, None
        if others.lk:
            tv_weight = tv_weight + lk_slope(weight, l1, others.lk)
        soft = None
        if others.soft_ce:  # p Σq − q, q what lies inside the draft's vocabulary
            soft = self.target[:n].copy_(delta)
            if mass is not None:
                soft.addcmul_(draft, (inner - 1.0)[:, None])
            soft.mul_((weight * others.soft_ce)[:, None])
        delta.sign_().mul_(draft)
        mean_sign = delta.sum(-1)
        draft.mul_((ce_weight - tv_weight * mean_sign)[:, None])
        delta.mul_(tv_weight[:, None]).add_(draft)
        delta.scatter_add_(1, column[:, None], -ce_weight[:, None])
        if soft is not None:
            delta.add_(soft)
        return ce, l1, soft_ce, None, delta

    def absolute_sum(self, values: Tensor) -> Tensor:
        """Σ|·| per row through the target's buffer, which nobody reads any more."""
        n = values.shape[0]
        return torch.abs(values, out=self.target[:n]).sum(-1)


Terms = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Cross entropy, L1 distance, cross entropy with the target's distribution, reverse KL, and the logits' gradient."""


def lk_slope(weight: Tensor, l1: Tensor, coefficient: float) -> Tensor:
    """Weight ``[n]`` of the L1 distance that stands for −log c*: its slope is that of the distance over 2 c*."""
    return weight * (0.5 * coefficient) / (1.0 - 0.5 * l1).clamp_min(SMALLEST)


def row_terms(
    logits: Tensor,
    target: Tensor,
    normaliser: Tensor | None,
    row: Tensor,
    column: Tensor,
    ce_weight: Tensor,
    tv_weight: Tensor,
    weight: Tensor,
    inside: Tensor,
    reduced: bool,
    gradient: bool,
    softcap: float | None,
    others: OtherCoefficients,
) -> Terms:
    """Terms and weighted logit gradient of a chunk as plain formulas (compiled on GPUs).

    Args:
        logits: ``[n, U]`` draft logits, soft-cap and bias included.
        target: ``[q, U]`` target logits, without soft-cap.
        normaliser: ``[q]`` log-sum-exp of the target's full logits; None takes that of ``target`` itself.
        row: ``[n]`` index into ``q``.
        column: ``[n]`` label's column in the draft vocabulary.
        ce_weight: ``[n]`` weight of the cross entropy (0 where the label is outside).
        tv_weight: ``[n]`` weight of the L1 distance.
        weight: ``[n]`` weight of the row, for the other terms.
        inside: ``[n]`` bool: the label is in the draft vocabulary.
        reduced: the target has mass outside the ``U`` columns.
        gradient: whether to compute the gradient.
        softcap: of the target's logits.
        others: coefficients of the terms beside the paper's.

    Returns:
        ``[n]`` each, None where its coefficient is 0, and the gradient ``[n, U]`` in the logits' dtype, or None.
    """
    accurate = ce_weight.dtype
    wide = target.to(accurate)
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    log_draft = torch.log_softmax(logits.to(accurate), -1)
    draft = log_draft.exp()
    level = torch.logsumexp(wide, -1) if normaliser is None else normaliser
    distribution = (wide[row] - level[row, None]).exp()
    ce = -log_draft.gather(1, column[:, None])[:, 0] * inside
    delta = draft - distribution
    l1 = delta.abs().sum(-1)
    if reduced:
        l1 = l1 + 1.0 - distribution.sum(-1)
    soft_ce = -(distribution * log_draft).sum(-1) if others.soft_ce else None
    gap = log_draft - (wide[row] - level[row, None])
    reverse_kl = (draft * gap).sum(-1) if others.reverse_kl else None
    if not gradient:
        return ce, l1, soft_ce, reverse_kl, None
    if others.lk:
        tv_weight = tv_weight + lk_slope(weight, l1, others.lk)
    signed = delta.sign() * draft
    slope = draft * (ce_weight - tv_weight * signed.sum(-1))[:, None] + tv_weight[:, None] * signed
    hot = torch.arange(logits.shape[1], device=logits.device) == column[:, None]
    slope = slope - torch.where(hot, ce_weight[:, None], 0.0)
    if others.soft_ce:
        inner = distribution.sum(-1, keepdim=True) if reduced else 1.0
        slope = slope + (weight * others.soft_ce)[:, None] * (draft * inner - distribution)
    if reverse_kl is not None:
        slope = slope + (weight * others.reverse_kl)[:, None] * draft * (gap - reverse_kl[:, None])
    return ce, l1, soft_ce, reverse_kl, slope.to(logits.dtype)


def _formula(gradient: bool, softcap: float | None, others: OtherCoefficients) -> Any:
    return partial(row_terms, gradient=gradient, softcap=softcap, others=others)


@cache
def _compiled(gradient: bool, softcap: float | None, others: OtherCoefficients) -> Any:
    """:func:`row_terms` compiled once per process (dynamic shapes: chunks differ in rows and positions)."""
    return torch.compile(_formula(gradient, softcap, others), dynamic=True)
