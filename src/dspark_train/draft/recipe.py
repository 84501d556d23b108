"""What the user chooses about the draft, and the configuration that follows from the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dspark_train.draft.config import DSparkConfig, HeadType, canonical_rope
from dspark_train.draft.families import (
    LAYER_FAMILIES,
    Family,
    full_attention_view,
    gemma4_problems,
    is_gemma4_text,
    text_fields,
)
from dspark_train.errors import UserError


@dataclass
class DraftRecipe:
    """Shape of the draft; everything else follows the target."""

    num_layers: int = 5
    """Decoder layers of the backbone."""
    layers: Literal["auto", "qwen3", "gemma4"] = "auto"
    """Kind of these layers, by which engines know the draft: ``gemma4`` for dense Gemma 4 targets, ``qwen3`` for all
    others."""
    block_size: int = 7
    """Draft tokens per round (γ)."""
    head: HeadType = "vanilla"
    """Sequential head: ``vanilla`` (Markov), ``gated``, ``rnn``, or ``none`` for a purely parallel draft."""
    markov_rank: int = 256
    """Rank r of the sequential head; 0 exactly where ``head`` is ``none``."""
    confidence_head: bool = True
    """Predict whether each draft token will be accepted."""
    confidence_with_markov: bool = True
    """Let the confidence head see the previous token's Markov embedding."""
    vocab_size: int | None = None
    """Tokens that the draft can propose, the most frequent ones of the training answers. Left out: all of the
    target's."""
    vocab_coverage: float | None = None
    """Share of the training answers' tokens that the draft's vocabulary must cover (in place of ``vocab_size``); 1.0
    keeps every token that occurs."""
    mask_token_id: int | None = None
    """Token fed to the slots after the anchor. Left out: one that the target's text never holds."""
    intermediate_size: int | None = None
    """Width of the feed-forward networks. Left out: the target's."""
    num_key_value_heads: int | None = None
    """Heads of keys and values; more let a slot read more of the context. Left out: the target's."""
    init: Literal["random", "target_layers", "linear"] = "random"
    """``random``; ``target_layers``: start the backbone's layers from copies of the target's own; or ``linear``: start
    backbone and head from a linear prediction fitted to the training answers (for short runs)."""
    head_start: Literal["random", "bigrams"] = "random"
    """Start of the sequential head: ``random``, or ``bigrams``: the token pairs of the training answers."""
    norm_init: float = 1.0
    """Initial weight of the final norm; a small one makes the first logits near uniform."""


def build_config(
    recipe: DraftRecipe,
    target: Any,
    layer_ids: tuple[int, ...],
    *,
    vocab_size: int | None = None,
    embedding_scale: float = 1.0,
    num_anchors: int = 512,
    mask_token_id: int | None = None,
) -> DSparkConfig:
    """Configuration of the draft that ``recipe`` asks for, checked.

    Args:
        recipe: the user's choices.
        target: the target's Hugging Face text config.
        layer_ids: tapped target layers.
        vocab_size: rows of the target's LM head; None takes the config's.
        embedding_scale: factor of the target's token embeddings.
        num_anchors: recorded for readers of the checkpoint.
        mask_token_id: where the recipe names none.

    Raises:
        UserError: names every combination that cannot work.
    """
    family = family_fields(recipe, target)
    target = full_attention_view(target)
    rope = canonical_rope(target.to_dict())
    if rope is None:
        raise UserError(
            f"the target's config ({target.model_type}) names no rope_theta: its positions are not rotary"
        )
    heads = target.num_attention_heads
    mask = recipe.mask_token_id if recipe.mask_token_id is not None else mask_token_id
    config = DSparkConfig(
        vocab_size=vocab_size or target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=recipe.intermediate_size or target.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=recipe.num_key_value_heads
        or getattr(target, "num_key_value_heads", None)
        or heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        hidden_act=getattr(target, "hidden_act", None)
        or getattr(target, "hidden_activation", None)
        or "silu",
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
        rope_parameters=family.pop("rope_parameters", rope),
        tie_word_embeddings=False,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=None,
        **family,
        block_size=recipe.block_size,
        num_target_layers=target.num_hidden_layers,
        target_layer_ids=list(layer_ids),
        mask_token_id=0 if mask is None else mask,
        num_anchors=num_anchors,
        markov_rank=recipe.markov_rank,
        markov_head_type=recipe.head,
        enable_confidence_head=recipe.confidence_head,
        confidence_head_with_markov=recipe.confidence_head and recipe.confidence_with_markov,
        embedding_scale=embedding_scale,
        final_logit_softcapping=getattr(target, "final_logit_softcapping", None),
    )
    if recipe.markov_rank == 0 and recipe.head != "none":
        config.markov_head_type = recipe.head
    if recipe.vocab_size is not None and recipe.vocab_coverage is not None:
        raise UserError("draft.vocab_size and draft.vocab_coverage exclude each other: give one")
    if recipe.head_start == "bigrams" and recipe.head == "none":
        raise UserError("draft.head_start bigrams is a start of a sequential head, and draft.head is none")
    if recipe.head_start == "bigrams" and recipe.init == "linear":
        raise UserError("draft.init linear sets the head too: leave draft.head_start random")
    if recipe.vocab_coverage is not None and not 0 < recipe.vocab_coverage <= 1:
        raise UserError(f"draft.vocab_coverage {recipe.vocab_coverage} must lie in (0, 1]")
    config.check()
    return config


def family_fields(recipe: DraftRecipe, target: Any) -> dict[str, Any]:
    """The configuration's fields for the kind of its layers.

    Raises:
        UserError: Gemma 4 layers for a target that they do not fit.
    """
    text = target.to_dict()
    problems = gemma4_problems(text) if is_gemma4_text(target) else [f"model type {target.model_type}"]
    family: Family = recipe.layers if recipe.layers != "auto" else "qwen3" if problems else "gemma4"
    fields: dict[str, Any] = {
        "layer_family": family,
        "architectures": [LAYER_FAMILIES[family].architecture],
    }
    if family == "qwen3":
        return fields
    if problems:
        raise UserError(
            f"draft.layers gemma4 is for dense Gemma 4 targets, and this one has {', '.join(problems)}: leave it auto"
        )
    return fields | {
        "attention_k_eq_v": bool(text["attention_k_eq_v"]),
        "rope_parameters": canonical_rope(text),
        "target_text_config": text_fields(text),
    }


def choose_mask_token(tokenizer: Any, vocab_size: int) -> int:
    """An id that the target's own text never holds.

    The first row of the head beyond the tokenizer, where there is one (Qwen3: 151669); else the last special token
    that neither the chat template nor generation uses.

    Args:
        tokenizer: the target's tokenizer, or None.
        vocab_size: rows of the target's LM head.

    Raises:
        UserError: no such id; the recipe must name one.
    """
    if tokenizer is not None:
        if len(tokenizer) < vocab_size:
            return len(tokenizer)
        template = str(tokenizer.chat_template or "")
        used = {
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
            tokenizer.unk_token_id,
        }
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True):
            if token.special and token_id not in used and token.content not in template:
                return int(token_id)
    raise UserError("draft.mask_token_id must be set: the target's tokenizer has no special token to spare")
