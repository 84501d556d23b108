"""Tiny quantised checkpoints, written by the layouts' own rules, beside the plain model with the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import tiny_model
from torch import Tensor

GROUP = 16
Packed = tuple[dict[str, Tensor], Tensor]
"""Stored tensors of one layer by the ends of their names, and the weight ``[out, in]`` that they mean."""


def _rounded(weight: Tensor, bits: int, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Signed numbers ``[out, in]`` and scales ``[out, groups]``."""
    grouped = weight.unflatten(1, (-1, group))
    scale = grouped.abs().amax(-1) / (2 ** (bits - 1) - 1)
    return (grouped / scale[..., None]).round().flatten(1).to(torch.int32), scale


def _words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of numbers ``[n, m]`` packed along the second dimension, one by one."""
    count = 32 // bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // count, dtype=torch.int64)
    for column in range(words.shape[1]):
        for place in range(count):
            taken = numbers[:, column * count + (place if order is None else order[place])].long()
            words[:, column] |= taken << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def block_fp8(weight: Tensor) -> Packed:
    rows, columns = weight.shape
    blocks = weight.view(rows // GROUP, GROUP, columns // GROUP, GROUP)
    scale = blocks.abs().amax((1, 3)) / 448
    stored = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
    meant = (stored.float().view_as(blocks) * scale[:, None, :, None]).reshape(rows, columns)
    return {"weight": stored, "weight_scale_inv": scale}, meant


def int8(weight: Tensor) -> Packed:
    numbers, scale = _rounded(weight, 8, weight.shape[1])
    return {"weight": numbers.to(torch.int8), "weight_scale": scale}, numbers * scale


def w4a16(weight: Tensor) -> Packed:
    numbers, scale = _rounded(weight, 4)
    stored = {
        "weight_packed": _words(numbers + 8, 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, numbers * scale.repeat_interleave(GROUP, 1)


def gptq(weight: Tensor) -> Packed:
    """Zeros are stored less one; the groups of columns are out of order, as with ``desc_act``."""
    numbers, scale = _rounded(weight, 4)
    scale = scale.half()
    zeros = 6 + torch.arange(scale.numel(), dtype=torch.int32).view_as(scale) % 3  # [out, groups]
    groups = torch.arange(weight.shape[1]) // GROUP
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    numbers, groups = (numbers + 8)[:, order], groups[order]
    meant = (numbers - zeros[:, groups]) * scale.float()[:, groups]
    stored = {
        "qweight": _words(numbers, 4).T.contiguous(),
        "qzeros": _words(zeros.T - 1, 4),
        "scales": scale.T.contiguous(),
        "g_idx": groups.to(torch.int32),
    }
    return stored, meant


def awq(weight: Tensor) -> Packed:
    numbers, scale = _rounded(weight, 4)
    scale, order = scale.half(), (0, 2, 4, 6, 1, 3, 5, 7)
    zeros = 7 + torch.arange(scale.numel(), dtype=torch.int32).view_as(scale) % 3
    groups = torch.arange(weight.shape[1]) // GROUP
    meant = (numbers + 8 - zeros[:, groups]) * scale.float()[:, groups]
    stored = {
        "qweight": _words((numbers + 8).T, 4, order),
        "qzeros": _words(zeros.T, 4, order),
        "scales": scale.T.contiguous(),
    }
    return stored, meant


def _compressed(weights: dict[str, Any], kind: str, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_INT = {"type": "int", "symmetric": True}
SCHEMES: dict[str, tuple[Callable[[Tensor], Packed], dict[str, Any]]] = {
    "fp8": (
        block_fp8,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]},
    ),
    "int8": (
        int8,
        _compressed(
            {**_INT, "num_bits": 8, "strategy": "channel"},
            "int-quantized",
            {**_INT, "num_bits": 8, "strategy": "token", "dynamic": True},
        ),
    ),
    "w4a16": (
        w4a16,
        _compressed({**_INT, "num_bits": 4, "strategy": "group", "group_size": GROUP}, "pack-quantized"),
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    ),
}


def write_quantised(folder: Path, scheme: str, **sizes: Any) -> Any:
    """Write a tiny checkpoint of a scheme; returns the plain model whose weights are what it means."""
    pack, settings = SCHEMES[scheme]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2} | sizes
    model = tiny_model("qwen3", tie_word_embeddings=False, **sizes)
    stored: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("_proj.weight"):
                stored[name] = parameter.detach().clone()
                continue
            parts, meant = pack(parameter.detach())
            stored |= {
                name.removesuffix("weight") + end: part.contiguous().clone() for end, part in parts.items()
            }
            parameter.copy_(meant)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **model.config.to_dict(),
        "architectures": ["Qwen3ForCausalLM"],
        "quantization_config": settings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return model
