"""The fused objective against a plain float64 form: values, gradients, reduced vocabulary, soft-cap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_draft, tiny_target
from torch import Tensor

from dspark_train.errors import UserError
from dspark_train.training import objective as module
from dspark_train.training import row_kernel
from dspark_train.training.objective import fused_objective, target_logsumexp
from dspark_train.training.reference import row_losses
from dspark_train.training.row_kernel import row_terms


def plain(
    hidden: Tensor,
    latent: Tensor | None,
    w2: Tensor | None,
    draft_head: Tensor,
    target_head: Tensor,
    target_hidden: Tensor,
    target_row: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    ce_coef: float,
    tv_coef: float,
    softcap: float | None = None,
    draft_token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Everything materialised by the readable twin, differentiated by autograd."""

    def soften(logits: Tensor) -> Tensor:
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    bias = latent @ w2.T if latent is not None and w2 is not None else 0.0
    logits, target = soften(hidden @ draft_head.T) + bias, soften(target_hidden @ target_head.T)[target_row]
    ce, l1, _ = row_losses(logits, target, labels, draft_token_ids)
    return (weights * (ce_coef * ce + tv_coef * l1)).sum(), ce, l1


def case(
    rows: int = 23,
    d: int = 8,
    r: int | None = 4,
    V: int = 61,
    U: int | None = None,
    P: int = 9,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    head = normal(V, d)
    ids = None if U is None else torch.randperm(V, generator=generator)[:U].sort().values
    return {
        "hidden": normal(rows, d).requires_grad_(),
        "latent": None if r is None else normal(rows, r).requires_grad_(),
        "w2": None if r is None else normal(V if U is None else U, r).requires_grad_(),
        "draft_head": head if ids is None else head[ids],
        "target_head": head,
        "target_hidden": normal(P, d),
        "target_row": torch.randint(0, P, (rows,), generator=generator),
        "labels": torch.randint(0, V, (rows,), generator=generator),
        "weights": torch.rand(rows, generator=generator, dtype=torch.float64).to(dtype),
        "draft_token_ids": ids,
        "ce_coef": 0.3,
        "tv_coef": 0.7,
    }


def gradients(loss: Tensor, inputs: dict[str, Any]) -> list[Tensor]:
    leaves = [inputs[name] for name in ("hidden", "latent", "w2") if inputs[name] is not None]
    return list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("U", [None, 17])
@pytest.mark.parametrize("r", [4, None])
def test_equals_the_plain_form_in_float64(softcap: float | None, U: int | None, r: int | None) -> None:
    inputs = case(r=r, U=U) | {"softcap": softcap}
    fused = fused_objective(**inputs, memory_budget_bytes=1)
    loss, ce, l1 = plain(**inputs)
    torch.testing.assert_close(fused.loss, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fused.ce, ce.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(fused.l1, l1.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(fused.accept, 1 - 0.5 * l1.detach(), rtol=1e-11, atol=1e-12)
    for ours, oracle in zip(gradients(fused.loss, inputs), gradients(loss, inputs), strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("U", [None, 17])
def test_gradcheck(U: int | None) -> None:
    inputs = case(rows=5, U=U, V=23) | {"softcap": 3.0}

    def loss(hidden: Tensor, latent: Tensor, w2: Tensor) -> Tensor:
        return fused_objective(**(inputs | {"hidden": hidden, "latent": latent, "w2": w2})).loss

    assert torch.autograd.gradcheck(loss, (inputs["hidden"], inputs["latent"], inputs["w2"]))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 70),
    P=st.integers(1, 20),
    V=st.integers(2, 40),
    seed=st.integers(0, 99),
    reduced=st.booleans(),
    budget=st.sampled_from([1, 10_000, 10_000_000]),
)
def test_any_cut_into_chunks_gives_the_same(
    rows: int, P: int, V: int, seed: int, reduced: bool, budget: int
) -> None:
    inputs = case(rows=rows, P=P, V=V, U=max(1, V // 2) if reduced else None, seed=seed)
    fused = fused_objective(**inputs, memory_budget_bytes=budget)
    loss, ce, _ = plain(**inputs)
    torch.testing.assert_close(fused.loss, loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fused.ce, ce.detach(), rtol=1e-9, atol=1e-10)
    for ours, oracle in zip(gradients(fused.loss, inputs), gradients(loss, inputs), strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-9, atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 70), P=st.integers(1, 20), seed=st.integers(0, 99), shared=st.integers(1, 20))
def test_chunks_that_share_a_product_of_target_logits_give_the_same(
    rows: int, P: int, seed: int, shared: int
) -> None:
    """As on a GPU; no position's logits are computed more than twice, and few products are made."""
    inputs, products, product = case(rows=rows, P=P, seed=seed), [], torch.mm
    head = inputs["target_head"] = inputs["target_head"].clone()

    def recorded(left: Tensor, right: Tensor, **options: Any) -> Tensor:
        if right.data_ptr() == head.data_ptr():
            products.append(left.shape[0])
        return product(left, right, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Chunking, "of", lambda *_: module.Chunking(4, shared))
        patch.setattr(module, "_tile", lambda *_: 1)
        patch.setattr(torch, "mm", recorded)
        fused = fused_objective(**inputs)
    loss, ce, _ = plain(**inputs)
    torch.testing.assert_close(fused.ce, ce.detach(), rtol=1e-9, atol=1e-10)
    for ours, oracle in zip(gradients(fused.loss, inputs), gradients(loss, inputs), strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-9, atol=1e-11)
    positions = len(inputs["target_row"].unique())
    assert sum(products) <= positions + len(products) - 1
    if shared >= positions:
        assert len(products) == 1


def test_a_gpu_s_chunks_fill_its_budget_and_are_few() -> None:
    """A micro-batch of the recipe for Qwen3-4B: 8 sequences × 512 blocks × 7 slots, 90 chunks with a CPU's budget."""
    vocabulary, rows = 151_936, 8 * 512 * 7
    options = {"accurate": torch.float32, "softcap": None, "ce_coef": 0.1, "tv_coef": 0.9, "gradient": True}
    options["others"] = row_kernel.OtherCoefficients()
    settings = row_kernel.ObjectiveSettings(
        dtype=torch.bfloat16,
        budget=module.default_budget("cuda"),
        **options,  # type: ignore[arg-type]
    )
    cut = module.Chunking.of(settings, vocabulary, "cuda")
    used = (2 * cut.rows + cut.positions) * vocabulary * 2
    assert 0.9 * settings.budget < used <= settings.budget
    assert -(-rows // cut.rows) <= 12
    assert cut.positions > 1_000


def test_products_come_in_few_sizes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN compiles a kernel for every size, which costs several times the product."""
    sizes, product = set(), torch.mm

    def recorded(left: Tensor, right: Tensor, **options: Any) -> Tensor:
        sizes.add(left.shape[0])
        return product(left, right, **options)

    monkeypatch.setattr(torch, "mm", recorded)
    for rows in range(260, 340):
        fused_objective(**case(rows=rows, P=rows - 160, r=None, seed=rows), memory_budget_bytes=2**20)
    assert len(sizes) <= 16
    assert all(size % 16 == 0 for size in sizes)


def test_many_small_inner_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache blocks that cut through a position's rows, and vocabulary tiles of W2's gradient."""
    monkeypatch.setattr(row_kernel, "_CACHE_ELEMENTS", 1)
    monkeypatch.setattr(module, "_VOCABULARY_TILE", 7)
    inputs = case(rows=40, P=3, dtype=torch.float32)
    fused = fused_objective(**inputs, memory_budget_bytes=1)
    loss, _, _ = plain(**inputs)
    for ours, oracle in zip(gradients(fused.loss, inputs), gradients(loss, inputs), strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
@pytest.mark.parametrize("reduced", [False, True])
def test_trains_on_the_logits_that_decoding_uses(family: str, reduced: bool) -> None:
    """The logits behind the loss are those of :meth:`DSparkDraft.logits`, soft-capped families included."""
    ids = torch.arange(0, 97, 2) if reduced else None
    target = tiny_target(family)
    draft = tiny_draft(target, token_ids=ids)
    assert (
        draft.config.final_logit_softcapping == target.logit_softcap == (10.0 if family == "gemma3" else None)
    )
    generator = torch.Generator().manual_seed(1)
    hidden = 3.0 * torch.randn(11, 32, generator=generator)
    latent = 3.0 * torch.randn(11, 8, generator=generator)
    labels = 2 * torch.randint(0, 48, (11,), generator=generator)
    sums = fused_objective(
        hidden,
        latent,
        draft.markov_head.markov_w2.weight,
        draft.head_weight,
        target.head_weight,
        torch.randn(11, 32, generator=generator),
        torch.arange(11),
        labels,
        torch.ones(11),
        ce_coef=1.0,
        tv_coef=0.0,
        softcap=target.logit_softcap,
        draft_token_ids=ids,
    )
    column = labels if ids is None else labels // 2
    expected = torch.nn.functional.cross_entropy(draft.logits(hidden, latent), column, reduction="none")
    torch.testing.assert_close(sums.ce, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("U", [None, 17])
@pytest.mark.parametrize("gradient", [True, False])
def test_compiled_formula_equals_the_in_cache_form(
    U: int | None, gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function that GPUs compile, run eagerly in place of the CPU's passes."""
    inputs = case(U=U) | {"softcap": 2.0}
    if not gradient:
        inputs = {k: v.detach() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    expected = fused_objective(**inputs)

    def formula(self: Any, *arguments: Any) -> Any:
        settings = self.settings
        return row_terms(*arguments, settings.gradient, settings.softcap, settings.others)

    monkeypatch.setattr(row_kernel.RowKernel, "_in_cache", formula)
    other = fused_objective(**inputs)
    torch.testing.assert_close(other.loss, expected.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(other.ce, expected.ce, rtol=1e-12, atol=1e-12)
    if gradient:
        for ours, oracle in zip(gradients(other.loss, inputs), gradients(expected.loss, inputs), strict=True):
            torch.testing.assert_close(ours, oracle, rtol=1e-11, atol=1e-13)


def test_a_cached_normaliser_replaces_the_full_target_head() -> None:
    inputs = case(U=17) | {"softcap": 2.5}
    fresh = fused_objective(**inputs)
    known = target_logsumexp(inputs["target_hidden"], inputs["target_head"], softcap=2.5)
    reduced_head = inputs["target_head"][inputs["draft_token_ids"]]
    cached = fused_objective(**(inputs | {"target_head": reduced_head}), target_logsumexp=known)
    assert torch.equal(fresh.loss, cached.loss)
    for ours, oracle in zip(gradients(cached.loss, inputs), gradients(fresh.loss, inputs), strict=True):
        assert torch.equal(ours, oracle)


def test_logsumexp_over_the_full_vocabulary() -> None:
    inputs = case()
    ours = target_logsumexp(inputs["target_hidden"], inputs["target_head"], memory_budget_bytes=1)
    oracle = (inputs["target_hidden"] @ inputs["target_head"].T).logsumexp(-1)
    torch.testing.assert_close(ours, oracle, rtol=1e-13, atol=1e-13)


def test_a_draft_equal_to_its_target_is_always_accepted() -> None:
    inputs = case(r=None)
    inputs["hidden"] = inputs["target_hidden"][inputs["target_row"]].clone().requires_grad_()
    sums = fused_objective(**inputs)
    torch.testing.assert_close(sums.accept, torch.ones_like(sums.accept))


def test_disjoint_distributions_are_never_accepted() -> None:
    inputs = case(rows=2, d=2, V=2, P=1, r=None)
    inputs |= {
        "draft_head": torch.tensor([[60.0, 0.0], [0.0, 60.0]], dtype=torch.float64),
        "target_head": torch.tensor([[60.0, 0.0], [0.0, 60.0]], dtype=torch.float64),
        "hidden": torch.tensor([[1.0, 0.0]] * 2, dtype=torch.float64),
        "target_hidden": torch.tensor([[0.0, 1.0]], dtype=torch.float64),
        "labels": torch.tensor([1, 1]),
    }
    sums = fused_objective(**inputs)
    torch.testing.assert_close(sums.l1, torch.full((2,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(sums.ce, torch.full((2,), 60.0, dtype=torch.float64))


def test_cross_entropy_survives_underflow_in_float32() -> None:
    """A label 200 nats below the maximum: its probability is 0 in fp32, its cross entropy is not infinite."""
    head = torch.tensor([[200.0], [0.0]])
    inputs = case(rows=1, d=1, V=2, P=1, r=None, dtype=torch.float32)
    inputs |= {"hidden": torch.ones(1, 1), "draft_head": head, "target_head": head}
    inputs["labels"] = torch.tensor([1])
    torch.testing.assert_close(fused_objective(**inputs).ce, torch.tensor([200.0]))


def test_no_rows_give_a_zero_that_can_be_differentiated() -> None:
    """A rank without any supervised token still takes part in the backward pass."""
    inputs = case(rows=1)
    for name in ("hidden", "latent"):
        inputs[name] = inputs[name].detach()[:0].requires_grad_()
    for name in ("target_row", "labels", "weights"):
        inputs[name] = inputs[name][:0]
    sums = fused_objective(**inputs)
    assert sums.loss.item() == 0.0
    assert sums.ce.shape == (0,)
    hidden, latent, w2 = gradients(sums.loss, inputs)
    assert hidden.shape == (0, 8)
    assert latent.shape == (0, 4)
    assert not w2.any()


def test_order_of_rows_does_not_matter() -> None:
    inputs = case()
    shuffle = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    names = ("hidden", "latent", "target_row", "labels", "weights")
    shuffled = inputs | {k: inputs[k][shuffle] for k in names}
    one, two = fused_objective(**inputs), fused_objective(**shuffled)
    torch.testing.assert_close(one.ce[shuffle], two.ce)
    torch.testing.assert_close(one.l1[shuffle], two.l1)


def test_bf16_error_is_bounded_by_the_naive_bf16_error() -> None:
    """Against float64, on the same bf16-rounded inputs: at most 1.5 times the error of the plain form."""
    exact = case(rows=200, d=64, r=16, V=997, P=60)
    rounded = {
        k: v.detach().to(torch.bfloat16) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in exact.items()
    }
    for name in ("hidden", "latent", "w2", "draft_head", "target_head", "target_hidden"):
        rounded[name] = rounded[name] * 0.2

    def cast(dtype: torch.dtype) -> dict[str, Any]:
        return {
            k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
            for k, v in rounded.items()
        }

    oracle, single = cast(torch.float64), cast(torch.float32)
    for group in (oracle, single):
        group["weights"] = group["weights"] / 200
        for name in ("hidden", "latent", "w2"):
            group[name].requires_grad_()
    truth = gradients(plain(**oracle)[0], oracle)
    with torch.autocast("cpu", torch.bfloat16):
        naive = gradients(plain(**single)[0], single)
        ours = gradients(fused_objective(**single).loss, single)
    for name, a, b, t in zip(("hidden", "latent", "w2"), ours, naive, truth, strict=True):
        ours_error, naive_error = (x.double().sub(t).norm() / t.norm() for x in (a, b))
        assert ours_error <= 1.5 * naive_error + 1e-4, (name, float(ours_error), float(naive_error))
        assert a.dtype == torch.float32


def test_nothing_of_the_size_of_the_logits_is_kept() -> None:
    """Between forward and backward only the three gradients are held."""
    inputs = case(rows=64, V=4099, dtype=torch.float32)
    sums = fused_objective(**inputs)
    function = sums.loss.grad_fn
    assert function is not None
    held = sum(t.numel() for t in function.saved_tensors)
    assert held == sum(inputs[name].numel() for name in ("hidden", "latent", "w2"))


def test_evaluation_computes_no_gradient() -> None:
    inputs = case()
    with torch.no_grad():
        sums = fused_objective(**inputs)
    assert not sums.loss.requires_grad
    torch.testing.assert_close(sums.loss, fused_objective(**inputs).loss.detach())


def test_vocabulary_rows_beyond_the_tokenizer_count_as_the_target_counts_them() -> None:
    """Padding rows of the head are part of the target's softmax, here as there."""
    inputs = case(r=None, V=64)
    inputs["labels"] = inputs["labels"].clamp(max=49)
    fused, (loss, _, _) = fused_objective(**inputs), plain(**inputs)
    torch.testing.assert_close(fused.loss, loss)


def test_float16_is_refused_by_name() -> None:
    inputs = case(dtype=torch.float16)
    with pytest.raises(UserError, match="bf16-mixed"):
        fused_objective(**inputs)


def test_a_reduced_head_without_its_token_ids_is_refused() -> None:
    inputs = case(U=17) | {"draft_token_ids": None}
    inputs["labels"] = inputs["labels"].clamp(max=16)
    with pytest.raises(ValueError, match="draft_token_ids"):
        fused_objective(**inputs)


@pytest.mark.parametrize("U", [None, 20])
@pytest.mark.parametrize(
    "others",
    [{"soft_ce": 0.7}, {"reverse_kl": 0.6}, {"lk": 0.5}, {"soft_ce": 0.2, "reverse_kl": 0.3, "lk": 0.4}],
)
def test_terms_beside_the_papers_equal_their_plain_forms(others: dict[str, float], U: int | None) -> None:
    """Values and gradients, alone and together with the paper's terms; float64, in several chunks."""
    inputs = case(U=U)
    kinds = row_kernel.OtherCoefficients(**others)
    found = fused_objective(**inputs, others=kinds, memory_budget_bytes=4096)
    mine = gradients(found.loss, inputs)

    def soften(logits: Tensor) -> Tensor:
        cap = inputs.get("softcap")
        return logits if cap is None else cap * torch.tanh(logits / cap)

    draft = soften(inputs["hidden"] @ inputs["draft_head"].T)
    if inputs["latent"] is not None:
        draft = draft + inputs["latent"] @ inputs["w2"].T
    target = soften(inputs["target_hidden"] @ inputs["target_head"].T)[inputs["target_row"]]
    ids = inputs.get("draft_token_ids")
    ce, l1, _ = row_losses(draft, target, inputs["labels"], ids)
    log_p, log_q = draft.log_softmax(-1), target.log_softmax(-1)
    log_q = log_q if ids is None else log_q[:, ids]
    soft = -(log_q.exp() * log_p).sum(-1)
    reverse = (log_p.exp() * (log_p - log_q)).sum(-1)
    rows = inputs["ce_coef"] * ce + inputs["tv_coef"] * l1 + kinds.soft_ce * soft + kinds.reverse_kl * reverse
    rows = rows - kinds.lk * (1 - l1 / 2).log()
    loss = (inputs["weights"] * rows).sum()
    torch.testing.assert_close(found.loss, loss)
    for one, other in zip(mine, gradients(loss, inputs), strict=True):
        torch.testing.assert_close(one, other)
    if kinds.soft_ce:
        torch.testing.assert_close(found.soft_ce, soft)
    if kinds.reverse_kl:
        torch.testing.assert_close(found.reverse_kl, reverse)
