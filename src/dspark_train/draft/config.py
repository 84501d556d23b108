"""The draft's configuration: a flat Qwen3 config and the DSpark fields that serving engines read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast, get_args

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from dspark_train.draft.families import FAMILIES, LAYER_FAMILIES, LayerFamily, from_gemma4
from dspark_train.errors import UserError
from dspark_train.target.config import layer_id_problems

HeadType = Literal["vanilla", "gated", "rnn", "none"]
HEAD_TYPES = get_args(HeadType)
LAYER_TYPES = ("full_attention", "sliding_attention")


class RopeKeys(NamedTuple):
    """Settings of one kind of rotary embedding."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    unshared: tuple[str, ...] = ()
    """Optional ones that some engines leave out."""

    @property
    def shared(self) -> tuple[str, ...]:
        """Every key that all engines read."""
        return ("rope_type", "rope_theta", *self.required, *self.optional)

    @property
    def all(self) -> tuple[str, ...]:
        """Every key that a configuration may hold."""
        return (*self.shared, *self.unshared)


ROPE_TYPES = {
    "default": RopeKeys(()),
    "linear": RopeKeys(("factor",)),
    "llama3": RopeKeys(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": RopeKeys(
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "truncate"),
        ("attention_factor", "mscale", "mscale_all_dim"),
    ),
}
"""Rotary embeddings that drafts, engines and the independent reader compute alike, whatever a sequence's length."""


class Sight(NamedTuple):
    """What the slots of a block see in a layer, beside the context before their anchor."""

    window: int | None = None
    """A slot sees this many positions, its own included; None is all."""
    causal: bool = False
    """A slot sees the slots of its block up to itself instead of all of them."""


EVERYTHING = Sight()
"""The whole context before the anchor, and the whole block."""


@strict
class DSparkConfig(Qwen3Config):
    """``config.json`` of a draft in the native layout.

    The Qwen3 fields describe the draft's own layers; ``vocab_size`` is that of the target. The fields below come
    on top.
    """

    model_type = "qwen3"

    block_size: int = 7
    """γ, draft tokens per round."""
    num_target_layers: int | None = 36
    """Decoder layers of the target; None where a foreign checkpoint does not say."""
    target_layer_ids: list[int] | None = None
    """Tapped layers, as in :class:`~dspark_train.target.config.TargetConfig`."""
    mask_token_id: int = 0
    """Token fed to the slots after the anchor."""
    num_anchors: int = 512
    """Most blocks per sequence in training; for readers only."""
    markov_rank: int = 256
    """r; 0 for a parallel draft."""
    markov_head_type: str = "vanilla"
    """One of :data:`HEAD_TYPES`."""
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    """The confidence head sees the previous token's Markov embedding."""
    sample_from_anchor: bool = True
    """The anchor's slot predicts too, so that γ slots give γ draft tokens."""
    draft_vocab_size: int | None = None
    """U, rows of the draft's logits; None for the target's vocabulary."""
    embedding_scale: float = 1.0
    """Factor of the target's token embeddings."""
    final_logit_softcapping: float | None = None
    """The target's soft-cap, applied to the draft's base logits."""
    sliding_window_non_causal: bool = False
    """In layers with a window (``layer_types``, ``sliding_window``) too, slots see their whole block."""
    layer_family: str = "qwen3"
    """Kind of the decoder layers, one of :data:`~dspark_train.draft.families.FAMILIES`."""
    attention_k_eq_v: bool = False
    """Values come from the projection of the keys (Gemma 4)."""
    target_text_config: dict[str, Any] | None = None
    """Fields of the target's text configuration that a Gemma 4 draft carries along."""

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("model_type", None)
        super().__post_init__(**kwargs)
        if self.architectures is None:
            self.architectures = [self.family.architecture]
        if self.markov_rank == 0:
            self.markov_head_type = "none"

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read ``config.json`` of any family."""
        raw, rest = super().get_config_dict(*args, **kwargs)
        return from_gemma4(raw), rest

    @property
    def family(self) -> LayerFamily:
        """What is particular to the decoder layers."""
        return LAYER_FAMILIES.get(self.layer_family, LAYER_FAMILIES["qwen3"])

    @property
    def head_type(self) -> HeadType:
        """Kind of the sequential head; ``none`` where the rank is 0."""
        return cast(HeadType, self.markov_head_type)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Tapped target layers; an id ``k ≥ 0`` is the output of decoder layer ``k``, -1 the embeddings."""
        return tuple(self.target_layer_ids or ())

    @property
    def sights(self) -> tuple[Sight, ...]:
        """What slots see, layer by layer."""
        windowed = Sight(self.sliding_window, causal=not self.sliding_window_non_causal)
        return tuple(
            windowed if kind == "sliding_attention" else EVERYTHING for kind in self.layer_types or ()
        )

    @property
    def draft_vocabulary(self) -> int:
        """U: rows of the draft's logits."""
        return self.draft_vocab_size or self.vocab_size

    def check(self) -> None:
        """Refuse every combination that cannot work.

        Raises:
            UserError: names every offending field with its value and the remedy.
        """
        problems = self.problems()
        if problems:
            raise UserError("the draft's configuration cannot work: " + "; ".join(problems))

    def problems(self) -> list[str]:
        """What cannot work, one sentence each: the rules for drafts made here and for those read from elsewhere."""
        types = list(self.layer_types or ())
        rank, head, confidence = self.markov_rank, self.markov_head_type, self.confidence_head_with_markov
        rules = [
            (self.block_size < 1, f"block_size {self.block_size} must be at least 1"),
            (self.num_hidden_layers < 1, f"num_layers {self.num_hidden_layers} must be at least 1"),
            (
                head not in HEAD_TYPES,
                f"markov_head_type {head!r} (draft.head) is not one of {', '.join(HEAD_TYPES)}",
            ),
            (rank < 0, f"markov_rank {rank} must not be negative"),
            (rank == 0 and head != "none", f"head {head!r} needs markov_rank > 0 (or choose head: none)"),
            (rank > 0 and head == "none", f"head none needs markov_rank 0, not {rank}"),
            (
                rank == 0 and self.enable_confidence_head and confidence,
                "confidence_with_markov (confidence_head_with_markov) needs a sequential head: set it to false, or "
                "markov_rank > 0",
            ),
            (
                not 0 <= self.mask_token_id < self.vocab_size,
                f"mask_token_id {self.mask_token_id} must lie in 0..{self.vocab_size - 1}, the target's vocabulary",
            ),
            (
                self.num_attention_heads % max(1, self.num_key_value_heads or 0) != 0,
                f"{self.num_attention_heads} attention heads are no multiple of "
                f"{self.num_key_value_heads} key-value heads",
            ),
            (
                len(types) != self.num_hidden_layers or any(kind not in LAYER_TYPES for kind in types),
                f"layer_types {types} must name {' or '.join(LAYER_TYPES)} for each of {self.num_hidden_layers} layers",
            ),
            (
                "sliding_attention" in types and (self.sliding_window or 0) < self.block_size,
                f"sliding_window {self.sliding_window} must be at least block_size {self.block_size}",
            ),
            (
                self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size,
                f"draft_vocab_size {self.draft_vocab_size} must lie in 1..{self.vocab_size}",
            ),
            (
                not self.sample_from_anchor,
                "sample_from_anchor false is the anchor-conditioned layout, which predicts at the masks only: "
                "this project's drafts predict from the anchor too",
            ),
            (
                self.layer_family not in FAMILIES,
                f"layer_family {self.layer_family!r} is not one of {', '.join(FAMILIES)}",
            ),
            (
                self.attention_k_eq_v and not self.family.normed_values,
                f"attention_k_eq_v is set, but {self.layer_family} layers project their values",
            ),
            (
                self.layer_family == "gemma4" and set(self.layer_types or ()) - {"full_attention"} != set(),
                f"layer_types {self.layer_types}: Gemma 4 draft layers have full attention only",
            ),
        ]
        return [
            *(text for wrong, text in rules if wrong),
            *layer_id_problems("target_layer_ids", self.layer_ids, self.num_target_layers),
            *rope_problems(self.rope_parameters, self.layer_family),
        ]


def canonical_rope(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rotary settings of full attention, with ``rope_type`` and ``rope_theta``; None where ``raw`` names no theta.

    Newer configurations keep them in ``rope_parameters`` (per kind of layer, where these differ), older ones in
    ``rope_theta`` and ``rope_scaling``.

    Args:
        raw: ``config.json`` of a draft or of a target's language model, of any age.
    """
    nested = raw.get("rope_parameters") or {}
    nested = nested.get("full_attention", nested)
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


def rope_problems(rope: Mapping[str, Any] | None, family: str = "qwen3") -> list[str]:
    """What the draft's layers cannot carry of canonical rotary settings."""
    settings, problems = rope or {}, []
    partial = settings.get("partial_rotary_factor")
    if family == "gemma4" and settings.get("rope_type") == "proportional":
        return []  # which rotates a part of each head, and drafts with Gemma 4's layers do so, too
    if partial not in (None, 1, 1.0):
        problems.append(
            f"partial_rotary_factor {partial}: a draft's layers rotate whole heads, and would be another draft without"
        )
    if settings.get("rope_type") == "mrope":
        problems.append("multimodal rotary embeddings are not carried by the draft's layers")
    return problems
