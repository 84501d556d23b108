"""The DFlash layout: the backbone alone, its fields nested in ``dflash_config``.

Published DFlash drafts are anchor-conditioned: ``block_size`` counts the anchor and its masks, and only the
masks predict, each its own position. A parallel draft trained here predicts from the anchor on instead; its
export says so (``sample_from_anchor``), because the two layouts share every tensor and a mix-up costs nearly
all acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark_train.errors import UserError
from dspark_train.interchange.checkpoint import DraftCheckpoint, read_config
from dspark_train.interchange.native import (
    TARGET_COPIES,
    layer_fields,
    layer_numbers,
    native_config,
    read_weights,
)

ARCHITECTURE = "DFlashDraftModel"


def nested_fields(raw: Mapping[str, Any], path: Path, notes: list[str]) -> dict[str, Any]:
    """Return γ, taps, mask token and slot layout from a configuration with a ``dflash_config``."""
    nested = raw.get("dflash_config") or {}
    taps = nested.get("target_layer_ids", raw.get("target_layer_ids"))
    mask = nested.get("mask_token_id", raw.get("mask_token_id"))
    block = nested.get("block_size", raw.get("block_size"))
    for name, value in (("mask_token_id", mask), ("block_size", block)):
        if not isinstance(value, int):
            raise UserError(f"{path}: {name} {value!r}; expected an integer")
    return {
        "block_size": block,
        "target_layer_ids": layer_numbers(taps, str(path), "target_layer_ids"),
        "mask_token_id": mask,
        "num_target_layers": raw.get("num_target_layers"),
        "num_anchors": raw.get("num_anchors", 512),
        "embedding_scale": 1.0,
        "final_logit_softcapping": None,
    }


def read_dflash(folder: Path) -> DraftCheckpoint:
    """Read a DFlash folder; its heads are missing and stay so (rank 0)."""
    path = folder / "config.json"
    raw, notes = read_config(path), list[str]()
    config = layer_fields(raw, str(path), notes) | nested_fields(raw, path, notes)
    from_anchor = bool((raw.get("dflash_config") or {}).get("sample_from_anchor", False))
    config |= {
        "markov_rank": 0,
        "markov_head_type": "none",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
        "sample_from_anchor": from_anchor,
        "draft_vocab_size": None,
    }
    if not from_anchor:
        config["block_size"] -= 1
        notes.append(
            f"block_size {config['block_size'] + 1} counts the anchor: {config['block_size']} draft tokens"
        )
    notes.append("DFlash has no sequential and no confidence head")
    return read_weights(folder, config, notes)


def to_dflash(checkpoint: DraftCheckpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return ``config.json`` and tensors of a DFlash folder: the backbone, without the target's copies.

    Raises:
        UserError: the draft has a sequential head, a reduced vocabulary or soft-capped logits, which the
            layout cannot hold.
    """
    config = checkpoint.config
    if config["markov_rank"]:
        raise UserError(
            f"format dflash holds no sequential head, and this draft has one ({config['markov_head_type']}, "
            f"rank {config['markov_rank']}); use native or speculators"
        )
    if checkpoint.draft_token_ids is not None:
        raise UserError("format dflash holds no reduced vocabulary; use native or speculators")
    if config["final_logit_softcapping"]:
        raise UserError(
            "format dflash holds no soft-cap, and this target caps its logits at "
            f"{config['final_logit_softcapping']}; use native"
        )
    if config["enable_confidence_head"]:
        checkpoint.notes.append("format dflash holds no confidence head: it was left out")
    kept = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if name not in TARGET_COPIES and not name.startswith("confidence_head.")
    }
    written = native_config(config, checkpoint.dtype)
    for name in (
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "sample_from_anchor",
        "target_layer_ids",
        "mask_token_id",
        "embedding_scale",
        "final_logit_softcapping",
    ):
        written.pop(name, None)
    written["architectures"] = [ARCHITECTURE]
    written["dflash_config"] = {
        **written.get("dflash_config", {}),
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": config["target_layer_ids"],
        "sample_from_anchor": config["sample_from_anchor"],
    }
    return written, kept
