"""What this machine has, and which way of computing is the fastest on it: measured, not read off its flags.

A processor may multiply in bfloat16 four times as fast as in float32, or ten times as slowly, and its flags do not
tell which; nor whether oneDNN or the BLAS library has the faster float32 product. So one decoder layer of the size at
hand runs a few times in each form, some tens of milliseconds each, and the fastest form is taken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SECONDS = 0.05
"""Time for each form that is measured, when it is not slow."""
_FLOPS = 1.5e9
"""Most arithmetic of one measured pass."""
_MARGIN = 1.03
"""How much faster a form must be than the plain one to be taken."""
_ONEDNN: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
SET_ELSEWHERE = "OMP_NUM_THREADS"
"""Reason of a number of threads that this process did not choose."""
_EXACT = 2e-6
"""Largest relative error of a float32 product, above that of any summation order."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one decoder layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> LayerShape:
        """Sizes that a Hugging Face (text) config names; common proportions where it names none."""

        layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]

        def number(name: str, default: int) -> int:
            values = [getattr(layer, name, None) or 0 for layer in layers]
            value = max(values, key=lambda v: max(v) if isinstance(v, list | tuple) else v)
            # some models have a list, of one number per layer
            return int((max(value) if isinstance(value, list | tuple) else value) or default)

        hidden = int(config.hidden_size)
        heads = number("num_attention_heads", max(1, hidden // 64))
        kv_heads = number("num_key_value_heads", heads)
        return cls(
            hidden,
            number("intermediate_size", 4 * hidden),
            heads,
            kv_heads if heads % kv_heads == 0 else heads,
            number("head_dim", max(1, hidden // heads)),
        )

    @property
    def parameters(self) -> int:
        """Weights of the layer's products."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.hidden * (attention + 3 * self.intermediate)

    def rows_within(self, most: int) -> int:
        """Rows that one measured pass takes: ``most``, or fewer where that would take long."""
        return max(8, min(most, int(_FLOPS / (2 * self.parameters))))


@dataclass(frozen=True)
class Choice:
    """A form of computing that was chosen, and why."""

    purpose: str
    """What it is for, as messages name it."""
    name: str
    """The chosen form."""
    milliseconds: dict[str, float] = field(default_factory=dict)
    """Of one measured pass, by form; empty where nothing was measured."""
    reason: str = ""
    """Why, where nothing was measured."""

    def __str__(self) -> str:
        others = {name: value for name, value in self.milliseconds.items() if name != self.name}
        if not others:
            return f"{self.purpose}: {self.name}{f' ({self.reason})' if self.reason else ''}"
        own = self.milliseconds[self.name]
        compared = ", ".join(f"{value / own:.1f} times as fast as {name}" for name, value in others.items())
        return f"{self.purpose}: {self.name} ({compared})"

    def to_json(self) -> dict[str, Any]:
        """As ``run.json`` holds it."""
        kept = {name: round(value, 3) for name, value in self.milliseconds.items()}
        return {"purpose": self.purpose, "name": self.name, "milliseconds": kept, "reason": self.reason}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Choice:
        """Inverse of :meth:`to_json`."""
        return cls(content["purpose"], content["name"], dict(content["milliseconds"]), content["reason"])


def fastest(purpose: str, forms: Mapping[str, Callable[[], object]], seconds: float = SECONDS) -> Choice:
    """Run every form for some ``seconds``, in turns, and choose the one whose best time is the shortest.

    In turns, since a machine's speed changes while it is measured. The first form is the plain one: another must be
    3 % faster to be taken instead. A form that takes twenty times as long as the best one runs once.

    Args:
        purpose: what the choice is for.
        forms: what to run, by name; the first call of each is not timed.
        seconds: of timed calls for each form.
    """
    if purpose in _decided:
        return _decided[purpose]
    best = dict.fromkeys(forms, float("inf"))
    spent = dict.fromkeys(forms, 0.0)
    for run in forms.values():
        run()
    while any(value < seconds for value in spent.values()):
        for name, run in forms.items():
            slow = best[name] > 20 * min(best.values())
            if spent[name] >= seconds or (slow and best[name] < float("inf")):
                spent[name] = seconds
                continue
            began = time.perf_counter()
            run()
            took = time.perf_counter() - began
            best[name] = min(best[name], took)
            spent[name] += took
    plain = next(iter(best))
    chosen = min(best, key=best.__getitem__)
    if best[plain] < _MARGIN * best[chosen]:
        chosen = plain
    return decide(Choice(purpose, chosen, {name: 1000 * value for name, value in best.items()}))


_decided: dict[str, Choice] = {}


def decide(choice: Choice) -> Choice:
    """Keep a choice for the rest of the process."""
    _decided[choice.purpose] = choice
    return choice


def decided() -> dict[str, dict[str, Any]]:
    """Everything that was chosen in this process, by purpose, as ``run.json`` keeps it."""
    return {purpose: choice.to_json() for purpose, choice in _decided.items()}


def remember(content: Mapping[str, Mapping[str, Any]]) -> None:
    """Take choices of an earlier process instead of measuring: a resumed run keeps its arithmetic."""
    for choice in content.values():
        decide(Choice.from_json(choice))


Multiply = Callable[[Tensor], Callable[[Tensor], Tensor]]
"""Makes the product with a weight ``[out, in]``."""


def layer_pass(
    shape: LayerShape,
    rows: int,
    dtype: torch.dtype,
    *,
    backward: bool = False,
    multiply: Multiply | None = None,
) -> Callable[[], object]:
    """One decoder layer with random weights, as a function to be timed.

    Args:
        shape: its sizes.
        rows: tokens of the pass, one sequence.
        dtype: float32, or bfloat16: weights and states without ``backward``, autocast with it.
        backward: also compute the gradients of weights and states.
        multiply: makes the products; None is PyTorch's.
    """
    generator = torch.Generator().manual_seed(0)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    kept = torch.float32 if backward else dtype

    def weight(out: int, inner: int) -> Tensor:
        made = torch.randn(out, inner, generator=generator) / inner**0.5
        return made.bfloat16().to(kept).requires_grad_(backward)

    qkv, output = weight(width, shape.hidden), weight(shape.hidden, shape.heads * shape.head_dim)
    gate_up, down = weight(2 * shape.intermediate, shape.hidden), weight(shape.hidden, shape.intermediate)
    states = torch.randn(rows, shape.hidden, generator=generator).to(kept).requires_grad_(backward)
    make = multiply or (lambda weight: lambda x: F.linear(x, weight))
    by_qkv, by_output, by_gate_up, by_down = (make(one) for one in (qkv, output, gate_up, down))
    sizes = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]

    def forward() -> Tensor:
        x = F.rms_norm(states, (shape.hidden,))
        query, key, value = (
            part.view(rows, -1, shape.head_dim).transpose(0, 1)[None]
            for part in by_qkv(x).split(sizes, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = states + by_output(mixed[0].transpose(0, 1).reshape(rows, -1))
        gate, up = by_gate_up(F.rms_norm(x, (shape.hidden,))).chunk(2, dim=-1)
        return x + by_down(F.silu(gate) * up)

    def run() -> object:
        if not backward:
            with torch.no_grad():
                return forward()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            result = forward()
        return torch.autograd.grad(result.float().sum(), [states, qkv, output, gate_up, down])

    return run


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_dtype(purpose: str, shape: LayerShape, rows: int, *, backward: bool = False) -> Choice:
    """``float32`` or ``bfloat16``, whichever runs a layer of this shape faster on this processor.

    Args:
        purpose: what the choice is for.
        shape: of the layer.
        rows: tokens of a pass.
        backward: with gradients, bfloat16 as autocast.
    """
    tune()
    rows = shape.rows_within(rows)
    forms = {
        name: made_when_run(partial(layer_pass, shape, rows, dtype, backward=backward))
        for name, dtype in DTYPES.items()
    }
    return fastest(f"{purpose} ({rows:,} rows of {shape.hidden})", forms)


def made_when_run(make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """A form that is made at its first run: one that was chosen before is never made."""
    made: list[Callable[[], object]] = []

    def run() -> object:
        if not made:
            made.append(make())
        return made[0]()

    return run


def choose_newton_schulz(rows: int, columns: int) -> Choice:
    """Dtype of Muon's iterations for matrices of this size: ``float32`` or ``bfloat16``."""
    tune()
    size = max(64, min(rows, columns, 1024))
    matrices = {name: torch.randn(size, size).to(dtype) for name, dtype in DTYPES.items()}
    forms = {name: (lambda matrix=matrix: matrix @ matrix.mT) for name, matrix in matrices.items()}
    return fastest(f"Muon's iterations ({size} × {size})", forms)


# -- float32 products and threads, once per process ------------------------------------------------------------------


@contextmanager
def onednn_products(enabled: bool = True) -> Iterator[None]:
    """Let oneDNN compute float32 products, instead of the BLAS library, inside the block.

    PyTorch offers this as a permission to round to bfloat16. Where oneDNN has no kernel that does so faster, it
    computes in float32, exactly; :func:`tune` takes it in that case alone.
    """
    before = _ONEDNN.fp32_precision
    set_onednn(enabled)
    try:
        yield
    finally:
        _ONEDNN.fp32_precision = before


def set_onednn(enabled: bool) -> None:
    """Choose between oneDNN and BLAS for this process."""
    _ONEDNN.fp32_precision = "bf16" if enabled else "none"


def tune() -> tuple[Choice, Choice]:
    """Choose threads and the library of float32 products, for the whole process; measured at the first call.

    Returns:
        The choice of threads, and that of the library (``BLAS`` or ``oneDNN``).
    """
    threads = _choose_threads()
    count = int(threads.name)
    library = choose_library()
    if not _tuned:
        _tuned.append(threads)
        torch.set_num_threads(min(count, usable_cores()))
        set_onednn(library.name == "oneDNN")
    return threads, library


_tuned: list[Choice] = []


def choose_library() -> Choice:
    """``BLAS`` or ``oneDNN`` for float32 products: the faster one, oneDNN only where it is exact."""
    purpose, size = "float32 products", 640
    known = _decided.get(purpose)
    if known is not None and known.name != "oneDNN":
        return known
    if not torch.backends.mkldnn.is_available():
        return decide(Choice(purpose, "BLAS", reason="PyTorch has no oneDNN here"))
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(512, size, generator=generator), torch.randn(size, size, generator=generator)
    exact = a.double() @ b.double()
    with onednn_products():
        error = float(((a @ b).double() - exact).norm() / exact.norm())
    if error > _EXACT:
        return decide(Choice(purpose, "BLAS", reason=f"oneDNN rounds them here (relative error {error:.0e})"))

    if known is not None:  # chosen by an earlier process, perhaps on another processor, and exact here too
        return known

    def by(enabled: bool) -> Callable[[], object]:
        def run() -> object:
            with onednn_products(enabled):
                return a @ b

        return run

    return fastest(purpose, {"BLAS": by(False), "oneDNN": by(True)})


def _choose_threads() -> Choice:
    now = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:  # by the user, or by a launcher that divides the cores over its ranks
        return decide(Choice("threads", str(now), reason=SET_ELSEWHERE))
    if "threads" in _decided:
        return _decided["threads"]
    counts = sorted({min(now, usable_cores()), *_thread_counts()}, reverse=True)
    if len(counts) == 1:
        return decide(Choice("threads", str(counts[0]), reason="one per core"))
    run = layer_pass(LayerShape(768, 2048, 12, 12, 64), 96, torch.float32)

    def with_threads(count: int) -> object:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        return run()

    return fastest("threads", {str(count): partial(with_threads, count) for count in counts})


def _thread_counts() -> set[int]:
    """Numbers of threads worth trying: all processors that may be used, and one for each core."""
    cores = usable_cores()
    return {cores, min(cores, physical_cores())}


# -- what there is -----------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """Processors that this process may use: its affinity, and the quota of its container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _content("/sys/fs/cgroup/cpu.max").split()
    if not quota:  # the first version of control groups
        quota = [_content(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        count = min(count, max(1, round(int(quota[0]) / int(quota[1]))))
    return max(1, count)


def physical_cores() -> int:
    """Cores, hyper-threads not counted; all processors where the system does not tell."""
    siblings = {
        _content(str(path))
        for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    }
    return len(siblings - {""}) or os.cpu_count() or 1


def free_memory() -> int | None:
    """Bytes that this process may still take: of the machine, and of its container; None where nothing tells."""
    found = []
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    for limit_file, used_file, folder in (
        ("memory.max", "memory.current", "/sys/fs/cgroup"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "/sys/fs/cgroup/memory"),
    ):
        limit, used = _content(f"{folder}/{limit_file}"), _content(f"{folder}/{used_file}")
        if limit.isdigit() and used.isdigit():
            found.append(int(limit) - int(used) + _reclaimable(f"{folder}/memory.stat"))
    return min(found) if found else None


def _reclaimable(path: str) -> int:
    """Bytes of files in memory that the system gives up when a program asks for memory."""
    rows = dict(line.split() for line in _content(path).splitlines() if line.count(" ") == 1)
    return int(rows.get("inactive_file", 0)) + int(rows.get("active_file", 0))


def _content(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:  # not Linux, or not told to this process
        return ""
