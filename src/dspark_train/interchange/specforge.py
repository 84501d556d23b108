"""SpecForge's raw DSpark export: fields nested in ``dflash_config``, no embedding and no LM head."""

from __future__ import annotations

from pathlib import Path

from dspark_train.errors import UserError
from dspark_train.interchange.checkpoint import DraftCheckpoint, read_config
from dspark_train.interchange.dflash import nested_fields
from dspark_train.interchange.native import head_type, layer_fields, read_weights, reduced_vocabulary


def read_specforge(folder: Path) -> DraftCheckpoint:
    """Read a SpecForge folder; its slots predict from the anchor on, as here."""
    path = folder / "config.json"
    raw, notes = read_config(path), list[str]()
    nested = raw.get("dflash_config")
    if not isinstance(nested, dict) or nested.get("projector_type", "dspark") != "dspark":
        raise UserError(f"{path}: dflash_config.projector_type is not dspark; not a SpecForge DSpark draft")
    if nested.get("attention_mode", "gqa") != "gqa":
        raise UserError(f"{path}: attention_mode {nested['attention_mode']!r}; only gqa drafts are supported")
    config = layer_fields(raw, str(path), notes) | nested_fields(raw, path, notes)
    rank = nested.get("markov_rank", raw.get("markov_rank", 0))
    if not isinstance(rank, int) or rank < 0:
        raise UserError(f"{path}: markov_rank {rank!r}; expected an integer")
    kind = nested.get("markov_head_type", raw.get("markov_head_type"))
    confidence = nested.get("enable_confidence_head", nested.get("use_confidence_head", False))
    config |= {
        "markov_rank": rank,
        "markov_head_type": head_type(kind, rank, str(path), notes),
        "enable_confidence_head": bool(confidence),
        "confidence_head_with_markov": bool(nested.get("confidence_head_with_markov", rank > 0)),
        "sample_from_anchor": True,
        "draft_vocab_size": reduced_vocabulary(raw, config["vocab_size"], str(path)),
    }
    if "confidence_head_with_markov" not in nested and confidence:
        notes.append("confidence_head_with_markov is missing and counts as true, as in SpecForge")
    return read_weights(folder, config, notes)
