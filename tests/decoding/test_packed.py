"""Packed linear layers: the same numbers, used only while they are active."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_target
from torch import nn

from dspark_train.decoding.cache import RowLayout
from dspark_train.decoding.packed import ROWS, packed_linears
from dspark_train.decoding.target_pass import TargetPass

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="packing is MKL's")


@pytest.mark.parametrize("rows", range(1, ROWS + 3))
def test_packed_passes_equal_plain_ones(rows: int) -> None:
    target = tiny_target()
    ids = torch.arange(5, 5 + rows)
    hidden = {}
    for kind in ("packed", "plain"):
        run = TargetPass(target, 2, 40, features=True)
        if kind == "plain":
            run._packed = None
        with torch.inference_mode(), run:
            run(torch.arange(40, 44), RowLayout([4], [0], CPU, first_slot=1))
            hidden[kind] = run(ids, RowLayout([rows], [4], CPU, first_slot=1))
    for mine, theirs in zip(hidden["packed"], hidden["plain"], strict=True):
        assert mine.shape[0] == rows
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_idle_rows_never_pass_the_end_of_a_buffer() -> None:
    target = tiny_target()
    with torch.inference_mode(), TargetPass(target, 1, 6, features=False) as run:
        hidden, _ = run(torch.arange(5, 10), RowLayout([5], [0], CPU))
    expected = target.states(torch.arange(5, 10)[None]).last_hidden[0]
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


def test_layers_are_as_before_afterwards() -> None:
    target = tiny_target()
    linears = [module for module in target.layers.modules() if isinstance(module, nn.Linear)]
    with TargetPass(target, 1, 8, features=False):
        assert all("forward" in vars(module) for module in linears)
    assert not any("forward" in vars(module) for module in linears)


def test_packing_is_done_once_and_again_when_weights_move() -> None:
    target = tiny_target()
    first = packed_linears(target)
    assert first is not None
    assert packed_linears(target) is first
    linear = next(module for module in target.layers.modules() if isinstance(module, nn.Linear))
    linear.weight.data = linear.weight.data.clone()
    assert packed_linears(target) is not first


def test_other_dtypes_are_left_alone() -> None:
    target = tiny_target()
    target.model.to(torch.bfloat16)
    assert packed_linears(target) is None
