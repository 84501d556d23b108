"""The training objective and its gradient in one sweep over chunks of rows.

A *row* is one supervised slot of one block. Shapes as in :mod:`dspark_train.structures`, and

    rows  supervised slots of a micro-batch      P  distinct positions whose target distribution they need

Draft logits of a row are ``softcap(hidden @ headᵀ) + latent @ W2ᵀ``; the target's ``softcap(state @ headᵀ)``.
Both loss terms have closed-form gradients with respect to the draft logits ``z`` (``p = softmax(z)``):

    cross entropy:  ∂ CE / ∂z = p − onehot(label)
    L1 distance:    ∂‖p − q‖₁ / ∂z = p ⊙ (s − Σ p s),   s = sign(p − q)

and so have the others that can be weighted beside them (q: what lies inside the draft's vocabulary):

    with the target's distribution:  ∂ Σ −q log p / ∂z = p Σq − q
    reverse KL:                      ∂ Σ p log(p/q) / ∂z = p ⊙ (log(p/q) − KL)
    acceptance likelihood:           ∂ −log c* / ∂z = ∂‖p − q‖₁ / ∂z / (2 c*)

so a chunk's logits are turned into their own gradient in place, multiplied back onto ``head`` and ``W2``, and
forgotten. Nothing of size ``[rows, U]`` outlives its chunk, and the frozen head needs no gradient at all.
Overlapping blocks ask for the same target rows: sorted by position, each is computed once.

The readable twin, and the oracle of the tests, is :mod:`dspark_train.training.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark_train.errors import UserError
from dspark_train.training.row_kernel import (
    SMALLEST,
    FrozenInputs,
    ObjectiveSettings,
    OtherCoefficients,
    RowKernel,
    rows_in_cache,
    soften,
)

_BUDGETS = {"cpu": 192 * 2**20, "cuda": 2 * 2**30}
_MIN_ROWS = 16
_MAX_ROWS = {"cpu": 1024, "cuda": 8192}
_VOCABULARY_TILE = 8192
"""Rows of ``W2`` whose gradient is accumulated at once, to bound a temporary of the product."""


@dataclass(frozen=True)
class ObjectiveSums:
    """Per-row terms and their weighted sum. Divisions happened before, in ``weights``."""

    loss: Tensor
    """Scalar, differentiable: ``Σ weights · (ce_coef · ce + tv_coef · l1)``."""
    ce: Tensor
    """``[rows]`` fp32, detached: cross entropy in nats; 0 where the data token is outside the vocabulary."""
    l1: Tensor
    """``[rows]`` fp32, detached: the full L1 distance of both distributions, in 0..2."""
    soft_ce: Tensor | None = None
    """``[rows]`` fp32, detached: cross entropy with the target's distribution; None where its coefficient is 0."""
    reverse_kl: Tensor | None = None
    """``[rows]`` fp32, detached: KL divergence of the draft from the target; None where its coefficient is 0."""

    @property
    def accept(self) -> Tensor:
        """``[rows]``: ``c* = 1 − l1/2``, probability that rejection sampling accepts the draft's token."""
        return 1.0 - 0.5 * self.l1


def fused_objective(
    hidden: Tensor,
    latent: Tensor | None,
    w2: Tensor | None,
    draft_head: Tensor,
    target_head: Tensor,
    target_hidden: Tensor,
    target_row: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    ce_coef: float,
    tv_coef: float,
    softcap: float | None = None,
    draft_token_ids: Tensor | None = None,
    target_logsumexp: Tensor | None = None,
    memory_budget_bytes: int | None = None,
    others: OtherCoefficients | None = None,
) -> ObjectiveSums:
    """Cross entropy and L1 distance of all rows, with gradients for ``hidden``, ``latent`` and ``w2``.

    Args:
        hidden: ``[rows, d]`` draft hidden states.
        latent: ``[rows, r]`` latents of the sequential head, or None for a parallel draft.
        w2: ``[U, r]`` projection of the latents; its gradient is accumulated in fp32.
        draft_head: ``[U, d]`` frozen head rows of the draft's vocabulary.
        target_head: ``[V, d]`` frozen head of the target, rows beyond the tokenizer included. With a reduced
            vocabulary and ``target_logsumexp`` given, its ``[U, d]`` rows suffice.
        target_hidden: ``[P, d]`` target's last hidden states, one per distinct position.
        target_row: ``[rows]`` int64, index into ``P``. Given on the CPU, nothing synchronises with a GPU.
        labels: ``[rows]`` int64 data tokens, target vocabulary.
        weights: ``[rows]`` slot weights, already divided by the global batch's denominator.
        ce_coef: coefficient of the cross entropy.
        tv_coef: coefficient of the L1 distance.
        softcap: the target's own logit soft-cap, applied to its logits and to the draft's before the bias.
        draft_token_ids: ``[U]`` int64, sorted: target ids of a reduced draft vocabulary. The target keeps its
            full distribution; what lies outside counts in the L1 distance.
        target_logsumexp: ``[P]`` fp32 normalisers of the target's logits, if known (from a feature cache).
        memory_budget_bytes: bytes for one chunk of logits; None takes :func:`default_budget`.
        others: coefficients of further terms; None has none. What lies outside a reduced vocabulary is in none of them.

    Returns:
        The weighted loss and the detached terms of every row, in the order given.
    """
    if (latent is None) != (w2 is None):
        raise ValueError("latent and w2 are given together or not at all")
    dtype = _matmul_dtype(hidden)
    if dtype == torch.float16:
        raise UserError(
            "precision: float16 cannot hold the gradients of a softmax over a vocabulary; "
            "use bf16-mixed or 32-true"
        )
    rows = hidden.shape[0]
    if rows == 0:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        anchors = [tensor for tensor in (hidden, latent, w2) if tensor is not None]
        zero = torch.stack([tensor.float().sum() * 0.0 for tensor in anchors]).sum()
        return ObjectiveSums(zero, empty, empty)

    host_row = target_row if target_row.device.type == "cpu" else target_row.cpu()
    order = None
    if bool((host_row[1:] < host_row[:-1]).any()):
        order = torch.argsort(host_row, stable=True)
        host_row = host_row[order]
        device_order = order.to(hidden.device)
        hidden, labels, weights = hidden[device_order], labels[device_order], weights[device_order]
        latent = None if latent is None else latent[device_order]
    used, dense = torch.unique_consecutive(host_row, return_inverse=True)
    if used.shape[0] != target_hidden.shape[0]:
        host_row = dense
        device_used = used.to(target_hidden.device, non_blocking=True)
        target_hidden = target_hidden[device_used]
        target_logsumexp = None if target_logsumexp is None else target_logsumexp[device_used]
    settings = ObjectiveSettings(
        dtype=dtype,
        accurate=torch.float64 if dtype == torch.float64 else torch.float32,
        softcap=softcap,
        ce_coef=ce_coef,
        tv_coef=tv_coef,
        budget=memory_budget_bytes or default_budget(hidden.device.type),
        others=others or OtherCoefficients(),
        gradient=torch.is_grad_enabled()
        and any(tensor is not None and tensor.requires_grad for tensor in (hidden, latent, w2)),
    )
    with torch.no_grad():
        inputs = _frozen_inputs(
            draft_head,
            target_head,
            target_hidden,
            host_row,
            labels,
            weights,
            draft_token_ids,
            target_logsumexp,
            settings,
        )
    loss, ce, l1, *rest = _Objective.apply(hidden, latent, w2, inputs, settings)
    if order is not None:
        inverse = torch.empty_like(device_order)
        inverse[device_order] = torch.arange(rows, device=device_order.device)
        ce, l1, *rest = (None if rows is None else rows[inverse] for rows in (ce, l1, *rest))
    return ObjectiveSums(loss, ce, l1, *rest)


@torch.no_grad()
def target_logsumexp(
    target_hidden: Tensor,
    target_head: Tensor,
    *,
    softcap: float | None = None,
    memory_budget_bytes: int | None = None,
) -> Tensor:
    """``log Σ exp`` of the target's logits at every position, over the full vocabulary.

    Args:
        target_hidden: ``[P, d]``.
        target_head: ``[V, d]``.
        softcap: the target's logit soft-cap.
        memory_budget_bytes: bytes for one chunk of logits.

    Returns:
        ``[P]`` fp32 (fp64 for fp64 inputs).
    """
    dtype = _matmul_dtype(target_hidden)
    accurate = torch.float64 if dtype == torch.float64 else torch.float32
    target_hidden, target_head = target_hidden.to(dtype), target_head.to(dtype)
    positions, vocabulary = target_hidden.shape[0], target_head.shape[0]
    result = target_hidden.new_empty(positions, dtype=accurate)
    kind = target_hidden.device.type
    chunk = _fit(memory_budget_bytes or default_budget(kind), vocabulary * dtype.itemsize, kind)
    inner = rows_in_cache(chunk, vocabulary, target_hidden.device)
    tile = _tile(chunk, target_hidden.device)
    target_hidden = _whole_tiles(target_hidden, tile)
    with torch.autocast(target_hidden.device.type, enabled=False):
        logits = target_hidden.new_empty(round_up(min(chunk, positions), tile), vocabulary)
        wide = target_hidden.new_empty(min(inner, positions), vocabulary, dtype=accurate)
        for start in range(0, positions, chunk):
            part = range(start, min(start + chunk, positions))
            whole = round_up(len(part), tile)
            torch.mm(target_hidden[start : start + whole], target_head.T, out=logits[:whole])
            for low in range(0, len(part), inner):
                block = logits[low : min(low + inner, len(part))]
                values = wide[: len(block)]
                if softcap is None:  # widened while the peak is taken off, not in a pass of its own
                    peak = block.amax(-1, keepdim=True).to(accurate)
                    torch.sub(block, peak, out=values)
                else:
                    soften(values.copy_(block), softcap)
                    peak = values.amax(-1, keepdim=True)
                    values.sub_(peak)
                total = values.exp_().sum(-1)
                result[start + low : start + low + len(block)] = total.log_().add_(peak[:, 0])
    return result


def objective_flops(rows: int, positions: int, size: int, rank: int, reduced: int, vocabulary: int) -> float:
    """FLOPs of :func:`fused_objective` with its gradients, tiles' padding left out.

    Args:
        rows: supervised slots.
        positions: P.
        size: d.
        rank: r; 0 for a parallel draft.
        reduced: U.
        vocabulary: V; where it is larger than U, the target's normalisers are computed over V first.
    """
    draft = rows * reduced * (2 * size + 3 * rank)  # logits and two gradients; W2's is a third one
    target = positions * size * (reduced + (vocabulary if vocabulary > reduced else 0))
    return 2.0 * (draft + target)


def objective_bytes(
    rows: int, size: int, rank: int, reduced: int, item: int, budget: int | None, device: str
) -> int:
    """Bytes of :func:`fused_objective` at its peak: a chunk of logits, ``W2`` and its gradient, the rows' gradients.

    Args:
        rows: supervised slots.
        size: d.
        rank: r.
        reduced: U.
        item: bytes of an element in the matrix products.
        budget: most bytes for one chunk of logits; None takes :func:`default_budget`.
        device: ``cpu`` or ``cuda``.
    """
    chunk = min(budget or default_budget(device), 2 * min(rows, _MAX_ROWS[device]) * reduced * item)
    return chunk + reduced * rank * (item + 4) + rows * (size + rank) * 3 * item


def default_budget(device: str) -> int:
    """Bytes that one chunk of logits (draft and target) may take, where nobody gives a number.

    A CPU's chunks stay small; on a GPU each chunk reads both heads, so there are few and large ones.

    Args:
        device: ``cpu``, or a GPU's type.
    """
    return _BUDGETS.get(device, _BUDGETS["cuda"])


@dataclass(frozen=True)
class Chunking:
    """How a sweep cuts its rows."""

    rows: int
    """Draft logits at once."""
    positions: int
    """Target logits of one product, which several chunks share; 0: one product per chunk."""

    @classmethod
    def of(cls, settings: ObjectiveSettings, vocabulary: int, device: str) -> Chunking:
        """Cut what the budget allows.

        On a CPU a chunk needs its draft and its target logits. On a GPU a quarter of the budget holds target logits;
        the rest a chunk of draft logits and the compiled formula's gradient of it. A soft-cap's slope is one more.

        Args:
            settings: of the objective.
            vocabulary: U.
            device: ``cpu``, or a GPU's type.
        """
        buffers, row = 2 + (settings.softcap is not None), vocabulary * settings.dtype.itemsize
        if device == "cpu":
            return cls(_fit(settings.budget, buffers * row, device), 0)
        shared = settings.budget // 4
        return cls(_fit(settings.budget - shared, buffers * row, device), max(1, shared // row))


def _matmul_dtype(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def _fit(budget: int, bytes_per_row: int, device: str) -> int:
    most = _MAX_ROWS.get(device, _MAX_ROWS["cuda"])
    return max(_MIN_ROWS, min(most, budget // max(1, bytes_per_row)) // 16 * 16)


def _tile(chunk: int, device: torch.device) -> int:
    """Rows to whose multiples products are widened: a CPU's library compiles a kernel for every size it meets."""
    return max(16, 2 ** (chunk.bit_length() - 4)) if device.type == "cpu" else 1


def round_up(count: int, step: int) -> int:
    """``count``, rounded up to a multiple of ``step``."""
    return -(-count // step) * step


def _whole_tiles(rows: Tensor, tile: int) -> Tensor:
    """``rows`` and zeros behind them: enough for every slice of them to be widened to whole tiles."""
    return rows if tile == 1 else torch.nn.functional.pad(rows, (0, 0, 0, tile))


def _frozen_inputs(
    draft_head: Tensor,
    target_head: Tensor,
    target_hidden: Tensor,
    host_row: Tensor,
    labels: Tensor,
    weights: Tensor,
    draft_token_ids: Tensor | None,
    normaliser: Tensor | None,
    settings: ObjectiveSettings,
) -> FrozenInputs:
    """Cast what is frozen, find the labels' columns and the rows' positions."""
    head, states = draft_head.to(settings.dtype), target_hidden.to(settings.dtype)
    reduced = draft_token_ids is not None
    weights = weights.to(settings.accurate)
    column, inside = labels, torch.ones_like(labels, dtype=torch.bool)
    if draft_token_ids is not None:
        column = torch.searchsorted(draft_token_ids, labels).clamp_(max=draft_token_ids.shape[0] - 1)
        inside = draft_token_ids[column] == labels
        if normaliser is None:
            normaliser = target_logsumexp(
                states, target_head, softcap=settings.softcap, memory_budget_bytes=settings.budget
            )
        if target_head.shape[0] != head.shape[0]:
            target_head = target_head[draft_token_ids]
    if target_head.shape[0] != head.shape[0]:
        raise ValueError(
            f"draft_head has {head.shape[0]} rows and target_head {target_head.shape[0]}: "
            "a reduced vocabulary needs draft_token_ids"
        )
    return FrozenInputs(
        head=head,
        target_head=target_head.to(settings.dtype),
        target_hidden=states,
        normaliser=None if normaliser is None else normaliser.to(settings.accurate),
        first_position=host_row.tolist(),
        target_row=host_row.to(labels.device, non_blocking=True),
        column=column,
        ce_weight=weights * settings.ce_coef * inside,
        tv_weight=weights * settings.tv_coef,
        weight=weights,
        inside=inside,
        reduced=reduced,
    )


class _Objective(torch.autograd.Function):
    """Computes loss and gradients in forward; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latent: Tensor | None,
        w2: Tensor | None,
        inputs: FrozenInputs,
        settings: ObjectiveSettings,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        with torch.autocast(hidden.device.type, enabled=False):
            (ce, l1, soft_ce, reverse_kl), grads = _sweep(hidden, latent, w2, inputs, settings)
        others = settings.others
        loss = (inputs.ce_weight * ce).sum() + (inputs.tv_weight * l1).sum()
        for coefficient, term in ((others.soft_ce, soft_ce), (others.reverse_kl, reverse_kl)):
            if term is not None:
                loss = loss + coefficient * (inputs.weight * term).sum()
        if others.lk:
            loss = loss - others.lk * (inputs.weight * (1.0 - 0.5 * l1).clamp_min(SMALLEST).log()).sum()
        ctx.mark_non_differentiable(*(term for term in (ce, l1, soft_ce, reverse_kl) if term is not None))
        ctx.set_materialize_grads(False)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, latent, w2)]
        ctx.save_for_backward(*grads)
        return loss, ce, l1, soft_ce, reverse_kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return None, None, None, None, None
        scaled = [
            None if grad is None or dtype is None else (grad * grad_loss.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return scaled[0], scaled[1], scaled[2], None, None


def _sweep(
    hidden: Tensor,
    latent: Tensor | None,
    w2: Tensor | None,
    inputs: FrozenInputs,
    settings: ObjectiveSettings,
) -> tuple[
    tuple[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None, Tensor | None]
]:
    """All chunks: the rows' terms ``[rows]``, and three gradients, each if wanted."""
    rows, vocabulary = hidden.shape[0], inputs.head.shape[0]
    states = hidden.detach().to(settings.dtype)
    z = None if latent is None else latent.detach().to(settings.dtype)
    project = None if w2 is None else w2.detach().to(settings.dtype)
    ce, l1 = (hidden.new_empty(rows, dtype=settings.accurate) for _ in range(2))
    soft_ce, reverse_kl = (
        torch.empty_like(ce) if coefficient else None
        for coefficient in (settings.others.soft_ce, settings.others.reverse_kl)
    )
    grad_hidden = grad_latent = grad_w2 = None
    chunking = Chunking.of(settings, vocabulary, hidden.device.type)
    chunk = min(rows, chunking.rows)
    tile = _tile(chunk, hidden.device)
    states, wanted = _whole_tiles(states, tile), _whole_tiles(inputs.target_hidden, tile)
    z = None if z is None else _whole_tiles(z, tile)
    if settings.gradient:
        grad_hidden = torch.empty_like(states)
        if z is not None and project is not None:
            grad_latent = torch.empty_like(z)
            grad_w2 = torch.zeros_like(project, dtype=settings.accurate)
    shared = _shared_positions(inputs.first_position, chunk, chunking.positions)
    most = max(high - low for low, high in shared)
    draft_buffer = states.new_empty(round_up(chunk, tile), vocabulary)
    target_buffer = states.new_empty(round_up(most, tile), vocabulary)
    slope_buffer = None if settings.softcap is None else torch.empty_like(draft_buffer)
    work = RowKernel(chunk, vocabulary, settings, states.device)
    target, held = target_buffer, None
    for start, (low, high) in zip(range(0, rows, chunk), shared, strict=True):
        real = slice(start, min(start + chunk, rows))
        part = slice(start, start + round_up(real.stop - start, tile))
        logits = torch.mm(states[part], inputs.head.T, out=draft_buffer[: part.stop - start])
        slope = None if slope_buffer is None else slope_buffer[: len(logits)]
        if slope is not None and settings.softcap is not None:
            soften(logits, settings.softcap)
            torch.div(logits, settings.softcap, out=slope).square_().neg_().add_(1.0)
        if z is not None and project is not None:
            logits.addmm_(z[part], project.T)
        if held != (low, high):
            held, whole = (low, high), round_up(high - low, tile)
            target = torch.mm(wanted[low : low + whole], inputs.target_head.T, out=target_buffer[:whole])
        count = real.stop - start
        kept = (None if term is None else term[real] for term in (soft_ce, reverse_kl))
        work.rows_to_gradients(logits[:count], target, real, low, inputs, ce[real], l1[real], *kept)
        if grad_hidden is None:
            continue
        logits[count:].zero_()
        if z is not None and project is not None and grad_latent is not None and grad_w2 is not None:
            torch.mm(logits, project, out=grad_latent[part])
            _accumulate(grad_w2, logits, z[part])
        if slope is not None:
            logits.mul_(slope)
        torch.mm(logits, inputs.head, out=grad_hidden[part])
    if grad_hidden is not None:
        grad_hidden = grad_hidden[:rows]
    if grad_latent is not None:
        grad_latent = grad_latent[:rows]
    return (ce, l1, soft_ce, reverse_kl), (grad_hidden, grad_latent, grad_w2)


def _shared_positions(first: list[int], chunk: int, most: int) -> list[tuple[int, int]]:
    """Positions ``low .. high`` whose target logits each chunk finds: consecutive chunks share one product.

    Args:
        first: position of each row, ascending.
        chunk: rows of a chunk.
        most: positions that several chunks may share.
    """
    spans = [
        (first[start], first[min(start + chunk, len(first)) - 1] + 1) for start in range(0, len(first), chunk)
    ]
    found: list[tuple[int, int]] = []
    begin = 0
    for index, (_, high) in enumerate(spans):
        if high - spans[begin][0] > most:
            found += [(spans[begin][0], spans[index - 1][1])] * (index - begin)
            begin = index
    return found + [(spans[begin][0], spans[-1][1])] * (len(spans) - begin)


def _accumulate(total: Tensor, gradient: Tensor, latent: Tensor) -> None:
    """``total += gradientᵀ @ latent``, the sum in ``total``'s precision: one product on a GPU, tiles on a CPU."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, latent)
    elif gradient.device.type == "cuda":
        torch.addmm(total, gradient.T, latent, total.dtype, out=total)
    else:
        for start in range(0, total.shape[0], _VOCABULARY_TILE):
            tile = gradient[:, start : start + _VOCABULARY_TILE]
            total[start : start + _VOCABULARY_TILE].add_(torch.mm(tile.T, latent))
