"""Runs training jobs in one or more ranks and writes what came out; started by the tests as a process of its own.

``python worker.py JOBS.json``: a list of jobs ``{"name", "strategy", "module", "data", "trainer", ...}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
warnings.filterwarnings("ignore")

import tiny  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch import Callback  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

from dspark_train.decoding.callback import DecodeValidation  # noqa: E402
from dspark_train.target.frozen import FrozenTarget  # noqa: E402
from dspark_train.target.sharding import shard_model  # noqa: E402
from dspark_train.training.checkpointing import TrainingCheckpoint, latest_checkpoint  # noqa: E402
from dspark_train.training.csv_logger import RunCSVLogger  # noqa: E402
from dspark_train.training.feature_cache import identity_of  # noqa: E402
from dspark_train.training.module import DSparkModule  # noqa: E402
from dspark_train.training.strategy import ZeroStrategy  # noqa: E402
from dspark_train.training.zero_state import master_state, whole_parameters  # noqa: E402

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
"""Read once: Lightning removes the variable after each run."""


class GradientModule(DSparkModule):
    """One step of plain gradient descent with a huge rate: the weights become the gradient, in every strategy."""

    RATE = 1e4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.draft.parameters(), lr=self.RATE)


class ConstantGradient(GradientModule):
    """Every gradient is 1 in the first micro-batch of the first rank, and 2⁻¹⁰ in all others.

    Summed in bfloat16 behind the first one, the others would vanish.
    """

    share = 1.0

    def configure_optimizers(self) -> Any:
        for parameter in self.draft.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: torch.full_like(gradient, self.share))
        return super().configure_optimizers()

    def training_step(self, prepared: Any, batch_idx: int) -> torch.Tensor:
        self.share = 1.0 if batch_idx == 0 and self.global_rank == 0 else 2.0**-10
        return super().training_step(prepared, batch_idx)


class DieAt(Callback):
    """A kill that nothing can catch, in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def features(folder: Path) -> None:
    """A sharded target against a whole one, each rank with a batch of its own."""
    rank = int(os.environ["RANK"])
    ids = torch.randint(0, 97, (2 + rank, 9 + 3 * rank), generator=torch.Generator().manual_seed(rank))
    plain, other = tiny.tiny_target(), tiny.tiny_target()
    whole = sum(parameter.numel() for parameter in other.decoder.layers.parameters())
    sharded = FrozenTarget(shard_model(other.model, torch.device("cpu")), [0, 1, 3], name="sharded")
    one, two = plain.states(ids), sharded.states(ids)
    held = sum(parameter.ds_tensor.numel() for parameter in sharded.decoder.layers.parameters())
    result = {
        "features": torch.equal(one.features, two.features),
        "last_hidden": torch.equal(one.last_hidden, two.last_hidden),
        "logits": torch.equal(plain.lm_head(one.last_hidden), sharded.lm_head(two.last_hidden)),
        "share": held / whole,
        "identity": not identity_of(plain).difference(identity_of(sharded)),
    }
    (folder / f"features-{rank}.json").write_text(json.dumps(result))


def strategy_of(name: str) -> Any:
    if name.startswith("zero"):
        return ZeroStrategy(stage=int(name[4]), **({"offload_optimizer": True} if "offload" in name else {}))  # type: ignore[arg-type]
    return DDPStrategy(process_group_backend="gloo") if name == "ddp" else "auto"


def run(job: dict[str, Any], folder: Path) -> None:
    data = tiny.TinyData(**job.get("data", {}))
    options = dict(job.get("trainer", {}))
    run_folder = folder / job.get("run", job["name"])
    checkpoint = job.get("checkpoint")
    if checkpoint is not None:
        options["callbacks"] = [TrainingCheckpoint(**checkpoint)]
        options["enable_checkpointing"] = True
        options["logger"] = RunCSVLogger(run_folder)
    trainer = tiny.tiny_trainer(
        run_folder,
        strategy=strategy_of(job.get("strategy", "auto")),
        devices=RANKS,
        **options,
    )
    module = tiny.tiny_module(**job.get("module", {}))
    if job.get("sharded"):
        module.target_config.sharding = "zero3"
        module.target = FrozenTarget(
            shard_model(tiny.tiny_target().model, torch.device("cpu")), [0, 1, 3], name="tiny"
        )
    if job.get("gradient"):
        module.__class__ = ConstantGradient if job["gradient"] == "constant" else GradientModule
    if "die_at" in job:
        trainer.callbacks.append(DieAt(job["die_at"]))
    resume = folder / job["resume"] if "resume" in job else None
    if "again" in job:
        resume = latest_checkpoint(run_folder / "trainer")
    if "decode" in job:
        trainer.callbacks.append(DecodeValidation(**job["decode"]))
    tiny.fit(module, data, trainer, ckpt_path=resume, weights_only=True if resume else None)
    state = master_state(module.draft)
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    with whole_parameters(module.draft):
        if trainer.is_global_zero and "export" in job:
            module.draft.save(folder / job["export"], dtype=torch.float32)
    if trainer.is_global_zero:
        torch.save(
            {
                "state": state,
                "rates": rates,
                "step": trainer.global_step,
                "logged": {name: float(value) for name, value in trainer.logged_metrics.items()},
            },
            folder / f"{job['name']}.pt",
        )
    trainer.strategy.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs_file = Path(sys.argv[1])
    for entry in json.loads(jobs_file.read_text()):
        if entry["name"] == "features":
            features(jobs_file.parent)
        else:
            run(entry, jobs_file.parent)
