"""The speculators layout: native tensor names, a nested ``config.json`` (vLLM, and Red Hat's models on the
hub).

Tapped layers count from the embedding output (native id + 1), the decoder layers sit in
``transformer_layer_config``, and a reduced vocabulary comes with ``d2t``, ``t2d`` and an LM head of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark_train.errors import UserError
from dspark_train.interchange.checkpoint import DraftCheckpoint, read_config
from dspark_train.interchange.native import (
    LAYER_FIELDS,
    dtype_name,
    head_type,
    layer_fields,
    layer_numbers,
    read_weights,
    reduced_vocabulary,
    written_windows,
)

SPECULATORS_VERSION = "0.9.0"
"""Version of the speculators library whose layout is written."""

ALGORITHMS = ("dspark", "dflash")
"""Values of ``speculators_model_type`` that are read."""


def read_speculators(folder: Path) -> DraftCheckpoint:
    """Read a speculators folder, in either slot layout, with or without a reduced vocabulary."""
    path = folder / "config.json"
    raw, notes = read_config(path), list[str]()
    algorithm = raw.get("speculators_model_type")
    if algorithm not in ALGORITHMS:
        raise UserError(f"{path}: speculators_model_type {algorithm!r}; expected {' or '.join(ALGORITHMS)}")
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError(f"{path}: transformer_layer_config is missing; not a speculators draft")
    causality = {"sliding_window_non_causal": raw.get("sliding_window_non_causal")}
    config = layer_fields({**layer, **causality}, f"{path}: transformer_layer_config", notes)
    name = "aux_hidden_state_layer_ids"
    taps = layer_numbers(raw.get(name), str(path), name)
    width = raw.get("target_hidden_size") or config["hidden_size"]
    if width != config["hidden_size"]:
        raise UserError(
            f"{path}: target_hidden_size {width} differs from the draft's hidden size "
            f"{config['hidden_size']}; this "
            "project's drafts have the width of their target"
        )
    for name in ("block_size", "mask_token_id"):
        if not isinstance(raw.get(name), int):
            raise UserError(f"{path}: {name} {raw.get(name)!r}; expected an integer")
    rank = raw.get("markov_rank", 0) if algorithm == "dspark" else 0
    config |= {
        "block_size": raw["block_size"],
        "target_layer_ids": [tap - 1 for tap in taps],
        "mask_token_id": raw["mask_token_id"],
        "num_anchors": raw.get("num_anchors", 512),
        "num_target_layers": None,
        "markov_rank": rank,
        "markov_head_type": head_type(raw.get("markov_head_type"), rank, str(path), notes),
        "enable_confidence_head": bool(raw.get("enable_confidence_head", False)),
        "confidence_head_with_markov": bool(raw.get("confidence_head_with_markov", False)),
        "sample_from_anchor": _slot_layout(raw, algorithm, notes),
        "embedding_scale": 1.0,
        "final_logit_softcapping": None,
    }
    if not config["sample_from_anchor"]:
        config["block_size"] -= 1
        notes.append(f"block_size {raw['block_size']} counts the anchor: {config['block_size']} draft tokens")
    reduced = config["draft_vocab_size"] = reduced_vocabulary(raw, config["vocab_size"], str(path))
    checkpoint = read_weights(folder, config, notes)
    if reduced is not None and "lm_head.weight" not in checkpoint.tensors:
        raise UserError(
            f"{folder}: a reduced vocabulary needs lm_head.weight [{reduced}, {config['hidden_size']}]"
        )
    return checkpoint


def _slot_layout(raw: Mapping[str, Any], algorithm: str, notes: list[str]) -> bool:
    """Whether the anchor's slot predicts; a note says so where the key is missing: readers disagree on it."""
    stated = raw.get("sample_from_anchor")
    if stated is not None:
        return bool(stated)
    default = algorithm == "dspark"
    notes.append(
        f"sample_from_anchor is missing and counts as {str(default).lower()}, as in the speculators library "
        "(vLLM takes it as false)"
    )
    return default


def to_speculators(
    checkpoint: DraftCheckpoint, verifier: str, verifier_architectures: list[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return ``config.json`` and tensors of a speculators folder.

    Args:
        checkpoint: to write; a reduced vocabulary keeps its own LM head ``[U, d]``.
        verifier: name or path of the target.
        verifier_architectures: of the target's ``config.json``.
    """
    config, tensors, dtype = checkpoint.config, dict(checkpoint.tensors), checkpoint.dtype
    gamma, vocabulary = config["block_size"], config["vocab_size"]
    if checkpoint.draft_token_ids is not None:
        ids = checkpoint.draft_token_ids
        tensors["d2t"] = ids - torch.arange(ids.numel())
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    rope = config["rope_parameters"]
    layer_names = (*LAYER_FIELDS, "hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
    layer = {name: config[name] for name in layer_names}
    layer |= {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": dtype_name(dtype),
        "num_hidden_layers": config["num_hidden_layers"],
        "num_key_value_heads": config["num_key_value_heads"],
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        **written_windows(config),
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": vocabulary,
    }
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": gamma,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    written = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": SPECULATORS_VERSION,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config["target_layer_ids"]],
        "block_size": gamma,
        "confidence_head_with_markov": config["confidence_head_with_markov"],
        "draft_vocab_size": config.get("draft_vocab_size") or vocabulary,
        "dtype": dtype_name(dtype),
        "enable_confidence_head": config["enable_confidence_head"],
        "mask_token_id": config["mask_token_id"],
        "markov_head_type": config["markov_head_type"],
        "markov_rank": config["markov_rank"],
        "num_anchors": config["num_anchors"],
        "sample_from_anchor": True,
        "sliding_window_non_causal": config["sliding_window_non_causal"],
        "target_hidden_size": config["hidden_size"],
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": verifier_architectures},
        },
    }
    return written, tensors
