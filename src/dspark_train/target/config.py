"""What to load as the frozen target, and which of its layers to tap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dspark_train.errors import UserError
from dspark_train.lists import Integers


@dataclass
class TargetConfig:
    """The frozen target model."""

    name_or_path: str = "smollm2-135m-instruct"
    """A local folder, a Hugging Face hub id, or ``smollm2-135m-instruct`` (the embedded default, from the package
    registry)."""
    layer_ids: Integers | None = None
    """Tapped layers, strictly increasing; ``k >= 0`` is the output of decoder layer k, -1 the embeddings. Left out:
    five, spread evenly."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the weights. ``auto`` is bfloat16 where the hardware computes in it, else float32."""
    device: str = "auto"
    """Where it runs; ``auto`` follows the trainer."""
    revision: str | None = None
    """Commit or tag on the hub."""
    gguf_file: str | None = None
    """Name of a GGUF file inside ``name_or_path``."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint. Only for sources that you trust."""
    attention: str = "sdpa"
    """Attention implementation of the target, as Hugging Face names them."""
    sharding: Literal["none", "zero3"] = "none"
    """``none`` keeps a whole copy on every rank; ``zero3`` shards the layers over the ranks, each of which gathers a
    layer while it runs: for targets larger than one GPU."""


def spread_layer_ids(num_layers: int, count: int = 5) -> list[int]:
    """Spread ``count`` taps evenly from the second layer to the third last (paper: 36 layers, 5 taps).

    Args:
        num_layers: decoder layers of the target.
        count: number of taps.
    """
    first, last = 1, num_layers - 3
    if last < first:
        first, last = 0, max(0, num_layers - 2)
    if count == 1:
        return [last]
    spread = [round(first + (last - first) * i / (count - 1)) for i in range(count)]
    return sorted(set(spread))


def layer_id_problems(name: str, layer_ids: Sequence[int], num_layers: int | None) -> list[str]:
    """What is wrong with a list of taps: empty, out of order, out of range, or on the last decoder layer.

    Args:
        name: of the field, for the messages.
        layer_ids: tapped layers.
        num_layers: decoder layers of the target; None where they are not known.
    """
    ids = list(layer_ids)
    if not ids or ids != sorted(set(ids)):
        return [f"{name} {ids} must be a non-empty, strictly increasing list"]
    if num_layers is not None and ids[-1] == num_layers - 1:
        return [
            f"{name} {ids} taps the last decoder layer ({ids[-1]} of {num_layers}): libraries disagree on "
            f"whether it comes before or after the final norm; tap at most layer {num_layers - 2}"
        ]
    if num_layers is not None and (ids[0] < -1 or ids[-1] > num_layers - 2):
        return [f"{name} {ids} must lie in -1..{num_layers - 2} for a target of {num_layers} layers"]
    if ids[0] < -1:
        return [f"{name} {ids} must not go below -1, the embeddings"]
    return []


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Refuse taps that cannot be used.

    Raises:
        UserError: names the value and what is allowed.
    """
    for problem in layer_id_problems("target.layer_ids", layer_ids, num_layers):
        raise UserError(problem)
    return tuple(layer_ids)


def text_config(config: Any) -> Any:
    """Config of the language model inside a (possibly multimodal) Hugging Face config."""
    return config.get_text_config()


def config_size(config: Any, name: str) -> int | None:
    """A positive integer of a Hugging Face config; None where it is missing, or differs between layers."""
    value = config.to_dict().get(config.attribute_map.get(name, name))
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


_INNER = ("language_model", "text_model", "model", "transformer", "decoder", "encoder")
"""Attributes under which wrappers hold the module that owns the layers."""


def language_model(model: Any) -> Any:
    """The decoder (embeddings, layers, final norm) inside a Hugging Face causal language model.

    Raises:
        UserError: there is no stack of layers inside.
    """
    for module in (model.get_decoder(), model.base_model, getattr(model, "model", None)):
        decoder = getattr(module, "language_model", module)
        if decoder is not None and decoder is not model and decoder_layers(decoder) is not None:
            return decoder
    raise UserError(f"{type(model).__name__} has no list of decoder layers: it cannot be a target")


def decoder_layers(decoder: Any) -> Any:
    """The stack of layers of a decoder: its list of modules called ``layers``, else its longest; None without one."""
    from torch import nn

    stacks = {name: child for name, child in decoder.named_children() if isinstance(child, nn.ModuleList)}
    if stacks:
        return stacks.get("layers") or max(stacks.values(), key=len)
    inner = (getattr(decoder, name, None) for name in _INNER)
    found = (decoder_layers(module) for module in inner if isinstance(module, nn.Module))
    return next((layers for layers in found if layers is not None), None)


def refusal(config: Any) -> str | None:
    """Why a model of this Hugging Face config cannot be a target, as far as its config tells; None where it may be."""
    if getattr(config, "is_encoder_decoder", False):
        return "reads its prompt through an encoder; a target is a decoder only"
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if auto_class(config) is None and not remote:
        return (
            f"is a {config.model_type}, which has no causal language model (an LM head over the last states)"
        )
    return None


def auto_class(config: Any) -> Any:
    """Hugging Face's class that loads a model of this config: a causal language model, or one with towers around it.

    None where there is neither.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto as auto

    if type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText if type(config) in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else None


def drop_towers(model: Any) -> None:
    """Drop what a multimodal model has beside its language model: text needs no vision or audio towers."""
    if text_config(model.config) is model.config:
        return
    decoder, head = language_model(model), model.get_output_embeddings()
    needed = {*decoder.modules(), head}
    holders = [module for module in model.modules() if decoder in module.modules() and module is not decoder]
    for holder in holders:
        for name, child in list(holder.named_children()):
            if child not in holders and needed.isdisjoint(child.modules()):
                setattr(holder, name, None)


def load_tokenizer(path: str, config: TargetConfig, **options: Any) -> Any:
    """Tokenizer of the target at ``path``, a folder or hub id; None where it has none that can be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, **hub_options(config), **options)
    except (OSError, ValueError, KeyError, ImportError, AttributeError):
        return None


def hub_options(config: TargetConfig) -> dict[str, Any]:
    """What every ``from_pretrained`` of this target is told."""
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    return options | ({"gguf_file": config.gguf_file} if config.gguf_file else {})
