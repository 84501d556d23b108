"""Checkpoint folders as data: headers checked before anything is allocated, tensors read and written plainly.

A folder holds ``config.json`` and either ``model.safetensors`` or shards named by
``model.safetensors.index.json``. Nothing is unpickled and no code that a folder brings along is run.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark_train.errors import UserError
from dspark_train.files import read_json

MAX_SHARD_BYTES = 5_000_000_000
"""Largest weight file that is written, in bytes (the hub's own limit for one shard)."""
MAX_HEADER_BYTES = 100_000_000
"""Largest safetensors header that is read, in bytes (the format's own limit)."""
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
    """Return the tensors of one safetensors file from its header, after checking it against the file's size.

    Raises:
        UserError: truncated file, overlong header, unknown element type, or byte ranges that do not fit.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file, but the index names it; download the checkpoint again")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise UserError(f"{path}: {size} bytes, too short for a safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise UserError(f"{path}: header of {length} bytes in a file of {size}; not a safetensors file")
        try:
            header = json.loads(file.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{path}: header is not JSON; not a safetensors file") from error
    if not isinstance(header, dict):
        raise UserError(f"{path}: header is not a JSON object; not a safetensors file")
    header.pop("__metadata__", None)
    specs, ranges = {}, [(0, 0)]
    for name, entry in header.items():
        specs[name], covered = _parse_entry(path, name, entry, data_bytes=size - 8 - length)
        ranges.append(covered)
    ranges.sort()
    if ranges[-1][1] != size - 8 - length:
        raise UserError(
            f"{path}: tensors end at byte {ranges[-1][1]}, data has {size - 8 - length}; truncated or padded"
        )
    if any(before[1] != after[0] for before, after in itertools.pairwise(ranges)):
        raise UserError(f"{path}: tensors overlap or leave gaps; not a safetensors file")
    return specs


def _parse_entry(path: Path, name: str, entry: Any, data_bytes: int) -> tuple[TensorSpec, tuple[int, int]]:
    """Check one header entry; return its spec and the bytes that its data covers."""
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: entry of {name!r} is malformed; not a safetensors file") from error
    if dtype_name not in DTYPES:
        raise UserError(f"{path}: {name} has element type {dtype_name}; a draft holds {', '.join(DTYPES)}")
    if any(not isinstance(number, int) or isinstance(number, bool) or number < 0 for number in numbers):
        raise UserError(f"{path}: {name} has shape {shape} and bytes {begin}..{end}; not a safetensors file")
    dtype = DTYPES[dtype_name]
    expected = math.prod(shape) * dtype.itemsize
    if end - begin != expected or end > data_bytes:
        raise UserError(
            f"{path}: {name} of shape {shape} needs {expected} bytes, its range is {begin}..{end}"
        )
    return TensorSpec(tuple(shape), dtype, path), (begin, end)


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
    from safetensors import safe_open

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
) -> list[Path]:
    """Write ``config.json`` and the weights; return the weight files.

    One file where everything fits into ``max_shard_bytes``, else shards and an index in the hub's naming.
    Weight files that an earlier export left in the folder are removed first, so that no stale shard stays
    behind.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for stale in [*folder.glob("model*.safetensors"), folder / "model.safetensors.index.json"]:
        stale.unlink(missing_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > max_shard_bytes:
            shards.append({})
        stored = tensor.detach().cpu().contiguous()
        shares = any(stored.data_ptr() == other.data_ptr() for other in shards[-1].values() if stored.numel())
        shards[-1][name] = stored.clone() if shares else stored  # tied matrices are written twice
    count, files, weight_map = len(shards), list[Path](), dict[str, str]()
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(shard, str(folder / name), metadata={"format": "pt"})
        files.append(folder / name)
        weight_map |= dict.fromkeys(shard, name)
    if count > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)
    write_json(folder / "config.json", dict(config))
    return files


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, indented, keys sorted, with a final newline."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
