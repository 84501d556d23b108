"""What to load as the frozen target, and which of its layers to tap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dspark_train.errors import UserError


@dataclass
class TargetConfig:
    """The frozen target model.

    Args:
        name_or_path: a local folder, a Hugging Face hub id, or ``smollm2-135m-instruct`` (the embedded default, from
            the package registry).
        layer_ids: tapped layers, strictly increasing; ``k >= 0`` is the output of decoder layer k, -1 the
            embeddings. Left out: five, spread evenly.
        dtype: of the weights. ``auto`` is bfloat16 where the hardware computes in it, else float32.
        device: where it runs; ``auto`` follows the trainer.
        revision: commit or tag on the hub.
        gguf_file: name of a GGUF file inside ``name_or_path``.
        trust_remote_code: run Python code that comes with the checkpoint. Only for sources that you trust.
        attention: attention implementation of the target, as Hugging Face names them.
        sharding: ``none`` keeps a whole copy on every rank; ``zero3`` shards the layers over the ranks, each of which
            gathers a layer while it runs: for targets larger than one GPU.
    """

    name_or_path: str = "smollm2-135m-instruct"
    layer_ids: list[int] | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "auto"
    revision: str | None = None
    gguf_file: str | None = None
    trust_remote_code: bool = False
    attention: str = "sdpa"
    sharding: Literal["none", "zero3"] = "none"


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


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Refuse taps that are out of range, out of order, or on the last decoder layer.

    Raises:
        UserError: names the value and what is allowed.
    """
    ids = list(layer_ids)
    if not ids or ids != sorted(set(ids)):
        raise UserError(f"target.layer_ids {ids} must be a non-empty, strictly increasing list")
    if ids[-1] == num_layers - 1:
        raise UserError(
            f"target.layer_ids {ids} taps the last decoder layer ({ids[-1]} of {num_layers}): libraries disagree on "
            f"whether it comes before or after the final norm; tap at most layer {num_layers - 2}"
        )
    if ids[0] < -1 or ids[-1] > num_layers - 2:
        raise UserError(
            f"target.layer_ids {ids} must lie in -1..{num_layers - 2} for a target of {num_layers} layers"
        )
    return tuple(ids)


def text_config(config: Any) -> Any:
    """Config of the language model inside a (possibly multimodal) Hugging Face config."""
    return config.get_text_config()
