"""One gradient however the batch is cut, ZeRO equal to a single process, and checkpoints that fit every strategy.

All multi-rank runs happen in one launch of two worker processes; the tests read what they wrote.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from dspark_train.draft.model import DSparkDraft
from dspark_train.errors import UserError
from dspark_train.training.strategy import ZeroStrategy
from dspark_train.training.zero_state import load_optimizer_state

pytestmark = pytest.mark.end_to_end
WORKER = Path(__file__).parent / "worker.py"
ONE_STEP = {"max_steps": 1, "gradient_clip_val": None}
EMPTY = {"empty": list(range(0, 40, 2)), "global_batch_size": 8}
"""Half of the samples have no supervised token; with one sequence per micro-batch some passes have none at all."""
TEN = {"trainer": {"max_steps": 10}}
SAVING = {"checkpoint": {"every_n_steps": 5, "keep": 9}}


def gradient(
    name: str, micro: int, data: dict[str, Any] | None = None, strategy: str = "auto"
) -> dict[str, Any]:
    options = {"micro_batch_size": micro} | (data or {})
    return {"name": name, "gradient": True, "trainer": ONE_STEP, "data": options, "strategy": strategy}


SINGLE = [
    gradient("1x8", 8),
    gradient("4x2", 2),
    gradient("8x1", 1),
    gradient("1x8-empty", 8, EMPTY),
    gradient("8x1-empty", 1, EMPTY),
    {"name": "ten", **TEN, **SAVING, "export": "export-0"},
    {"name": "killed-alone", "again": True, **TEN, "checkpoint": {"every_n_steps": 2}},
    {"name": "summary", "strategy": "zero3", "trainer": {"max_steps": 1, "enable_model_summary": True}},
    gradient("zero2-4x2-one-rank", 2, None, "zero2"),
    {"name": "offload-one-rank", "strategy": "zero3-offload", **TEN},
    {
        "name": "bf16-one-rank",
        "strategy": "zero2",
        "trainer": {"max_steps": 100, "precision": "bf16-mixed"},
        "module": {"lr": 1e-4},
    },
]
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
IN_BF16 = {"max_steps": 1, "gradient_clip_val": None, "precision": "bf16-mixed"}


def in_bf16(strategy: str, kind: bool | str = True) -> dict[str, Any]:
    """Four micro-batches on each of two ranks."""
    name = f"{strategy}-bf16" + ("-constant" if kind == "constant" else "")
    return gradient(name, 1, None, strategy) | {"gradient": kind, "trainer": IN_BF16}


FOUR = {"data": {"micro_batch_size": 4}, **TEN}
PAIR = [
    *(gradient(f"{strategy}-{micro}", micro, None, strategy) for strategy in STRATEGIES for micro in (4, 2)),
    *(gradient(f"{strategy}-empty", 1, EMPTY, strategy) for strategy in ("ddp", "zero2", "zero3")),
    *(
        {
            "name": f"zero{stage}-ten",
            "strategy": f"zero{stage}",
            **FOUR,
            **SAVING,
            "export": f"export-{stage}",
        }
        for stage in (1, 2, 3)
    ),
    *(in_bf16(strategy, kind) for strategy in STRATEGIES for kind in (True, "constant")),
    {
        "name": "zero1-bf16-ten",
        "strategy": "zero1",
        "data": {"micro_batch_size": 4},
        "trainer": {"max_steps": 10, "precision": "bf16-mixed"},
        **SAVING,
    },
    {
        "name": "zero1-bf16-again",
        "strategy": "zero1",
        "resume": "zero1-bf16-ten/trainer/step=00000005.ckpt",
        "data": {"micro_batch_size": 4},
        "trainer": {"max_steps": 10, "precision": "bf16-mixed"},
    },
    {"name": "one-to-two", "strategy": "zero2", "resume": "ten/trainer/step=00000005.ckpt", **FOUR},
    {"name": "3-to-1", "strategy": "zero1", "resume": "zero3-ten/trainer/step=00000005.ckpt", **FOUR},
    {"name": "zero2-again", "strategy": "zero2", "resume": "zero2-ten/trainer/step=00000005.ckpt", **FOUR},
    {"name": "killed", "again": True, "strategy": "zero2", **FOUR, "checkpoint": {"every_n_steps": 2}},
    {"name": "features"},
    *(
        {
            "name": f"decoded-{'sharded' if sharded else 'whole'}",
            "strategy": "ddp",
            "sharded": sharded,
            "trainer": {"max_steps": 2, "limit_val_batches": 1, "val_check_interval": 2},
            "data": {"micro_batch_size": 4},
            "decode": {"prompts": 1 if sharded else 2, "max_new_tokens": 6, "seconds": 1e-6},
        }
        for sharded in (True, False)
    ),
    {"name": "2-to-3", "strategy": "zero3", "resume": "zero2-ten/trainer/step=00000005.ckpt", **FOUR},
]


def launch(folder: Path, jobs: list[dict[str, Any]], ranks: int) -> None:
    """Run the jobs in ``ranks`` processes and wait; a failure shows the output of every rank."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"jobs-{ranks}-{len(list(folder.glob('jobs-*')))}.json"
    path.write_text(json.dumps(jobs))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in range(ranks):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment |= {
            "WORLD_SIZE": str(ranks),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
        }
        with (folder / f"rank-{ranks}-{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(WORKER), str(path)], env=environment, stdout=log, stderr=log
                )
            )
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise AssertionError(
            "\n".join(log.read_text()[-4000:] for log in sorted(folder.glob(f"rank-{ranks}-*.log")))
        )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for jobs, name, ranks in ((SINGLE, "killed-alone", 1), (PAIR, "killed", 2)):
        doomed = next(job for job in jobs if job["name"] == name)
        with pytest.raises(AssertionError):
            launch(folder, [doomed | {"die_at": 7}], ranks)
        assert not (folder / f"{name}.pt").exists()
        launch(folder, jobs, ranks)
    return folder


def load(folder: Path, name: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(folder / f"{name}.pt")["state"]
    return state


def distance(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """Relative difference of two sets of tensors, over all of them."""
    assert one.keys() == two.keys()
    numerator = sum(float((one[name].double() - two[name].double()).square().sum()) for name in one)
    return (numerator / sum(float(value.double().square().sum()) for value in one.values())) ** 0.5


def largest(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    return max(float((one[name] - two[name]).abs().max()) for name in one)


@pytest.mark.parametrize("name", ["4x2", "8x1", "zero2-4x2-one-rank"] + [
    f"{strategy}-{micro}" for strategy in STRATEGIES for micro in (4, 2)
])  # fmt: skip
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(results: Path, name: str) -> None:
    """Uneven numbers of supervised slots; fp32."""
    assert distance(load(results, "1x8"), load(results, name)) < 1e-6


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_bf16_gradients_are_summed_in_fp32_under_zero(results: Path, stage: int) -> None:
    """One micro-batch of eight has a gradient of 1, the others 2⁻¹⁰: the same bits as DDP's."""
    plain, sharded = load(results, "ddp-bf16-constant"), load(results, f"zero{stage}-bf16-constant")
    assert all(torch.equal(plain[name], sharded[name]) for name in plain)
    moved = torch.cat([value.flatten() for value in plain.values()]).abs().median()
    assert abs(float(moved) / 1e4 - (1 + 7 * 2**-10) / 2) < 2e-4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_in_bf16_is_near_ddp_s(results: Path, stage: int) -> None:
    """Each micro-batch's gradient is rounded once (2⁻⁹ at most), and its pass runs on rounded weights."""
    plain, sharded = load(results, "ddp-bf16"), load(results, f"zero{stage}-bf16")
    assert distance(plain, sharded) < 1e-2


@pytest.mark.parametrize("name", ["8x1-empty", "ddp-empty", "zero2-empty", "zero3-empty"])
def test_passes_without_a_supervised_token_neither_hang_nor_shift_the_gradient(
    results: Path, name: str
) -> None:
    assert distance(load(results, "1x8-empty"), load(results, name)) < 1e-6


def test_a_mean_of_unequal_micro_batches_would_be_noticed(results: Path) -> None:
    """The two global batches of these tests do differ, so the comparisons above compare something."""
    assert distance(load(results, "1x8"), load(results, "1x8-empty")) > 1e-3


@pytest.mark.parametrize("name", ["zero1-ten", "zero2-ten", "zero3-ten", "offload-one-rank"])
def test_ten_steps_equal_a_single_process(results: Path, name: str) -> None:
    assert largest(load(results, "ten"), load(results, name)) < 1e-5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_export_is_complete_and_equals_the_one_without_zero(results: Path, stage: int) -> None:
    plain, sharded = (DSparkDraft.load(results / f"export-{number}") for number in (0, stage))
    one, two = (dict(draft.state_dict()) for draft in (plain, sharded))
    assert {name: value.shape for name, value in one.items()} == {
        name: value.shape for name, value in two.items()
    }
    assert all(value.numel() for value in two.values())
    assert largest(one, two) < 1e-5


def checkpoint(folder: Path, run: str, step: int) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(
        folder / run / "trainer" / f"step={step:08d}.ckpt", weights_only=False
    )
    return content


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_checkpoints_hold_whole_tensors_in_the_plain_form(results: Path, stage: int) -> None:
    plain, sharded = checkpoint(results, "ten", 10), checkpoint(results, f"zero{stage}-ten", 10)
    assert plain["state_dict"].keys() == sharded["state_dict"].keys()
    one, two = (part["optimizer_states"][0]["state"] for part in (plain, sharded))
    assert one.keys() == two.keys()
    for index, entry in one.items():
        assert float(entry["step"]) == float(two[index]["step"]) == 10
        for key in ("exp_avg", "exp_avg_sq"):
            scale = float(entry[key].abs().max()) + 1e-12
            assert float((entry[key] - two[index][key]).abs().max()) < 1e-3 * scale + 1e-9


def test_nothing_of_the_target_is_saved(results: Path) -> None:
    names = checkpoint(results, "zero3-ten", 10)["state_dict"]
    draft = DSparkDraft.load(results / "export-3")
    trained = {name for name, parameter in draft.named_parameters() if parameter.requires_grad}
    assert {name.removeprefix("draft.") for name in names} == trained


@pytest.mark.parametrize("name", ["one-to-two", "3-to-1", "2-to-3"])
def test_a_run_goes_on_with_more_ranks_or_under_another_stage(results: Path, name: str) -> None:
    """Weights and optimiser state: the second five steps end where an uninterrupted run ends."""
    assert largest(load(results, "ten"), load(results, name)) < 1e-5


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_goes_on_from_two_ranks_to_one(results: Path, tmp_path: Path, stage: int) -> None:
    path = results / f"zero{stage}-ten" / "trainer" / "step=00000005.ckpt"
    trainer = tiny.tiny_trainer(tmp_path, max_steps=10)
    module = tiny.fit(tiny.tiny_module(), tiny.TinyData(), trainer, ckpt_path=path, weights_only=False)
    assert largest(load(results, "ten"), tiny.weights_of(module)) < 1e-5


@pytest.mark.parametrize(
    ("name", "whole"),
    [("killed-alone", "ten"), ("killed", "zero2-ten"), ("zero2-again", "zero2-ten"),
     ("zero1-bf16-again", "zero1-bf16-ten")],
)  # fmt: skip
def test_killed_and_started_again_a_run_ends_with_the_same_bits(results: Path, name: str, whole: str) -> None:
    """SIGKILL in the middle of the eighth step: alone, and one of two ranks under ZeRO-2."""
    one, two = load(results, whole), load(results, name)
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sharded_target_gives_the_same_features(results: Path, rank: int) -> None:
    """Each rank has a batch of another shape, and holds half of the layers' weights."""
    found = json.loads((results / f"features-{rank}.json").read_text())
    assert found["features"]
    assert found["last_hidden"]
    assert found["logits"]
    assert found["share"] < 0.51
    assert found["identity"]  # so that both find the same feature cache


def test_with_a_sharded_target_all_ranks_decode_all_prompts_together(results: Path) -> None:
    """One prompt for two ranks, and no time: alone, a rank would wait for the other's passes for ever."""
    found, whole = (torch.load(results / f"decoded-{kind}.pt") for kind in ("sharded", "whole"))
    assert 1 <= found["logged"]["decode/tau"] <= 5
    assert found["logged"]["decode/divergences"] == 0
    assert largest(found["state"], whole["state"]) < 1e-5


def test_the_model_summary_survives_stage_3(results: Path) -> None:
    assert (results / "summary.pt").exists()


def test_bf16_keeps_fp32_masters_and_the_norms_move(results: Path) -> None:
    """A hundred steps at the usual rate: steps far below bf16's resolution near 1 must add up."""
    state = load(results, "bf16-one-rank")
    for name in ("layers.0.input_layernorm.weight", "hidden_norm.weight", "norm.weight"):
        moved = (state[name] - 1).abs()
        assert state[name].dtype == torch.float32
        assert float(moved.mean()) > 1e-3, name
        assert not torch.equal(state[name], state[name].bfloat16().float()), name


def test_bf16_mixed_without_zero_keeps_fp32_weights_that_move(tmp_path: Path) -> None:
    trainer = tiny.tiny_trainer(tmp_path, max_steps=100, precision="bf16-mixed")
    module = tiny.fit(tiny.tiny_module(lr=1e-4), tiny.TinyData(), trainer)
    state = tiny.weights_of(module)
    for name in ("layers.0.input_layernorm.weight", "hidden_norm.weight", "norm.weight"):
        assert state[name].dtype == torch.float32
        assert 1e-4 < float((state[name] - 1).abs().mean()) < 2e-2, name


def test_float_batch_tensors_are_not_rounded() -> None:
    from dspark_train.training.strategy import ExactPrecision

    batch = {"weight": torch.tensor([0.123456789])}
    assert ExactPrecision("bf16-mixed").convert_input(batch)["weight"].dtype == torch.float32


@pytest.mark.parametrize(
    "masters",
    ["single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat"],
)
@pytest.mark.parametrize("fused", [True, False])
def test_a_resumed_optimiser_has_its_step_count_where_it_wants_it(masters: str, fused: bool) -> None:
    """Beside the weights when fused (here the ``meta`` device stands for a GPU), on the CPU when not."""
    flat, group = torch.zeros(10, device="meta"), {"lr": 1.0, "fused": fused}
    inner = SimpleNamespace(param_groups=[dict(group)], state={})
    moments = {"exp_avg": torch.zeros(10), "exp_avg_sq": torch.zeros(10)}
    saved = {"param_groups": [group], "state": {0: {"step": torch.tensor(5.0), **moments}}}
    optimizer = SimpleNamespace(optimizer=inner, **{masters: [flat]})
    load_optimizer_state(torch.nn.Module(), optimizer, saved)
    found = {name: value.device.type for name, value in inner.state[flat].items()}
    assert found == {"step": "meta" if fused else "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_muon_under_zero_is_refused(tmp_path: Path) -> None:
    job = {"name": "muon", "strategy": "zero1", "module": {"optimizer": {"name": "muon"}}, **TEN}
    with pytest.raises(AssertionError, match="muon needs whole matrices, which ZeRO cuts apart"):
        launch(tmp_path, [job], 1)


def test_what_zero_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ZeRO stage 4"):
        ZeroStrategy(stage=4)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="offload_parameters needs ZeRO stage 3"):
        ZeroStrategy(stage=2, offload_parameters=True)
