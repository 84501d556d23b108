"""What is chosen follows what was measured, and stays chosen."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark_train import machine
from dspark_train.machine import Choice, LayerShape, fastest

SHAPE = LayerShape(64, 96, 4, 2, 16)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing chosen yet, and nothing that a test chooses outlives it."""
    monkeypatch.setattr(machine, "_decided", {})
    before = machine._ONEDNN.fp32_precision, torch.get_num_threads()
    monkeypatch.setattr(machine, "_tuned", [Choice("threads", str(before[1]))])
    yield
    machine._ONEDNN.fp32_precision = before[0]
    torch.set_num_threads(before[1])


class Clock:
    """A clock that only moves while a form runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(machine.time, "perf_counter", lambda: self.now)

    def form(self, *seconds: float) -> Any:
        """A form that takes these times in turn, the last one from then on."""
        left = list(seconds)

        def run() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


@pytest.mark.parametrize(
    ("plain", "other", "chosen"), [(3.0, 1.0, "bfloat16"), (1.0, 5.5, "float32"), (1.02, 1.0, "float32")]
)
def test_the_faster_form_is_taken(
    monkeypatch: pytest.MonkeyPatch, plain: float, other: float, chosen: str
) -> None:
    """The last case: a difference within the noise leaves the plain form."""
    clock = Clock(monkeypatch)
    choice = fastest("test", {"float32": clock.form(plain), "bfloat16": clock.form(other)}, seconds=10)
    assert choice.name == chosen
    assert choice.milliseconds == pytest.approx({"float32": 1000 * plain, "bfloat16": 1000 * other})


def test_a_disturbance_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    forms = {"a": clock.form(9, 8, 2.0), "b": clock.form(1, 7, 1.0)}
    assert fastest("test", forms, seconds=30).name == "b"


def test_a_hopeless_form_runs_twice_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(monkeypatch), []
    slow = clock.form(100.0)
    fastest("test", {"fast": clock.form(0.01), "slow": lambda: (calls.append(1), slow())}, seconds=1)
    assert len(calls) == 2


def test_dtypes_follow_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor's flags say."""
    for winner in ("float32", "bfloat16"):
        monkeypatch.setattr(machine, "_decided", {})
        monkeypatch.setattr(
            machine,
            "fastest",
            lambda purpose, forms, winner=winner: Choice(purpose, winner, dict.fromkeys(forms, 1.0)),
        )
        assert machine.choose_dtype("training", SHAPE, 64, backward=True).name == winner
        assert machine.choose_newton_schulz(64, 96).name == winner


def test_threads_that_someone_has_set_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the user, or by a launcher for its ranks; even where an earlier process chose others."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    machine.decide(Choice("threads", "64"))
    before = torch.get_num_threads()
    monkeypatch.setattr(machine, "_tuned", [])
    machine.tune()
    assert torch.get_num_threads() == before
    assert machine.decided()["threads"]["reason"] == "OMP_NUM_THREADS"


def test_choices_of_an_earlier_process_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    first = fastest("training", {"float32": clock.form(2.0), "bfloat16": clock.form(1.0)}, seconds=3)
    stored = json.loads(json.dumps(machine.decided()))
    monkeypatch.setattr(machine, "_decided", {})
    machine.remember(stored)
    again = fastest("training", {"float32": clock.form(1.0), "bfloat16": clock.form(9.0)}, seconds=3)
    assert again.name == first.name == "bfloat16"
    assert "2.0 times as fast as float32" in str(again)


@given(
    hidden=st.integers(8, 8192),
    most=st.integers(8, 4096),
    intermediate=st.integers(8, 30_000),
    heads=st.integers(1, 64),
)
def test_a_measured_pass_is_short(hidden: int, most: int, intermediate: int, heads: int) -> None:
    shape = LayerShape(hidden, intermediate, heads, heads, 64)
    rows = shape.rows_within(most)
    assert 8 <= rows <= most
    assert rows == 8 or 2 * rows * shape.parameters <= machine._FLOPS


def test_the_layer_runs_in_every_form() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert machine.layer_pass(SHAPE, 8, dtype)().shape == (8, 64)
        gradients = machine.layer_pass(SHAPE, 8, dtype, backward=True)()
        assert [gradient.dtype for gradient in gradients] == [torch.float32] * 5


def test_float32_products_stay_exact() -> None:
    """Whichever library computes them."""
    library = machine.choose_library()
    machine.set_onednn(library.name == "oneDNN")
    a, b = torch.randn(100, 300), torch.randn(300, 200)
    exact = a.double() @ b.double()
    assert ((a @ b).double() - exact).norm() < machine._EXACT * exact.norm()


def test_a_library_that_rounds_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As oneDNN does where the processor has units for bfloat16 tiles."""
    product = torch.Tensor.__matmul__

    def rounding(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rounds = machine._ONEDNN.fp32_precision == "bf16" and a.dtype == torch.float32
        return product(a.bfloat16(), b.bfloat16()).float() if rounds else product(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounding)
    choice = machine.choose_library()
    assert choice.name == "BLAS"
    assert "rounds" in choice.reason


def test_a_remembered_library_that_rounds_here_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen on another processor."""
    machine.decide(Choice("float32 products", "oneDNN", {"BLAS": 2.0, "oneDNN": 1.0}))
    assert machine.choose_library().name == "oneDNN" or "rounds" in machine.choose_library().reason
    monkeypatch.setattr(machine, "_EXACT", 0.0)
    machine.decide(Choice("float32 products", "oneDNN", {"BLAS": 2.0, "oneDNN": 1.0}))
    assert machine.choose_library().name == "BLAS"


def test_shapes_are_read_from_any_config() -> None:
    full = SimpleNamespace(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    assert LayerShape.of(full) == SHAPE
    assert LayerShape.of(SimpleNamespace(hidden_size=128)) == LayerShape(128, 512, 2, 2, 64)
    lists = SimpleNamespace(hidden_size=128, intermediate_size=[64, 256], num_key_value_heads=[1, 2])
    assert LayerShape.of(lists) == LayerShape(128, 256, 2, 2, 64)


def test_a_containers_quota_bounds_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    files = {"/sys/fs/cgroup/cpu.max": "200000 100000"}
    monkeypatch.setattr(machine, "_content", lambda path: files.get(path, ""))
    assert machine.usable_cores() == 2
    files["/sys/fs/cgroup/cpu.max"] = "max 100000"
    assert machine.usable_cores() == 64
    files |= {"/sys/fs/cgroup/memory.max": "5000000", "/sys/fs/cgroup/memory.current": "2000000"}
    assert machine.free_memory() == 3_000_000
    files["/sys/fs/cgroup/memory.stat"] = "anon 900000\ninactive_file 400000\nactive_file 100000"
    assert machine.free_memory() == 3_500_000
    files.clear()
    files |= {
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    files |= {
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "70",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "30",
    }
    assert (machine.usable_cores(), machine.free_memory()) == (3, 40)
