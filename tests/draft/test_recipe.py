"""The draft's shape: the target's where that makes sense, its own where it does not, and what is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_target
from transformers import AutoConfig

from dspark_train.draft.config import EVERYTHING, DSparkConfig, Sight
from dspark_train.draft.cost import trained_parameters
from dspark_train.draft.model import DSparkDraft
from dspark_train.draft.recipe import DraftRecipe, build_config
from dspark_train.errors import UserError
from dspark_train.target.config import text_config

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def config_of(model_type: str, recipe: dict[str, Any] | None = None, **fields: Any) -> DSparkConfig:
    target = text_config(AutoConfig.for_model(model_type, **fields))
    return build_config(DraftRecipe(**(recipe or {})), target, (0, 1), mask_token_id=0)


ODD = [
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "glm4", "glm4_moe", "mimo_v2_flash", "bamba", "phi", "stablelm", "nemotron",
    "gpt_neox", "kimi_linear", "nemotron_h", "jamba", "deepseek_v3", "deepseek_v4", "solar_open", "llama4", "gpt2",
    "mamba2", "longcat_flash", "minicpm3", "gpt_oss", "falcon_h1", "lfm2", "exaone4", "cohere2",
]  # fmt: skip
"""Targets whose positions, heads or feed-forward layers are no example for a draft, one way or another."""


@pytest.mark.parametrize("model_type", ODD)
def test_a_draft_of_any_target_can_be_built(model_type: str) -> None:
    config = config_of(model_type)
    with torch.device("meta"):
        draft = DSparkDraft(config)
    assert config.hidden_act == "silu" or config.hidden_act.startswith("gelu")
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.intermediate_size >= 2 * config.hidden_size
    assert "partial_rotary_factor" not in config.rope_parameters
    assert draft.rotary.inv_freq.numel() == config.head_dim // 2
    assert trained_parameters(draft) < 5e9


def test_latent_attention_is_no_example() -> None:
    """DeepSeek V3 has 128 heads of keys; a draft of five layers with as many would have 3.5 B parameters."""
    config = config_of("deepseek_v3")
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (56, 8, 128)
    assert config.intermediate_size == 18_432  # of the dense layers
    with torch.device("meta"):
        assert trained_parameters(DSparkDraft(config)) < 2.8e9


@pytest.mark.parametrize(
    ("model_type", "fields", "width"),
    [
        ("mixtral", {"hidden_size": 4096, "intermediate_size": 14_336}, 14_336),
        ("granitemoe", {"hidden_size": 1536, "intermediate_size": 512}, 4608),
        ("qwen3_5_moe", {}, 6144),
        ("llama", {"hidden_size": 64, "intermediate_size": 72}, 72),
    ],
)
def test_narrow_experts_are_no_example(model_type: str, fields: dict[str, Any], width: int) -> None:
    assert config_of(model_type, **fields).intermediate_size == width


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_parameters": PLAIN | {"rope_theta": 5e5}}, PLAIN | {"rope_theta": 5e5}),
        ({"rope_theta": 5e5, "partial_rotary_factor": 0.25}, PLAIN | {"rope_theta": 5e5}),
        ({"rope_parameters": PLAIN | {"mrope_section": [2, 1, 1]}}, PLAIN),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, PLAIN),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
    ],
)
def test_rope_is_the_targets_where_engines_share_it(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert config_of("llama", **fields).rope_parameters == expected


def test_magnitudes_that_not_every_engine_reads_are_left_to_the_draft() -> None:
    rope = YARN | {"rope_theta": 1e6, "beta_fast": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0, "other": 2.0}
    assert config_of("llama", rope_parameters=rope).rope_parameters == YARN | {
        "rope_theta": 1e6,
        "beta_fast": 16.0,
    }


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def test_chosen_rope_lies_over_the_targets() -> None:
    assert config_of("llama", {"rope": {"rope_theta": 1e6}}).rope_parameters == PLAIN | {"rope_theta": 1e6}
    assert config_of("llama", {"rope": YARN}).rope_parameters == YARN | {"rope_theta": 10000.0}
    scaled = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
    assert config_of("llama", {"rope": {"rope_type": "default"}}, **scaled).rope_parameters == PLAIN
    assert config_of("llama", {"rope": {"factor": 3.0}}, **scaled).rope_parameters["factor"] == 3.0


def test_scaled_rope_trains() -> None:
    target = tiny_target()
    recipe = DraftRecipe(num_layers=1, block_size=3, markov_rank=4, mask_token_id=96, rope=YARN)
    draft = DSparkDraft(build_config(recipe, target.config, target.layer_ids), target=target)
    assert draft.rotary.attention_scaling > 1.1
    assert float(draft.rotary.inv_freq[-1]) == pytest.approx(10000.0 ** (-6 / 8) / 4)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (
            {"rope": {"rope_type": "longrope"}},
            "rope_type 'longrope' is not one of default, linear, llama3, yarn",
        ),
        ({"rope": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings is missing"),
        ({"rope": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not known"),
        ({"rope": {"rope_theta": -1}}, "rope_theta -1 must be a positive number"),
        ({"full_attention_layers": [0]}, "needs draft.sliding_window"),
        (
            {"sliding_window": 64, "full_attention_layers": [5]},
            r"full_attention_layers \[5\] must lie in 0..4",
        ),
        ({"sliding_window": 6}, "sliding_window 6 must be at least block_size 7"),
        ({"head_dim": 33}, "head_dim 33 is odd"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "6 attention heads are no multiple of 4"),
    ],
)
def test_shapes_that_cannot_work_are_refused_by_name(recipe: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        config_of("llama", recipe)


def test_every_size_can_be_chosen(tmp_path: Any) -> None:
    target = tiny_target()
    recipe = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 40,
              "sliding_window": 9, "full_attention_layers": [1]}  # fmt: skip
    config = build_config(
        DraftRecipe(num_layers=2, block_size=3, markov_rank=4, mask_token_id=96, **recipe),
        target.config,
        target.layer_ids,
    )
    draft = DSparkDraft(config, target=target)
    assert draft.layers[0].self_attn.q_proj.weight.shape == (96, 32)
    assert draft.layers[0].self_attn.k_proj.weight.shape == (48, 32)
    assert config.sights == (Sight(9, causal=True), EVERYTHING)
    draft.save(tmp_path / "draft")
    loaded = DSparkDraft.load(tmp_path / "draft").config
    assert (loaded.sights, loaded.head_dim, loaded.intermediate_size) == (config.sights, 16, 40)


def test_heads_of_keys_follow_when_queries_are_chosen() -> None:
    assert config_of("llama", {"num_attention_heads": 6}).num_key_value_heads == 6
    assert config_of("mixtral", {"num_attention_heads": 12}).num_key_value_heads == 6
