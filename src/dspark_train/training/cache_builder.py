"""Building a feature cache, and the callback that trains from one (format: :mod:`.feature_cache`)."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from dspark_train.data.dataset import ExampleStore
from dspark_train.errors import UserError
from dspark_train.files import file_digest, write_json
from dspark_train.target.frozen import FrozenTarget
from dspark_train.training.feature_cache import (
    MANIFEST,
    CacheEstimate,
    CacheIdentity,
    FeatureCache,
    Storage,
    check_shard,
    digest_tokens,
    encode_fp8,
    estimate_cache,
    identity_of,
)
from dspark_train.training.objective import round_up, target_logsumexp

LENGTH_STEP = 8
"""Multiple that a pass is padded to: few different lengths, since a CPU's library compiles kernels for each."""


@dataclass(frozen=True)
class _Sample:
    digest: int
    ids: NDArray[np.integer[Any]]
    mask: NDArray[np.bool_]


class CacheBuilder:
    """Builds a cache shard by shard; several ranks may share the work.

    Args:
        folder: of the cache.
        target: whose states are stored.
        stores: the samples' sources (training and held-out split).
        storage: ``exact`` or ``fp8``.
        shard_tokens: most tokens of a shard.
        batch_tokens: most padded tokens of one pass of the target.
    """

    def __init__(
        self,
        folder: Path | str,
        target: FrozenTarget,
        stores: Sequence[ExampleStore],
        *,
        storage: Storage = "exact",
        shard_tokens: int = 65_536,
        batch_tokens: int = 2_048,
    ) -> None:
        self.folder, self.target, self.storage = Path(folder), target, storage
        self.batch_tokens = batch_tokens
        self.identity = identity_of(target, storage)
        self.stores = stores
        places = [(source, index) for source, store in enumerate(stores) for index in range(len(store))]
        lengths = [int(stores[source].lengths[index]) for source, index in places]
        self.shards: list[list[tuple[int, int]]] = []
        held = shard_tokens
        for place, length in zip(places, lengths, strict=True):
            if held + length > shard_tokens:
                self.shards.append([])
                held = 0
            self.shards[-1].append(place)
            held += length
        self.estimate = estimate_cache(target, lengths, storage)

    def check_disk(self) -> CacheEstimate:
        """Compare the estimate with the free disk space and time one pass, before a byte is written.

        Raises:
            UserError: it does not fit.
        """
        existing = next(
            parent for parent in (self.folder, *self.folder.absolute().parents) if parent.exists()
        )
        done = sum(path.stat().st_size for path in self.folder.glob("shard-*.safetensors"))
        needed, free = self.estimate.bytes - done, shutil.disk_usage(existing).free
        if needed > free * 0.95:
            raise UserError(
                f"the feature cache {self.folder} needs {needed / 2**30:.2f} GiB, but its disk has only "
                f"{free / 2**30:.2f} GiB free: choose another folder, storage fp8, or train without a cache"
            )
        batch = self._batches(self._samples(0))[0]
        started = time.perf_counter()
        self._run(batch)
        rate = sum(len(sample.ids) for sample in batch) / (time.perf_counter() - started)
        return CacheEstimate(self.estimate.tokens, self.estimate.bytes, self.estimate.tokens / rate)

    def build(self, rank: int = 0, world_size: int = 1) -> None:
        """Write the shards of one rank that are not there yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._refuse_foreign()
        for number in range(rank, len(self.shards), world_size):
            if not self._finished(number):
                self._write(number)

    def finish(self) -> FeatureCache:
        """Write the manifest (one rank, after all have built) and open the cache."""
        shards = [json.loads(self._path(number, ".json").read_text()) for number in range(len(self.shards))]
        content = {"identity": asdict(self.identity), "tokens": self.estimate.tokens, "shards": shards}
        write_json(self.folder / MANIFEST, content)
        return FeatureCache(self.folder, self.identity, verify=False)

    def check_complete(self, cache: FeatureCache) -> None:
        """Raise UserError where ``cache`` lacks a sample of this builder's data."""
        for number in range(len(self.shards)):
            for sample in self._samples(number):
                if sample.ids not in cache:
                    raise UserError(
                        f"the feature cache {self.folder} was built from other data (it lacks a sample of "
                        f"{len(sample.ids)} tokens): choose another folder, or delete it"
                    )

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"shard-{number:05d}{suffix}"

    def _refuse_foreign(self) -> None:
        for path in sorted(self.folder.glob("shard-*.json")):
            found = json.loads(path.read_text())["identity"]
            other = CacheIdentity(**found | {"layer_ids": tuple(found["layer_ids"])})
            if different := self.identity.difference(other):
                shard = path.with_suffix(".safetensors")
                raise UserError(
                    f"the cache shard {shard} was made from something else ({different}): "
                    "choose another folder, or delete it"
                )

    def _finished(self, number: int) -> bool:
        sidecar, path = self._path(number, ".json"), self._path(number, ".safetensors")
        if not sidecar.is_file():
            return False
        shard = json.loads(sidecar.read_text())
        expected = [sample.digest for sample in self._samples(number)]
        if shard["content"] != _content_digest(expected):
            raise UserError(
                f"the cache shard {path} was made from other data: choose another folder, "
                f"or delete {self.folder}"
            )
        check_shard(path, shard)
        return True

    def _samples(self, number: int) -> list[_Sample]:
        samples: dict[int, _Sample] = {}
        for source, index in self.shards[number]:
            example = self.stores[source][index]
            sample = _Sample(digest_tokens(example.input_ids), example.input_ids, example.loss_mask)
            known = samples.get(sample.digest)
            if known is not None:
                sample = _Sample(sample.digest, sample.ids, known.mask | sample.mask)
            samples[sample.digest] = sample
        return list(samples.values())

    def _batches(self, samples: list[_Sample]) -> list[list[_Sample]]:
        """Group samples of similar length into passes of at most ``batch_tokens`` padded tokens."""
        batches: list[list[_Sample]] = []
        for sample in sorted(samples, key=lambda sample: -len(sample.ids)):
            length = round_up(len(batches[-1][0].ids), LENGTH_STEP) if batches else 0
            if not batches or (len(batches[-1]) + 1) * length > self.batch_tokens:
                batches.append([])
            batches[-1].append(sample)
        return batches

    def _run(self, batch: list[_Sample]) -> list[dict[str, Tensor]]:
        """States of a few samples, on the CPU."""
        longest = round_up(len(batch[0].ids), LENGTH_STEP)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        wanted = torch.zeros(len(batch), longest, dtype=torch.bool)
        for row, sample in enumerate(batch):
            ids[row, : len(sample.ids)] = torch.from_numpy(sample.ids.astype(np.int64))
            mask = np.asarray(sample.mask, dtype=bool)
            wanted[row, : len(mask) - 1] = torch.from_numpy(mask[:-1] & mask[1:])
        states = self.target.states(ids.to(self.target.device))
        level = torch.full(ids.shape, float("nan"))
        place = wanted.nonzero(as_tuple=True)
        rows = states.last_hidden[place[0].to(self.target.device), place[1].to(self.target.device)]
        if len(rows):
            values = target_logsumexp(rows, self.target.head_weight, softcap=self.target.logit_softcap)
            level[place] = values.float().cpu()
        found = []
        for row, sample in enumerate(batch):
            length = len(sample.ids)
            entry = {"last_hidden": states.last_hidden[row, :length].cpu(), "logsumexp": level[row, :length]}
            features = states.features[row, :length]
            if self.storage == "fp8":
                features, scale = encode_fp8(features, len(self.identity.layer_ids))
                entry["scale"] = scale.cpu()
            found.append(entry | {"features": features.cpu()})
        return found

    def _write(self, number: int) -> None:
        samples = self._samples(number)
        results: dict[int, dict[str, Tensor]] = {}
        for batch in self._batches(samples):
            results.update(zip((sample.digest for sample in batch), self._run(batch), strict=True))
        digests = [sample.digest for sample in samples]
        names = results[digests[0]].keys()
        tensors = {name: torch.cat([results[digest][name] for digest in digests]) for name in names}
        lengths = torch.tensor([0] + [len(sample.ids) for sample in samples])
        tensors |= {"digest": torch.tensor(digests), "start": lengths.cumsum(0)}
        path = self._path(number, ".safetensors")
        aside = path.with_suffix(".tmp")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(aside))
        aside.replace(path)
        shard = {"file": path.name, "bytes": path.stat().st_size, "sha256": file_digest(path)}
        extra = {"content": _content_digest(digests), "identity": asdict(self.identity)}
        write_json(self._path(number, ".json"), shard | extra)


class CacheFeatures(Callback):
    """Computes the target's states once, before training, and trains from the stored ones.

    Worth it where the same samples are seen in several epochs; anchors still change every epoch.
    """

    def __init__(
        self,
        folder: str | None = None,
        storage: Storage = "exact",
        keep: bool = True,
        verify: bool = True,
        shard_tokens: int = 65_536,
        batch_tokens: int = 2_048,
        by_identity: bool = False,
    ) -> None:
        """Say where the cache is, or shall be.

        Args:
            folder: of the cache; made where it does not exist, continued where it is unfinished. Left out:
                ``feature_cache`` in the run's folder.
            storage: ``exact``, or ``fp8`` for half the size and a small error.
            keep: leave the cache there after training.
            verify: compare the SHA-256 of every shard when the cache is opened.
            shard_tokens: most tokens of one file.
            batch_tokens: most padded tokens of one pass of the target while building.
            by_identity: use a folder inside ``folder`` that is named after what the states are made from, so that runs
                with other taps or targets can name the same place, and those with the same share one cache.
        """
        self.given, self.storage, self.keep, self.verify = folder, storage, keep, verify
        self.by_identity = by_identity
        self.folder = Path(folder or "feature_cache")
        self.shard_tokens, self.batch_tokens = shard_tokens, batch_tokens

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Build or open the cache, and hand it to the module, before the draft is made."""
        if stage != "fit":
            return
        module: Any = pl_module
        if self.given is None:
            self.folder = Path(trainer.default_root_dir) / "feature_cache"
        elif self.by_identity:
            self.folder = Path(self.given) / identity_of(module.target, self.storage).short
        data = trainer.datamodule  # type: ignore[attr-defined]
        stores = [data.store(split) for split in dict.fromkeys((data.train_split, data.val_split))]
        builder = CacheBuilder(
            self.folder,
            module.target,
            stores,
            storage=self.storage,
            shard_tokens=self.shard_tokens,
            batch_tokens=self.batch_tokens,
        )
        if (self.folder / MANIFEST).is_file():
            cache = FeatureCache(self.folder, builder.identity, verify=self.verify)
            builder.check_complete(cache)
        else:
            if trainer.is_global_zero:
                rank_zero_info(f"feature cache {self.folder}: {builder.check_disk()}")
            trainer.strategy.barrier("feature cache: disk space")
            builder.build(trainer.global_rank, trainer.world_size)
            trainer.strategy.barrier("feature cache: shards")
            if trainer.is_global_zero:
                builder.finish()
            trainer.strategy.barrier("feature cache: manifest")
            cache = FeatureCache(self.folder, builder.identity, verify=False)
        module.outside["feature_cache"] = cache

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the module go back to its target."""
        module: Any = pl_module
        module.outside.pop("feature_cache", None)
        if not self.keep and trainer.is_global_zero:
            shutil.rmtree(self.folder)


def _content_digest(digests: list[int]) -> str:
    return hashlib.sha256(np.asarray(digests, dtype=np.int64).tobytes()).hexdigest()
