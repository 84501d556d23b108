"""ZeRO through Lightning: DeepSpeed's strategy, also on CPUs, and the factor that keeps gradients exact."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from typing_extensions import override

from dspark_train.errors import UserError
from dspark_train.training.zero_state import (
    BUCKET,
    load_master_state,
    load_optimizer_state,
    master_state,
    optimizer_state,
)

T = TypeVar("T")


def loss_scale(trainer: Trainer) -> float:
    """Factor of a micro-batch's loss that undoes the averages of accumulation and ranks.

    The loss of a micro-batch is its share of the global batch's loss: shares are to be *summed*. Lightning divides
    every loss by the number of accumulated micro-batches, DeepSpeed divides by the same number once more, and DDP and
    ZeRO average gradients over the ranks; all of these are undone here. Micro-batches with more supervised slots weigh
    more, as they must, and the end of an epoch needs no exception, because every global batch is cut into the same
    number of micro-batches.
    """
    accumulated = trainer.accumulate_grad_batches
    if trainer.strategy.handles_gradient_accumulation:
        accumulated *= accumulated
    return float(trainer.world_size * accumulated)


def gather_objects(item: T) -> list[T]:
    """``item`` of every rank, in their order (collective; a list of one without ranks)."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [item]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, item)
    return found


class ExactPrecision(DeepSpeedPrecision):
    """DeepSpeed's precision, except that it leaves batches alone.

    Lightning casts every float of a batch to the compute dtype, which would round denominators and weights.
    """

    @override
    def convert_input(self, data: Any) -> Any:
        """Return the batch unchanged."""
        return data


class ZeroStrategy(DeepSpeedStrategy):
    """DeepSpeed ZeRO for the draft. The frozen target is no part of it: not partitioned, saved or counted.

    Runs on GPUs, and on CPUs (gloo) for tests and for trying a configuration out.
    """

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        overlap_comm: bool = True,
        reduce_bucket_size: int = BUCKET,
        allgather_bucket_size: int = BUCKET,
        process_group_backend: str | None = None,
    ) -> None:
        """Choose what is sharded.

        Args:
            stage: 1 shards the optimiser's state, 2 gradients too, 3 parameters too.
            offload_optimizer: keep the optimiser's state and step on the CPU.
            offload_parameters: keep parameters on the CPU between uses (stage 3 only).
            overlap_comm: reduce gradients while the backward pass goes on (GPUs only).
            reduce_bucket_size: elements reduced at once.
            allgather_bucket_size: elements gathered at once.
            process_group_backend: ``nccl`` or ``gloo``; left out, what suits the accelerator.
        """
        if stage not in (1, 2, 3):
            raise UserError(
                f"ZeRO stage {stage} does not exist: choose 1, 2 or 3 (or strategy auto for none)"
            )
        if offload_parameters and stage != 3:
            raise UserError(f"offload_parameters needs ZeRO stage 3, not {stage}")
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            overlap_comm=overlap_comm,
            reduce_bucket_size=reduce_bucket_size,
            allgather_bucket_size=allgather_bucket_size,
            process_group_backend=process_group_backend,
            logging_batch_size_per_gpu=1,
            exclude_frozen_parameters=True,
        )
        self.stage = stage
        assert isinstance(self.config, dict)
        # the optimiser is the user's own (torch's AdamW), offloaded or not: the same arithmetic everywhere
        self.config["zero_force_ds_cpu_optimizer"] = False
        # in bf16 too, gradients are summed over micro-batches and ranks in fp32, as without ZeRO
        self.config["data_types"] = {"grad_accum_dtype": "fp32"}
        self.config["communication_data_type"] = "fp32"

    @property
    def on_cpu(self) -> bool:
        """Whether the accelerator is the CPU."""
        return isinstance(self.accelerator, CPUAccelerator)

    @property
    @override
    def precision_plugin(self) -> DeepSpeedPrecision:
        """The trainer's precision, without the cast of batches."""
        plugin = super().precision_plugin
        if isinstance(plugin, DeepSpeedPrecision) and not isinstance(plugin, ExactPrecision):
            plugin = self._precision_plugin = ExactPrecision(plugin.precision)  # type: ignore[arg-type]
        return plugin  # type: ignore[return-value]

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = plugin

    @property
    @override
    def root_device(self) -> torch.device:
        """Device of this process. DeepSpeed wants an index on CPUs too; all CPU indices are the same device."""
        return torch.device("cpu", 0) if self.on_cpu else super().root_device

    @override
    def setup_environment(self) -> None:
        """Lightning refuses anything but GPUs here; DeepSpeed itself runs on CPUs as well."""
        if not self.on_cpu:
            super().setup_environment()
            return
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        # the shared-memory collectives serve inference only, and would be compiled at the first use
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        assert isinstance(self.config, dict)
        self.config["zero_optimization"]["overlap_comm"] = False
        for part in ("offload_optimizer", "offload_param"):
            if part in self.config["zero_optimization"]:
                self.config["zero_optimization"][part]["pin_memory"] = False
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    @override
    def setup_distributed(self) -> None:
        """As Lightning does, without its check of GPU indices where there are none."""
        if not self.on_cpu:
            super().setup_distributed()
            return
        self.set_world_ranks()
        self._process_group_backend = "gloo"
        self._init_deepspeed_distributed()

    @override
    def determine_ddp_device_ids(self) -> list[int] | None:
        """No ids on CPUs."""
        return None if self.on_cpu else super().determine_ddp_device_ids()

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Make the draft whole on every rank; the engine partitions it before training.

        Partitioning each layer as it is made would leave every initialisation that comes later (zeroed heads, copies of
        the target's layers, a warm start) without effect. A draft is small enough to be made whole.
        """
        self._init_config_if_needed()
        with nullcontext():
            yield

    @override
    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        whole = master_state(model)
        super()._initialize_deepspeed_train(model)
        load_master_state(model, whole)  # the engine takes masters from weights that it has rounded
        from dspark_train.training.optimizer import MuonAdamW

        inner = getattr(self.optimizers[0], "optimizer", None)
        if isinstance(inner, MuonAdamW):
            raise UserError(
                "optimizer.name muon needs whole matrices, which ZeRO cuts apart: use adamw, or strategy ddp"
            )

    # -- one checkpoint format for every strategy ----------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole fp32 weights."""
        assert self.lightning_module is not None
        return master_state(self.lightning_module)

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Whole moments, in the form of a plain optimiser."""
        assert self.lightning_module is not None
        return optimizer_state(self.lightning_module, self.optimizers[0])

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one file from rank zero."""
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what any strategy wrote."""
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Set parameters and masters."""
        assert self.lightning_module is not None
        load_master_state(self.lightning_module, checkpoint["state_dict"])

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        """Lightning asks for the optimiser's state to be restored, as without ZeRO."""
        return True

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Set moments, step counts and learning rate."""
        assert self.lightning_module is not None
        load_optimizer_state(self.lightning_module, self.optimizers[0], checkpoint["optimizer_states"][0])
