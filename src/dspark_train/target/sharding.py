"""Targets larger than one GPU: the frozen layers sharded over the ranks by DeepSpeed's ZeRO-3 inference.

Every rank holds its share of each layer's weights and gathers a layer while it runs, on a batch of its own. The
embedding and the LM head stay whole: the draft and the objective use them on every rank.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from dspark_train.errors import UserError


class WholeEmbedding(nn.Module):
    """An embedding whose matrix is no parameter, so that nothing shards it; it scales as the one it replaces."""

    def __init__(self, embedding: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._held: tuple[Tensor] = (embedding.weight.detach().to(device),)  # type: ignore[operator]
        scale = getattr(embedding, "embed_scale", None)
        self._scale = None if scale is None else torch.as_tensor(scale).to(device)

    @property
    def weight(self) -> Tensor:
        """``[V, d]``."""
        return self._held[0]

    def forward(self, ids: Tensor) -> Tensor:
        """``[..] -> [.., d]``."""
        embedded = nn.functional.embedding(ids, self.weight)
        return embedded if self._scale is None else embedded * self._scale.to(embedded.dtype)


class WholeHead(nn.Module):
    """An LM head whose matrix is no parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._held = (weight,)

    @property
    def weight(self) -> Tensor:
        """``[V, d]``."""
        return self._held[0]

    def forward(self, hidden: Tensor) -> Tensor:
        """``[.., d] -> [.., V]``."""
        return nn.functional.linear(hidden, self.weight)


def is_shared(model: Any) -> bool:
    """Whether ranks share the layers of ``model``, so that all must take part in each of its passes."""
    return hasattr(model, "_sharding_engine")


def local_rank(device: torch.device) -> str:
    """Number of this process on its node: as SLURM says, else as its device says."""
    return os.environ.get("SLURM_LOCALID", str(device.index or 0))


def shard_model(model: Any, device: torch.device) -> Any:
    """Shard a Hugging Face causal LM (loaded on the CPU) over the ranks; every rank must call.

    Args:
        model: the model; changed in place.
        device: of this rank.

    Returns:
        The model, whose decoder now gathers each layer as it runs.

    Raises:
        UserError: there are no ranks to shard over.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise UserError(
            "target.sharding zero3 needs several ranks: set trainer.devices, and strategy ddp or ZeRO"
        )
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", local_rank(device))  # DeepSpeed reads it; SLURM and DDP do not set it
    import deepspeed

    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
    model.requires_grad_(False)
    dtype = next(model.parameters()).dtype
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    whole = WholeEmbedding(embedding, device)
    model.set_input_embeddings(whole)
    model.set_output_embeddings(WholeHead(whole.weight if tied else head.weight.detach().to(device)))
    decoder = model.get_decoder()
    decoder = getattr(decoder, "language_model", decoder)
    for module in decoder.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    engine = deepspeed.initialize(
        model=decoder, config=config, model_parameters=[], dist_init_required=False
    )[0]
    model._sharding_engine = (engine,)  # kept alive, outside the module tree
    return model
