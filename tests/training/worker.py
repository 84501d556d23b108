"""Runs training jobs in one or more ranks and writes what came out; started by the tests as a process of its own.

``python worker.py JOBS.json``: a list of jobs ``{"name", "strategy", "module", "data", "trainer", ...}``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
warnings.filterwarnings("ignore")

import tiny  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

from dspark_train.training.checkpointing import TrainingCheckpoint  # noqa: E402
from dspark_train.training.csv_logger import RunCSVLogger  # noqa: E402
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
    if job.get("gradient"):
        module.__class__ = GradientModule
    resume = folder / job["resume"] if "resume" in job else None
    tiny.fit(module, data, trainer, ckpt_path=resume, weights_only=False if resume else None)
    state = master_state(module.draft)
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    with whole_parameters(module.draft):
        if trainer.is_global_zero and "export" in job:
            module.draft.save(folder / job["export"], dtype=torch.float32)
    if trainer.is_global_zero:
        torch.save(
            {"state": state, "rates": rates, "step": trainer.global_step}, folder / f"{job['name']}.pt"
        )
    trainer.strategy.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs_file = Path(sys.argv[1])
    for entry in json.loads(jobs_file.read_text()):
        run(entry, jobs_file.parent)
