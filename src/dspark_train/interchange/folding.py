"""Exact rewrites of a draft for engines that lack one of its parts (shape legend:
:mod:`dspark_train.structures`).

* a reduced vocabulary, folded into a full one through one more dimension of the sequential head's latent;
* a parallel draft, given a sequential head that adds nothing;
* a target's embedding scale, folded into the draft's copy of the embedding;
* one temperature, or a calibrated bias, folded into the confidence head.

None of them changes what the draft proposes: the constants below saturate in bfloat16 and float16 alike.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dspark_train.calibration.bias import BIAS
from dspark_train.errors import UserError
from dspark_train.interchange.checkpoint import DraftCheckpoint

RANK_MULTIPLE = 16
"""A rewritten head's rank is rounded up to a multiple of this, for the engines' kernels."""
EXCLUDED = -10_000.0
"""Bias of tokens outside the vocabulary: finite in float16, and no logit comes near it."""
SATURATED = 32.0
"""Pre-activation at which sigmoid and tanh are exactly 1 in every element type in use."""


def widen_rank(checkpoint: DraftCheckpoint, extra: int) -> dict[str, Tensor]:
    """Return tensors whose sequential head has rank ``r + extra``; the new latent dimensions are always 0.

    The confidence head's weights of the new embedding dimensions are 0. Logits and confidences do not change.
    """
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    rank, d = config["markov_rank"], config["hidden_size"]
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        tensors[name] = pad(tensors[name], (0, extra))
    if config["markov_head_type"] == "gated":
        weight, bias = tensors["markov_head.gate_proj.weight"], tensors["markov_head.gate_proj.bias"]
        tensors["markov_head.gate_proj.weight"] = pad(weight, (0, extra, 0, extra))
        tensors["markov_head.gate_proj.bias"] = pad(bias, (0, extra))
    if config["markov_head_type"] == "rnn":
        weight, bias = tensors["markov_head.joint_proj.weight"], tensors["markov_head.joint_proj.bias"]
        state, embedded, hidden = weight.split([rank, rank, d], dim=1)
        columns = torch.cat([pad(state, (0, extra)), pad(embedded, (0, extra)), hidden], dim=1)
        rows = [pad(chunk, (0, 0, 0, extra)) for chunk in columns.split(rank, dim=0)]
        tensors["markov_head.joint_proj.weight"] = torch.cat(rows, dim=0)
        tensors["markov_head.joint_proj.bias"] = torch.cat(
            [pad(chunk, (0, extra)) for chunk in bias.split(rank)]
        )
    if config["enable_confidence_head"] and config["confidence_head_with_markov"]:
        tensors["confidence_head.proj.weight"] = pad(tensors["confidence_head.proj.weight"], (0, extra))
    return tensors


def fold_vocabulary(checkpoint: DraftCheckpoint, full_head: Tensor) -> DraftCheckpoint:
    """Return a draft over the whole vocabulary that proposes exactly what the reduced one does.

    One more latent dimension is constantly 1; its column of W2 is 0 inside the reduced vocabulary and
    :data:`EXCLUDED` outside, so that no token outside is ever proposed.

    Args:
        checkpoint: with ``draft_token_ids``; a parallel draft gets its sequential head first.
        full_head: ``[V, d]``, the target's LM head.

    Returns:
        The same draft without ``draft_token_ids``.
    """
    ids = checkpoint.draft_token_ids
    if ids is None:
        return checkpoint
    if checkpoint.config["markov_rank"] == 0:
        checkpoint = add_empty_head(checkpoint, RANK_MULTIPLE)
    config, vocabulary = checkpoint.config, checkpoint.config["vocab_size"]
    rank, kind = config["markov_rank"], config["markov_head_type"]
    extra = 1 + -(rank + 1) % RANK_MULTIPLE
    tensors = widen_rank(checkpoint, extra)
    reduced = tensors["markov_head.markov_w2.weight"]
    projection = reduced.new_zeros(vocabulary, rank + extra)
    projection[:, rank] = EXCLUDED
    projection[ids] = reduced
    tensors["markov_head.markov_w2.weight"] = projection
    if kind in ("vanilla", "gated"):
        tensors["markov_head.markov_w1.weight"][:, rank] = 1.0
    if kind == "gated":
        tensors["markov_head.gate_proj.bias"][rank] = SATURATED
    if kind == "rnn":
        tensors["markov_head.joint_proj.bias"][2 * (rank + extra) + rank] = SATURATED
    tensors["lm_head.weight"] = full_head.to(reduced.dtype)
    note = f"reduced vocabulary of {ids.numel()} tokens folded into rank {rank + extra} (was {rank})"
    return replace(
        checkpoint,
        config={**config, "markov_rank": rank + extra, "draft_vocab_size": None},
        tensors=tensors,
        draft_token_ids=None,
        notes=[*checkpoint.notes, note],
    )


def add_empty_head(checkpoint: DraftCheckpoint, rank: int = RANK_MULTIPLE) -> DraftCheckpoint:
    """Return a parallel draft with a vanilla sequential head of zeros, which adds nothing to any logit.

    Engines that insist on a sequential head serve the draft through it, with the acceptance that it has
    without.
    """
    if checkpoint.config["markov_rank"]:
        return checkpoint
    like, vocabulary = checkpoint.tensors["fc.weight"], checkpoint.config["vocab_size"]
    reduced = checkpoint.config.get("draft_vocab_size") or vocabulary
    tensors = {
        **checkpoint.tensors,
        "markov_head.markov_w1.weight": like.new_zeros(vocabulary, rank),
        "markov_head.markov_w2.weight": like.new_zeros(reduced, rank),
    }
    config = {**checkpoint.config, "markov_rank": rank, "markov_head_type": "vanilla"}
    note = f"parallel draft written with a sequential head of zeros (rank {rank}), which engines require"
    return replace(checkpoint, config=config, tensors=tensors, notes=[*checkpoint.notes, note])


def fold_embedding_scale(checkpoint: DraftCheckpoint) -> DraftCheckpoint:
    """Return the draft with the target's embedding scale multiplied into its own copy of the embedding."""
    scale = checkpoint.config.get("embedding_scale", 1.0)
    if scale == 1.0:
        return checkpoint
    embedding = checkpoint.tensors["embed_tokens.weight"]
    tensors = {**checkpoint.tensors, "embed_tokens.weight": (embedding.float() * scale).to(embedding.dtype)}
    note = f"embedding scale {scale:g} folded into embed_tokens.weight"
    return replace(
        checkpoint,
        config={**checkpoint.config, "embedding_scale": 1.0},
        tensors=tensors,
        notes=[*checkpoint.notes, note],
    )


def fold_temperature(checkpoint: DraftCheckpoint, temperature: float) -> DraftCheckpoint:
    """Return the draft with its confidence logits divided by one temperature.

    Raises:
        UserError: there is no confidence head, or the temperature is not a positive number.
    """
    if not checkpoint.config["enable_confidence_head"]:
        raise UserError("fold_temperature: this draft has no confidence head; leave the option out")
    if not 0.0 < temperature < float("inf"):
        raise UserError(f"fold_temperature {temperature}: expected a positive number")
    tensors = dict(checkpoint.tensors)
    for name in ("confidence_head.proj.weight", BIAS):
        tensors[name] = (tensors[name].double() / temperature).to(tensors[name].dtype)
    note = f"confidence logits divided by one temperature, {temperature:.4g}"
    return replace(checkpoint, tensors=tensors, notes=[*checkpoint.notes, note])


def fold_bias(checkpoint: DraftCheckpoint, bias: float, sampling: str) -> DraftCheckpoint:
    """Return the draft with a calibrated bias added to its confidence head.

    Args:
        checkpoint: the draft, left as it is.
        bias: added to every confidence logit.
        sampling: label of the way of sampling that it was fitted for.

    Raises:
        UserError: there is no confidence head.
    """
    if not checkpoint.config["enable_confidence_head"]:
        raise UserError("fold_bias: this draft has no confidence head; leave the option out")
    moved = (checkpoint.tensors[BIAS].double() + bias).to(checkpoint.tensors[BIAS].dtype)
    note = f"a bias of {bias:+.4g} is added to the confidence head; it holds for {sampling} decoding alone"
    tensors = {**checkpoint.tensors, BIAS: moved}
    return replace(checkpoint, tensors=tensors, notes=[*checkpoint.notes, note])
