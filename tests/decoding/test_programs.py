"""Passes of fixed shapes are the ragged ones, padded; compiled modules compute what they computed before."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, tiny_draft, tiny_target

from dspark_train.decoding.cache import RaggedCache, RaggedStep
from dspark_train.decoding.decoder import Decoder, generate
from dspark_train.decoding.layout import FixedLayout, RowLayout
from dspark_train.decoding.programs import (
    Programs,
    compiled,
    padded_reach,
    padded_requests,
    padded_rows,
)
from dspark_train.errors import UserError

CPU = torch.device("cpu")
PROMPTS = [[7], [8, 9, 10], [11, 12, 13, 14, 15, 16], [17, 18], [19] * 11]


@given(st.integers(1, 4096))
def test_sizes_hold_what_they_pad_and_waste_little(rows: int) -> None:
    assert rows <= padded_rows(rows) < rows + max(rows, 8) + 64 * (rows > 256)
    assert padded_rows(padded_rows(rows)) == padded_rows(rows)
    assert rows <= padded_requests(rows, 4096) < 2 * rows
    assert rows <= padded_reach(rows, 4096) < 2 * rows + 64
    assert len({padded_rows(other) for other in range(1, 257)}) == 4 + 31


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 70)), min_size=1, max_size=5),
    block=st.booleans(),
    window=st.sampled_from([None, 3, 50]),
    softcap=st.sampled_from([None, 4.0]),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fixed_shapes_attend_as_ragged_ones(
    rows: list[tuple[int, int]],
    block: bool,
    window: int | None,
    softcap: float | None,
    causal: bool,
    seed: int,
) -> None:
    """Same keys and values written, same states read, whatever was padded (float64)."""
    counts = [4 if block else count for count, _ in rows]
    ragged = RowLayout(counts, [start for _, start in rows], CPU, block=block)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    caches = [RaggedCache(6, 80), RaggedCache(7, 80)]
    history = random(6, 2, 128, 8), random(6, 2, 128, 8)
    for cache in caches:
        for buffer, old in zip(cache.buffers(0, history[0][0], history[1][0]), history, strict=True):
            buffer[:6] = old
    total = sum(counts)
    query, key, value = random(4, total, 8), random(2, total, 8), random(2, total, 8)
    expected = RaggedStep(caches[0], ragged).attend(0, query, key, value, 0.3, window, softcap, causal)

    fixed = Programs(6, CPU).place(ragged, 4, caches[1].length)
    padding = fixed.rows - total
    padded = [torch.cat([x, random(x.shape[0], padding, 8)], dim=1) for x in (query, key, value)]
    found = RaggedStep(caches[1], fixed).attend(0, *padded, 0.3, window, softcap, causal)
    rounding = 1e-12 if softcap is None else 1e-6  # soft-capped scores are normalised in float32
    torch.testing.assert_close(found[:total], expected, rtol=rounding, atol=rounding)
    assert bool(found.isfinite().all())
    for store in ("keys", "values"):
        assert torch.equal(getattr(caches[1], store)[0][:6], getattr(caches[0], store)[0])


def test_a_layout_keeps_its_buffers() -> None:
    """What a graph has captured is where it was, with the new round's numbers in it."""
    programs = Programs(4, CPU)
    first = programs.place(RowLayout([2, 3], [5, 9], CPU), 5, 128)
    before = {
        name: getattr(first, name).data_ptr() for name in ("slot", "position", "cell", "grid", "counts")
    }
    second = programs.place(RowLayout([1, 5], [7, 12], CPU), 5, 128)
    assert second is first
    assert {name: getattr(second, name).data_ptr() for name in before} == before
    assert second.position.tolist() == [7, 12, 13, 14, 15, 16, 0, 0]
    assert second.slot.tolist() == [0, 1, 1, 1, 1, 1, 4, 4]  # 4: the slot that no request owns


def test_inputs_are_copied_into_place_and_programs_reused() -> None:
    programs = Programs(4, CPU)
    seen: list[tuple[int, list[int]]] = []

    def function(values: torch.Tensor) -> tuple[torch.Tensor]:
        seen.append((values.data_ptr(), values.tolist()))
        return (values * 2,)

    for values in ([1, 2], [3, 4, 5]):
        (found,) = programs.run("double", 0, function, (torch.tensor(values), 4))
        assert found is not None
        assert found[: len(values)].tolist() == [2 * value for value in values]
    assert len(programs) == 1
    assert seen[0][0] == seen[1][0]
    programs.run("double", 1, function, (torch.tensor([1]), 4))
    assert len(programs) == 2


def test_few_programs_serve_many_rounds() -> None:
    target = tiny_target("llama", max_position_embeddings=64)
    decoder = Decoder(target, tiny_draft(target), graphs=True)
    run = decoder.start(3, 40, 0)
    with run, torch.inference_mode():
        run.join(decoder.requests(PROMPTS[:3], 20, [])[:3])
        for _ in range(8):
            run.round()
            run.leave()
    assert run.timings.rounds == 8
    assert run.programs is not None
    assert len(run.programs) <= 4 * 2  # target, context, draft, walk; twice where a request leaves


@pytest.mark.parametrize("rule", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}])
def test_sampling_draws_the_same(rule: dict[str, Any]) -> None:
    """As many rows of random numbers are drawn as requests run, where these are a power of two."""
    target = tiny_target("qwen3", max_position_embeddings=64)
    draft = tiny_draft(target, head="rnn")
    options: dict[str, Any] = {"max_new_tokens": 12, "batch_size": 1, "seed": 3, **rule}
    expected = generate(target, draft, PROMPTS, **options)
    assert generate(target, draft, PROMPTS, graphs=True, **options).tokens == expected.tokens


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_modules_decode_the_same() -> None:
    target = tiny_target("llama", max_position_embeddings=64)
    draft = tiny_draft(target)
    options: dict[str, Any] = {"max_new_tokens": 8, "batch_size": 2, "stop_token_ids": []}
    expected = generate(target, None, PROMPTS[:2], **options).tokens
    assert generate(target, draft, PROMPTS[:2], compile=True, **options).tokens == expected
    for owner in (target.model, draft):
        assert not any("forward" in vars(module) for module in owner.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_compiled(family: str) -> None:
    """Norms always; MLPs where their products are not packed for a CPU."""
    target = tiny_target(family, max_position_embeddings=64)
    with compiled(target.decoder) as names:
        kinds = {name.rsplit(".", 1)[-1] for name in names}
    assert {"norm", "input_layernorm", "mlp"} <= kinds
    for module in target.decoder.modules():
        if type(module) is torch.nn.Linear:
            module.forward = module.forward  # type: ignore[method-assign]
    with compiled(target.decoder) as names:
        assert not any(name.endswith("mlp") for name in names)
    for module in target.decoder.modules():
        vars(module).pop("forward", None)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    target = tiny_target("llama")
    with pytest.raises(UserError, match="no-such-compiler"):
        generate(target, tiny_draft(target), [[4]], compile=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_graphs_on_a_gpu(family: str, temperature: float) -> None:
    target = tiny_target(family, max_position_embeddings=64).to("cuda")
    draft = tiny_draft(target).to("cuda")
    options: dict[str, Any] = {"max_new_tokens": 16, "batch_size": 4, "temperature": temperature}
    expected = generate(target, draft, PROMPTS[:4], **options)
    found = generate(target, draft, PROMPTS[:4], graphs=True, **options)
    if temperature == 0:
        assert found.tokens == expected.tokens
    assert found.timings.rounds > 0


def test_scratch_slot_is_no_request() -> None:
    fixed = FixedLayout(8, 2, 4, 64, scratch=2, device=CPU, block=False)
    fixed.load(RowLayout([1], [3], CPU))
    assert fixed.slot.tolist() == [0] + [2] * 7
    assert fixed.counts.tolist() == [1, 0]
    mask = fixed.mask(None, torch.float32)
    assert mask is not None
    assert bool((mask[1] == 0).any(-1).all())  # a request of padding sees something: no NaN
