"""Passes of fixed shapes: what a CUDA graph needs, and ``torch.compile`` for what lies between the products.

A ragged pass has as many rows as this round happens to verify. A graph replays kernels of the shapes that it was
captured with, from the memory that it was captured with. So the rows are padded to one of a few sizes, the requests
and the reach of the attention too, and everything that changes from round to round (tokens, positions, slots, masks'
bounds) lies in buffers that stay where they are. Rows of padding write to a slot that no request owns.

R  requests      S  rows of a pass
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dspark_train.decoding.layout import TILE, FixedLayout, RowLayout
from dspark_train.errors import UserError

Outputs = tuple[Tensor | None, ...]


def padded_rows(rows: int) -> int:
    """Rows that a pass of ``rows`` is padded to: 1, 2, 4, 8, then by 8, from 256 on by 64."""
    step = 64 if rows > 256 else 8
    return _doubled(rows) if rows <= 8 else -(-rows // step) * step


def padded_requests(requests: int, slots: int) -> int:
    """Requests that a pass is padded to: the next power of two, at most all ``slots``."""
    return min(_doubled(requests), slots)


def padded_reach(reach: int, length: int) -> int:
    """Positions that a pass reads: the next power of two of tiles, at most the ``length`` of the cache."""
    return min(TILE * _doubled(-(-reach // TILE)), length)


def _doubled(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


class Program:
    """One function of fixed inputs, captured as a CUDA graph; on other devices simply called."""

    def __init__(
        self,
        function: Callable[[], Outputs],
        device: torch.device,
        generator: torch.Generator | None,
        pool: Any,
    ) -> None:
        """Capture ``function``, which must read only memory that stays, and write only what may be written twice."""
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: Outputs = ()
        if device.type != "cuda":
            return
        side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries set themselves up at the first call, which no graph can hold
                function()
        current.wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        if generator is not None:
            self.graph.register_generator_state(generator)
        try:
            with torch.cuda.graph(self.graph, pool=pool):
                self.outputs = function()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"this model's pass cannot be captured as a CUDA graph: {reason}. Decode without graphs"
            ) from error

    def __call__(self) -> Outputs:
        """Run once; the outputs are copies, which the next run leaves alone."""
        if self.graph is None:
            return self.function()
        self.graph.replay()
        return tuple(None if output is None else output.clone() for output in self.outputs)


class Programs:
    """Programs of one run of a decoder, made when their shapes are first met."""

    def __init__(self, slots: int, device: torch.device, generator: torch.Generator | None = None) -> None:
        self.slots, self.device, self.generator = slots, device, generator
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._layouts: dict[tuple[int, ...], FixedLayout] = {}
        self._programs: dict[tuple[Any, ...], tuple[Program, list[Tensor]]] = {}
        self._loaded: tuple[RowLayout, FixedLayout] | None = None

    def place(self, layout: RowLayout, width: int, length: int) -> FixedLayout:
        """``layout`` padded to fixed shapes.

        Args:
            layout: rows, from slot 0 on.
            width: most rows that a request may have in passes of this kind.
            length: positions of the cache.
        """
        if self._loaded is not None and self._loaded[0] is layout:
            return self._loaded[1]
        requests = padded_requests(len(layout.counts), self.slots)
        rows = requests * width if layout.block else min(padded_rows(sum(layout.counts)), requests * width)
        reach = padded_reach(layout.reach, length)
        key = (rows, requests, width, reach, int(layout.block))
        fixed = self._layouts.get(key)
        if fixed is None:
            fixed = FixedLayout(rows, requests, width, reach, self.slots, self.device, layout.block)
            self._layouts[key] = fixed
        fixed.load(layout)
        self._loaded = (layout, fixed)
        return fixed

    def run(
        self, name: str, key: object, function: Callable[..., Outputs], *inputs: tuple[Tensor, int]
    ) -> Outputs:
        """Run the program of this name and key on new inputs.

        Args:
            name: of the function.
            key: what else the program depends on.
            function: of the inputs; called to make the program.
            inputs: each a tensor, and the size that its first dimension is padded to.
        """
        shapes = tuple((size, tensor.shape[1:], tensor.dtype) for tensor, size in inputs)
        known = self._programs.get((name, key, shapes))
        if known is None:
            static = [tensor.new_zeros(size, *tensor.shape[1:]) for tensor, size in inputs]
            _fill(static, inputs)
            program = Program(lambda: function(*static), self.device, self.generator, self._pool)
            known = self._programs[name, key, shapes] = (program, static)
        program, static = known
        _fill(static, inputs)
        return program()

    def __len__(self) -> int:
        return len(self._programs)


def _fill(static: Sequence[Tensor], inputs: Sequence[tuple[Tensor, int]]) -> None:
    for place, (tensor, _) in zip(static, inputs, strict=True):
        place[: tensor.shape[0]] = tensor


# -- torch.compile ---------------------------------------------------------------------------------------------


@contextmanager
def compiled(owner: nn.Module) -> Iterator[list[str]]:
    """Compile the norms and, where they are not packed for a CPU, the MLPs of a model while inside.

    What lies between attentions: it needs nothing of caches, taps or rounds, and is alike in all families.

    Yields:
        Names of the compiled modules.

    Raises:
        UserError: no C++ compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise UserError(
            f"torch.compile needs a C++ compiler, and {compiler} is not there: decode without compile"
        )
    chosen = [
        (name, module)
        for name, module in owner.named_modules()
        if type(module).__name__.endswith("RMSNorm") or (name.endswith("mlp") and _plain(module))
    ]
    for _, module in chosen:
        module.forward = torch.compile(module.forward, dynamic=True)
    try:
        yield [name for name, _ in chosen]
    finally:
        for _, module in chosen:
            vars(module).pop("forward", None)


def _plain(mlp: nn.Module) -> bool:
    """Whether an MLP is a few plain linear layers, none of them packed."""
    linears = [module for module in mlp.modules() if isinstance(module, nn.Linear)]
    return bool(linears) and len(linears) <= 3 and not any("forward" in vars(module) for module in linears)
