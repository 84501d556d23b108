"""The plan's arithmetic against real models and hand-checked numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

from dspark_train.cli.plan import (
    GPUS,
    KNOWN_TARGETS,
    count_steps,
    make_plan,
    merge,
    plan,
    ranks_of,
    shape_of,
    stage_of,
)
from dspark_train.draft.model import DSparkDraft
from dspark_train.draft.recipe import DraftRecipe, build_config
from dspark_train.errors import UserError
from dspark_train.training.costs import Load, flops_of, load_of, memory_of

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("vocab_size", [None, 40])
def test_parameters_are_counted_exactly(head: Any, vocab_size: int | None) -> None:
    target = tiny.tiny_target()
    rank = 0 if head == "none" else 6
    recipe = DraftRecipe(
        num_layers=3,
        head=head,
        markov_rank=rank,
        confidence_with_markov=rank > 0,
        intermediate_size=24,
        mask_token_id=1,
    )
    config = build_config(recipe, target.config, target.layer_ids)
    config.draft_vocab_size = vocab_size
    draft = DSparkDraft(config)
    settings = {"draft": vars(recipe) | {"vocab_size": vocab_size}, "target": {"layer_ids": [0, 1, 3]}}
    shape = shape_of(settings, target.config.to_dict())
    assert shape.trained == sum(p.numel() for p in draft.parameters() if p.requires_grad)
    assert shape.frozen == sum(p.numel() for p in target.model.parameters())


def recipe_plan(*overlays: str, **changes: Any) -> Any:
    config: dict[str, Any] = {}
    for name in ("qwen3_4b", *overlays):
        config = merge(config, yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))
    return make_plan(merge(config, changes), KNOWN_TARGETS["Qwen/Qwen3-4B"], "h100", 1_300_000, 800.0, 0.6)


def test_the_papers_recipe() -> None:
    result = recipe_plan()
    assert result.ranks == 8
    assert result.accumulation == 512 // (8 * 8)
    assert result.steps == 10 * 2540
    assert 0.6e9 < result.shape.trained < 0.63e9
    assert 3.9e9 < result.shape.frozen < 4.1e9


def test_each_stage_shards_what_it_says() -> None:
    shape = recipe_plan().shape
    load = load_of(shape, 2, 800, 0.6, 512)
    n = shape.trained
    parts = [memory_of(shape, load, stage, 8, 0, mixed=True) for stage in range(4)]
    assert [part["weights"] for part in parts] == [4 * n, 2 * n, 2 * n, 2 * n // 8]
    assert [part["gradients"] for part in parts] == [4 * n, 2 * n, 2 * n // 8, 2 * n // 8]
    assert [part["optimiser"] for part in parts] == [8 * n, 12 * n // 8, 12 * n // 8, 12 * n // 8]
    assert memory_of(shape, load, 3, 8, 0, mixed=True, offload=True)["optimiser"] == 0
    assert recipe_plan("zero3_offload").memory["optimiser"] == 0


def test_the_objective_takes_target_rows_once_per_position() -> None:
    shape = recipe_plan().shape
    load = Load(sequences=1, tokens=100, blocks=10, rows=70, positions=25)
    head = 2.0 * shape.vocabulary
    expected = head * (70 * (2 * (2560 + 256) + 256) + 25 * 2560)
    assert flops_of(shape, load)["objective"] == pytest.approx(expected)
    assert flops_of(shape, load, cached=True)["target"] == 0


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    result = recipe_plan()
    limit = GPUS["h100"][1] * 1e9

    def taken(size: int) -> float:
        load = load_of(result.shape, size, 800.0, 0.6, 512)
        return 1.1 * sum(memory_of(result.shape, load, 0, 8, 192 * 2**20, mixed=True).values())

    assert taken(result.largest) < limit <= taken(result.largest + 1)


def test_anchors_are_limited_by_the_answer() -> None:
    shape = recipe_plan().shape
    assert load_of(shape, 2, 100, 0.5, 512).blocks == 2 * 49
    assert load_of(shape, 2, 5000, 0.5, 512).blocks == 2 * 512


def test_steps_epochs_and_limits() -> None:
    assert count_steps({"max_epochs": 3}, 100, 8) == (39, 3.0, [])
    assert count_steps({"max_steps": 20}, 100, 8)[0] == 20
    assert count_steps({"max_steps": 20, "max_epochs": 1}, 100, 8)[0] == 13
    assert count_steps({"max_steps": 20}, None, 8)[2]
    steps, epochs, (note,) = count_steps({"max_epochs": 3}, None, 8)
    assert (steps, epochs) == (375_000, 3.0)
    assert "1,000,000 training sequences assumed: give --samples" in note


def test_ranks_and_stages_are_read_from_the_trainer() -> None:
    assert ranks_of({"devices": [0, 3], "num_nodes": 2}) == 4
    assert ranks_of({"devices": "auto"}) == 8
    assert ranks_of({"devices": "auto", "accelerator": "cpu"}) == 1
    for stage in (1, 2, 3):
        overlay = yaml.safe_load((CONFIGS / f"zero{stage}.yaml").read_text())
        assert stage_of(overlay["trainer"]) == (stage, False)
    assert stage_of({"strategy": "ddp"}) == (0, False)


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="micro_batch_size × ranks = 7 × 8"):
        recipe_plan(data={"micro_batch_size": 7})
    with pytest.raises(UserError, match="no 'hidden_size'"):
        shape_of({}, {})
    with pytest.raises(UserError, match="there is no config"):
        plan([Path("absent.yaml")])
    with pytest.raises(UserError, match="gpu 'x' is not known"):
        make_plan({"data": {"global_batch_size": 8}, "trainer": {"max_steps": 1}},
                  KNOWN_TARGETS["Qwen/Qwen3-4B"], "x", 10, 100.0, 0.5)  # fmt: skip


def test_the_command_prints_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    plan([CONFIGS / "qwen3_8b.yaml", CONFIGS / "zero3.yaml"], gpu="h200", samples=1000, length=500.0)
    text = capsys.readouterr().out
    for word in (
        "trained parameters",
        "under ZeRO-3",
        "FLOPs per step",
        "optimiser steps",
        "h200",
        "largest",
    ):
        assert word in text
