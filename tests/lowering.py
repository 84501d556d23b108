"""Lowers FlexAttention as Inductor would for a GPU, on a machine that has none (``tests/draft/test_lowering.py``).

Tensors are fake and lie on CUDA, whose device guard does nothing, and the device's properties are an H100's. Inductor
chooses its kernels from these; the first thing that it cannot do is to ask the driver to compile what it has chosen,
which is where a shape counts as lowered. No kernel runs.

    python tests/lowering.py '[[4, 8], [40]]' '[[32, 8]]'    blocks per sequence; query and key-value heads
"""

from __future__ import annotations

import ast
import ctypes
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::DeviceGuardImplRegistrar guard(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
"""
H100 = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20, gcnArchName="",
)  # fmt: skip
DRIVER = "libcuda.so"
"""What is missed once the kernels are chosen."""


def pretend() -> None:
    """Make this process believe in one H100."""
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        flags = ["-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
        flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
        subprocess.run(["g++", *flags, str(source), "-lc10", "-o", str(library)], check=True)
        ctypes.CDLL(str(library))

    from torch._dynamo import device_interface
    from torch._inductor import config as inductor
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch.utils import _triton

    def always(value: Any) -> Any:
        return lambda *args, **kwargs: value

    cuda: Any = torch.cuda
    for name, value in {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "synchronize": None,
        "get_device_properties": H100, "get_device_capability": (9, 0), "get_device_name": H100.name,
        "_lazy_init": None,
        "_exchange_device": 0, "_maybe_exchange_device": 0, "set_device": None, "set_rng_state": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }.items():  # fmt: skip
        setattr(cuda, name, always(value))
    torch.version.cuda = "13.0"
    for name, value in {
        "_cuda_getDevice": 0, "_cuda_setDevice": None, "_cuda_getCurrentRawStream": 0, "_cuda_exchangeDevice": 0,
        "_cuda_maybeExchangeDevice": 0, "_cuda_getDeviceCount": 1, "_cuda_isInBadFork": False,
        "_cuda_synchronize": None, "_cuda_getArchFlags": "sm_90",
    }.items():  # fmt: skip
        if not hasattr(torch._C, name):
            setattr(torch._C, name, always(value))
    interface: Any = device_interface.CudaInterface
    for holder, name, value in (
        (interface, "is_available", True),
        (interface.Worker, "get_device_properties", H100),
        (interface, "get_device_properties", H100),
        (interface, "current_device", 0),
        (interface, "get_compute_capability", 90),
    ):
        setattr(holder, name, staticmethod(always(value)))
    patterns: Any
    for patterns in (joint_graph, post_grad):
        patterns.lazy_init = always(None)  # patterns are traced on a device
    triton: Any = _triton
    triton.has_triton = triton.has_triton_package = always(True)
    inductor.pattern_matcher = inductor.use_joint_graph_passes = inductor.joint_graph_constant_folding = False
    inductor.compile_threads, inductor.fallback_random = 1, True


def lower(
    counts: list[int], heads: int, kv_heads: int, slots: int = 7, length: int = 200, size: int = 128
) -> str:
    """``lowered``, or why not, for blocks of ``slots`` in sequences of ``length`` tokens."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dspark_train.draft.config import Sight
    from dspark_train.draft.flex import FlexLayout, flex_block_attention
    from dspark_train.structures import Blocks

    torch._dynamo.reset()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            batch, blocks = len(counts), sum(counts)
            sequence = torch.zeros(blocks, dtype=torch.int64, device="cuda")
            zeros = torch.zeros(blocks, slots, dtype=torch.int64, device="cuda")
            layout = FlexLayout.of(
                Blocks(sequence, sequence + 1, zeros, zeros, zeros, zeros.bool()),
                batch,
                length,
                Sight(64, causal=True),
            )
            query = torch.empty(blocks, slots, heads, size, device="cuda", dtype=torch.bfloat16)
            context = torch.empty(batch, length, kv_heads, size, device="cuda", dtype=torch.bfloat16)
            own = torch.empty(blocks, slots, kv_heads, size, device="cuda", dtype=torch.bfloat16)
            flex_block_attention(query, context, context, own, own, layout, size**-0.5)
    except Exception as error:
        chain: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            chain.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__ or cause.__context__
        return "lowered" if any(DRIVER in text for text in chain) else chain[-1].splitlines()[0]
    return "lowered"


if __name__ == "__main__":
    pretend()
    print(
        json.dumps(
            [
                [counts, groups, lower(counts, *groups)]
                for counts in ast.literal_eval(sys.argv[1])
                for groups in ast.literal_eval(sys.argv[2])
            ]
        )
    )
