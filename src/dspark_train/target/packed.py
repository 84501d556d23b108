"""Linear layers that are as fast for a few rows as for one, on a CPU.

A pass over one row reads every weight once and is bound by memory. A general matrix product of a few rows copies
each weight into the layout that its kernel wants, which costs more than the product. Here the copy is made once:

* float32 weights become half-precision numbers, which the kernel (FBGEMM's) widens as it reads: half the traffic,
  and float32 arithmetic. Weights trained or published in bfloat16, and held in float32, are half-precision numbers
  almost without exception, so the product is the same; a weight that is not stays as it is.
* bfloat16 weights keep their numbers, in the layout of oneDNN's kernels, where the processor multiplies in bfloat16.

Layers that read the same input (queries, keys and values; gate and up) become one product. The copies take the
memory that the weights take in bfloat16. How many rows a packed product is the faster one for is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_train.machine import fastest
from dspark_train.target.quantised import is_plain

ROWS = (32, 256, 2048)
"""Numbers of rows at which packed products are held against plain ones."""
LIKELY = 32
"""Rows that the layout of a bfloat16 weight is chosen for. With AMX, products of up to so many give each row the bits
that it gets alone; larger ones add up in another order."""
STEP = 8
"""Beyond so many rows a product is padded to a multiple of them: oneDNN compiles a kernel for every size it meets."""

_packed: WeakKeyDictionary[nn.Module, PackedLinears] = WeakKeyDictionary()


class SharedProduct:
    """One product for several layers that read the same input; each takes its columns."""

    def __init__(self, linears: Sequence[nn.Linear], multiply: Callable[[Tensor], Tensor]) -> None:
        """``multiply`` gives the outputs of all ``linears``, one after the other."""
        self.sizes = [linear.out_features for linear in linears]
        self.multiply = multiply
        self.input: Tensor | None = None
        self.outputs: dict[int, Tensor] = {}

    def forward(self, place: int, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        """Forward function of the layer at ``place``: the first one called with an input computes all."""

        def product(x: Tensor) -> Tensor:
            if not _small(x):
                return F.linear(x, linear.weight, linear.bias)
            if self.input is not x or place not in self.outputs:
                self.input = x
                self.outputs = dict(enumerate(self.multiply(x).split(self.sizes, dim=-1)))
            output = self.outputs.pop(place)
            if not self.outputs:
                self.input = None
            return output

        return product


class PackedLinears:
    """Packed copies of weights; while entered, small products use them."""

    def __init__(
        self, owner: nn.Module, head: Tensor | None = None, groups: Sequence[Sequence[str]] = ()
    ) -> None:
        """Copy the weights of every linear layer of ``owner``, and ``head [V, d]``, that lose nothing by it.

        ``groups`` names neighbours that read the same input.
        """
        linears = (module for module in owner.modules() if _plain(module))
        self.modules = [module for module in linears if module.weight is not head]
        self.forwards: dict[nn.Linear, Callable[[Tensor], Tensor]] = {}
        self.shared: list[SharedProduct] = []
        for parent in owner.modules():
            for names in groups:
                self._share([getattr(parent, name, None) for name in names])
        for module in self.modules:
            if module not in self.forwards:
                product = packed_product(module.weight, module.bias)
                if product is not None:
                    self.forwards[module] = product
        self.head = None if head is None else packed_product(head)
        """Product with the rows of the head; None where it is not packed."""
        self._state = self._now(head)

    def _share(self, neighbours: Sequence[Any]) -> None:
        if any(not _plain(one) or one in self.forwards for one in neighbours):
            return
        first: nn.Linear = neighbours[0]
        alike = all(
            one.weight.shape[-1:] == first.weight.shape[-1:] and (one.bias is None) == (first.bias is None)
            for one in neighbours
        )
        # each alone first: a joint norm would hide the rounding of a small weight behind a large one
        if not alike or any(not _packs(one.weight) for one in neighbours):
            return
        weight = torch.cat([one.weight.detach() for one in neighbours])
        bias = None if first.bias is None else torch.cat([one.bias.detach() for one in neighbours])
        self.shared.append(SharedProduct(neighbours, _pack(weight, bias)))
        for place, one in enumerate(neighbours):
            self.forwards[one] = self.shared[-1].forward(place, one)

    def _now(self, head: Tensor | None) -> list[tuple[int, int]]:
        weights = [module.weight for module in self.modules] + ([] if head is None else [head])
        return [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]

    def stale(self, head: Tensor | None) -> bool:
        """Whether weights have moved or changed since they were copied."""
        return self._state != self._now(head)

    def __enter__(self) -> None:
        for module, forward in self.forwards.items():
            module.forward = forward  # type: ignore[method-assign, assignment]

    def __exit__(self, *error: object) -> None:
        for module in self.modules:
            vars(module).pop("forward", None)
        for shared in self.shared:
            shared.input, shared.outputs = None, {}


def packed_linears(
    owner: nn.Module, head: Tensor | None = None, groups: Sequence[Sequence[str]] = ()
) -> PackedLinears:
    """Packed weights of a model, made at the first call and again where they have changed since.

    Args:
        owner: whose linear layers.
        head: ``[V, d]`` LM head where it is no layer of ``owner``.
        groups: names of neighbouring layers that are called with the same input.
    """
    known = _packed.get(owner)
    if known is None or known.stale(head):
        known = _packed[owner] = PackedLinears(owner, head, groups)
    return known


def _plain(module: Any) -> TypeGuard[nn.Linear]:
    """A linear layer of numbers; a quantised one multiplies in its own way."""
    return type(module) is nn.Linear and is_plain(module)


def packed_product(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor] | None:
    """``x ↦ x Wᵀ + b`` with packed weights; None where they would not be the same numbers, or gain nothing.

    Args:
        weight: ``[out, in]``; on a CPU, float32 with FBGEMM or bfloat16 with instructions for it.
        bias: ``[out]``.
    """
    if not _packs(weight):
        return None
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    multiply = _pack(weight, bias)

    def product(x: Tensor) -> Tensor:
        return multiply(x) if _small(x) else F.linear(x, weight, bias)

    return product


def packed_or_plain(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """``x ↦ x Wᵀ``, with packed weights where they are the same numbers."""
    return packed_product(weight) or (lambda x: F.linear(x, weight))


def _pack(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Product of few rows with a weight that packs."""
    if weight.dtype == torch.float32:
        return partial(_multiply_half, torch.ops.quantized.linear_prepack_fp16(weight, bias))
    return partial(_multiply_bfloat16, torch.ops.mkldnn._reorder_linear_weight(weight, LIKELY), bias)


def _multiply_half(packed: Any, x: Tensor) -> Tensor:
    return torch.ops.quantized.linear_dynamic_fp16(x, packed)


def _multiply_bfloat16(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    rows = x.numel() // x.shape[-1]
    flat = x.reshape(rows, x.shape[-1])
    if (missing := -rows % STEP) and rows > STEP:
        flat = F.pad(flat, (0, 0, 0, missing))
    product = torch.ops.mkldnn._linear_pointwise(flat, packed, bias, "none", [], "")
    return product[:rows].view(*x.shape[:-1], -1)


def _small(x: Tensor) -> bool:
    return x.numel() <= most_rows(x.dtype) * x.shape[-1]


_most: dict[torch.dtype, int] = {}


def most_rows(dtype: torch.dtype) -> int:
    """Rows up to which a packed product is the faster one here, measured at the first call (32 at least)."""
    if dtype not in _most:
        size = 768
        weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).bfloat16().to(dtype)
        packed = _pack(weight, None)
        _most[dtype] = ROWS[0]
        for rows in ROWS[1:]:
            x = torch.ones(rows, size, dtype=dtype)
            forms = {
                "plain": lambda x=x: F.linear(x, weight),
                "packed": lambda x=x: packed(x),
            }
            name = str(dtype).removeprefix("torch.")
            if fastest(f"products of {rows:,} rows in {name}", forms, seconds=0.02).name == "plain":
                break
            _most[dtype] = rows if rows < ROWS[-1] else 2**40
    return _most[dtype]


@lru_cache(maxsize=2)
def rows_stand_alone(dtype: torch.dtype) -> bool:
    """Whether a decoder of so few rows gives each of them the bits that it gets alone.

    Products are tried here; attention does so where the processor has tiles (AMX), and not elsewhere.
    """
    if dtype == torch.bfloat16 and not torch.cpu._is_amx_tile_supported():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1536, 576, generator=generator).to(dtype)
    rows = torch.randn(8, 576, generator=generator).to(dtype)
    multiply = packed_or_plain(weight)
    return torch.equal(multiply(rows), torch.cat([multiply(row) for row in rows.split(1)]))


def has_bfloat16() -> bool:
    """Whether oneDNN multiplies in bfloat16 on this processor; how fast, only a measurement tells."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packs(weight: Tensor) -> bool:
    """Whether a packed copy of ``weight`` holds the same numbers, and is used."""
    # empty: sharded over ranks, gathered only while its layer runs; inference: made so that changes go unnoticed
    if weight.device.type != "cpu" or weight.numel() == 0 or weight.is_inference():
        return False
    if weight.dtype == torch.bfloat16:
        return has_bfloat16()
    if weight.dtype != torch.float32 or "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    weight = weight.detach()
    lost = torch.linalg.vector_norm(weight.half().float() - weight)
    # less than float32 itself rounds; infinities of weights beyond half precision, and NaN, fail too
    return bool(lost <= 2.0**-24 * torch.linalg.vector_norm(weight))
