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
class ObjectiveSettings:
    """What does not change from row to row."""

    dtype: torch.dtype
    accurate: torch.dtype
    softcap: float | None
    ce_coef: float
    tv_coef: float
    budget: int
    gradient: bool


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
    ) -> None:
        """Overwrite ``logits [n, U]`` with the loss's gradient with respect to them; fill ``ce [n]`` and ``l1 [n]``.

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
                inputs.inside[here],
                inputs.reduced,
            )
            run = self._in_cache if self.on_cpu else _compiled(self.settings.gradient, self.settings.softcap)
            row_ce, row_l1, gradient = run(*arguments)
            ce[here.start - part.start : here.stop - part.start] = row_ce
            l1[here.start - part.start : here.stop - part.start] = row_l1
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
        inside: Tensor,
        reduced: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """:func:`row_terms`, in place: short passes over data that is already in the cache."""
        n = logits.shape[0]
        draft, delta = self.draft[:n], self.delta[:n]
        wide = soften(self.target[: target.shape[0]].copy_(target), self.settings.softcap)
        distribution = (
            torch.softmax(wide, -1, out=wide) if normaliser is None else wide.sub_(normaliser[:, None]).exp_()
        )
        mass = distribution.sum(-1) if reduced else None
        draft.copy_(logits)
        peak, at_label = draft.amax(-1), draft.gather(1, column[:, None])[:, 0]
        torch.softmax(draft, -1, out=draft)
        ce = (peak - draft.amax(-1).log() - at_label) * inside

        torch.index_select(distribution, 0, row, out=delta)
        torch.sub(draft, delta, out=delta)
        l1 = self.absolute_sum(delta)
        if mass is not None:
            l1 = l1 + (1.0 - mass[row])
        if not self.settings.gradient:
            return ce, l1, None
        delta.sign_().mul_(draft)
        mean_sign = delta.sum(-1)
        draft.mul_((ce_weight - tv_weight * mean_sign)[:, None])
        delta.mul_(tv_weight[:, None]).add_(draft)
        delta.scatter_add_(1, column[:, None], -ce_weight[:, None])
        return ce, l1, delta

    def absolute_sum(self, values: Tensor) -> Tensor:
        """Σ|·| per row through the target's buffer, which nobody reads any more."""
        n = values.shape[0]
        return torch.abs(values, out=self.target[:n]).sum(-1)


def row_terms(
    logits: Tensor,
    target: Tensor,
    normaliser: Tensor | None,
    row: Tensor,
    column: Tensor,
    ce_weight: Tensor,
    tv_weight: Tensor,
    inside: Tensor,
    reduced: bool,
    gradient: bool,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cross entropy, L1 distance and weighted logit gradient of a chunk as plain formulas (compiled on GPUs).

    Args:
        logits: ``[n, U]`` draft logits, soft-cap and bias included.
        target: ``[q, U]`` target logits, without soft-cap.
        normaliser: ``[q]`` log-sum-exp of the target's full logits; None takes that of ``target`` itself.
        row: ``[n]`` index into ``q``.
        column: ``[n]`` label's column in the draft vocabulary.
        ce_weight: ``[n]`` weight of the cross entropy (0 where the label is outside).
        tv_weight: ``[n]`` weight of the L1 distance.
        inside: ``[n]`` bool: the label is in the draft vocabulary.
        reduced: the target has mass outside the ``U`` columns.
        gradient: whether to compute the gradient.
        softcap: of the target's logits.

    Returns:
        ``ce [n]``, ``l1 [n]``, and the gradient ``[n, U]`` in the logits' dtype, or None.
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
    if not gradient:
        return ce, l1, None
    signed = delta.sign() * draft
    slope = draft * (ce_weight - tv_weight * signed.sum(-1))[:, None] + tv_weight[:, None] * signed
    hot = torch.arange(logits.shape[1], device=logits.device) == column[:, None]
    slope = slope - torch.where(hot, ce_weight[:, None], 0.0)
    return ce, l1, slope.to(logits.dtype)


@cache
def _compiled(gradient: bool, softcap: float | None) -> Any:
    """:func:`row_terms` compiled once per process (dynamic shapes: chunks differ in rows and positions)."""
    return torch.compile(partial(row_terms, gradient=gradient, softcap=softcap), dynamic=True)
