"""Linear layers that are as fast for eight rows as for one, on a CPU.

A pass over one row reads every weight once and is bound by memory. A general matrix product of a few rows first
copies each weight into the layout that its kernel wants, which costs more than the product. Here the copy is made
once: verification of up to eight rows then costs little more than one decoding step. The copies take as much memory
as the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_train.target.frozen import FrozenTarget

ROWS = 8
"""Rows that the weights are packed for."""
FEWEST = 3
"""Passes of fewer rows are as fast with the weights as they are."""

_packed: WeakKeyDictionary[nn.Module, PackedLinears] = WeakKeyDictionary()


class PackedLinears:
    """Packed copies of the weights of a target's layers; while :meth:`active`, passes of ``ROWS`` rows use them."""

    def __init__(self, layers: nn.Module) -> None:
        """Copy the weights of every linear layer below ``layers``."""
        pack = torch.ops.mkl._mkl_reorder_linear_weight
        self.modules = [module for module in layers.modules() if type(module) is nn.Linear]
        self.forwards: list[Callable[[Tensor], Tensor]] = [
            partial(_forward, module, pack(module.weight.detach(), ROWS)) for module in self.modules
        ]
        self.sources = [module.weight.data_ptr() for module in self.modules]

    @property
    def stale(self) -> bool:
        """Whether the weights have moved since they were copied."""
        return self.sources != [module.weight.data_ptr() for module in self.modules]

    def __enter__(self) -> None:
        for module, forward in zip(self.modules, self.forwards, strict=True):
            module.forward = forward  # type: ignore[method-assign, assignment]

    def __exit__(self, *error: object) -> None:
        for module in self.modules:
            del module.forward


def _forward(module: nn.Linear, packed: Tensor, x: Tensor) -> Tensor:
    if x.numel() != ROWS * x.shape[-1]:
        return F.linear(x, module.weight, module.bias)
    return torch.ops.mkl._mkl_linear(x, packed, module.weight, module.bias, ROWS)


def packed_linears(target: FrozenTarget) -> PackedLinears | None:
    """Packed weights of a target, made at the first call; None where they are of no use.

    Args:
        target: frozen target; only float32 on a CPU with MKL gains.
    """
    if target.device.type != "cpu" or target.dtype != torch.float32 or not torch.backends.mkl.is_available():
        return None
    known = _packed.get(target.model)
    if known is None or known.stale:
        known = _packed[target.model] = PackedLinears(target.layers)
    return known
