"""Where the time of a training step goes, and what it costs: tokens/s, shares, gradient norm, rate, memory."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from dspark_train.data.load import Load
from dspark_train.target.cost import TargetCost
from dspark_train.training.costs import StepCost, peak_rate
from dspark_train.training.feature_cache import FeatureCache

PARTS = ("data", "target", "draft", "objective", "backward", "optimizer")
"""Parts of a step, in their order: each lasts from the end of the part before it."""


class StepClock:
    """Adds up the time between marks; on a GPU by events, so that nothing waits for it until it is read."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._last: Any = None

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Begin without a part."""
        self._last = self._now()

    def mark(self, part: str) -> None:
        """The time since the last mark belongs to ``part``."""
        if self._last is None:
            self.start()
            return
        now = self._now()
        self._marks.append((part, (self._last, now)))
        self._last = now

    def read(self) -> dict[str, float]:
        """Seconds of each part since the last reading."""
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds = dict.fromkeys(PARTS, 0.0)
        for part, (begin, end) in self._marks:
            seconds[part] += begin.elapsed_time(end) / 1000 if self.on_gpu else end - begin
        self._marks.clear()
        return seconds


class StepMonitor(Callback):
    """Logs, at every logging step: ``tokens_per_second`` (all ranks), ``seconds_per_step``, ``lr``,
    ``grad_norm`` (before clipping), ``skipped_steps`` (so far, their gradients not being finite), ``memory_gib`` (peak
    of the GPU, or of the process), ``tflops`` (per second and rank), ``mfu`` (their share of the GPU's peak, where it
    is known), ``compiled_graphs`` (so far), and ``time/<part>``, the share of each part of a step: ``time/data`` is
    the wait for data.

    Nothing here synchronises with a GPU outside logging steps.
    """

    def __init__(self) -> None:
        self._clock: StepClock | None = None
        self._tokens: Tensor | int = 0
        self._cost: StepCost | None = None
        self._flops = 0.0
        self._handles: list[Any] = []
        self._logged_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put marks around the draft."""
        self._clock = StepClock(pl_module.device)
        self._logged_step = trainer.global_step
        draft: Any = pl_module.draft
        self._cost = cost_of(pl_module)
        self._handles = [
            draft.register_forward_pre_hook(lambda *_: self._mark("target")),
            draft.register_forward_hook(lambda *_: self._mark("draft")),
        ]
        self._clock.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the marks away."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._clock = [], None

    def _mark(self, part: str) -> None:
        if self._clock is not None:
            self._clock.mark(part)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is no part of a step."""
        self._paused, self._clock = self._clock, None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on."""
        self._clock = self._paused
        if self._clock is not None:
            self._clock.start()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The batch is here."""
        self._mark("data")
        self._tokens = self._tokens + batch.batch.tokens.lengths.sum()
        if self._cost is not None:
            self._flops += sum(self._cost.flops(load_of(batch)).values())

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """The loss is known."""
        self._mark("objective")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The gradients are known."""
        self._mark("backward")

    def _is_due(self, step: int, trainer: Trainer) -> bool:
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        return step % every == 0 and step != self._logged_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step is done; log where it is due."""
        self._mark("optimizer")
        if not self._is_due(trainer.global_step, trainer) or self._clock is None:
            return
        steps, self._logged_step = trainer.global_step - self._logged_step, trainer.global_step
        engine: Any = trainer.model
        module: Any = pl_module
        norm: Any = module.gradient_norm
        if norm is None and hasattr(engine, "get_global_grad_norm"):
            norm = engine.get_global_grad_norm()
        seconds = self._clock.read()
        total = max(sum(seconds.values()), 1e-9)
        values: dict[str, float] = {
            "tokens_per_second": float(self._tokens) * trainer.world_size / total,
            "seconds_per_step": total / max(1, steps),
            "lr": float(trainer.optimizers[0].param_groups[0]["lr"]),
            "memory_gib": peak_memory(pl_module.device) / 2**30,
        }
        if norm is not None:
            values |= {"grad_norm": float(norm), "skipped_steps": float(module.skipped_steps)}
        if self._cost is not None:
            values["tflops"] = self._flops / total / 1e12
            peak = peak_rate(torch.cuda.get_device_name(module.device)) if self._clock.on_gpu else None
            if peak is not None:
                values["mfu"] = self._flops / total / peak
        values["compiled_graphs"] = float(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        values |= {f"time/{part}": value / total for part, value in seconds.items()}
        self._tokens, self._flops = 0, 0.0
        for name, value in values.items():
            pl_module.log(name, value, prog_bar=name == "tokens_per_second", rank_zero_only=False)


def load_of(batch: Any) -> Load:
    """What a micro-batch holds, from its shapes alone."""
    tokens, blocks, rows = batch.batch.tokens.input_ids, batch.batch.blocks.anchor, batch.rows
    return Load(tokens.shape[0], tokens.numel(), blocks.numel(), rows.slot.numel(), rows.position.numel())


def cost_of(module: Any) -> StepCost | None:
    """What a step of ``module`` costs; None where its parameters are shared out, and cannot be counted."""
    target, draft = module.target, module.draft
    if any(hasattr(one, "ds_id") for part in (target.model, draft) for one in part.parameters()):
        return None
    cached = isinstance(module.source, FeatureCache)
    return StepCost(TargetCost.of(target.model), draft, None, False, target.dtype.itemsize, cached=cached)


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of the GPU's allocations, or of this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
