"""The draft: causality, isolation of blocks, what it borrows, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, tiny_draft, tiny_target

from dspark_train.data.blocks import build_blocks
from dspark_train.draft.attention import AttentionLayout, block_attention
from dspark_train.draft.model import DSparkDraft
from dspark_train.draft.recipe import DraftRecipe, build_config
from dspark_train.errors import UserError
from dspark_train.structures import Blocks, TokenBatch

HEADS = ("vanilla", "gated", "rnn", "none")


def full_batch(target, batch: int = 2, length: int = 12, num_anchors: int = 99) -> tuple[TokenBatch, Blocks]:
    torch.manual_seed(1)
    ids = torch.randint(3, 90, (batch, length))
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[:, :2] = False
    tokens = TokenBatch(ids, torch.full((batch,), length), mask, torch.arange(batch))
    return tokens, build_blocks(
        tokens, num_anchors=num_anchors, block_size=4, mask_token_id=96, seed=0, epoch=0
    )


@pytest.mark.parametrize("head", HEADS)
def test_no_block_sees_features_at_or_after_its_anchor(head: str) -> None:
    target = tiny_target()
    draft = tiny_draft(target, head=head)
    tokens, blocks = full_batch(target)
    features = target.states(tokens.input_ids).features.requires_grad_()
    output = draft(features, blocks)
    latent = 0 if output.latent is None else output.latent.sum((1, 2))
    outputs = output.hidden.sum((1, 2)) + output.confidence_logits.sum(1) + latent
    for index in range(blocks.anchor.numel()):
        (gradient,) = torch.autograd.grad(outputs[index], features, retain_graph=True)
        row, anchor = int(blocks.sequence[index]), int(blocks.anchor[index])
        assert gradient[row, anchor:].eq(0).all()
        assert gradient[row, :anchor].ne(0).any(dim=-1).all()
        assert gradient[1 - row].eq(0).all()


@pytest.mark.parametrize("head", HEADS)
def test_changing_one_block_changes_no_other(head: str) -> None:
    target = tiny_target()
    draft = tiny_draft(target, head=head)
    tokens, blocks = full_batch(target)
    features = target.states(tokens.input_ids).features
    before = draft(features, blocks)
    slot_ids, previous = blocks.slot_ids.clone(), blocks.previous.clone()
    slot_ids[3], previous[3] = 5, 7
    changed = Blocks(blocks.sequence, blocks.anchor, slot_ids, blocks.labels, previous, blocks.supervised)
    after = draft(features, changed)
    others = torch.arange(blocks.anchor.numel()) != 3
    assert torch.equal(before.hidden[others], after.hidden[others])
    assert torch.equal(before.confidence_logits[others], after.confidence_logits[others])
    assert not torch.allclose(before.hidden[3], after.hidden[3])


@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 5),
    st.integers(1, 4),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
)
@settings(max_examples=40, deadline=None)
def test_block_attention_against_a_dense_oracle(
    batch: int, length: int, count: int, slots: int, heads: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(batch * 1000 + length * 100 + count * 10 + slots)
    query_heads, kv_heads, size = *heads, 5
    sequence = torch.randint(batch, (count,), generator=generator).sort().values
    anchor = torch.randint(length, (count,), generator=generator)
    empty = torch.zeros(count, slots, dtype=torch.int64)
    blocks = Blocks(sequence, anchor, empty, empty, empty, empty.bool())
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    query = draw(count, slots, query_heads, size)
    context_key, context_value = draw(2, batch, length, kv_heads, size)
    block_key, block_value = draw(2, count, slots, kv_heads, size)
    if count == 0:
        return
    layout = AttentionLayout.of(blocks, batch, length)
    got = block_attention(query, context_key, context_value, block_key, block_value, layout, 0.3)
    for index in range(count):
        seen = int(anchor[index])
        keys = torch.cat([context_key[sequence[index], :seen], block_key[index]])
        values = torch.cat([context_value[sequence[index], :seen], block_value[index]])
        for head in range(query_heads):
            group = head // (query_heads // kv_heads)
            weights = (query[index, :, head] @ keys[:, group].T * 0.3).softmax(-1)
            torch.testing.assert_close(got[index, :, head], weights @ values[:, group], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load_give_the_same_draft(family: str, tmp_path) -> None:
    target = tiny_target(family)
    tokens, blocks = full_batch(target)
    features = target.states(tokens.input_ids).features
    draft = tiny_draft(target)
    draft.save(tmp_path / "draft")
    loaded = DSparkDraft.load(tmp_path / "draft").eval()
    expected, got = draft(features, blocks), loaded(features, blocks)
    for name in ("hidden", "latent", "confidence_logits"):
        assert torch.equal(getattr(expected, name), getattr(got, name))
    assert torch.equal(draft.logits(expected.hidden, expected.latent), loaded.logits(got.hidden, got.latent))
    loaded.borrow(target)
    assert "embed_tokens.weight" not in loaded.state_dict()


def test_reduced_vocabulary_survives_saving(tmp_path) -> None:
    target = tiny_target()
    ids = torch.tensor([2, 5, 7, 40, 96])
    draft = tiny_draft(target, token_ids=ids)
    assert draft.head_weight.shape[0] == 5
    draft.save(tmp_path / "draft")
    loaded = DSparkDraft.load(tmp_path / "draft")
    assert torch.equal(loaded.draft_token_ids, ids)
    assert torch.equal(loaded.head_weight, target.head_weight[ids])


def test_a_damaged_checkpoint_is_one_clear_error(tmp_path) -> None:
    target = tiny_target()
    tiny_draft(target).save(tmp_path / "draft")
    weights = tmp_path / "draft" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"truncated"):
        DSparkDraft.load(tmp_path / "draft")
    weights.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        DSparkDraft.load(tmp_path / "draft")
    with pytest.raises(UserError, match=r"config\.json is missing"):
        DSparkDraft.load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_draft(tiny_target()).save(tmp_path / "draft")
    weights = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["lm_head.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing keys: lm_head\.weight"):
        DSparkDraft.load(tmp_path / "draft")


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"head": "none"}, "needs markov_rank 0"),
        ({"markov_rank": 0}, r"needs markov_rank > 0"),
        ({"head": "none", "markov_rank": 0}, "confidence_with_markov"),
        ({"block_size": 0}, "block_size 0"),
        ({"num_layers": 0}, "num_layers 0"),
        ({"mask_token_id": 97}, "mask_token_id 97"),
        ({"vocab_size": 10, "vocab_coverage": 0.5}, "exclude each other"),
        ({"vocab_coverage": 1.5}, "must lie in"),
    ],
)
def test_what_cannot_work_is_refused_by_name(recipe: dict[str, object], words: str) -> None:
    target = tiny_target()
    with pytest.raises(UserError, match=words):
        build_config(DraftRecipe(**recipe), target.config, (0, 1))  # type: ignore[arg-type]


def test_all_problems_come_at_once() -> None:
    target = tiny_target()
    with pytest.raises(UserError, match=r"block_size 0.*mask_token_id 500"):
        build_config(DraftRecipe(block_size=0, mask_token_id=500), target.config, (0, 1))


def test_another_target_is_refused() -> None:
    draft = tiny_draft(tiny_target())
    with pytest.raises(UserError, match="hidden size"):
        draft.borrow(tiny_target(hidden_size=16))
