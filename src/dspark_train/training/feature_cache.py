"""An optional cache of the target's states, for few epochs over small data.

A cache is a folder::

    manifest.json             written last: without it the cache is unfinished, and building continues
    shard-00000.safetensors   features, last hidden states, log-sum-exps and digests of a range of samples
    shard-00000.json          written when the shard is complete: bytes, SHA-256 and what it was made from

Samples are found by a digest of their tokens, so that training and held-out samples share one cache and a
sample that the cache has never seen cannot be mistaken for another. What is read is bit for bit what the
target computed (``storage: exact``); ``fp8`` halves the size of the features and rounds them, which changed
a trained draft's held-out loss by 0.0002 (``benchmarks/feature_cache.py``). Letters as in
:mod:`dspark_train.structures`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark_train.errors import UserError
from dspark_train.files import file_digest
from dspark_train.structures import TargetStates, TokenBatch
from dspark_train.target.frozen import FrozenTarget

MANIFEST = "manifest.json"
FORMAT = 1
Storage = Literal["exact", "fp8"]
_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0


@dataclass(frozen=True)
class CacheIdentity:
    """What a cache was made from; a cache of another one is refused, and the difference named."""

    target: str
    """Fingerprint of the target's configuration and weights."""
    target_name: str
    layer_ids: tuple[int, ...]
    dtype: str
    storage: Storage
    hidden_size: int
    format: int = FORMAT

    def difference(self, other: CacheIdentity) -> str:
        """Names of the fields that differ, with both values (empty where none does)."""
        return "; ".join(
            f"{name.replace('_', ' ')} {theirs!r} instead of {ours!r}"
            for (name, ours), theirs in zip(self._facts().items(), other._facts().values(), strict=True)
            if ours != theirs
        )

    @property
    def short(self) -> str:
        """Eight hexadecimal digits that differ where identities do."""
        return hashlib.sha256(json.dumps(self._facts(), sort_keys=True).encode()).hexdigest()[:8]

    def _facts(self) -> dict[str, Any]:
        """What makes two identities differ: all but what the target is called."""
        return {name: value for name, value in asdict(self).items() if name != "target_name"}


@dataclass(frozen=True)
class CacheEstimate:
    """What a cache will take, known before anything is written."""

    tokens: int
    bytes: int
    seconds: float | None = None

    def __str__(self) -> str:
        duration = "" if self.seconds is None else f", about {self.seconds / 60:.1f} minutes"
        return f"{self.tokens:,} tokens, {self.bytes / 2**30:.2f} GiB{duration}"


def identity_of(target: FrozenTarget, storage: Storage = "exact") -> CacheIdentity:
    """Identity of the states that ``target`` computes."""
    digest = hashlib.sha256()
    config = target.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in sorted(target.model.named_parameters()):
        step = max(1, parameter.numel() // 64)
        sample = parameter.detach().reshape(-1)[::step][:64].float().cpu().numpy()
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.tobytes())
    dtype = str(target.dtype).removeprefix("torch.")
    return CacheIdentity(
        digest.hexdigest()[:32], target.name, tuple(target.layer_ids), dtype, storage, target.hidden_size
    )


def digest_tokens(ids: NDArray[np.integer[Any]]) -> int:
    """64-bit digest of one sample's tokens."""
    raw = hashlib.blake2b(np.ascontiguousarray(ids, dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(raw, "little", signed=True)


def estimate_cache(target: FrozenTarget, lengths: Iterable[int], storage: Storage = "exact") -> CacheEstimate:
    """Size of a cache of samples with these lengths.

    Args:
        target: whose states are to be stored.
        lengths: tokens of each sample.
        storage: form of the features.
    """
    tokens = int(sum(int(length) for length in lengths))
    each = bytes_per_token(len(target.layer_ids), target.hidden_size, target.dtype.itemsize, storage)
    return CacheEstimate(tokens, tokens * each)


def bytes_per_token(taps: int, hidden_size: int, item: int, storage: Storage = "exact") -> int:
    """Bytes that a cache stores of one token.

    Args:
        taps: m, tapped layers.
        hidden_size: d.
        item: bytes of an element of the target.
        storage: form of the features.
    """
    features = taps * hidden_size * item if storage == "exact" else taps * (hidden_size + 4)
    return features + hidden_size * item + 4


class FeatureCache:
    """States of samples seen before, read from files that are mapped only while a sample is read."""

    def __init__(self, folder: Path | str, identity: CacheIdentity, *, verify: bool = True) -> None:
        """Open a finished cache.

        Args:
            folder: where it lies.
            identity: what it must have been made from.
            verify: compare every shard's SHA-256 with the manifest's (its size is always compared).

        Raises:
            UserError: an unfinished cache, a foreign one, or a damaged shard, by name.
        """
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        if not path.is_file():
            raise UserError(f"{self.folder} is no finished feature cache: it has no {MANIFEST}")
        content = json.loads(path.read_text())
        found = CacheIdentity(**content["identity"] | {"layer_ids": tuple(content["identity"]["layer_ids"])})
        if different := identity.difference(found):
            raise UserError(
                f"the feature cache {self.folder} was made from something else ({different}): "
                "choose another folder, or delete it"
            )
        self.identity, self.tokens = identity, int(content["tokens"])
        self._files: list[Path] = []
        self._index: dict[int, tuple[int, int, int]] = {}
        for number, shard in enumerate(content["shards"]):
            self._add(number, shard, verify)

    def _add(self, number: int, shard: dict[str, Any], verify: bool) -> None:
        path = self.folder / shard["file"]
        check_shard(path, shard, verify)
        try:
            with safe_open(str(path), framework="pt") as file:
                digests, starts = file.get_tensor("digest").tolist(), file.get_tensor("start").tolist()
        except SafetensorError as error:
            raise UserError(
                f"the cache shard {path} is damaged ({error}): delete it and build again"
            ) from error
        self._files.append(path)
        for digest, start, stop in zip(digests, starts[:-1], starts[1:], strict=True):
            self._index[digest] = (number, start, stop)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, ids: NDArray[np.integer[Any]]) -> bool:
        return digest_tokens(ids) in self._index

    def states(self, tokens: TokenBatch, device: torch.device | str) -> TargetStates:
        """States of a batch, as ``target.states`` gives them (zero at padding).

        Raises:
            UserError: a sample that was not cached.
        """
        taps, size = len(self.identity.layer_ids), self.identity.hidden_size
        dtype = getattr(torch, self.identity.dtype)
        features = self._empty(tokens, (taps * size,), dtype, device)
        hidden = self._empty(tokens, (size,), dtype, device)
        for row, (path, start, stop) in enumerate(self._places(tokens)):
            with safe_open(str(path), framework="pt") as file:
                features[row, : stop - start] = self._features(file, start, stop, dtype)
                hidden[row, : stop - start] = file.get_slice("last_hidden")[start:stop]
        return TargetStates(features.to(device, non_blocking=True), hidden.to(device, non_blocking=True))

    def logsumexp(self, tokens: TokenBatch, device: torch.device | str) -> Tensor:
        """``[B, T]`` fp32: log-sum-exp of the target's full logits; NaN where no slot can ask for it."""
        values = self._empty(tokens, (), torch.float32, device)
        for row, (path, start, stop) in enumerate(self._places(tokens)):
            with safe_open(str(path), framework="pt") as file:
                values[row, : stop - start] = file.get_slice("logsumexp")[start:stop]
        return values.to(device, non_blocking=True)

    @staticmethod
    def _empty(
        tokens: TokenBatch, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        pinned = torch.device(device).type == "cuda"
        return torch.zeros(*tokens.input_ids.shape, *shape, dtype=dtype, pin_memory=pinned)

    def _places(self, tokens: TokenBatch) -> list[tuple[Path, int, int]]:
        ids, places = tokens.input_ids.cpu().numpy(), []
        for row, length in enumerate(tokens.lengths.tolist()):
            place = self._index.get(digest_tokens(ids[row, :length]))
            if place is None or place[2] - place[1] != length:
                raise UserError(
                    f"sample {int(tokens.sample_ids[row])} is not in the feature cache {self.folder}: it was "
                    "built from other data or with another tokenizer; choose another folder, or delete it"
                )
            places.append((self._files[place[0]], place[1], place[2]))
        return places

    def _features(self, file: Any, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        stored = file.get_slice("features")[start:stop]
        if self.identity.storage == "exact":
            return stored
        scale = file.get_slice("scale")[start:stop]
        return decode_fp8(stored, scale, dtype)


def encode_fp8(features: Tensor, taps: int) -> tuple[Tensor, Tensor]:
    """Features ``[n, m·d]`` as 8-bit floats (4 exponent bits), and a scale per token and tap ``[n, m]``."""
    parts = features.float().unflatten(-1, (taps, -1))
    scale = parts.abs().amax(-1).clamp(min=1e-12) / _FP8_MAX
    return (parts / scale[..., None]).to(_FP8).flatten(-2), scale


def decode_fp8(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of :func:`encode_fp8`, rounded to ``dtype``."""
    parts = stored.float().unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]
    return parts.to(dtype).flatten(-2)


def check_shard(path: Path, shard: dict[str, Any], verify: bool = True) -> None:
    """Raise UserError where a shard is missing, truncated, or (with ``verify``) has another SHA-256."""
    if not path.is_file():
        raise UserError(f"the cache shard {path} is missing: delete {path.parent / MANIFEST} and build again")
    if path.stat().st_size != shard["bytes"]:
        raise UserError(
            f"the cache shard {path} is truncated ({path.stat().st_size} of {shard['bytes']} bytes): "
            "delete it and build again"
        )
    if verify and file_digest(path) != shard["sha256"]:
        raise UserError(
            f"the cache shard {path} is corrupt (its SHA-256 has changed): delete it and build again"
        )
