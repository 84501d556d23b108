"""Exact rewrites, as laws over ranks, heads and vocabularies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark_train.errors import UserError
from dspark_train.interchange.checkpoint import DraftCheckpoint
from dspark_train.interchange.folding import add_empty_head, fold_temperature, fold_vocabulary, widen_rank
from dspark_train.interchange.native import expected_shapes

V, D = 23, 6


def random_checkpoint(
    kind: str, rank: int, reduced: int | None, dtype: torch.dtype, seed: int
) -> DraftCheckpoint:
    generator = torch.Generator().manual_seed(seed)
    config = {
        "hidden_size": D,
        "intermediate_size": 8,
        "head_dim": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "attention_bias": False,
        "layer_types": ["full_attention"],
        "sliding_window": None,
        "sliding_window_non_causal": False,
        "vocab_size": V,
        "target_layer_ids": [0],
        "num_target_layers": 4,
        "block_size": 4,
        "mask_token_id": 0,
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": rank > 0,
        "draft_vocab_size": reduced,
    }
    shapes = expected_shapes(config)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    ids = None if reduced is None else torch.randperm(V, generator=generator)[:reduced].sort().values
    return DraftCheckpoint(config, tensors, ids)


def walk(checkpoint: DraftCheckpoint, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Logit bias ``[γ, U]`` and confidence logits ``[γ]`` in float64, straight from the definitions."""
    weights = {name: tensor.double() for name, tensor in checkpoint.tensors.items()}
    rank, kind = checkpoint.config["markov_rank"], checkpoint.config["markov_head_type"]
    biases, confidences, state = [], [], torch.zeros(rank, dtype=torch.float64)
    for h, token in zip(hidden.double(), previous, strict=True):
        features = [h]
        if rank:
            embedded = weights["markov_head.markov_w1.weight"][token]
            features += [embedded] if checkpoint.config["confidence_head_with_markov"] else []
            latent = embedded
            if kind == "gated":
                gate = weights["markov_head.gate_proj.weight"] @ torch.cat([h, embedded])
                latent = (gate + weights["markov_head.gate_proj.bias"]).sigmoid() * embedded
            if kind == "rnn":
                joint = weights["markov_head.joint_proj.weight"] @ torch.cat([state, embedded, h])
                keep, candidate, out = (joint + weights["markov_head.joint_proj.bias"]).split(rank)
                latent = out.tanh()
                state = keep.sigmoid() * state + (1 - keep.sigmoid()) * candidate.tanh()
            biases.append(weights["markov_head.markov_w2.weight"] @ latent)
        proj = weights["confidence_head.proj.weight"][0] @ torch.cat(features)
        confidences.append(proj + weights["confidence_head.proj.bias"][0])
    return torch.stack(biases) if biases else torch.zeros(len(hidden), V), torch.stack(confidences)


heads = st.sampled_from(["vanilla", "gated", "rnn"])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@settings(max_examples=40, deadline=None)
@given(heads, st.integers(1, 20), st.integers(1, V - 1), dtypes, st.integers(0, 1000))
def test_a_folded_vocabulary_proposes_the_same_and_nothing_else(
    kind: str, rank: int, reduced: int, dtype: torch.dtype, seed: int
) -> None:
    checkpoint = random_checkpoint(kind, rank, reduced, dtype, seed)
    full_head = torch.randn(V, D).to(dtype)
    folded = fold_vocabulary(checkpoint, full_head)
    ids = checkpoint.draft_token_ids
    assert ids is not None
    assert folded.draft_token_ids is None
    assert folded.config["markov_rank"] % 16 == 0
    assert expected_shapes(folded.config) == {name: tuple(t.shape) for name, t in folded.tensors.items()}
    assert all(tensor.dtype == dtype for tensor in folded.tensors.values())
    assert all(bool(tensor.isfinite().all()) for tensor in folded.tensors.values())
    hidden, previous = torch.randn(4, D), torch.randint(V, (4,))
    bias, confidence = walk(checkpoint, hidden, previous)
    new_bias, new_confidence = walk(folded, hidden, previous)
    torch.testing.assert_close(new_bias[:, ids], bias, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(new_confidence, confidence, rtol=1e-12, atol=1e-12)
    outside = torch.ones(V, dtype=torch.bool).index_fill(0, ids, False)
    assert float(new_bias[:, outside].max()) < -9000
    assert torch.equal(folded.tensors["lm_head.weight"], full_head)


@settings(max_examples=30, deadline=None)
@given(heads, st.integers(1, 12), st.integers(1, 9), st.integers(0, 1000))
def test_a_wider_rank_changes_nothing(kind: str, rank: int, extra: int, seed: int) -> None:
    checkpoint = random_checkpoint(kind, rank, None, torch.float32, seed)
    wider = DraftCheckpoint({**checkpoint.config, "markov_rank": rank + extra}, widen_rank(checkpoint, extra))
    hidden, previous = torch.randn(5, D), torch.randint(V, (5,))
    for before, after in zip(walk(checkpoint, hidden, previous), walk(wider, hidden, previous), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


def test_an_empty_head_adds_nothing_and_keeps_the_confidences() -> None:
    checkpoint = random_checkpoint("none", 0, None, torch.float32, 1)
    served = add_empty_head(checkpoint)
    assert served.config["markov_rank"] == 16
    assert served.config["markov_head_type"] == "vanilla"
    hidden, previous = torch.randn(3, D), torch.randint(V, (3,))
    assert bool((walk(served, hidden, previous)[0] == 0).all())
    assert torch.equal(walk(served, hidden, previous)[1], walk(checkpoint, hidden, previous)[1])
    assert add_empty_head(served) is served


def test_a_folded_temperature_divides_the_logits() -> None:
    checkpoint = random_checkpoint("vanilla", 4, None, torch.float32, 2)
    hidden, previous = torch.randn(3, D), torch.randint(V, (3,))
    before = walk(checkpoint, hidden, previous)[1]
    after = walk(fold_temperature(checkpoint, 2.5), hidden, previous)[1]
    torch.testing.assert_close(after, before / 2.5, rtol=1e-6, atol=1e-6)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="positive number"):
            fold_temperature(checkpoint, wrong)
    headless = DraftCheckpoint({**checkpoint.config, "enable_confidence_head": False}, checkpoint.tensors)
    with pytest.raises(UserError, match="no confidence head"):
        fold_temperature(headless, 2.0)
