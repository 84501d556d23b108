"""Whole tensors out of ZeRO's shards, and back: what makes one checkpoint format do for every strategy.

DeepSpeed's own checkpoints are tied to a stage and to a number of ranks. Here fp32 masters and optimiser moments
are gathered (exactly: they are copied, not computed) into the form that a plain optimiser saves, so a run can go on
under another stage, with more or fewer ranks, or without ZeRO. Every function is collective: all ranks call it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

BUCKET = 200_000_000
"""Elements that ZeRO reduces, or gathers, at once."""


def bucket_bytes(parameters: int, stage: int, ranks: int) -> int:
    """Bytes per GPU of what gradients travel in.

    DDP keeps a copy of all gradients in its buckets; ZeRO fills one fp32 bucket while another travels, and gathers
    parameters in the compute dtype.

    Args:
        parameters: that are trained.
        stage: 0 for DDP, else ZeRO's.
        ranks: that reduce.
    """
    if stage == 0:
        return 4 * parameters if ranks > 1 else 0
    return (2 if stage < 3 else 1) * 4 * BUCKET + 2 * min(parameters, BUCKET)


def state_bytes(parameters: int, stage: int, ranks: int, *, mixed: bool) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimiser state per GPU, with two moments of AdamW.

    Args:
        parameters: that are trained.
        stage: 0 for none (fp32 weights), else ZeRO's: weights in the compute dtype, fp32 masters in the state.
            Gradients are summed in fp32 either way.
        ranks: that share what the stage shards.
        mixed: bf16 compute.
    """
    sharded = stage > 0 and mixed
    item, state = (2, 12) if sharded else (4, 8)
    weights, gradients, optimiser = (ranks if stage >= least else 1 for least in (3, 2, 1))
    return parameters * item // weights, parameters * 4 // gradients, parameters * state // optimiser


def is_sharded(module: nn.Module) -> bool:
    """Whether ZeRO holds the masters of ``module``'s parameters."""
    return any(hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for p in module.parameters())


def whole_parameters(module: nn.Module) -> AbstractContextManager[None]:
    """Complete parameters on every rank inside the block, also under ZeRO-3."""
    return gathered(module.parameters())


@contextmanager
def gathered(tensors: Iterable[Tensor]) -> Generator[None, None, None]:
    """Complete tensors on every rank inside the block: those that ZeRO-3 has partitioned are gathered."""
    partitioned = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned):
        yield


def master_state(module: nn.Module) -> dict[str, Tensor]:
    """State of ``module`` on the CPU, floats in fp32: the masters where a strategy keeps some.

    Under ZeRO with bf16 the parameters themselves are rounded copies of sharded fp32 masters.
    """
    state = {name: value.detach() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    if is_sharded(module):
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in module.named_parameters():
            full = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            if full is not None:
                state[name] = full
    return {
        name: (value.float() if value.is_floating_point() else value).cpu() for name, value in state.items()
    }


def load_master_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Set parameters and masters from what :func:`master_state` returned (same names and shapes)."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in state:
                buffer.copy_(state[name])
    for name, parameter in module.named_parameters():
        with _modifiable(parameter), torch.no_grad():
            parameter.copy_(state[name])
        if parameter.requires_grad:
            _set_whole(parameter, state[name])


@contextmanager
def _modifiable(parameter: nn.Parameter) -> Generator[None, None, None]:
    if not hasattr(parameter, "ds_id"):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield


def optimizer_state(module: nn.Module, zero_optimizer: Any) -> dict[str, Any]:
    """Optimiser state in the form of a plain torch optimiser over ``module``'s trained parameters, on the CPU."""
    from deepspeed.utils import safe_get_full_optimizer_state

    inner, flats = zero_optimizer.optimizer, _flat_masters(zero_optimizer)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    example = inner.state.get(flats[0], {})
    moments = [
        key for key, value in example.items() if isinstance(value, Tensor) and value.shape == flats[0].shape
    ]
    scalars = {key: value for key, value in example.items() if key not in moments}
    state: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(trained):
        entry = {
            key: value.detach().cpu().clone() if isinstance(value, Tensor) else value
            for key, value in scalars.items()
        }
        for key in moments:
            full = safe_get_full_optimizer_state(parameter, key)
            assert full is not None
            entry[key] = full.detach().float().cpu().clone()
        if entry:
            state[index] = entry
    group = {key: value for key, value in inner.param_groups[0].items() if key != "params"}
    return {"state": state, "param_groups": [group | {"params": list(range(len(trained)))}]}


def load_optimizer_state(module: nn.Module, zero_optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Set moments, step counts and hyper-parameters (the learning rate among them) from :func:`optimizer_state`."""
    inner, flats = zero_optimizer.optimizer, _flat_masters(zero_optimizer)
    for group in inner.param_groups:
        for key, value in saved["param_groups"][0].items():
            if key != "params":
                group[key] = value
    if not saved["state"]:
        return
    example = saved["state"][0]
    moments = [key for key, value in example.items() if isinstance(value, Tensor) and value.dim() > 0]
    on_device = any(group.get("fused") or group.get("capturable") for group in inner.param_groups)
    for flat in flats:
        fresh: dict[str, Any] = {key: torch.zeros_like(flat, dtype=torch.float32) for key in moments}
        for key, value in example.items():
            if key not in moments:  # a fused optimiser wants its step count beside the weights
                count = isinstance(value, Tensor)
                fresh[key] = value.to(flat.device if on_device else "cpu", copy=True) if count else value
        inner.state[flat] = fresh
    if hasattr(zero_optimizer, "_lazy_init_hp_params_optimizer_state"):
        zero_optimizer._hp_optimizer_states_linked = False
        zero_optimizer._lazy_init_hp_params_optimizer_state()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for index, parameter in enumerate(trained):
        for key in moments:
            _set_whole(parameter, saved["state"][index][key], key)


def _set_whole(parameter: nn.Parameter, value: Tensor, moment: str | None = None) -> None:
    """Give this rank its part of a whole master (or of a moment)."""
    from deepspeed import utils

    value = value.to(parameter.device, torch.float32)
    if hasattr(parameter, "ds_id"):
        # the padding of partitions is done here: DeepSpeed's own setter fails where a tensor does not divide evenly
        partitioned: Any = parameter
        part = partitioned.partition_numel()
        rank = torch.distributed.get_rank(group=partitioned.ds_process_group)
        padded = value.new_zeros(max(value.numel(), part * (rank + 1)))
        padded[: value.numel()] = value.flatten()
        local = padded.narrow(0, part * rank, part)
        if moment is None:
            utils.safe_set_local_fp32_param(parameter, local)
        else:
            utils.safe_set_local_optimizer_state(parameter, local, moment)
    elif moment is None:
        utils.safe_set_full_fp32_param(parameter, value)
    else:
        utils.safe_set_full_optimizer_state(parameter, value, moment)


def _flat_masters(zero_optimizer: Any) -> list[Tensor]:
    """This rank's flat fp32 partitions, the keys of the inner optimiser's state."""
    for name in (
        "fp32_partitioned_groups_flat",  # stage 3
        "single_partition_of_fp32_groups",  # stages 1 and 2
        "fp32_groups_flat_partition",  # stage 1 in bf16
    ):
        if hasattr(zero_optimizer, name):
            return list(getattr(zero_optimizer, name))
    raise TypeError(f"{type(zero_optimizer).__name__} is no ZeRO optimiser of stage 1, 2 or 3")
