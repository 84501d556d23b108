"""Tiny targets and drafts with random weights; everything is built here, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dspark_train.draft.config import DSparkConfig
from dspark_train.draft.model import DSparkDraft
from dspark_train.interchange.export import TargetWeights
from dspark_train.target.frozen import FrozenTarget

VOCABULARY = 53
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], None]:
    """Make a module's ``to_native`` give one tensor's rows in the wrong order."""

    def swap(module: Any, name: str) -> None:
        original = module.to_native

        def swapped(checkpoint: Any) -> Any:
            config, tensors = original(checkpoint)
            return config, {**tensors, name: tensors[name].flip(0)}

        monkeypatch.setattr(module, "to_native", swapped)

    return swap


@pytest.fixture(scope="session")
def make_target() -> Callable[..., FrozenTarget]:
    def make(family: str = "qwen3", **overrides: Any) -> FrozenTarget:
        import transformers

        name = family.capitalize()
        config_class = getattr(transformers, "Gemma3TextConfig" if family == "gemma3" else f"{name}Config")
        model_class = getattr(transformers, f"{name}ForCausalLM")
        torch.manual_seed(3 + len(family))
        config = config_class(**{**SIZES, "tie_word_embeddings": False, **overrides})
        model = model_class(config).float()
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        return FrozenTarget(model, [0, 2], name=f"tiny-{family}")

    return make


@pytest.fixture(scope="session")
def target(make_target: Callable[..., FrozenTarget]) -> FrozenTarget:
    return make_target("qwen3")


@pytest.fixture(scope="session")
def target_weights(target: FrozenTarget) -> TargetWeights:
    return TargetWeights.of(target)


@pytest.fixture(scope="session")
def make_draft(target: FrozenTarget) -> Callable[..., DSparkDraft]:
    def make(
        head: str = "vanilla", reduced: int | None = None, of: FrozenTarget = target, **fields: Any
    ) -> DSparkDraft:
        rank = 0 if head == "none" else 8
        config = DSparkConfig(
            **{
                **SIZES,
                "num_hidden_layers": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
                "block_size": 4,
                "num_target_layers": of.num_layers,
                "target_layer_ids": list(of.layer_ids),
                "mask_token_id": VOCABULARY - 1,
                "markov_rank": rank,
                "markov_head_type": head,
                "confidence_head_with_markov": rank > 0,
                "draft_vocab_size": reduced,
                **fields,
            },
        )
        generator = torch.Generator().manual_seed(7)
        ids = (
            None
            if reduced is None
            else torch.randperm(VOCABULARY, generator=generator)[:reduced].sort().values
        )
        torch.manual_seed(5)
        draft = DSparkDraft(config, target=of, draft_token_ids=ids)
        for parameter in draft.parameters():
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
        return draft.eval()

    return make
