"""The callback that lets training fill, and read, a cache of the target's states."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from dspark_train.training.feature_cache import FeatureCache, Storage, cache_bytes, check_disk, identity_of
from dspark_train.training.states import LiveStates
from dspark_train.training.strategy import gather_objects


class CacheFeatures(Callback):
    """Keeps the target's states of every sample that a step has asked for, and reads them from then on.

    Worth it where the same samples are seen in several epochs; anchors still change every epoch.
    """

    def __init__(
        self,
        folder: str | None = None,
        storage: Storage = "exact",
        keep: bool = True,
        verify: bool = True,
        batch_tokens: int = 2_048,
        by_identity: bool = False,
    ) -> None:
        """Say where the cache is, or shall be.

        Args:
            folder: of the cache; made where it does not exist. Left out: ``feature_cache`` in the run's folder.
            storage: ``exact``, or ``fp8`` for half the size and a small error.
            keep: leave the cache there after training.
            verify: compare the SHA-256 of every file when the cache is opened.
            batch_tokens: most padded tokens of one pass of the target.
            by_identity: use a folder inside ``folder`` that is named after what the states are made from, so that runs
                with other taps or targets can name the same place, and those with the same share one cache.
        """
        self.given, self.storage, self.keep, self.verify = folder, storage, keep, verify
        self.by_identity, self.batch_tokens = by_identity, batch_tokens
        self.folder = Path(folder or "feature_cache")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open the cache and hand it to the module, before the draft is made."""
        if stage != "fit":
            return
        module: Any = pl_module
        identity = identity_of(module.target, self.storage)
        if self.given is None:
            self.folder = Path(trainer.default_root_dir) / "feature_cache"
        elif self.by_identity:
            self.folder = Path(self.given) / identity.short
        check_disk(self.folder, cache_bytes(module.target, self._tokens(trainer), self.storage))
        trainer.strategy.barrier("feature cache: disk space")
        sharded = module.target_config.sharding != "none" and trainer.world_size > 1
        module.source = FeatureCache(
            self.folder,
            identity,
            module.target,
            verify=self.verify,
            pass_tokens=self.batch_tokens,
            **({"together": _any_rank} if sharded else {}),
        )

    @staticmethod
    def _tokens(trainer: Trainer) -> int:
        """Tokens that the steps of this run will ask for, at most."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        lengths = data.store(data.train_split).lengths
        steps = trainer.max_steps if trainer.max_steps >= 0 else len(lengths)
        share = min(1.0, steps * data.global_batch_size / max(1, len(lengths)))
        validates = trainer.limit_val_batches and data.val_split != data.train_split
        heldout = int(data.store(data.val_split).lengths.sum()) if validates else 0
        return int(share * int(lengths.sum())) + heldout

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the module go back to its target."""
        module: Any = pl_module
        module.source = LiveStates(module.target)
        if not self.keep and trainer.is_global_zero:
            shutil.rmtree(self.folder)


def _any_rank(own: bool) -> bool:
    return any(gather_objects(own))
