"""A tiny target, tiny data and the real modules around them; also imported by worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer, seed_everything
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from dspark_train.data.module import DSparkDataModule
from dspark_train.data.tokenize import Example
from dspark_train.draft.recipe import DraftRecipe
from dspark_train.target.config import TargetConfig
from dspark_train.target.frozen import FrozenTarget
from dspark_train.training.module import DSparkModule
from dspark_train.training.optimizer import OptimizerConfig
from dspark_train.training.terms import ObjectiveConfig

VOCABULARY = 97


def tiny_target(seed: int = 0, softcap: float | None = None) -> FrozenTarget:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            tie_word_embeddings=False,
        )
        return FrozenTarget(LlamaForCausalLM(config), [0, 1, 3], name="tiny")


class MemoryStore:
    """Examples in memory, with the interface of :class:`dspark_train.data.dataset.ExampleStore`."""

    def __init__(self, count: int, seed: int, empty: tuple[int, ...] = ()) -> None:
        generator = np.random.default_rng(seed)
        self.examples = []
        for index in range(count):
            length = int(generator.integers(12, 40))
            ids = generator.integers(0, VOCABULARY - 1, length).astype(np.int32)
            mask = np.zeros(length, dtype=bool)
            if index not in empty:
                mask[int(generator.integers(2, length - 4)) :] = True
            self.examples.append(Example(ids, mask, "chat", f"c{index}", "train"))

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    def loss_mask(self, index: int) -> NDArray[np.bool_]:
        return self.examples[index].loss_mask

    @property
    def lengths(self) -> NDArray[np.int32]:
        return self.column("length")

    def column(self, name: str) -> NDArray[Any]:
        if name == "length":
            return np.array([len(example.input_ids) for example in self.examples], dtype=np.int32)
        return np.array([getattr(example, name) for example in self.examples])


class TinyData(DSparkDataModule):
    """The real data module over :class:`MemoryStore`."""

    def __init__(self, count: int = 40, empty: tuple[int, ...] = (), **kwargs: Any) -> None:
        options = {
            "global_batch_size": 8,
            "micro_batch_size": 8,
            "num_anchors": 5,
            "block_size": 4,
            "seed": 3,
        }
        super().__init__(Path("unused"), **(options | kwargs))
        self._stores = {"train": MemoryStore(count, 1, empty), "validation": MemoryStore(6, 2)}

    def setup(self, stage: str | None = None) -> None:
        pass

    def store(self, split: str) -> Any:
        return self._stores[split]


def tiny_module(
    head: str = "vanilla", *, lr: float = 1e-2, optimizer: dict[str, Any] | None = None, **recipe: Any
) -> DSparkModule:
    seed_everything(11, verbose=False)
    options: dict[str, Any] = {
        "num_layers": 2,
        "block_size": 4,
        "head": head,
        "markov_rank": 0 if head == "none" else 8,
        "confidence_with_markov": head != "none",
        "mask_token_id": VOCABULARY - 1,
        "intermediate_size": 40,
    }
    module = DSparkModule(
        TargetConfig(),
        DraftRecipe(**(options | recipe)),
        ObjectiveConfig(),
        OptimizerConfig(**({"lr": lr, "warmup": 0.1} | (optimizer or {}))),
    )
    module.target = tiny_target()
    return module


def tiny_trainer(folder: Path | str, **kwargs: Any) -> Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "use_distributed_sampler": False,
        "default_root_dir": str(folder),
        "log_every_n_steps": 1,
        "gradient_clip_val": 1.0,
    }
    return Trainer(**(options | kwargs))


def fit(module: DSparkModule, data: DSparkDataModule, trainer: Trainer, **kwargs: Any) -> DSparkModule:
    """Fit as ``fit`` does: the accumulation follows from the global batch and the ranks."""
    trainer.accumulate_grad_batches = data.accumulation(trainer.world_size)
    trainer.fit(module, datamodule=data, **kwargs)
    return module


def weights_of(module: DSparkModule) -> dict[str, torch.Tensor]:
    assert module.draft is not None
    return {name: value.detach().clone() for name, value in module.draft.state_dict().items()}
