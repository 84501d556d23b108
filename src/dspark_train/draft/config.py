"""The draft's configuration: a flat Qwen3 config plus the DSpark fields that serving engines read."""

from __future__ import annotations

from typing import Any, Literal, cast

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from dspark_train.errors import UserError

HeadType = Literal["vanilla", "gated", "rnn", "none"]
HEAD_TYPES = ("vanilla", "gated", "rnn", "none")


@strict
class DSparkConfig(Qwen3Config):
    """``config.json`` of a draft in the native layout.

    The Qwen3 fields describe the draft's own layers; ``vocab_size`` is that of the target. The fields below come
    on top. ``block_size`` is γ, and ``sample_from_anchor`` says that the anchor's slot predicts too, so that γ
    slots give γ draft tokens.
    """

    model_type = "qwen3"

    block_size: int = 7
    num_target_layers: int = 36
    target_layer_ids: list[int] | None = None
    mask_token_id: int = 0
    num_anchors: int = 512
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    sample_from_anchor: bool = True
    draft_vocab_size: int | None = None
    embedding_scale: float = 1.0
    final_logit_softcapping: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("model_type", None)
        super().__post_init__(**kwargs)
        if self.architectures is None:
            self.architectures = ["Qwen3DSparkModel"]
        if self.markov_rank == 0:
            self.markov_head_type = "none"

    @property
    def head_type(self) -> HeadType:
        """Kind of the sequential head; ``none`` where the rank is 0."""
        return cast(HeadType, self.markov_head_type)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Tapped target layers; an id ``k ≥ 0`` is the output of decoder layer ``k``, -1 the embeddings."""
        return tuple(self.target_layer_ids or ())

    @property
    def draft_vocabulary(self) -> int:
        """U: rows of the draft's logits."""
        return self.draft_vocab_size or self.vocab_size

    def check(self) -> None:
        """Refuse every combination that cannot work.

        Raises:
            UserError: names every offending field with its value and the remedy.
        """
        problems = [text for wrong, text in self._rules() if wrong]
        if problems:
            raise UserError("the draft's configuration cannot work: " + "; ".join(problems))

    def _rules(self) -> list[tuple[bool, str]]:
        taps, rank, head = self.layer_ids, self.markov_rank, self.markov_head_type
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        partial = (self.rope_parameters or {}).get("partial_rotary_factor", 1.0)
        return [
            (self.block_size < 1, f"block_size {self.block_size} must be at least 1"),
            (self.num_hidden_layers < 1, f"num_layers {self.num_hidden_layers} must be at least 1"),
            (head not in HEAD_TYPES, f"head {head!r} is not one of {', '.join(HEAD_TYPES)}"),
            (rank < 0, f"markov_rank {rank} must not be negative"),
            (rank == 0 and head != "none", f"head {head!r} needs markov_rank > 0 (or choose head: none)"),
            (rank > 0 and head == "none", f"head none needs markov_rank 0, not {rank}"),
            (
                rank == 0 and self.enable_confidence_head and self.confidence_head_with_markov,
                "confidence_with_markov needs a sequential head: set it to false, or markov_rank > 0",
            ),
            (not taps, "target_layer_ids is empty: tap at least one target layer"),
            (list(taps) != sorted(set(taps)), f"target_layer_ids {list(taps)} must be strictly increasing"),
            (
                any(tap < -1 or tap >= self.num_target_layers for tap in taps),
                f"target_layer_ids {list(taps)} must lie in -1..{self.num_target_layers - 2}",
            ),
            (
                bool(taps) and max(taps) == self.num_target_layers - 1,
                f"target_layer_ids {list(taps)} taps the last decoder layer {self.num_target_layers - 1}, which "
                "libraries return before or after the final norm: tap an earlier one",
            ),
            (
                not 0 <= self.mask_token_id < self.vocab_size,
                f"mask_token_id {self.mask_token_id} must lie below the target's vocabulary {self.vocab_size}",
            ),
            (
                self.num_attention_heads % max(1, self.num_key_value_heads or 0) != 0,
                f"{self.num_attention_heads} attention heads are no multiple of "
                f"{self.num_key_value_heads} key-value heads",
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
                partial not in (None, 1.0),
                f"partial rotary embeddings (factor {partial}) are not carried by the draft's Qwen3 layers",
            ),
            (rope_type == "mrope", "multimodal rotary embeddings are not carried by the draft's layers"),
        ]
