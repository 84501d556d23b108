"""A tiny random model of every causal language model in the installed transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": 12,
    "attention_chunk_size": 12,
    # experts
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # sparse attention
    "index_topk": 12,
    "index_head_dim": 8,
    "index_n_heads": 16,
    # linear attention and state spaces
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
    "mamba_dt_rank": 4,
}
"""Taken where a config has the field."""

ALWAYS = ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")

HYBRID = ["linear_attention", "full_attention"] * 2
WINDOWS = ["sliding_attention", "full_attention"] * 2
_GEMMA4 = {
    "layer_types": WINDOWS,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "final_logit_softcapping": 30.0,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2, "layer_types": None, "mlp_layer_types": None},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        }
    },
    "cpmant": {"dim_ff": 48, "dim_head": 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24},
    },
    "dots3_note_text": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "head_dim": 16,
        "per_layer_config": {},
    },
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 3,
    },
    "dory": {"layer_types": WINDOWS, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "gemma3n_text": {
        "layer_types": WINDOWS,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_text": _GEMMA4 | {"num_kv_shared_layers": 2},
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 12},
    "gptj": {"rotary_dim": 4},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "granitemoehybrid": {"layer_types": HYBRID, "shared_intermediate_size": 48, "logits_scaling": 4.0},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "inkling2_loop_text": {"unpadded_vocab_size": 97},
    "inkling2_text": {"unpadded_vocab_size": 97},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    "minimax": {"head_dim": 8, "block_size": 8},
    "ministral": {"head_dim": 8},
    "minimax_m3_vl_text": {
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "rotary_dim": 4,
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 24,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    },
    "moshi": {"ffn_dim": 48},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8,
                   "moe_shared_expert_intermediate_size": 24},
    "phimoe": {"lm_head_bias": True},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen4_exp_text": {
        "hc_lowrank": 8, "ple_embed_dim": 16, "ngram_vocab_size_base": 97, "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 1, "split_ngram_parts": 1, "indexer_n_heads": 4, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 12, "indexer_compress_ratio": 2,
    },
    "xlstm": {"num_heads": 4, "qk_dim_factor": 1.0},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "n_mamba_heads": 8, "mamba_headdim": 8,
               "chunk_size": 8, "mamba_d_state": 16},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip


NOT_TINY: dict[str, str] = {
    "blt": "nested models over bytes",
    "dbrx": "the width of its experts is no field of its config",
    "emu3": "multimodal",
    "fuyu": "multimodal",
    "gemma4_assistant": "a draft itself",
    "gemma4_unified_assistant": "a draft itself",
    "dots3_note": "multimodal",
    "gemma3": "multimodal; its text part is gemma3_text",
    "gemma3n": "multimodal; its text part is gemma3n_text",
    "gemma4": "multimodal; its text part is gemma4_text",
    "gemma4_unified": "multimodal; its text part is gemma4_unified_text",
    "git": "multimodal",
    "got_ocr2": "multimodal",
    "llama4": "multimodal; its text part is llama4_text",
    "mllama": "multimodal",
    "moss_transcribe_diarize": "multimodal",
    "musicgen": "multimodal",
    "musicgen_melody": "multimodal",
    "phi4_multimodal": "multimodal",
    "qwen3_5": "multimodal; its text part is qwen3_5_text",
    "qwen3_5_moe": "multimodal; its text part is qwen3_5_moe_text",
    "qwen4_exp": "multimodal; its text part is qwen4_exp_text",
    "reformer": "an encoder unless asked",
    "roc_bert": "an encoder unless asked",
    "xlnet": "an encoder unless asked",
}
"""Not built here, and why."""


def family_names() -> list[str]:
    """Types of all decoder-only causal language models of the installed transformers."""
    return sorted(
        kind
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if not getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False)
    )


def tiny_config(kind: str) -> Any:
    """Config of a model of this type, with every kind of layer that its default has."""
    default = CONFIG_MAPPING[kind]()

    def has(name: str) -> bool:
        fixed = getattr(type(default), name, None)
        if isinstance(fixed, property) and fixed.fset is None:
            return False
        if name in ALWAYS:
            return True
        try:
            return getattr(default, name, None) is not None
        except Exception:  # of another value in every layer
            return True

    settings = {name: value for name, value in SIZES.items() if has(name)}
    if "kv_lora_rank" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        own = has(name) and name not in default.attribute_map
        kinds = list(dict.fromkeys(getattr(default, name, None) or ())) if own else []
        if kinds:
            settings[name] = (kinds * 4)[:4]
    return CONFIG_MAPPING[kind](**(settings | OVERRIDES.get(kind, {})))


def tiny_family(kind: str) -> Any:
    """A random model of this type; every state of every layer matters to its logits."""
    config = tiny_config(kind)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    assert size < 3e6, f"{kind} has {size} parameters: not tiny"
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and (parameter.ndim >= 2 or name.endswith("bias")):
                parameter.normal_(0.0, 0.15, generator=generator)
    return model
