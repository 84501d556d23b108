"""Ragged passes of the target against its own forward pass, over families of models."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import tiny_model

from dspark_train.decoding.cache import RaggedCache, RaggedStep
from dspark_train.decoding.layout import RowLayout
from dspark_train.decoding.target_pass import TargetPass
from dspark_train.errors import UserError
from dspark_train.target.frozen import FrozenTarget

CPU = torch.device("cpu")
# Rounding only: the same fp32 sums in another order.
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}


def gemma2() -> transformers.PreTrainedModel:
    """Soft-capped attention, and sliding windows on every other layer."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=5.0,
        max_position_embeddings=64,
    )
    config._attn_implementation = "eager"
    model = transformers.Gemma2ForCausalLM(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model


MODELS = {
    "llama": lambda: tiny_model("llama"),
    "qwen3": lambda: tiny_model("qwen3"),
    "mistral": lambda: tiny_model("mistral"),
    "gemma3": lambda: tiny_model("gemma3"),
    "gemma2": gemma2,
}


def windowed_mistral() -> transformers.PreTrainedModel:
    model = tiny_model("mistral")
    model.config.sliding_window = 5
    return model


MODELS["mistral_window"] = windowed_mistral


@pytest.mark.parametrize("name", MODELS)
def test_ragged_passes_equal_whole_sequences(name: str) -> None:
    target = FrozenTarget(MODELS[name](), [0, 2])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (3, 34), generator=generator)
    expected = target.states(ids)
    done = [3, 7, 1]
    with torch.inference_mode(), TargetPass(target, 3, 40, features=True) as run:

        def check(counts: list[int], starts: list[int], slots: range, layout: RowLayout) -> None:
            spans = [
                (slot, start, start + count) for slot, start, count in zip(slots, starts, counts, strict=True)
            ]
            rows = torch.cat([ids[slot, start:end] for slot, start, end in spans])
            hidden, features = run(rows, layout)
            for mine, theirs in ((hidden, expected.last_hidden), (features, expected.features)):
                wanted = torch.cat([theirs[slot, start:end] for slot, start, end in spans])
                torch.testing.assert_close(mine, wanted, **TOLERANCE)

        for slot in range(3):
            check(
                [done[slot]], [0], range(slot, slot + 1), RowLayout([done[slot]], [0], CPU, first_slot=slot)
            )
        for counts in ([1, 4, 2], [5, 0, 3], [1, 1, 1], [4, 4, 8], [8, 1, 2]):
            # wrong tokens first: what verification rejects must leave no trace
            run(torch.full((sum(counts),), 5), RowLayout(counts, done, CPU))
            check(counts, done, range(3), RowLayout(counts, done, CPU))
            done = [start + count for start, count in zip(done, counts, strict=True)]
        check([3], [done[1]], range(1, 2), RowLayout([3], [done[1]], CPU, first_slot=1))


def test_target_is_left_as_it_was() -> None:
    target = FrozenTarget(tiny_model(), [0, 2])
    before = target.model.config._attn_implementation
    with TargetPass(target, 1, 8, features=True):
        assert target.model.config._attn_implementation != before
    assert target.model.config._attn_implementation == before
    assert not any(layer._forward_hooks for layer in target.layers)


def test_a_moved_slot_keeps_its_context() -> None:
    target = FrozenTarget(tiny_model(), [0, 2])
    ids = torch.arange(10, 22)[None]
    expected = target.states(ids).last_hidden[0, 8:]
    with torch.inference_mode(), TargetPass(target, 3, 16, features=False) as run:
        run(torch.full((9,), 3), RowLayout([9], [0], CPU))
        run(ids[0, :8], RowLayout([8], [0], CPU, first_slot=2))
        run.cache.move(2, 0, 8)
        hidden, _ = run(ids[0, 8:], RowLayout([4], [8], CPU))
    torch.testing.assert_close(hidden, expected, **TOLERANCE)


def test_layout_of_rows() -> None:
    layout = RowLayout([2, 0, 3], [4, 9, 0], CPU)
    assert layout.slot.tolist() == [0, 0, 2, 2, 2]
    assert layout.position.tolist() == [4, 5, 0, 1, 2]
    assert layout.grid.tolist() == [[0, 1, 0], [0, 0, 0], [2, 3, 4]]
    assert layout.grid.flatten()[layout.cell].tolist() == list(range(5))
    mask = layout.mask(window=2, dtype=torch.float32)
    assert mask is not None
    visible = [row.isfinite().nonzero().flatten().tolist() for row in mask.flatten(0, 1)[layout.cell]]
    assert visible == [[3, 4], [4, 5], [0], [0, 1], [1, 2]]


def test_block_rows_see_each_other_both_ways() -> None:
    mask = RowLayout([2, 2], [1, 3], CPU, block=True).mask(None, torch.float32)
    assert mask is not None
    assert mask.isfinite().sum(-1).tolist() == [[3, 3], [5, 5]]


def test_buffers_start_finite() -> None:
    cache = RaggedCache(slots=1, length=1000)
    key, value = cache.buffers(0, torch.ones(2, 1, 8), torch.ones(2, 1, 8))
    assert key.isfinite().all()
    assert value.isfinite().all()
    assert cache.bytes == 2 * 1024 * 2 * 8 * 4  # whole tiles of positions


@pytest.mark.parametrize(("counts", "starts"), [([6], [0]), ([2, 3], [5, 1])])
def test_attention_sinks_take_their_share(counts: list[int], starts: list[int]) -> None:
    """Against the definition, in float64: a position of score ``sink`` and no value."""
    generator = torch.Generator().manual_seed(0)
    heads, groups, size, scale = 4, 2, 8, 0.3
    known = [
        torch.randn(2, 2, start + count, size, generator=generator)
        for start, count in zip(starts, counts, strict=True)
    ]
    query = torch.randn(heads, sum(counts), size, generator=generator)
    sinks = torch.randn(heads, generator=generator)
    cache = RaggedCache(len(counts), 16)
    for slot, (start, (key, value)) in enumerate(zip(starts, known, strict=True)):
        if start:
            before = RaggedStep(cache, RowLayout([start], [0], CPU, first_slot=slot))
            before.write(0, key[:, :start], value[:, :start])
    new = [torch.cat([kv[i][:, start:] for kv, start in zip(known, starts, strict=True)], 1) for i in (0, 1)]
    step = RaggedStep(cache, RowLayout(counts, starts, CPU))
    mixed = step.attend(0, query, *new, scale, sinks=sinks)  # [S, H, h]
    row = 0
    for (key, value), start, count in zip(known, starts, counts, strict=True):
        for place in range(start, start + count):
            for head in range(heads):
                k, v = (t[head // groups, : place + 1].double() for t in (key, value))
                scores = torch.cat([k @ query[head, row].double() * scale, sinks[head, None].double()])
                expected = scores.softmax(0)[:-1] @ v
                torch.testing.assert_close(mixed[row, head].double(), expected, atol=1e-5, rtol=1e-5)
            row += 1


def test_attention_without_keyword_arguments_is_refused() -> None:
    from dspark_train.decoding.target_pass import ragged_attention

    heads = torch.zeros(1, 2, 1, 8)
    with pytest.raises(UserError, match="keyword arguments"):
        ragged_attention(torch.nn.Identity(), heads, heads, heads)
