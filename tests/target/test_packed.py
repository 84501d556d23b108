"""Packed linear layers: the same numbers, used only while they are entered."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_target
from torch import nn

from dspark_train.decoding.layout import RowLayout
from dspark_train.decoding.target_pass import TargetPass
from dspark_train.machine import Choice
from dspark_train.target import packed
from dspark_train.target.packed import PackedLinears, has_bfloat16, packed_linears, packed_product

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="packing is FBGEMM's"
)


def half_target() -> nn.Module:
    """A tiny target in float32 whose weights are half-precision numbers."""
    target = tiny_target()
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.copy_(parameter.half().float())
    return target


PRODUCTS = given(
    rows=st.integers(1, 40) | st.sampled_from([33, 257, 2049]),
    out=st.integers(1, 40),
    size=st.integers(1, 70),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
"""Any small product."""


@PRODUCTS
@settings(deadline=None, max_examples=60)
def test_product_is_float32s(rows: int, out: int, size: int, bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, size, generator=generator).bfloat16().float()
    offset = torch.randn(out, generator=generator) if bias else None
    x = torch.randn(2, rows, size, generator=generator)[1:]
    product = packed_product(weight, offset)
    assert product is not None
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    # float32's rounding of sums of `size` terms, and not half precision's (1e-3)
    bound = 4 * 2.0**-24 * size * x.abs().max() * weight.abs().max() + 1e-6
    assert (product(x) - exact).abs().max() <= bound


@pytest.mark.parametrize(
    "spoil",
    [
        lambda weight: weight + 1e-4 * torch.randn_like(weight),
        lambda weight: weight * 1e6,
        lambda weight: weight * 1e-6,
        lambda weight: weight * float("nan"),
        lambda weight: weight.half(),
        lambda weight: weight[:, :0],
    ],
    ids=["full precision", "large", "small", "not a number", "half precision", "sharded away"],
)
def test_weights_that_would_change_stay(spoil) -> None:
    weight = torch.randn(24, 32).bfloat16().float()
    assert packed_product(weight) is not None
    assert packed_product(spoil(weight)) is None


fast_bfloat16 = pytest.mark.skipif(not has_bfloat16(), reason="this processor emulates bfloat16")
tiles = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="a row's bits are its own in tiles (AMX) only"
)


@fast_bfloat16
@PRODUCTS
@settings(deadline=None, max_examples=60)
def test_bfloat16_product_rounds_once(rows: int, out: int, size: int, bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, size, generator=generator).bfloat16()
    offset = torch.randn(out, generator=generator).bfloat16() if bias else None
    x = torch.randn(2, rows, size, generator=generator).bfloat16()[1:]
    product = packed_product(weight, offset)
    assert product is not None
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    got = product(x)
    assert got.dtype == torch.bfloat16
    # one rounding to bfloat16's eight bits, after a sum in float32
    assert ((got - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-18 * size).all()


@fast_bfloat16
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 30])
def test_rows_that_lie_apart_are_multiplied_alike(rows: int) -> None:
    """As in the first of each block's hidden states; padding is cut off again."""
    product = packed_product(torch.randn(24, 32).bfloat16())
    assert product is not None
    blocks = torch.randn(rows, 5, 32).bfloat16()
    apart = product(blocks[:, :1])
    assert apart.shape == (rows, 1, 24)
    assert torch.equal(apart, product(blocks[:, :1].contiguous()))


@tiles
@given(rows=st.integers(2, 32), out=st.sampled_from([192, 576, 1536]), size=st.sampled_from([64, 576, 1536]))
@settings(deadline=None, max_examples=25)
def test_a_row_does_not_depend_on_its_neighbours(rows: int, out: int, size: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    product = packed_product(torch.randn(out, size, generator=generator).bfloat16())
    assert product is not None
    x = torch.randn(rows, size, generator=generator).bfloat16()
    together = product(x)
    assert torch.equal(together, torch.cat([product(x[row : row + 1]) for row in range(rows)]))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=fast_bfloat16)])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_share_a_product(dtype: torch.dtype, bias: bool) -> None:
    sizes = {"q_proj": 12, "k_proj": 4, "v_proj": 4}
    owner = nn.ModuleDict({name: nn.Linear(8, out, bias=bias) for name, out in sizes.items()})
    owner = owner.bfloat16().to(dtype)
    x, y = torch.randn(2, 3, 8).to(dtype)
    expected = {name: (owner[name](x), owner[name](y)) for name in sizes}
    packed = PackedLinears(owner, groups=[tuple(sizes)])
    assert len(packed.shared) == 1
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    with packed:
        # in any order, one left out, one asked twice, inputs alternating
        for name, which in [
            ("k_proj", 0),
            ("v_proj", 0),
            ("q_proj", 1),
            ("q_proj", 0),
            ("q_proj", 0),
            ("v_proj", 1),
        ]:
            torch.testing.assert_close(owner[name]((x, y)[which]), expected[name][which], **tolerance)
        many = torch.randn(2049, 8).to(dtype)
        torch.testing.assert_close(
            owner["k_proj"](many), nn.functional.linear(many, *owner["k_proj"].parameters())
        )
    assert packed.shared[0].input is None
    assert packed.shared[0].outputs == {}


def test_neighbours_that_differ_stay_apart() -> None:
    odd = nn.ModuleDict({"gate_proj": nn.Linear(8, 4), "up_proj": nn.Linear(6, 4)}).bfloat16().float()
    assert PackedLinears(odd, groups=[("gate_proj", "up_proj")]).shared == []
    one_rounds = nn.ModuleDict({"gate_proj": nn.Linear(8, 4).bfloat16().float(), "up_proj": nn.Linear(8, 4)})
    packed = PackedLinears(one_rounds, groups=[("gate_proj", "up_proj")])
    assert packed.shared == []
    assert list(packed.forwards) == [one_rounds["gate_proj"]]


@tiles
@pytest.mark.parametrize("rows", [2, 6])
def test_bfloat16_verification_gives_plain_decodings_bits(rows: int) -> None:
    target = tiny_target()
    target.model.bfloat16()
    ids = torch.arange(5, 5 + 2 * rows)
    passes = []
    for width in (1, rows):
        with torch.inference_mode(), TargetPass(target, 1, 60, features=True) as run:
            run(torch.arange(40, 44), RowLayout([4], [0], CPU))
            starts = range(0, len(ids), width)
            hidden = [run(ids[at : at + width], RowLayout([width], [4 + at], CPU))[0] for at in starts]
            passes.append(target.lm_head(torch.cat(hidden)))
    assert torch.equal(*passes)


@pytest.mark.parametrize("rows", [1, 2, 6, 32, 33])
def test_packed_passes_equal_plain_ones(rows: int) -> None:
    target = half_target()
    ids = torch.arange(5, 5 + rows)
    with torch.inference_mode(), TargetPass(target, 2, 60, features=True) as run:
        run(torch.arange(40, 44), RowLayout([4], [0], CPU, first_slot=1))
        hidden, features = run(ids, RowLayout([rows], [4], CPU, first_slot=1))
        logits = target.lm_head(hidden)
    whole = target.states(torch.cat([torch.arange(40, 44), ids])[None])
    torch.testing.assert_close(hidden, whole.last_hidden[0, 4:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(features, whole.features[0, 4:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, target.lm_head(whole.last_hidden[0, 4:]), atol=1e-5, rtol=1e-5)


def test_layers_are_as_before_afterwards() -> None:
    target = half_target()
    linears = [module for module in target.model.modules() if isinstance(module, nn.Linear)]
    with TargetPass(target, 1, 8, features=False):
        assert all("forward" in vars(module) for module in linears)
    assert not any("forward" in vars(module) for module in linears)


def test_rows_up_to_which_packing_pays_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faked: the packed product wins up to 256 rows."""
    monkeypatch.setattr(packed, "_most", {})
    asked: list[str] = []

    def faked(purpose: str, forms: dict, seconds: float) -> Choice:
        asked.append(purpose)
        assert list(forms) == ["plain", "packed"]
        torch.testing.assert_close(forms["plain"](), forms["packed"]())
        return Choice(purpose, "packed" if " 256 rows" in purpose else "plain")

    monkeypatch.setattr(packed, "fastest", faked)
    assert packed.most_rows(torch.float32) == 256
    assert asked == ["products of 256 rows in float32", "products of 2,048 rows in float32"]
    packed.most_rows(torch.float32)
    assert len(asked) == 2


def test_a_target_whose_large_passes_are_packed_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_most", {torch.float32: 2**40})
    target = half_target()
    ids = torch.arange(40).reshape(2, 20)
    plain = target.states(ids)
    target.form = Choice("", "float32, packed")
    torch.testing.assert_close(target.states(ids).features, plain.features, atol=1e-5, rtol=1e-5)
    assert not any("forward" in vars(module) for module in target.model.modules())


def test_packing_is_done_once_and_again_when_weights_change() -> None:
    model = half_target().model
    first = packed_linears(model)
    assert packed_linears(model) is first
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    linear.weight.data = linear.weight.data.clone()
    second = packed_linears(model)
    assert second is not first
    with torch.no_grad():
        linear.weight.mul_(2)
    third = packed_linears(model)
    assert third is not second
    head = torch.ones(3, 4)
    assert packed_linears(model, head) is not third
    assert packed_linears(model, head) is packed_linears(model, head)
    with torch.no_grad():
        head.mul_(2)
    x = torch.ones(1, 4)
    assert packed_linears(model, head).head(x).tolist() == [[8.0] * 3]
