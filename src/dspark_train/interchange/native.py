"""The native layout: flat Qwen3 or Gemma 4 ``config.json`` with the DSpark fields on top, tensors without a prefix.

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

from dspark_train.draft.config import LAYER_TYPES, DSparkConfig, canonical_rope, rope_problems
from dspark_train.draft.families import LAYER_FAMILIES, from_gemma4, to_gemma4
from dspark_train.draft.model import tensor_shapes
from dspark_train.errors import UserError
from dspark_train.interchange.checkpoint import (
    DraftCheckpoint,
    TensorSpec,
    read_config,
    read_specs,
    read_tensors,
)

ARCHITECTURES = tuple(family.architecture for family in LAYER_FAMILIES.values())
"""The only names under which vLLM takes a folder for a dense DSpark draft."""

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

SHAPE_FIELDS = (
    "block_size",
    "target_layer_ids",
    "num_target_layers",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
"""DSpark fields that decide shapes, or that the rules for drafts are about."""

DSPARK_DEFAULTS: dict[str, Any] = {
    "num_anchors": 512,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
    "sample_from_anchor": True,
    "embedding_scale": 1.0,
    "final_logit_softcapping": None,
    "layer_family": "qwen3",
    "attention_k_eq_v": False,
    "target_text_config": None,
}
"""What a missing DSpark field means in the native layout, as vLLM reads it."""


def layer_fields(raw: Mapping[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    """Return the canonical fields of the decoder layers from a Qwen3 configuration of any age.

    Args:
        raw: ``config.json`` of a flat layout, or the nested layer configuration.
        where: path and key of ``raw``, for messages.
        notes: gets one sentence for each field that was filled in.

    Raises:
        UserError: required fields missing, or a kind of layer that drafts do not have.
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
    fields |= window_fields(raw, where)
    check_rope_types(raw, where)
    fields["rope_parameters"] = canonical_rope(raw)
    return fields


def window_fields(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the kinds of the layers, their window (None without one), and whether windowed ones see a whole block.

    As vLLM reads them: a window makes a layer causal within the block unless something says otherwise; where
    ``layer_types`` is missing, ``use_sliding_window`` counts from ``max_window_layers`` on, as in Qwen3. DFlash drafts
    may say the same in ``dflash_config``.

    Raises:
        UserError: unknown kinds, no window where one is needed, or causal layers without a window.
    """
    layers, nested = raw["num_hidden_layers"], raw.get("dflash_config") or {}
    nested = nested if isinstance(nested, dict) else {}
    types, causal = raw.get("layer_types"), True
    if types is None:
        first = raw.get("max_window_layers", 28)
        windowed = bool(raw.get("use_sliding_window")) and raw.get("sliding_window") is not None
        if windowed and not (isinstance(first, int) and not isinstance(first, bool)):
            raise UserError(f"{where}: max_window_layers {first!r}; expected an integer")
        types = [LAYER_TYPES[windowed and layer >= first] for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(kind not in LAYER_TYPES for kind in types):
        raise UserError(
            f"{where}: layer_types {types!r}; expected {' or '.join(LAYER_TYPES)} for each of {layers}"
        )
    if nested.get("use_swa") and "sliding_attention" not in types:
        types, causal = ["sliding_attention"] * layers, False
    window = None
    if "sliding_attention" in types:
        window = nested.get("swa_window_size", raw.get("sliding_window"))
        if not _is_size(window):
            raise UserError(f"{where}: sliding_window {window!r}; layers with a window need its size")
    if raw.get("sliding_window_non_causal") is not None:
        causal = not raw["sliding_window_non_causal"]
    stated = [value for value in (raw.get("is_causal"), nested.get("causal")) if value is not None]
    if stated:
        causal = bool(stated[0])
        if causal and "full_attention" in types:
            raise UserError(
                f"{where}: causal blocks in layers without a window; blocks here see both ways there"
            )
    return {
        "layer_types": types,
        "sliding_window": window,
        "sliding_window_non_causal": window is not None and not causal,
    }


def written_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the layer configuration says of windows, as Qwen3 configurations do."""
    window = config["sliding_window"]
    return {
        "layer_types": config["layer_types"],
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }


def check_rope_types(raw: Mapping[str, Any], where: str) -> None:
    """Refuse rope settings of a stranger's configuration that are not made of what they should be.

    Raises:
        UserError: names the field and its value.
    """
    settings: dict[str, Any] = {"rope_theta": raw.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        value = raw.get(name) or {}
        if not isinstance(value, dict) or not isinstance(value.get("full_attention", {}), dict):
            raise UserError(f"{where}: {name} {value!r}; expected an object")
        settings |= value.get("full_attention", value)
    theta = settings["rope_theta"]
    number = isinstance(theta, int | float) and not isinstance(theta, bool)
    if theta is not None and not (number and 0 < theta < math.inf):
        raise UserError(f"{where}: rope_theta {theta!r}; expected a positive number")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def layer_numbers(value: Any, where: str, name: str) -> list[int]:
    """Return a stranger's list of tapped layers, after checking what it is made of."""
    integers = isinstance(value, list) and all(type(tap) is int for tap in value)
    if not integers or not 0 < len(value) <= MAX_LAYERS:
        raise UserError(f"{where}: {name} {value!r}; expected a list of layer numbers")
    return list(value)


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a canonical configuration, target copies included.

    ``lm_head.weight`` and ``markov_head.markov_w2.weight`` have U rows, ``markov_head.markov_w1.weight`` and
    ``embed_tokens.weight`` V.

    Raises:
        UserError: sizes whose product no computer can count.
    """
    try:
        return tensor_shapes(shape_config(config))
    except RuntimeError as error:
        raise UserError(f"the draft's sizes are too large: {str(error).splitlines()[0]}") from error


def shape_config(config: Mapping[str, Any]) -> DSparkConfig:
    """The fields of a canonical configuration that decide shapes, or that the rules for drafts are about.

    Slot layout and rotary settings are not among them: drafts that predict at their masks are read too.
    """
    return DSparkConfig(
        **{name: config[name] for name in (*REQUIRED_FIELDS, "head_dim", *SHAPE_FIELDS)},
        attention_bias=bool(config["attention_bias"]),
        **written_windows(config),
        **{name: config.get(name, DSPARK_DEFAULTS[name]) for name in ("layer_family", "attention_k_eq_v")},
        draft_vocab_size=config.get("draft_vocab_size"),
        bos_token_id=None,
        eos_token_id=None,
    )


def check_fields(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse configurations that no draft has, before shapes are derived from them.

    Raises:
        UserError: names every offending field and its value.
    """
    where, rank, reduced = folder / "config.json", config["markov_rank"], config.get("draft_vocab_size")
    layer_numbers(config["target_layer_ids"], str(where), "target_layer_ids")
    types = {
        f"head_dim {config['head_dim']!r} is no positive even integer": (
            _is_size(config["head_dim"]) and config["head_dim"] % 2 == 0
        ),
        f"block_size {config['block_size']!r} is not in 1..{MAX_LAYERS}": (
            _is_size(config["block_size"]) and config["block_size"] <= MAX_LAYERS
        ),
        f"markov_rank {rank!r} is no integer": type(rank) is int,
        f"mask_token_id {config['mask_token_id']!r} is no integer": type(config["mask_token_id"]) is int,
        f"num_target_layers {config['num_target_layers']!r} is no positive integer": (
            config["num_target_layers"] is None or _is_size(config["num_target_layers"])
        ),
        f"draft_vocab_size {reduced!r} is no integer": reduced is None or type(reduced) is int,
    }
    problems = [text for text, right in types.items() if not right]
    family = config.get("layer_family", "qwen3")
    problems = problems or [
        *shape_config(config).problems(),
        *rope_problems(config["rope_parameters"], family),
    ]
    if problems:
        raise UserError(f"{where}: {'; '.join(problems)}")


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
    """Return target ids ``[U]`` (ascending, distinct, below V) from offsets ``[U]``.

    Raises:
        UserError: the offsets are missing, or give other ids.
    """
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
    where, notes = f"{folder / 'config.json'}", list[str]()
    raw = read_config(folder / "config.json")
    check_rope_types(raw, where)
    raw = from_gemma4(raw)
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
    return reduced


def head_type(value: Any, rank: int, where: str, notes: list[str]) -> str:
    """Return the kind of the sequential head; ``none`` at rank 0, ``vanilla`` where nothing is said."""
    if rank == 0:
        return "none"
    if value is None:
        notes.append("markov_head_type is missing and counts as vanilla")
        return "vanilla"
    return value if isinstance(value, str) else repr(value)


def native_config(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return ``config.json`` of the native layout: every field explicit, rope settings in both forms.

    Raises:
        UserError: a Gemma 4 draft for a target whose embeddings are not scaled as Gemma's are.
    """
    written = {name: value for name, value in config.items() if value is not None}
    if config.get("layer_family") == "gemma4":
        return to_gemma4({**config, "dtype": dtype_name(dtype), "use_cache": True})
    for name in ("layer_family", "attention_k_eq_v"):
        written.pop(name, None)
    rope = config["rope_parameters"]
    written |= {
        "architectures": [LAYER_FAMILIES["qwen3"].architecture],
        "model_type": "qwen3",
        "dtype": dtype_name(dtype),
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        **written_windows(config),
        "tie_word_embeddings": False,
        "use_cache": True,
        "markov_head_type": config["markov_head_type"],
    }
    if config["sliding_window_non_causal"]:
        written["dflash_config"] = {"causal": False}  # where vLLM looks for it
    return written


def to_native(checkpoint: DraftCheckpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return ``config.json`` and tensors of a native folder; a reduced vocabulary is kept as ``d2t``."""
    tensors = dict(checkpoint.tensors)
    if checkpoint.draft_token_ids is not None:
        ids = checkpoint.draft_token_ids
        tensors["d2t"] = ids - torch.arange(ids.numel())
    return native_config(checkpoint.config, checkpoint.dtype), tensors
