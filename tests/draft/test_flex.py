"""Both attention forms against a dense oracle: values and gradients, grouped queries included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark_train.draft.attention import AttentionLayout, block_attention
from dspark_train.draft.flex import FlexLayout, flex_block_attention
from dspark_train.structures import Blocks


def dense(q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, blocks: Blocks, scale: float) -> Tensor:
    """One block at a time, from the definition."""
    groups, rows = q.shape[2] // bk.shape[2], []
    for n in range(q.shape[0]):
        s, a = int(blocks.sequence[n]), int(blocks.anchor[n])
        keys = torch.cat([ck[s, :a], bk[n]]).repeat_interleave(groups, 1)
        values = torch.cat([cv[s, :a], bv[n]]).repeat_interleave(groups, 1)
        weights = (torch.einsum("ihd,jhd->hij", q[n], keys) * scale).softmax(-1)
        rows.append(torch.einsum("hij,jhd->ihd", weights, values))
    return torch.stack(rows)


def case(heads: int, kv_heads: int, seed: int, counts: tuple[int, ...] = (3, 0, 2)) -> Any:
    generator = torch.Generator().manual_seed(seed)
    batch, length, slots, size = len(counts), 11, 4, 8
    sequence = torch.repeat_interleave(torch.arange(batch), torch.tensor(counts))
    count = len(sequence)
    anchor = torch.randint(0, length, (count,), generator=generator)
    zeros = torch.zeros(count, slots, dtype=torch.int64)
    blocks = Blocks(sequence, anchor, zeros, zeros, zeros, zeros.bool())

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    tensors = (
        normal(count, slots, heads, size),
        normal(batch, length, kv_heads, size),
        normal(batch, length, kv_heads, size),
        normal(count, slots, kv_heads, size),
        normal(count, slots, kv_heads, size),
    )
    return tensors, blocks, batch, length


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("form", ["explicit", "flex"])
@pytest.mark.parametrize("counts", [(3, 0, 2), (2, 2)])
def test_values_and_gradients_equal_the_dense_form(
    form: str, heads: int, kv_heads: int, counts: tuple[int, ...]
) -> None:
    tensors, blocks, batch, length = case(heads, kv_heads, 0, counts)
    oracle = dense(*tensors, blocks, 0.3)
    if form == "flex":
        # the eager form on CPUs has no backward; the compiled one on GPUs has
        detached = [part.detach() for part in tensors]
        ours = flex_block_attention(*detached, FlexLayout.of(blocks, batch, length), 0.3)
    else:
        ours = block_attention(*tensors, AttentionLayout.of(blocks, batch, length), 0.3)
    tolerance = 1e-6 if form == "explicit" else 1e-9  # the explicit softmax is fp32
    torch.testing.assert_close(ours, oracle, rtol=tolerance, atol=tolerance)
    if form == "explicit":
        weight = torch.randn_like(oracle)
        expected = torch.autograd.grad((oracle * weight).sum(), tensors)
        for one, two in zip(torch.autograd.grad((ours * weight).sum(), tensors), expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(sum), seed=st.integers(0, 9))
def test_both_forms_agree_for_any_packing(counts: list[int], seed: int) -> None:
    tensors, blocks, batch, length = case(4, 2, seed, tuple(counts))
    detached = [part.detach() for part in tensors]
    flex = flex_block_attention(*detached, FlexLayout.of(blocks, batch, length), 0.3)
    explicit = block_attention(*detached, AttentionLayout.of(blocks, batch, length), 0.3)
    torch.testing.assert_close(flex, explicit, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
def test_compiled_on_a_gpu_values_and_gradients_equal_the_dense_form(heads: int, kv_heads: int) -> None:
    tensors, blocks, batch, length = case(heads, kv_heads, 1, (40, 0, 25))
    tensors = tuple(
        torch.cat([part, part], dim=-1).float().detach().cuda().requires_grad_() for part in tensors
    )
    blocks = blocks.to("cuda")
    oracle = dense(*tensors, blocks, 0.3)
    ours = flex_block_attention(*tensors, FlexLayout.of(blocks, batch, length), 0.3)
    torch.testing.assert_close(ours, oracle, rtol=2e-3, atol=2e-3)
    weight = torch.randn_like(oracle)
    expected = torch.autograd.grad((oracle * weight).sum(), tensors)
    for one, two in zip(torch.autograd.grad((ours * weight).sum(), tensors), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=5e-3, atol=5e-3)
