"""Checkpoint folders as data: headers checked before anything is allocated, then tensors read and written.

A folder holds ``config.json`` and either ``model.safetensors`` or shards named by
``model.safetensors.index.json``. Nothing is unpickled and no code that a folder brings along is run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark_train.errors import UserError
from dspark_train.files import read_json

MAX_SHARD_BYTES = 5_000_000_000
"""Largest weight file that is written, in bytes (the hub's own limit for one shard)."""
MAX_CONFIG_BYTES = 10_000_000
"""Largest ``config.json`` or index that is read, in bytes."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
"""Element types that a draft may hold, by their name in a safetensors header."""


@dataclass(frozen=True)
class TensorSpec:
    """What a header says about one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path


@dataclass
class DraftCheckpoint:
    """A draft in memory, in native names, whatever layout it was read from.

    ``tensors`` never holds vocabulary maps: a reduced draft vocabulary is ``draft_token_ids``.
    """

    config: dict[str, Any]
    """The flat native ``config.json`` (Qwen3 fields and the DSpark fields)."""
    tensors: dict[str, Tensor]
    draft_token_ids: Tensor | None = None
    """``[U]`` int64, ascending: target id of each draft id; None where U = V."""
    notes: list[str] = field(default_factory=list)
    """What the reader filled in or left out, one sentence each."""

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the weights."""
        return self.tensors["fc.weight"].dtype


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object of a draft's configuration or index; a :class:`UserError` where there is none."""
    return read_json(
        path,
        missing="a draft is a folder with config.json and safetensors weights",
        most=MAX_CONFIG_BYTES,
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder; shards must lie in it, under plain names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_config(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: no weight_map; expected tensor names and their files")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise UserError(
                    f"{index}: shard {name!r}; expected the name of a .safetensors file in this folder"
                )
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    pickled = sorted(p.name for p in folder.glob("*") if p.suffix in {".bin", ".pt", ".pth", ".ckpt", ".pkl"})
    if pickled:
        raise UserError(
            f"{folder}: weights only as {pickled[0]}, which can run code when opened; convert them to "
            "safetensors first"
        )
    raise UserError(
        f"{folder}: no model.safetensors; a draft is a folder with config.json and safetensors weights"
    )


def read_header(path: Path) -> dict[str, TensorSpec]:
    """Return the tensors of one safetensors file from its header, which the library holds against the file's size.

    Raises:
        UserError: no such file, a damaged or truncated one, or an element type that no draft has.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file, but the index names it; download the checkpoint again")
    try:
        with safe_open(str(path), framework="pt") as file:
            entries = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {name: (entry.get_dtype(), entry.get_shape()) for name, entry in entries.items()}
    except SafetensorError as error:
        raise UserError(
            f"{path}: truncated, damaged or not a safetensors file ({error}); download the checkpoint again"
        ) from error
    for name, (dtype_name, _) in found.items():
        if dtype_name not in DTYPES:
            raise UserError(
                f"{path}: {name} has element type {dtype_name}; a draft holds {', '.join(DTYPES)}"
            )
    return {name: TensorSpec(tuple(shape), DTYPES[kind], path) for name, (kind, shape) in found.items()}


def read_specs(folder: Path) -> dict[str, TensorSpec]:
    """Return every tensor that a checkpoint folder holds, from its headers alone."""
    specs: dict[str, TensorSpec] = {}
    for path in weight_files(folder):
        for name, spec in read_header(path).items():
            if name in specs:
                raise UserError(
                    f"{folder}: {name} is in {specs[name].file.name} and in {path.name}; keep one"
                )
            specs[name] = spec
    return specs


def read_tensors(specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Read the tensors that ``specs`` names, in their stored element type, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for path in sorted({spec.file for spec in specs.values()}):
        with safe_open(str(path), framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name, spec in specs.items() if spec.file == path}
    return tensors


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write ``config.json`` and the weights; weight files of an earlier export in the folder are removed.

    One file where everything fits into ``max_shard_bytes``, else shards and an index in the hub's naming.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        tied = any(plain.data_ptr() == other.data_ptr() for other in stored.values() if plain.numel())
        stored[name] = plain.clone() if tied else plain  # tied matrices are written twice
    save_torch_state_dict(stored, folder, max_shard_size=max_shard_bytes)
    write_json(folder / "config.json", dict(config))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, indented, keys sorted, with a final newline."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
