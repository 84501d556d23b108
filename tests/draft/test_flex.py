"""Both attention forms against a dense oracle: values and gradients, grouped queries included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark_train.draft import flex
from dspark_train.draft.attention import AttentionLayout, block_attention
from dspark_train.draft.config import EVERYTHING, Sight
from dspark_train.draft.flex import FlexLayout, flex_block_attention
from dspark_train.structures import Blocks

SIGHTS = [EVERYTHING, Sight(4), Sight(6), Sight(6, causal=True), Sight(None, causal=True)]


def visible(blocks: Blocks, batch: int, length: int, sight: Sight) -> Tensor:
    """``[N·γ, B·T + N·γ]`` bool, one slot at a time, from the definition."""
    count, slots = blocks.slot_ids.shape
    seen = torch.zeros(count * slots, batch * length + count * slots, dtype=torch.bool)
    for n in range(count):
        s, a = int(blocks.sequence[n]), int(blocks.anchor[n])
        for slot in range(slots):
            first = 0 if sight.window is None else max(0, a + slot - sight.window + 1)
            seen[n * slots + slot, s * length + first : s * length + a] = True
            own = batch * length + n * slots
            seen[n * slots + slot, own : own + (slot + 1 if sight.causal else slots)] = True
    return seen


def dense(
    q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, blocks: Blocks, scale: float, sight: Sight
) -> Tensor:
    """All queries over all keys, most of them hidden."""
    groups = q.shape[2] // bk.shape[2]
    keys, values = (
        torch.cat([context.flatten(0, 1), block.flatten(0, 1)]).repeat_interleave(groups, 1)
        for context, block in ((ck, bk), (cv, bv))
    )
    mask = visible(blocks, ck.shape[0], ck.shape[1], sight).to(q.device)
    scores = torch.einsum("ihd,jhd->hij", q.flatten(0, 1), keys) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, values).view(q.shape)


def case(heads: int, kv_heads: int, seed: int, counts: tuple[int, ...] = (3, 0, 2), length: int = 11) -> Any:
    generator = torch.Generator().manual_seed(seed)
    batch, slots, size = len(counts), 4, 8
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
@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_values_and_gradients_equal_the_dense_form(
    form: str, heads: int, kv_heads: int, counts: tuple[int, ...], sight: Sight
) -> None:
    tensors, blocks, batch, length = case(heads, kv_heads, 0, counts)
    oracle = dense(*tensors, blocks, 0.3, sight)
    if form == "flex":
        # the eager form on CPUs has no backward; the compiled one on GPUs has
        detached = [part.detach() for part in tensors]
        ours = flex_block_attention(*detached, FlexLayout.of(blocks, batch, length, sight), 0.3)
    else:
        ours = block_attention(*tensors, AttentionLayout.of(blocks, batch, length, sight), 0.3)
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
    found = flex_block_attention(*detached, FlexLayout.of(blocks, batch, length), 0.3)
    explicit = block_attention(*detached, AttentionLayout.of(blocks, batch, length), 0.3)
    torch.testing.assert_close(found, explicit, rtol=1e-6, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(sum),
    length=st.sampled_from([1, 90, 128, 300, 513]),
    slots=st.sampled_from([1, 5, 7, 128, 150]),
    window=st.sampled_from([None, 150, 200]),
    causal=st.booleans(),
    seed=st.integers(0, 9),
)
def test_tiles_are_those_of_the_dense_mask(
    counts: list[int], length: int, slots: int, window: int | None, causal: bool, seed: int
) -> None:
    """Which tiles are met, and which of them need no mask, against the form that makes all scores."""
    counts = [min(count, 3) if slots > 7 else count for count in counts]
    sequence = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    anchor = torch.randint(0, length, sequence.shape, generator=torch.Generator().manual_seed(seed))
    zeros = torch.zeros(len(sequence), slots, dtype=torch.int64)
    blocks, sight = Blocks(sequence, anchor, zeros, zeros, zeros, zeros.bool()), Sight(window, causal)
    mask = FlexLayout.of(blocks, len(counts), length, sight).mask
    seen = visible(blocks, len(counts), length, sight)
    expected = create_block_mask(lambda b, h, q, k: seen[q, k], None, None, *seen.shape, device="cpu")
    assert mask.shape == expected.shape
    for part in ("kv", "full_kv", "q", "full_q"):
        found, wanted = (getattr(m, f"{part}_num_blocks") for m in (mask, expected))
        assert torch.equal(found, wanted), part
        columns = torch.arange(getattr(mask, f"{part}_indices").shape[-1]) < wanted[..., None]
        found, wanted = (getattr(m, f"{part}_indices") for m in (mask, expected))
        assert torch.equal(found[columns], wanted[columns]), part
    q, k = torch.meshgrid(*(torch.arange(size) for size in seen.shape), indexing="ij")
    assert torch.equal(mask.mask_mod(q, q, q, k), seen)


def test_the_mask_of_a_batch_stays_small() -> None:
    """Eight sequences of 1,024 tokens with 512 anchors each, the shape of ``configs/qwen3_4b.yaml``."""
    sequence = torch.arange(8).repeat_interleave(512)
    zeros = torch.zeros(len(sequence), 7, dtype=torch.int64)
    blocks = Blocks(sequence, torch.arange(1, 513).repeat(8), zeros, zeros, zeros, zeros.bool())
    with LargestTensor() as largest:
        mask = FlexLayout.of(blocks, 8, 1024).mask
    assert mask.shape == (1, 1, 28_672, 36_864)
    assert largest.bytes < 2**20


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that an operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return made


def test_few_programs_serve_all_batches() -> None:
    """Counted by Dynamo, which would fall back to the eager form past its limit."""
    torch._dynamo.reset()
    programs = CompileCounter()
    attend = torch.compile(flex_attention, dynamic=True, backend=programs)
    for counts, length in [((40, 25), 200), ((41, 26), 210), ((70, 3, 9), 333), ((64, 64), 128), ((60,), 99),
                           ((1,), 50), ((2,), 60), ((18,), 128), ((90, 80, 70, 60), 64)]:  # fmt: skip
        for sight in (EVERYTHING, Sight(32, causal=True)):
            tensors, blocks, batch, length = case(4, 1, 0, counts, length)
            q, ck, _, bk, _ = (part.detach().float() for part in tensors)
            keys = torch.cat([ck.flatten(0, 1), bk.flatten(0, 1)]).transpose(0, 1)[None]
            mask = FlexLayout.of(blocks, batch, length, sight).mask
            attend(q.flatten(0, 1).transpose(0, 1)[None], keys, keys, block_mask=mask, enable_gqa=True)
    assert programs.frame_count <= 4
    flex._compiled()
    assert torch._dynamo.config.recompile_limit >= flex.RECOMPILATIONS
    torch._dynamo.reset()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
@pytest.mark.parametrize("counts", [(40, 0, 25), (9,), (1,)], ids=str)  # nine: fewer than 128 slots
@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_compiled_on_a_gpu_values_and_gradients_equal_the_dense_form(
    heads: int, kv_heads: int, counts: tuple[int, ...], sight: Sight
) -> None:
    tensors, blocks, batch, length = case(heads, kv_heads, 1, counts)
    tensors = tuple(
        torch.cat([part, part], dim=-1).float().detach().cuda().requires_grad_() for part in tensors
    )
    blocks = blocks.to("cuda")
    oracle = dense(*tensors, blocks, 0.3, sight)
    ours = flex_block_attention(*tensors, FlexLayout.of(blocks, batch, length, sight), 0.3)
    torch.testing.assert_close(ours, oracle, rtol=2e-3, atol=2e-3)
    weight = torch.randn_like(oracle)
    expected = torch.autograd.grad((oracle * weight).sum(), tensors)
    for one, two in zip(torch.autograd.grad((ours * weight).sum(), tensors), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=5e-3, atol=5e-3)
