"""What the user chooses about the draft, and the configuration that follows from the target."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from dspark_train.draft.config import ROPE_TYPES, DSparkConfig, HeadType, canonical_rope
from dspark_train.draft.eagle3 import ARCHITECTURE, Eagle3Config
from dspark_train.draft.families import (
    LAYER_FAMILIES,
    Family,
    full_attention_view,
    gemma4_problems,
    is_gemma4_text,
    text_fields,
)
from dspark_train.errors import UserError
from dspark_train.target.config import config_size

HEAD_DIM = 128
"""Size of an attention head where the target's is no example."""
KEY_VALUE_HEADS = 8
"""Most heads of keys and values where the target's are no example."""
PLAIN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
"""Rotary settings where the target has none."""
GATED_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""Activations that a draft takes over from its target; others belong to feed-forward networks without a gate."""


@dataclass
class DraftRecipe:
    """Shape of the draft; what is left out follows the target."""

    num_layers: int = 5
    """Decoder layers of the backbone."""
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
    num_attention_heads: int | None = None
    """Heads of queries. Left out: the target's; with latent attention (MLA), as many as fill the hidden size."""
    num_key_value_heads: int | None = None
    """Heads of keys and values; more let a slot read more of the context. Left out: the target's; with latent
    attention at most eight."""
    head_dim: int | None = None
    """Size of an attention head. Left out: the target's; with latent attention 128."""
    intermediate_size: int | None = None
    """Width of the feed-forward networks. Left out: that of the target's dense layers; where it has experts only, three
    times the hidden size."""
    rope: dict[str, Any] | None = None
    """Rotary settings, named as in ``rope_parameters``: ``{rope_theta: 1e6}``, or ``{rope_type: yarn, factor: 4,
    original_max_position_embeddings: 32768}``. Left out: the target's, if it rotates whole heads by a rule that engines
    share (default, linear, llama3, yarn); else its theta, whole heads and no scaling."""
    sliding_window: int | None = None
    """Positions that a slot sees in windowed layers, its own included. Left out: no layer has a window."""
    full_attention_layers: list[int] | None = None
    """Layers of the draft without the window. Left out: none, where ``sliding_window`` is given."""
    sliding_window_non_causal: bool = False
    """Let the slots of a block see each other in both directions in windowed layers too, as they always do in the
    others. SGLang cannot serve that."""
    init: Literal["random", "target_layers", "linear"] = "random"
    """``random``; ``target_layers``: start the backbone's layers from copies of the target's own; or ``linear``: start
    backbone and head from a linear prediction fitted to the training answers (for short runs)."""
    head_start: Literal["random", "bigrams"] = "random"
    """Start of the sequential head: ``random``, or ``bigrams``: the token pairs of the training answers."""
    norm_init: float = 1.0
    """Initial weight of the final norm; a small one makes the first logits near uniform."""
    kind: Literal["dspark", "eagle3"] = "dspark"
    """``dspark``: a block in one pass, with or without heads (without: the parallel draft of DFlash). ``eagle3``: one
    layer that writes token by token, trained on its own states."""
    layers: Literal["auto", "qwen3", "gemma4"] = "auto"
    """Kind of the layers, by which engines know the draft: ``gemma4`` for dense Gemma 4 targets, ``qwen3`` for all
    others."""


EAGLE3_OPTIONS = ("kind", "block_size", "intermediate_size", "num_key_value_heads", "norm_init")
"""Options that an Eagle3 draft has; ``block_size`` is the length of its chain."""


def build_eagle3_config(
    recipe: DraftRecipe,
    target: Any,
    layer_ids: tuple[int, ...],
    *,
    vocab_size: int,
    embedding_scale: float = 1.0,
) -> Eagle3Config:
    """Configuration of the Eagle3 draft that ``recipe`` asks for; arguments as of :func:`build_config`.

    Raises:
        UserError: options of another kind of draft, or a target whose features it cannot read.
    """
    plain = DraftRecipe()
    foreign = [
        f"draft.{field.name}"
        for field in fields(recipe)
        if field.name not in EAGLE3_OPTIONS
        and getattr(recipe, field.name) != getattr(plain, field.name)
        and not (field.name == "num_layers" and recipe.num_layers == 1)
    ]
    if foreign:
        raise UserError(f"draft.kind eagle3 has no {', '.join(foreign)}: leave them out")
    like = build_config(plain, target, layer_ids, vocab_size=vocab_size, mask_token_id=0)
    config = Eagle3Config(
        **{name: getattr(like, name) for name in LAYER_FIELDS},
        num_hidden_layers=1,
        tie_word_embeddings=False,
        architectures=[ARCHITECTURE],
        num_target_layers=like.num_target_layers,
        target_layer_ids=list(layer_ids),
        ttt_length=recipe.block_size,
        embedding_scale=embedding_scale,
        final_logit_softcapping=like.final_logit_softcapping,
    )
    config.intermediate_size = recipe.intermediate_size or config.intermediate_size
    config.num_key_value_heads = recipe.num_key_value_heads or config.num_key_value_heads
    config.check()
    return config


LAYER_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "bos_token_id", "eos_token_id",
)  # fmt: skip
"""Fields that a draft's layers share, whatever its kind."""


def build_config(
    recipe: DraftRecipe,
    target: Any,
    layer_ids: tuple[int, ...],
    *,
    vocab_size: int | None = None,
    embedding_scale: float = 1.0,
    num_anchors: int = 512,
    mask_token_id: int | None = None,
    num_layers: int | None = None,
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
        num_layers: decoder layers of the target; None takes the config's.

    Raises:
        UserError: names every combination that cannot work.
    """
    family = family_fields(recipe, target)
    target = full_attention_view(target)
    mask = recipe.mask_token_id if recipe.mask_token_id is not None else mask_token_id
    heads, kv_heads, head_dim = attention_shape(recipe, target)
    activation = getattr(target, "hidden_act", None) or getattr(target, "hidden_activation", None)
    config = DSparkConfig(
        vocab_size=vocab_size or target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=recipe.intermediate_size or dense_width(target),
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=activation if activation in GATED_ACTIVATIONS else "silu",
        max_position_embeddings=getattr(target, "max_position_embeddings", None) or 32768,
        rms_norm_eps=getattr(target, "rms_norm_eps", None) or 1e-6,
        rope_parameters=family.pop("rope_parameters", None) or rope_settings(recipe.rope, target),
        **window_fields(recipe),
        tie_word_embeddings=False,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=None,
        **family,
        block_size=recipe.block_size,
        num_target_layers=num_layers or target.num_hidden_layers,
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


def attention_shape(recipe: DraftRecipe, target: Any) -> tuple[int, int, int]:
    """Query heads, key-value heads and head size of the draft: the recipe's, else the target's, else usual ones.

    The heads of latent attention (MLA) are cheap for the target, whose cache holds a latent instead of them; a draft
    would keep all of them. There, and where the target has no attention, they follow from the hidden size.

    Args:
        recipe: the user's choices.
        target: the target's Hugging Face text config.

    Raises:
        UserError: an odd head size.
    """
    heads, kv_heads, head_dim = (
        config_size(target, name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if heads is None or has_latent_attention(target):
        dim = recipe.head_dim or next((n for n in (HEAD_DIM, 64) if target.hidden_size % n == 0), 32)
        heads, kv_heads = max(1, target.hidden_size // dim), KEY_VALUE_HEADS
    else:
        even = target.hidden_size // heads if target.hidden_size % heads == 0 else HEAD_DIM
        dim = recipe.head_dim or head_dim or even
    if dim % 2:
        raise UserError(f"draft.head_dim {dim} is odd: rotary positions turn pairs of coordinates")
    heads = recipe.num_attention_heads or heads
    most = min(heads, kv_heads or heads)
    shared = next(count for count in range(most, 0, -1) if heads % count == 0)
    return heads, recipe.num_key_value_heads or shared, dim


def has_latent_attention(target: Any) -> bool:
    """Whether keys or queries go through a low-rank projection (MLA)."""
    return any(config_size(target, name) is not None for name in ("kv_lora_rank", "q_lora_rank"))


def dense_width(target: Any) -> int:
    """Feed-forward width of the target's dense layers; three times its hidden size where its experts are narrow.

    Mixture-of-experts configs use ``intermediate_size`` for a dense layer or for one expert; less than twice the hidden
    size is taken for an expert.
    """
    width, experts = (
        config_size(target, "intermediate_size"),
        ("num_experts", "num_local_experts", "n_routed_experts"),
    )
    mixture = any(config_size(target, name) for name in experts)
    if width is None or (mixture and width < 2 * target.hidden_size):
        return -(-3 * target.hidden_size // 64) * 64
    return width


def rope_settings(given: dict[str, Any] | None, target: Any) -> dict[str, Any]:
    """Rotary settings of the draft: the given ones, over what follows from the target.

    Args:
        given: of the recipe.
        target: the target's Hugging Face text config.

    Raises:
        UserError: a type or a key that the draft's layers do not know, or one that is missing.
    """
    theirs = canonical_rope(target.to_dict()) or PLAIN_ROPE
    theta = {"rope_type": "default", "rope_theta": theirs["rope_theta"]}
    keys = ROPE_TYPES.get(theirs["rope_type"])
    whole = theirs.get("partial_rotary_factor") in (None, 1, 1.0) and "mrope_section" not in theirs
    own = theta
    if keys is not None and whole and not has_latent_attention(target) and set(keys.required) <= set(theirs):
        own = {name: value for name, value in theirs.items() if name in keys.shared and value is not None}
    if given is None:
        return own
    settings = {**(theta if "rope_type" in given else own), **given}
    kind = settings["rope_type"]
    if kind not in ROPE_TYPES:
        raise UserError(f"draft.rope: rope_type {kind!r} is not one of {', '.join(ROPE_TYPES)}")
    unknown = sorted(set(settings) - set(ROPE_TYPES[kind].all))
    missing = sorted(set(ROPE_TYPES[kind].required) - set(settings))
    if unknown or missing:
        wrong = [f"{name} is missing" for name in missing] + [f"{name} is not known" for name in unknown]
        raise UserError(f"draft.rope: {'; '.join(wrong)} ({kind} takes {', '.join(ROPE_TYPES[kind].all)})")
    for name, value in settings.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if name not in ("rope_type", "truncate") and not number:
            raise UserError(f"draft.rope: {name} {value!r} must be a positive number")
    return {**settings, "rope_theta": float(settings["rope_theta"])}


def window_fields(recipe: DraftRecipe) -> dict[str, Any]:
    """The configuration's fields for windowed layers.

    Raises:
        UserError: layers without a window where none has one, or that the draft does not have.
    """
    full = recipe.full_attention_layers
    if recipe.sliding_window is None:
        if full is not None:
            raise UserError(
                "draft.full_attention_layers needs draft.sliding_window: without it, no layer has a window"
            )
        return {}
    beyond = [layer for layer in full or [] if not 0 <= layer < recipe.num_layers]
    if beyond:
        raise UserError(f"draft.full_attention_layers {beyond} must lie in 0..{recipe.num_layers - 1}")
    return {
        "use_sliding_window": True,
        "sliding_window": recipe.sliding_window,
        "sliding_window_non_causal": recipe.sliding_window_non_causal,
        "layer_types": [
            "full_attention" if layer in (full or []) else "sliding_attention"
            for layer in range(recipe.num_layers)
        ],
    }


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
    if recipe.rope is not None or recipe.sliding_window is not None:
        name = "draft.rope" if recipe.rope is not None else "draft.sliding_window"
        raise UserError(
            f"{name}: Gemma 4 layers rotate as their target's do, and all see everything; leave it out, or set "
            "draft.layers: qwen3"
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
