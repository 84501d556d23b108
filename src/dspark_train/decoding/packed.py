"""Linear layers that are as fast for a few rows as for one, on a CPU.

A pass over one row reads every weight once and is bound by memory. A general matrix product of a few rows copies
each weight into the layout that its kernel wants, which costs more than the product. Here the copy is made once, in
half precision, which the kernel (FBGEMM's) widens as it reads: half the traffic, and float32 arithmetic. Weights
trained or published in bfloat16, and held in float32, are half-precision numbers almost without exception, so
the product is the same; a weight that is not stays as it is. The copies take half the memory of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST = 32
"""Rows up to which a packed product is the faster one."""

_packed: WeakKeyDictionary[nn.Module, PackedLinears] = WeakKeyDictionary()


class PackedLinears:
    """Packed copies of weights; while entered, small products use them."""

    def __init__(self, owner: nn.Module, head: Tensor | None = None) -> None:
        """Copy the weights of every linear layer of ``owner``, and ``head [V, d]``, that lose nothing by it."""
        linears = (module for module in owner.modules() if type(module) is nn.Linear)
        self.modules = [module for module in linears if module.weight is not head]
        self.forwards = [packed_product(module.weight, module.bias) for module in self.modules]
        self.head = None if head is None else packed_product(head)
        """Product with the rows of the head; None where it is not packed."""
        self._state = self._now(head)

    def _now(self, head: Tensor | None) -> list[tuple[int, int]]:
        weights = [module.weight for module in self.modules] + ([] if head is None else [head])
        return [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]

    def stale(self, head: Tensor | None) -> bool:
        """Whether weights have moved or changed since they were copied."""
        return self._state != self._now(head)

    def __enter__(self) -> None:
        for module, forward in zip(self.modules, self.forwards, strict=True):
            if forward is not None:
                module.forward = forward  # type: ignore[method-assign, assignment]

    def __exit__(self, *error: object) -> None:
        for module in self.modules:
            vars(module).pop("forward", None)


def packed_linears(owner: nn.Module, head: Tensor | None = None) -> PackedLinears:
    """Packed weights of a model, made at the first call and again where they have changed since.

    Args:
        owner: whose linear layers.
        head: ``[V, d]`` LM head where it is no layer of ``owner``.
    """
    known = _packed.get(owner)
    if known is None or known.stale(head):
        known = _packed[owner] = PackedLinears(owner, head)
    return known


def packed_product(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor] | None:
    """``x ↦ x Wᵀ + b`` with packed weights; None where they would not be the same numbers, or gain nothing.

    Args:
        weight: ``[out, in]``; only float32 on a CPU that FBGEMM supports gains.
        bias: ``[out]``.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _has_fbgemm():
        return None
    # sharded over ranks, gathered only while its layer runs; or made so that changes go unnoticed
    if weight.numel() == 0 or weight.is_inference():
        return None
    weight = weight.detach()
    lost = torch.linalg.vector_norm(weight.half().float() - weight)
    # less than float32 itself rounds; infinities of weights beyond half precision, and NaN, fail too
    if not lost <= 2.0**-24 * torch.linalg.vector_norm(weight):
        return None
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None if bias is None else bias.detach())
    multiply = torch.ops.quantized.linear_dynamic_fp16

    def product(x: Tensor) -> Tensor:
        if x.numel() > MOST * x.shape[-1]:
            return F.linear(x, weight, bias)
        return multiply(x, packed)

    return product


def _has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines
