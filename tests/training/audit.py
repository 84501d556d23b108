"""A training step on fake CUDA tensors, and every wait in it; started by the tests as a process of its own.

``python audit.py GUARD.so`` prints two JSON objects ``{wait: the lines that cause it}``: of the step as it is, and of
one that is made to wait, so that the audit shows that it sees it. No kernel runs: fake tensors have shapes and
devices. ``guard.cpp`` makes a build of PyTorch for CPUs accept their device. The backward pass cannot run so.
"""

from __future__ import annotations

import ctypes
import json
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import tiny
import torch
import transformers.modeling_utils
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import import_utils

from dspark_train.data.sampler import GlobalBatchSampler
from dspark_train.draft import model as draft_model
from dspark_train.draft.recipe import build_config
from dspark_train.target import frozen
from dspark_train.training import row_kernel
from dspark_train.training.monitor import StepMonitor
from dspark_train.training.progress import TrainingProgress

GPU = torch.device("cuda", 0)
SYNCHRONISING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "bincount",
}
"""Operators whose result, or its size, the host waits for."""
PINNED: set[int] = set()


def pinned(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    PINNED.add(copy.data_ptr())
    KEPT.append(copy)
    return copy


KEPT: list[Tensor] = []


class Audit(TorchDispatchMode):
    """Notes what makes the host wait for the device, or a copy wait for the host."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: dict[str, list[str]] = {}

    def note(self, what: str) -> None:
        lines = [
            f"{frame.filename.split('/src/')[-1].split('site-packages/')[-1]}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if "dspark_train" in frame.filename or "transformers/" in frame.filename
        ]
        self.waits.setdefault(what, []).append(" < ".join(reversed(lines[-3:])))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).split(".")[1]
        leaves = tree_leaves((args, kwargs))
        faked = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        if not faked and not any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        on_gpu = first is not None and first.device.type == "cuda"
        if on_gpu and name in SYNCHRONISING:
            self.note(name)
            if name == "_local_scalar_dense":
                return True if args[0].dtype == torch.bool else 1
        if on_gpu and str(func) == "aten.repeat_interleave.Tensor" and kwargs.get("output_size") is None:
            self.note("repeat_interleave without its size")
        if on_gpu and name == "index":
            for index in args[1]:
                if index is not None and (index.dtype == torch.bool or index.device.type == "cpu"):
                    self.note(f"indexed by {index.dtype} on {index.device.type}")
        if name == "_to_copy" and first is not None and kwargs.get("device") is not None:
            self.copy(first, torch.device(kwargs["device"]), bool(kwargs.get("non_blocking")))
        if name == "copy_":
            self.copy(args[1], args[0].device, bool(args[2]) if len(args) > 2 else False)
        return func(*args, **kwargs)

    def copy(self, source: Tensor, device: torch.device, non_blocking: bool) -> None:
        if source.device.type == device.type or (source.dim() == 0 and device.type == "cuda"):
            return
        if source.device.type == "cpu" and non_blocking and source.data_ptr() in PINNED:
            return
        how = "non-blocking, from pageable memory" if non_blocking else "blocking"
        self.note(f"copy {source.device.type} to {device.type}, {how}")


def attention(query: Tensor, context_key: Tensor, context_value: Tensor, *rest: Any) -> Tensor:
    """Stands for the compiled kernel, whose mask is made by the real code."""
    return query + 0 * (context_key.sum() + context_value.sum())


def prepare() -> None:
    """Take away what fake tensors cannot do: compiling, reading values, drawing weights."""
    draft_model.flex_block_attention = attention  # type: ignore[assignment]
    row_kernel._compiled = row_kernel._formula  # type: ignore[assignment]
    frozen.FrozenTarget._probe = lambda self: setattr(self, "embedding_scale", 1.0)  # type: ignore[method-assign]
    transformers.modeling_utils.PreTrainedModel.init_weights = lambda self: None
    import_utils.is_fake_tensor = lambda tensor: False  # or the check that waits would be left out
    Tensor.pin_memory = pinned  # type: ignore[assignment]
    torch.amp.autocast_mode.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    for name in ("uniform_", "normal_", "kaiming_uniform_"):
        setattr(Tensor, name, lambda self, *_, **__: self)


def audit(blocking: bool) -> dict[str, list[str]]:
    data = tiny.TinyData(count=40, num_anchors=5).batches("train")
    sampler = GlobalBatchSampler(data.store.lengths, global_batch_size=8, micro_batch_size=8, seed=0)
    batch = data[next(iter(sampler))]
    module = tiny.tiny_module()
    module.draft = None
    with FakeTensorMode(allow_non_fake_inputs=True):
        config = Qwen3Config(
            vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, attn_implementation="sdpa",
        )  # fmt: skip
        with GPU:
            torch.set_default_dtype(torch.bfloat16)
            model = Qwen3ForCausalLM(config)
            torch.set_default_dtype(torch.float32)
            target = module.target = frozen.FrozenTarget(model, [0, 1, 3], name="fake")
            shape = build_config(
                module.recipe, target.config, target.layer_ids, vocab_size=97, mask_token_id=96
            )
            module.draft = draft_model.DSparkDraft(shape, target=target)
            module.slot_weights = module.slot_weights.new_zeros(4, device=GPU)
        module._device = GPU
        metrics, monitor, shown = module.metrics("train"), StepMonitor(), TrainingProgress()
        monitor._clock = SimpleNamespace(mark=lambda part: None)  # type: ignore[assignment]
        values = {"train/loss": torch.zeros((), device=GPU)}
        trainer = SimpleNamespace(
            logged_metrics=values,
            global_step=3,
            log_every_n_steps=10,
            estimated_stepping_batches=9,
            callbacks=[],
        )
        shown._shown = SimpleNamespace(done=2, update=lambda *_: None, remaining=None)  # type: ignore[assignment]
        with Audit() as found, torch.autocast("cuda", torch.bfloat16):
            prepared: Any = module.on_before_batch_transfer(batch, 0)
            prepared = prepared.to(GPU) if blocking else module.transfer_batch_to_device(prepared, GPU, 0)
            if blocking:
                frozen.one_sequence_per_row = nullcontext  # type: ignore[assignment]
            monitor.on_train_batch_start(trainer, module, prepared, 0)  # type: ignore[arg-type]
            loss, terms = module.compute(prepared)
            metrics.update(terms)
            monitor.on_before_backward(trainer, module, loss)  # type: ignore[arg-type]
            for parameter in module.draft.parameters():
                parameter.grad = torch.empty_like(parameter)
            module.on_before_optimizer_step(SimpleNamespace(param_groups=[{"fused": True}]))
            monitor.on_train_batch_end(trainer, module, loss, prepared, 0)  # type: ignore[arg-type]
            shown.on_train_batch_end(trainer, module, loss, prepared, 0)  # type: ignore[arg-type]
        assert loss.device.type == "cuda"
    return found.waits


if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])
    prepare()
    print(json.dumps([audit(blocking=False), audit(blocking=True)]))
