"""What a feature cache costs and changes: bytes, seconds, and the held-out losses from fresh, exact and fp8 states.

``python benchmarks/feature_cache.py RUN`` takes a finished run's target, draft and held-out conversations, and trains
nothing. The table goes into ``benchmarks/README.md``.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from table import machine, run_argument, write_table

from dspark_train.draft.recipe import DraftRecipe
from dspark_train.run import Run
from dspark_train.target.config import TargetConfig
from dspark_train.training.feature_cache import FeatureCache, Storage, identity_of
from dspark_train.training.module import DSparkModule
from dspark_train.training.optimizer import OptimizerConfig
from dspark_train.training.terms import ObjectiveConfig


def module_of(run: Run) -> DSparkModule:
    """The trained module of a run, without a trainer."""
    config = run.config
    module = DSparkModule(
        target=TargetConfig(**config["target"]),
        draft=DraftRecipe(**config["draft"]),
        objective=ObjectiveConfig(**config["objective"]),
        optimizer=OptimizerConfig(**config["optimizer"]),
    )
    module.target, module.draft = run.target, run.draft
    run.data.mask_token_id = run.draft.config.mask_token_id
    return module


def held_out(run: Run, cache: FeatureCache | None) -> tuple[dict[str, float], float]:
    """Losses and expected τ over the held-out conversations, and the seconds that the target's states took."""
    module = module_of(run)
    if cache is not None:
        module.source = cache
    seconds = 0.0
    with torch.no_grad(), torch.autocast(run.target.device.type, torch.bfloat16):
        for batch in run.data.val_dataloader():
            prepared = module.on_before_batch_transfer(batch, 0)
            started = time.perf_counter()
            module._states(prepared.batch.tokens)
            seconds += time.perf_counter() - started
            module.validation_step(prepared, 0)
    values = module.metrics("val").compute()
    return {name: float(value) for name, value in values.items()}, seconds


def main() -> None:
    run = run_argument(__doc__)
    store = run.data.store(run.data.val_split)
    storages: tuple[Storage, ...] = ("exact", "fp8")
    results: dict[str, tuple[Any, ...]] = {}
    with tempfile.TemporaryDirectory(dir=run.path) as folder:
        for kind in ("fresh", *storages):
            cache, size, building = None, 0, 0.0
            if kind != "fresh":
                cache = FeatureCache(Path(folder) / kind, identity_of(run.target, kind), run.target)
                for batch in run.data.val_dataloader():
                    cache.states(batch.tokens, "cpu")
                building = cache.filling.seconds
                size = sum(path.stat().st_size for path in cache.folder.glob("*.safetensors"))
            values, seconds = held_out(run, cache)
            results[kind] = (size, building, seconds, values)
    names = ("loss", "ce", "tv", "confidence", "tau")
    lines = [
        "| states | MiB | seconds to build | seconds to get | " + " | ".join(names) + " |",
        "|---" * (4 + len(names)) + "|",
    ]
    for kind, (size, building, seconds, values) in results.items():
        cells = [kind, f"{size / 2**20:,.0f}", f"{building:.1f}", f"{seconds:.2f}"]
        lines.append("| " + " | ".join([*cells, *(f"{values[name]:.5f}" for name in names)]) + " |")
    caption = f"{len(store)} held-out conversations, {sum(store.lengths):,} tokens. {machine()}"
    write_table("feature cache", "python benchmarks/feature_cache.py RUN", caption, lines)


if __name__ == "__main__":
    main()
