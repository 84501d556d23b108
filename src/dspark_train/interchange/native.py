"""The native layout: flat Qwen3 ``config.json`` with the DSpark fields on top, tensors without a prefix.

It is what vLLM and SGLang read, and what :class:`dspark_train.draft.model.DSparkDraft` saves and loads.
Every other layout of this package is translated to and from it. Shape legend: :mod:`dspark_train.structures`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark_train.errors import UserError
from dspark_train.interchange.checkpoint import (
    DraftCheckpoint,
    TensorSpec,
    read_config,
    read_specs,
    read_tensors,
)

ARCHITECTURE = "Qwen3DSparkModel"
"""The only name under which vLLM takes the folder for a dense DSpark draft."""

TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight")
"""Copies of the target's weights: optional in every layout, never trained."""

VOCABULARY_MAPS = ("d2t", "t2d")
"""Offsets ``[U]`` int64 (target id = index + offset) and membership ``[V]`` bool of a reduced vocabulary."""

MAX_LAYERS = 1024
"""Bound on layers, taps and block size of a configuration that is read."""

SKIPPED_SUFFIXES = ("rotary_emb.inv_freq", "rotary.inv_freq")
"""Buffers that some writers store and every reader computes again."""

LAYER_FIELDS: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
"""Fields of the decoder layers that a configuration may leave to Qwen3's defaults."""

REQUIRED_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
"""Fields without which no layout can be read."""

DSPARK_DEFAULTS: dict[str, Any] = {
    "num_anchors": 512,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
    "sample_from_anchor": True,
    "embedding_scale": 1.0,
    "final_logit_softcapping": None,
}
"""What a missing DSpark field means in the native layout, as vLLM reads it."""


def layer_fields(raw: Mapping[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    """Return the canonical fields of the decoder layers from a Qwen3 configuration of any age.

    Args:
        raw: ``config.json`` of a flat layout, or the nested layer configuration.
        where: path and key of ``raw``, for messages.
        notes: gets one sentence for each field that was filled in.

    Raises:
        UserError: required fields missing, sliding windows, or a layer type that the draft does not have.
    """
    missing = [name for name in REQUIRED_FIELDS if not _is_size(raw.get(name))]
    if missing:
        raise UserError(
            f"{where}: {', '.join(missing)} missing or no positive integer; not a draft's configuration"
        )
    if raw["num_hidden_layers"] > MAX_LAYERS:
        raise UserError(f"{where}: num_hidden_layers {raw['num_hidden_layers']} is above {MAX_LAYERS}")
    fields = {name: raw[name] for name in REQUIRED_FIELDS}
    fields["head_dim"] = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    for name, default in LAYER_FIELDS.items():
        fields[name] = raw.get(name, default)
    filled = sorted(set(LAYER_FIELDS) - set(raw) - {"attention_dropout", "initializer_range"})
    if filled:
        notes.append(
            f"filled in {', '.join(f'{name} {LAYER_FIELDS[name]}' for name in filled)} (Qwen3's defaults)"
        )
    types = raw.get("layer_types") or ["full_attention"] * raw["num_hidden_layers"]
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise UserError(f"{where}: layer_types {types!r}; only full_attention drafts are supported")
    if raw.get("use_sliding_window"):
        raise UserError(f"{where}: use_sliding_window is set; only full_attention drafts are supported")
    partial = _rope_settings(raw, where).get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise UserError(
            f"{where}: partial_rotary_factor {partial}; a draft's layers rotate whole heads, and without it the "
            "draft would be another one"
        )
    fields["layer_types"] = ["full_attention"] * raw["num_hidden_layers"]
    fields["rope_parameters"] = rope_parameters(raw)
    return fields


def _rope_settings(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return all rope settings of a stranger's configuration, after checking what they are made of."""
    settings: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = raw.get(name) or {}
        if not isinstance(value, dict):
            raise UserError(f"{where}: {name} {value!r}; expected an object")
        settings |= value
    settings = {"partial_rotary_factor": raw.get("partial_rotary_factor"), **settings}
    theta = settings.get("rope_theta", raw.get("rope_theta"))
    number = isinstance(theta, int | float) and not isinstance(theta, bool)
    if theta is not None and not (number and 0 < theta < math.inf):
        raise UserError(f"{where}: rope_theta {theta!r}; expected a positive number")
    return settings


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return rope settings as one dictionary with ``rope_type`` and ``rope_theta``; None where ``raw`` has
    none.

    Newer configurations keep them in ``rope_parameters``, older ones in ``rope_theta`` and ``rope_scaling``.
    """
    nested = raw.get("rope_parameters") or {}
    older = raw.get("rope_scaling") or {}
    theta = nested.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        return None
    kind = nested.get("rope_type") or older.get("rope_type") or older.get("type") or "default"
    settings = {**{key: value for key, value in older.items() if key != "type"}, **nested}
    partial = raw.get("partial_rotary_factor")
    if partial is not None:
        settings.setdefault("partial_rotary_factor", partial)
    return {**settings, "rope_type": kind, "rope_theta": float(theta)}


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a canonical configuration, target copies included.

    ``lm_head.weight`` and ``markov_head.markov_w2.weight`` have U rows, ``markov_head.markov_w1.weight`` and
    ``embed_tokens.weight`` V.
    """
    d, taps, inter = config["hidden_size"], len(config["target_layer_ids"]), config["intermediate_size"]
    h, rank, vocabulary = config["head_dim"], config["markov_rank"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    reduced = config.get("draft_vocab_size") or vocabulary
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocabulary, d),
        "lm_head.weight": (reduced, d),
        "fc.weight": (d, taps * d),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, d),
        "self_attn.k_proj.weight": (keys, d),
        "self_attn.v_proj.weight": (keys, d),
        "self_attn.o_proj.weight": (d, queries),
        "self_attn.q_norm.weight": (h,),
        "self_attn.k_norm.weight": (h,),
        "mlp.gate_proj.weight": (inter, d),
        "mlp.up_proj.weight": (inter, d),
        "mlp.down_proj.weight": (d, inter),
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
    }
    if config["attention_bias"]:
        layer |= {
            f"self_attn.{name}_proj.bias": (size,)
            for name, size in zip("qkvo", (queries, keys, keys, d), strict=True)
        }
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    if rank:
        shapes["markov_head.markov_w1.weight"] = (vocabulary, rank)
        shapes["markov_head.markov_w2.weight"] = (reduced, rank)
    if config["markov_head_type"] == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, d + rank), "markov_head.gate_proj.bias": (rank,)}
    if config["markov_head_type"] == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * rank, 2 * rank + d),
            "markov_head.joint_proj.bias": (3 * rank,),
        }
    if config["enable_confidence_head"]:
        width = d + (rank if config["confidence_head_with_markov"] else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def check_fields(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse configurations that no draft has, before shapes are derived from them.

    Raises:
        UserError: names every offending field and its value.
    """
    rank, taps, vocabulary = config["markov_rank"], config["target_layer_ids"], config["vocab_size"]
    tap_list = isinstance(taps, list) and all(
        isinstance(tap, int) and not isinstance(tap, bool) for tap in taps
    )
    rules = {
        f"head_dim {config['head_dim']!r} is no positive integer": not _is_size(config["head_dim"]),
        f"block_size {config['block_size']!r} is not in 1..{MAX_LAYERS}": (
            not _is_size(config["block_size"]) or config["block_size"] > MAX_LAYERS
        ),
        f"markov_rank {rank!r} is no integer ≥ 0": not _is_size(rank)
        and (rank != 0 or isinstance(rank, bool)),
        f"target_layer_ids {taps!r} is no strictly increasing list of integers ≥ -1": (
            not tap_list or not taps or len(taps) > MAX_LAYERS or taps != sorted(set(taps)) or taps[0] < -1
        ),
        f"mask_token_id {config['mask_token_id']!r} is not in 0..{vocabulary - 1}": (
            not isinstance(config["mask_token_id"], int) or not 0 <= config["mask_token_id"] < vocabulary
        ),
        f"confidence_head_with_markov needs markov_rank > 0, not {rank!r}": bool(
            config["enable_confidence_head"] and config["confidence_head_with_markov"] and not rank
        ),
        f"num_attention_heads {config['num_attention_heads']} is no multiple of num_key_value_heads": (
            config["num_attention_heads"] % config["num_key_value_heads"] != 0
        ),
    }
    problems = [text for text, wrong in rules.items() if wrong]
    if problems:
        raise UserError(f"{folder / 'config.json'}: {'; '.join(problems)}")


def check_specs(
    folder: Path, config: Mapping[str, Any], specs: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """Compare headers with a canonical configuration; return the specs to read.

    Raises:
        UserError: missing, unexpected or misshapen tensors, integer weights, or weights of mixed element
            types.
    """
    expected = expected_shapes(config)
    kept = {name: spec for name, spec in specs.items() if not name.endswith(SKIPPED_SUFFIXES)}
    weights = {name: spec for name, spec in kept.items() if name not in VOCABULARY_MAPS}
    problems = [f"{name} is missing" for name in expected if name not in kept and name not in TARGET_COPIES]
    problems += [f"{name} is unexpected" for name in weights if name not in expected]
    for name, spec in weights.items():
        if name in expected and spec.shape != expected[name]:
            problems.append(
                f"{name} has shape {list(spec.shape)}, config.json implies {list(expected[name])}"
            )
        if not spec.dtype.is_floating_point:
            problems.append(f"{name} holds {spec.dtype}")
    kinds = {spec.dtype for name, spec in weights.items() if name not in TARGET_COPIES}
    if len(kinds) > 1:
        problems.append(f"weights mix {', '.join(sorted(map(str, kinds)))}")
    if problems:
        more = f" (and {len(problems) - 6} more)" if len(problems) > 6 else ""
        raise UserError(f"{folder}: the tensors do not fit config.json: {'; '.join(problems[:6])}{more}")
    return kept


def read_weights(folder: Path, config: dict[str, Any], notes: list[str]) -> DraftCheckpoint:
    """Read the tensors of a folder under a canonical configuration; the vocabulary maps become token ids."""
    check_fields(folder, config)
    kept = check_specs(folder, config, read_specs(folder))
    tensors = read_tensors({name: spec for name, spec in kept.items() if name != "t2d"})
    offsets = tensors.pop("d2t", None)
    token_ids = None
    reduced = config.get("draft_vocab_size")
    if reduced is not None:
        token_ids = token_ids_of(folder, offsets, reduced, config["vocab_size"])
    for name in (name for name in TARGET_COPIES if name not in tensors):
        notes.append(f"{name} is not in the folder: it comes from the target")
    config["dtype"] = dtype_name(tensors["fc.weight"].dtype)
    return DraftCheckpoint(config, tensors, token_ids, notes)


def token_ids_of(folder: Path, offsets: Tensor | None, reduced: int, vocabulary: int) -> Tensor:
    """Return target ids ``[U]`` from offsets ``[U]``: ascending, distinct, below V; anything else is
    refused."""
    if offsets is None:
        raise UserError(
            f"{folder}: draft_vocab_size {reduced} is below vocab_size {vocabulary}, but d2t is missing"
        )
    if offsets.shape != (reduced,) or offsets.dtype not in (torch.int64, torch.int32):
        raise UserError(f"{folder}: d2t is {offsets.dtype} {list(offsets.shape)}; expected int64 [{reduced}]")
    ids = offsets.to(torch.int64) + torch.arange(reduced)
    if bool((ids.diff() <= 0).any()) or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise UserError(f"{folder}: d2t does not give ascending target ids in 0..{vocabulary - 1}")
    return ids


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def read_native(folder: Path) -> DraftCheckpoint:
    """Read a native folder: an export of this project, a run's ``draft``, or a DeepSpec checkpoint."""
    raw, notes = read_config(folder / "config.json"), list[str]()
    where = f"{folder / 'config.json'}"
    config = layer_fields(raw, where, notes)
    needed = ("block_size", "target_layer_ids", "mask_token_id", "markov_rank", "num_target_layers")
    missing = [name for name in needed if raw.get(name) is None]
    if missing:
        raise UserError(f"{where}: {', '.join(missing)} missing; the native layout has them at top level")
    config |= {name: raw[name] for name in needed}
    for name, default in DSPARK_DEFAULTS.items():
        config[name] = raw.get(name, default)
        if name not in raw and name in ("enable_confidence_head", "confidence_head_with_markov"):
            notes.append(f"{name} is missing and counts as false, as in vLLM")
    config["markov_head_type"] = head_type(raw.get("markov_head_type"), config["markov_rank"], where, notes)
    config["draft_vocab_size"] = reduced_vocabulary(raw, config["vocab_size"], where)
    return read_weights(folder, config, notes)


def reduced_vocabulary(raw: Mapping[str, Any], vocabulary: int, where: str) -> int | None:
    """Return U where ``raw`` states a draft vocabulary smaller than the target's; None where U = V."""
    reduced = raw.get("draft_vocab_size")
    if reduced is None or reduced == vocabulary:
        return None
    if not _is_size(reduced) or reduced > vocabulary:
        raise UserError(f"{where}: draft_vocab_size {reduced!r} is not in 1..{vocabulary}")
    return int(reduced)


def head_type(value: Any, rank: int, where: str, notes: list[str]) -> str:
    """Return the kind of the sequential head; ``none`` at rank 0, ``vanilla`` where nothing is said."""
    if rank == 0:
        return "none"
    if value is None:
        notes.append("markov_head_type is missing and counts as vanilla")
        return "vanilla"
    if value not in ("vanilla", "gated", "rnn"):
        raise UserError(f"{where}: markov_head_type {value!r}; expected vanilla, gated or rnn")
    return str(value)


def native_config(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return ``config.json`` of the native layout: every field explicit, rope settings in both forms."""
    written = {name: value for name, value in config.items() if value is not None}
    rope = config["rope_parameters"]
    written |= {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": dtype_name(dtype),
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "markov_head_type": config["markov_head_type"],
    }
    return written


def to_native(checkpoint: DraftCheckpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return ``config.json`` and tensors of a native folder; a reduced vocabulary is kept as ``d2t``."""
    tensors = dict(checkpoint.tensors)
    if checkpoint.draft_token_ids is not None:
        ids = checkpoint.draft_token_ids
        tensors["d2t"] = ids - torch.arange(ids.numel())
    return native_config(checkpoint.config, checkpoint.dtype), tensors
