"""Tiny targets and drafts, built on the spot: random weights, fp32, one family each."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from dspark_train.draft.model import DSparkDraft
from dspark_train.draft.recipe import DraftRecipe, build_config
from dspark_train.target.frozen import FrozenTarget

FAMILIES = ("llama", "qwen3", "mistral", "gemma3")

_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_model(family: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """A random causal LM of a family, with weights large enough for peaked distributions."""
    settings = _COMMON | overrides
    if family == "llama":
        config: Any = transformers.LlamaConfig(**settings)
        kind: Any = transformers.LlamaForCausalLM
    elif family == "qwen3":
        config, kind = transformers.Qwen3Config(head_dim=8, **settings), transformers.Qwen3ForCausalLM
    elif family == "mistral":
        config = transformers.MistralConfig(sliding_window=None, head_dim=8, **settings)
        kind = transformers.MistralForCausalLM
    elif family == "gemma3":
        config = transformers.Gemma3TextConfig(
            head_dim=8, sliding_window=16, final_logit_softcapping=10.0, query_pre_attn_scalar=8, **settings
        )
        kind = transformers.Gemma3ForCausalLM
    elif family in ("gemma4", "gemma4_kv_shared"):
        layers = ["sliding_attention", "full_attention"] * (settings["num_hidden_layers"] // 2)
        config = transformers.Gemma4TextConfig(
            head_dim=8,
            global_head_dim=16,
            num_global_key_value_heads=1,
            attention_k_eq_v=family == "gemma4_kv_shared",
            layer_types=layers,
            sliding_window=16,
            hidden_size_per_layer_input=0,
            final_logit_softcapping=10.0,
            **settings,
        )
        kind = transformers.Gemma4ForCausalLM
    else:
        raise ValueError(family)
    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"
    model = kind(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.08 if "embed" not in name and "lm_head" not in name else 0.3)
    return model


def tiny_target(
    family: str = "llama", layer_ids: tuple[int, ...] = (0, 1, 2), seed: int = 0, **kw: Any
) -> FrozenTarget:
    """A frozen tiny target."""
    return FrozenTarget(tiny_model(family, seed, **kw), list(layer_ids), name=f"tiny-{family}")


def tiny_draft(
    target: FrozenTarget, seed: int = 0, token_ids: torch.Tensor | None = None, **recipe: Any
) -> DSparkDraft:
    """A random draft for a tiny target, with a sequential head that is not zero."""
    choices: dict[str, Any] = {
        "num_layers": 2,
        "block_size": 4,
        "markov_rank": 8,
        "mask_token_id": 96,
    } | recipe
    if choices.get("head") == "none":
        choices["markov_rank"], choices["confidence_with_markov"] = 0, False
    config = build_config(
        DraftRecipe(**choices),
        target.config,
        target.layer_ids,
        vocab_size=target.vocab_size,
        embedding_scale=target.embedding_scale,
    )
    if token_ids is not None:
        config.draft_vocab_size = token_ids.numel()
    torch.manual_seed(seed)
    draft = DSparkDraft(config, target=target, draft_token_ids=token_ids).float().eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.15)
    return draft
