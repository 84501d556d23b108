"""A step's FLOPs and bytes against what PyTorch counts on a tiny model, and against the measured table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from dspark_train.data.load import Load, distinct_positions, expected_load
from dspark_train.draft.attention import AttentionLayout
from dspark_train.draft.cost import activation_bytes, attention_flops, matrix_flops, trained_parameters
from dspark_train.draft.model import DSparkDraft
from dspark_train.draft.recipe import DraftRecipe, build_config
from dspark_train.structures import Blocks
from dspark_train.target.cost import TargetCost
from dspark_train.training.costs import StepCost
from dspark_train.training.objective import fused_objective, objective_flops
from dspark_train.training.zero_state import state_bytes

SEQUENCES, LENGTH, ANCHORS, GAMMA = 2, 25, 5, 4
LOAD = Load(SEQUENCES, SEQUENCES * LENGTH, SEQUENCES * ANCHORS, SEQUENCES * ANCHORS * GAMMA, 40)


def counted(run: Any) -> int:
    def product(_total: Any, a: Any, b: Any, **_: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: product}) as counter:
        run()
    return counter.get_total_flops()


def make_draft(head: str = "vanilla", layers: int = 2) -> DSparkDraft:
    target, rank = tiny.tiny_target(), 0 if head == "none" else 6
    recipe = DraftRecipe(
        layers, GAMMA, head=head, markov_rank=rank, confidence_with_markov=rank > 0, num_key_value_heads=4
    )
    return DSparkDraft(build_config(recipe, target.config, target.layer_ids), target=target)


def make_blocks() -> Blocks:
    """Anchors on both sides of the middle, so that slots see half of their sequence on average."""
    count = SEQUENCES * ANCHORS
    ids = torch.randint(0, tiny.VOCABULARY, (3, count, GAMMA))
    anchors = torch.tensor([8, 10, 12, 15, 17.5]).repeat(SEQUENCES).long()
    anchors[-1] += 1
    assert anchors.double().mean() == LENGTH / 2
    sequence = torch.arange(SEQUENCES).repeat_interleave(ANCHORS)
    return Blocks(sequence, anchors, ids[0], ids[1], ids[2], torch.ones(count, GAMMA, dtype=torch.bool))


def test_the_targets_matrices_are_counted() -> None:
    target = tiny.tiny_target()
    cost = TargetCost.of(target.model)
    ids = torch.randint(0, tiny.VOCABULARY, (SEQUENCES, LENGTH))
    products = counted(lambda: target.states(ids))  # PyTorch counts no fused attention on CPUs
    attention = 4 * SEQUENCES * LENGTH * LENGTH / 2 * 32 * 5
    assert cost.pass_flops(SEQUENCES * LENGTH, LENGTH) == products + attention
    assert cost.parameters == sum(p.numel() for p in target.model.parameters())


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_the_drafts_matrices_are_counted_forward_and_backward(head: str) -> None:
    draft, features = make_draft(head), torch.randn(SEQUENCES, LENGTH, 3 * 32)

    def run() -> None:
        output = draft(features, make_blocks())
        parts = [output.hidden, output.latent, output.confidence_logits]
        torch.stack([part.sum() for part in parts if part is not None]).sum().backward()

    assert matrix_flops(draft, LOAD) == counted(run)


def test_attention_is_counted_by_what_slots_see() -> None:
    draft = make_draft(layers=3)
    seen = int((AttentionLayout.of(make_blocks(), SEQUENCES, LENGTH).mask == 0).sum())
    assert attention_flops(draft, LOAD) == 3 * 7 * 2 * seen * 32


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("layers", [1, 4])
def test_activations_are_what_the_backward_pass_keeps(layers: int, mixed: bool) -> None:
    """Within a factor of two: what is kept differs with the kernels."""
    draft, features = make_draft(layers=layers), torch.randn(SEQUENCES, LENGTH, 3 * 32)
    own = {parameter.untyped_storage().data_ptr() for parameter in [*draft.parameters(), features]}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.shape not in shapes:
            kept[storage.data_ptr()] = storage
        return tensor

    shapes = {parameter.shape for parameter in draft.parameters()}
    shapes |= {shape[::-1] for shape in shapes}  # weights narrowed by autocast, transposed or not
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=mixed),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        output = draft(features, make_blocks())
    bytes_kept = sum(storage.nbytes() for storage in kept.values())
    assert output.hidden.requires_grad
    assert 0.5 < activation_bytes(draft, LOAD, 2 if mixed else 4) / bytes_kept < 2


@pytest.mark.parametrize("reduced", [None, 48])
@pytest.mark.parametrize("rank", [0, 8])
def test_the_objectives_products_are_counted(reduced: int | None, rank: int) -> None:
    rows, positions, size, vocabulary = 256, 128, 16, 96  # whole tiles
    hidden = torch.randn(rows, size, requires_grad=True)
    latent = torch.randn(rows, rank, requires_grad=True) if rank else None
    columns = reduced or vocabulary
    w2 = torch.randn(columns, rank, requires_grad=True) if rank else None
    head, ids = torch.randn(vocabulary, size), torch.arange(columns)

    def run() -> None:
        fused_objective(
            hidden, latent, w2, head[ids], head, torch.randn(positions, size),
            torch.arange(rows) // 2, torch.randint(0, columns, (rows,)), torch.full((rows,), 1 / rows),
            ce_coef=0.1, tv_coef=0.9, draft_token_ids=ids if reduced else None,
        ).loss.backward()  # fmt: skip

    assert objective_flops(rows, positions, size, rank, columns, vocabulary) == counted(run)


def test_a_cached_step_runs_no_target_and_no_normalisers() -> None:
    draft = make_draft()
    draft.config.draft_vocab_size = 40
    target = TargetCost.of(tiny.tiny_target().model)
    live, cached = (
        StepCost(target, draft, 0, True, 2, cached=cached).flops(LOAD) for cached in (False, True)
    )
    assert cached["target"] == 0 < live["target"]
    assert live["objective"] - cached["objective"] == 2 * 40 * 32 * tiny.VOCABULARY


def test_each_stage_shards_what_it_says() -> None:
    parts = [state_bytes(800, stage, 8, mixed=True) for stage in range(4)]
    assert parts == [(3200, 3200, 6400), (1600, 3200, 1200), (1600, 400, 1200), (200, 400, 1200)]
    assert state_bytes(800, 2, 8, mixed=False) == (3200, 400, 800)
    cost = StepCost(TargetCost.of(tiny.tiny_target().model), make_draft(), 0, True, 2)
    memory = cost.memory(LOAD, 1, 8)
    trained = trained_parameters(cost.draft)
    assert [memory[part] for part in ("weights", "gradients", "optimiser")] == [
        2 * trained, 4 * trained, 12 * trained // 8
    ]  # fmt: skip


def test_a_sharded_target_keeps_a_whole_layer() -> None:
    cost = TargetCost.of(tiny.tiny_target().model)
    rest = cost.parameters - cost.layer_parameters
    assert cost.weight_bytes(2) == 2 * cost.parameters
    assert cost.weight_bytes(2, 5) == 2 * (rest + 2 * cost.layer_parameters // 5)


def test_anchors_are_limited_by_the_answer() -> None:
    assert expected_load(2, 100, 0.5, 512, 7).blocks == 2 * 49
    assert expected_load(2, 5000, 0.5, 512, 7).blocks == 2 * 512
    assert distinct_positions(10**6, 50) == 50
    assert distinct_positions(1, 1e9) == 1


def measured_steps() -> list[tuple[dict[str, float], StepCost, Load]]:
    """Rows of the table that ``benchmarks/step.py`` wrote, beside what is expected of them."""
    text = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text()
    section = text[text.index("<!-- step -->") : text.index("<!-- /step -->")]
    with torch.device("meta"):
        config = LlamaConfig(
            vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    found = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not re.fullmatch(r"\d+ × \d+ × \d+", cells[1] if len(cells) > 1 else ""):
            continue
        sequences, length, anchors = map(int, cells[1].split(" × "))
        draft_config = build_config(DraftRecipe(2, 7, markov_rank=128), config, (1, 8, 15, 22, 28))
        if not cells[0].startswith("full vocabulary"):
            draft_config.draft_vocab_size = 7080
        with torch.device("meta"):
            draft = DSparkDraft(draft_config)
        cost = StepCost(
            TargetCost.of(model), draft, 192 * 2**20, mixed=True, target_item=2, cached="cached" in cells[0]
        )
        numbers = {"seconds": float(cells[2].split()[0]), "bytes": float(cells[-2].split()[0]) * 2**20}
        found.append((numbers, cost, expected_load(sequences, length, 0.75, anchors, 7)))
    return found


def test_the_estimates_follow_the_measured_steps() -> None:
    """Memory within a factor of 1.7 of the measured peak; all steps at about one rate, within a factor of 2.5."""
    steps = measured_steps()
    assert len(steps) == 8
    rates = []
    for measured, cost, load in steps:
        memory = cost.memory(load, 0, 1)
        moving = sum(value for name, value in memory.items() if name not in ("target", "weights"))
        assert 1 / 1.7 < moving / measured["bytes"] < 1.7
        rates.append(sum(cost.flops(load).values()) / measured["seconds"])
    assert max(rates) / min(rates) < 2.5
