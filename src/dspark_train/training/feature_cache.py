"""An optional cache of the target's states, for several epochs over small data. It fills as training goes.

A sample that the cache does not hold yet is computed in the step that asks for it, and written. So the first epoch
runs beside the target and the later ones without it, and nothing is computed that no step reads. A cache is a folder::

    pass-<digest>.safetensors   features, last hidden states and log-sum-exps of the samples of one batch
    pass-<digest>.json          written when that file is complete: bytes, SHA-256, and what it was made from

Samples are found by a digest of their tokens and of their loss mask, so that training and held-out samples share one
cache and a sample that the cache has never seen cannot be mistaken for another. What is read is bit for bit what the
target computed (``storage: exact``); ``fp8`` halves the size of the features and rounds them, which changed a trained
draft's held-out loss by 0.0002 (``benchmarks/feature_cache.py``). Letters as in :mod:`dspark_train.structures`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark_train.errors import UserError
from dspark_train.files import check_made, file_digest, nearest_folder, read_json, write_json
from dspark_train.structures import TargetStates, TokenBatch
from dspark_train.target.frozen import FrozenTarget
from dspark_train.training.objective import round_up, target_logsumexp
from dspark_train.training.zero_state import gathered

FORMAT = 2
LENGTH_STEP = 8
"""Multiple that a pass is padded to: a CPU's library compiles kernels for each length."""
_EARLIER = "manifest.json"
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


def identity_of(target: FrozenTarget, storage: Storage = "exact") -> CacheIdentity:
    """Identity of the states that ``target`` computes; of a sharded one, all ranks ask together."""
    digest = hashlib.sha256()
    config = target.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(_named_weights(target.model).items()):
        with gathered([weight]):
            step, values = max(1, weight.numel() // 64), weight.detach()
            values = values if type(values) is Tensor else values.dequantize()  # quantised ones hold parts
            sample = values.reshape(-1)[::step][:64].float().cpu().numpy()
            digest.update(f"{name}{tuple(weight.shape)}".encode() + sample.tobytes())
    if target.quantisation is not None:
        digest.update(target.quantisation.describe().encode())  # dequantised or not, states differ
    dtype = str(target.dtype).removeprefix("torch.")
    return CacheIdentity(
        digest.hexdigest()[:32], target.name, tuple(target.layer_ids), dtype, storage, target.hidden_size
    )


def _named_weights(model: Any) -> dict[str, Tensor]:
    """Weights by name. A sharded target's embedding and head are no parameters, and count all the same."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is embedding or (module is head and head.weight is not embedding.weight):
            found[f"{name}.weight"] = module.weight
    return found


def digest_sample(ids: NDArray[np.integer[Any]], mask: NDArray[np.bool_]) -> int:
    """64-bit digest of one sample's tokens and of the positions whose normalisers are asked for."""
    content = np.ascontiguousarray(ids, dtype=np.int64).tobytes() + np.packbits(asked(mask)).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def asked(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Positions ``[T]`` at which a slot may ask for the target's distribution: supervised, and so is the next."""
    found = np.zeros(len(mask), dtype=bool)
    found[:-1] = mask[:-1] & mask[1:]
    return found


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


def cache_bytes(target: FrozenTarget, tokens: int, storage: Storage = "exact") -> int:
    """Size of a cache of so many tokens."""
    return tokens * bytes_per_token(len(target.layer_ids), target.hidden_size, target.dtype.itemsize, storage)


def check_disk(folder: Path, needed: int) -> None:
    """Compare what a cache will take with the free disk space, before a byte is written.

    Raises:
        UserError: it does not fit.
    """
    needed -= sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    free = shutil.disk_usage(nearest_folder(folder)).free
    if needed > free * 0.95:
        raise UserError(
            f"the feature cache {folder} needs {needed / 2**30:.2f} GiB, but its disk has only "
            f"{free / 2**30:.2f} GiB free: choose another folder, storage fp8, or train without a cache"
        )


@dataclass
class Filling:
    """What was computed so far, and how long it took: the pace that a budget of time plans with."""

    tokens: int = 0
    seconds: float = 0.0
    held: int = 0
    """Tokens in the cache, those of earlier processes included."""


class FeatureCache:
    """States of samples seen before, read from files that are mapped only while a sample is read."""

    def __init__(
        self,
        folder: Path | str,
        identity: CacheIdentity,
        target: FrozenTarget | None = None,
        *,
        verify: bool = True,
        pass_tokens: int = 2_048,
        together: Callable[[bool], bool] = bool,
    ) -> None:
        """Open a cache, or begin one.

        Args:
            folder: where it lies.
            identity: what it must have been made from.
            target: computes what is missing; None refuses what is missing.
            verify: compare every file's SHA-256 (its size is always compared).
            pass_tokens: most padded tokens of one pass of the target.
            together: whether any rank answers yes, where all must take part in a pass of a sharded target.

        Raises:
            UserError: a foreign cache, or a damaged file, by name.
        """
        self.folder, self.identity, self.target = Path(folder), identity, target
        self.filling = Filling()
        self._verify, self._pass_tokens, self._together = verify, pass_tokens, together
        self._known: set[str] = set()
        self._index: dict[int, tuple[Path, int, int]] = {}
        if (self.folder / _EARLIER).is_file() or any(self.folder.glob("shard-*.json")):
            raise UserError(
                f"the feature cache {self.folder} has the format of an earlier version: delete it, or choose "
                "another folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.refresh()

    def refresh(self) -> None:
        """Find what this and other processes have written since the last look."""
        for name in sorted(name for name in os.listdir(self.folder) if name.endswith(".json")):
            if name not in self._known:
                self._add(self.folder / name)

    def _add(self, sidecar: Path) -> None:
        record = read_json(sidecar)
        found = CacheIdentity(**record["identity"] | {"layer_ids": tuple(record["identity"]["layer_ids"])})
        path = self.folder / record["file"]
        if different := self.identity.difference(found):
            raise UserError(
                f"the feature cache {self.folder} was made from something else ({different}): "
                "choose another folder, or delete it"
            )
        check_made(
            path, record, f"delete it and {sidecar.name}, and it is computed again", verify=self._verify
        )
        try:
            with safe_open(str(path), framework="pt") as file:
                digests, starts = file.get_tensor("digest").tolist(), file.get_tensor("start").tolist()
        except SafetensorError as error:
            raise UserError(
                f"the cache file {path} is damaged ({error}): delete it and {sidecar.name}"
            ) from error
        self._known.add(sidecar.name)
        self._hold(path, digests, starts)

    def _hold(self, path: Path, digests: list[int], starts: list[int]) -> None:
        for digest, start, stop in zip(digests, starts[:-1], starts[1:], strict=True):
            self._index[digest] = (path, start, stop)
        self.filling.held += starts[-1]

    def __len__(self) -> int:
        return len(self._index)

    # -- reading --------------------------------------------------------------------------------------------------

    def states(
        self, tokens: TokenBatch, device: torch.device | str, host: TokenBatch | None = None
    ) -> TargetStates:
        """States of a batch, as ``target.states`` gives them (zero at padding); computed where they are missing.

        Args:
            tokens: of the batch.
            device: of the states.
            host: the same tokens on the CPU, so that nothing waits for a GPU to tell them.

        Raises:
            UserError: a sample is missing, and there is no target to compute it.
        """
        taps, size = len(self.identity.layer_ids), self.identity.hidden_size
        dtype = getattr(torch, self.identity.dtype)
        features = self._empty(tokens, (taps * size,), dtype, device)
        hidden = self._empty(tokens, (size,), dtype, device)
        level = self._empty(tokens, (), torch.float32, device)
        for row, (path, start, stop) in enumerate(self._places(tokens if host is None else host)):
            with safe_open(str(path), framework="pt") as file:
                features[row, : stop - start] = self._features(file, start, stop, dtype)
                hidden[row, : stop - start] = file.get_slice("last_hidden")[start:stop]
                level[row, : stop - start] = file.get_slice("logsumexp")[start:stop]
        return TargetStates(features, hidden, level).to(device, non_blocking=True)

    @staticmethod
    def _empty(
        tokens: TokenBatch, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        pinned = torch.device(device).type == "cuda"
        return torch.zeros(*tokens.input_ids.shape, *shape, dtype=dtype, pin_memory=pinned)

    def _places(self, tokens: TokenBatch) -> list[tuple[Path, int, int]]:
        samples = _samples(tokens)
        missing = {sample.digest: sample for sample in samples if sample.digest not in self._index}
        if missing:
            self.refresh()
            missing = {digest: sample for digest, sample in missing.items() if digest not in self._index}
        if missing and self.target is None:
            number = next(row for row, sample in enumerate(samples) if sample.digest in missing)
            raise UserError(
                f"sample {int(tokens.sample_ids[number])} is not in the feature cache {self.folder}: it was "
                "built from other data or with another tokenizer; choose another folder, or delete it"
            )
        if self._together(bool(missing)):
            self._fill(list(missing.values()), samples[:1])
        return [self._index[sample.digest] for sample in samples]

    def _features(self, file: Any, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        stored = file.get_slice("features")[start:stop]
        if self.identity.storage == "exact":
            return stored
        scale = file.get_slice("scale")[start:stop]
        return decode_fp8(stored, scale, dtype)

    # -- filling --------------------------------------------------------------------------------------------------

    def _fill(self, samples: list[_Sample], stand_in: list[_Sample]) -> None:
        """Compute and write samples; without any, take part in the passes of other ranks and write nothing."""
        began = time.perf_counter()
        results: dict[int, dict[str, Tensor]] = {}
        for batch in self._passes(samples or stand_in):
            results.update(zip((sample.digest for sample in batch), self._run(batch), strict=True))
        if samples:
            self._write(samples, results)
        self.filling.tokens += sum(len(sample.ids) for sample in samples)
        self.filling.seconds += time.perf_counter() - began

    def _passes(self, samples: list[_Sample]) -> list[list[_Sample]]:
        """Group samples of similar length into passes of at most ``pass_tokens`` padded tokens."""
        if self._together is not bool:  # ranks must run equally many passes
            return [samples]
        batches: list[list[_Sample]] = []
        for sample in sorted(samples, key=lambda sample: -len(sample.ids)):
            length = round_up(len(batches[-1][0].ids), LENGTH_STEP) if batches else 0
            if not batches or (len(batches[-1]) + 1) * length > self._pass_tokens:
                batches.append([])
            batches[-1].append(sample)
        return batches

    @torch.no_grad()
    def _run(self, batch: list[_Sample]) -> list[dict[str, Tensor]]:
        """States of a few samples, on the CPU."""
        assert self.target is not None
        longest = round_up(max(len(sample.ids) for sample in batch), LENGTH_STEP)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        wanted = torch.zeros(len(batch), longest, dtype=torch.bool)
        for row, sample in enumerate(batch):
            ids[row, : len(sample.ids)] = torch.from_numpy(sample.ids.astype(np.int64))
            wanted[row, : len(sample.ids)] = torch.from_numpy(asked(sample.mask))
        device = self.target.device
        with torch.autocast(device.type, enabled=False):
            states = self.target.states(ids.to(device))
            level = torch.full(ids.shape, float("nan"))
            place = wanted.nonzero(as_tuple=True)
            rows = states.last_hidden[place[0].to(device), place[1].to(device)]
            if len(rows):
                values = target_logsumexp(rows, self.target.head_weight, softcap=self.target.logit_softcap)
                level[place] = values.float().cpu()
        found = []
        for row, sample in enumerate(batch):
            length = len(sample.ids)
            entry = {"last_hidden": states.last_hidden[row, :length].cpu(), "logsumexp": level[row, :length]}
            features = states.features[row, :length]
            if self.identity.storage == "fp8":
                features, scale = encode_fp8(features, len(self.identity.layer_ids))
                entry["scale"] = scale.cpu()
            found.append(entry | {"features": features.cpu()})
        return found

    def _write(self, samples: list[_Sample], results: dict[int, dict[str, Tensor]]) -> None:
        digests = [sample.digest for sample in samples]
        names = results[digests[0]].keys()
        tensors = {name: torch.cat([results[digest][name] for digest in digests]) for name in names}
        lengths = torch.tensor([0] + [len(sample.ids) for sample in samples])
        tensors |= {"digest": torch.tensor(digests), "start": lengths.cumsum(0)}
        content = hashlib.sha256(np.asarray(digests, dtype=np.int64).tobytes()).hexdigest()[:16]
        path = self.folder / f"pass-{content}.safetensors"
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(aside))
        aside.replace(path)
        record = {"file": path.name, "bytes": path.stat().st_size, "sha256": file_digest(path)}
        write_json(path.with_suffix(".json"), record | {"identity": asdict(self.identity)})
        self._known.add(f"{path.stem}.json")
        self._hold(path, digests, lengths.cumsum(0).tolist())


@dataclass(frozen=True)
class _Sample:
    digest: int
    ids: NDArray[np.integer[Any]]
    mask: NDArray[np.bool_]


def _samples(tokens: TokenBatch) -> list[_Sample]:
    ids, masks, found = tokens.input_ids.cpu().numpy(), tokens.loss_mask.cpu().numpy(), []
    for row, length in enumerate(tokens.lengths.tolist()):
        own, mask = ids[row, :length], masks[row, :length]
        found.append(_Sample(digest_sample(own, mask), own, mask))
    return found


def encode_fp8(features: Tensor, taps: int) -> tuple[Tensor, Tensor]:
    """Features ``[n, m·d]`` as 8-bit floats (4 exponent bits), and a scale per token and tap ``[n, m]``."""
    parts = features.float().unflatten(-1, (taps, -1))
    scale = parts.abs().amax(-1).clamp(min=1e-12) / _FP8_MAX
    return (parts / scale[..., None]).to(_FP8).flatten(-2), scale


def decode_fp8(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of :func:`encode_fp8`, rounded to ``dtype``."""
    parts = stored.float().unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]
    return parts.to(dtype).flatten(-2)
