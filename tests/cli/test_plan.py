"""What ``plan`` says: the parameters of the draft that training builds, and the recipe as ``fit`` reads it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tiny_data import tiny_recipe
from tiny_models import tiny_model
from transformers import AutoConfig, Qwen3ForCausalLM

from dspark_train.cli.main import main
from dspark_train.cli.planning import KNOWN_TARGETS, plan, target_model
from dspark_train.cli.recipe import parse_recipe
from dspark_train.data.module import DSparkDataModule
from dspark_train.draft.recipe import DraftRecipe
from dspark_train.errors import UserError
from dspark_train.target.config import TargetConfig
from dspark_train.target.frozen import FrozenTarget
from dspark_train.training.module import DSparkModule
from dspark_train.training.optimizer import OptimizerConfig
from dspark_train.training.plan import GPUS, Plan, count_steps, fits, ranks_of, stage_of
from dspark_train.training.terms import ObjectiveConfig

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = {"qwen3_4b": 615_221_249, "qwen3_8b": 1_126_422_017, "qwen3_14b": 1_860_438_529}
"""Trained parameters, counted by hand from the paper's shapes."""
OVERLAYS = ["debug_profile", "feature_cache", "wandb", "zero1", "zero2", "zero3", "zero3_offload"]
KINDS = ["dflash", "eagle3"]
ON_THE_PAPERS_DATA = ["--gpu", "h100", "--samples", "1300000", "--length", "800"]


def plan_of(*names: str, flags: list[str] | None = None) -> Plan:
    configs = [word for name in names for word in ("--config", str(CONFIGS / f"{name}.yaml"))]
    return plan([*configs, *(flags or [])])


def built(arguments: list[str], target: FrozenTarget | None = None) -> int:
    """Trained parameters of the draft that ``fit`` would train."""
    config = parse_recipe(arguments).as_dict()
    data = DSparkDataModule(**config["data"])
    recipe = DraftRecipe(**(config["draft"] | {"init": "random"}))
    module = DSparkModule(TargetConfig(**config["target"]), recipe, ObjectiveConfig(), OptimizerConfig())
    module.target = target or FrozenTarget.load(module.target_config, "cpu")
    if recipe.vocab_coverage or recipe.vocab_size:
        data.tokenizer = module.target.tokenizer
        data.setup()
    module._trainer = SimpleNamespace(datamodule=data, ckpt_path=None)  # type: ignore[assignment]
    module.configure_model()
    return sum(parameter.numel() for parameter in module.draft.parameters() if parameter.requires_grad)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe beside a tiny target, with data."""
    folder = tmp_path_factory.mktemp("plan")
    settings = {**tiny_recipe(folder), "trainer": {"accelerator": "cpu", "max_steps": 6}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    return folder / "tiny.yaml"


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_shipped_config_is_known_here(name: str) -> None:
    others = [
        "quickstart",
        "debug_overfit",
        "sweep",
        "ablate_quickstart",
        "ablate_objectives",
        "compare_quickstart",
    ]
    assert name in [*RECIPES, *OVERLAYS, *KINDS, *others, "gemma4_12b"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_draft_plans_as_it_is_built(kind: str, recipe: Path) -> None:
    words = ["--config", str(recipe), "--config", str(CONFIGS / f"{kind}.yaml")]
    if kind == "eagle3":
        words += ["--draft.block_size", "3", "--draft.confidence_with_markov", "true"]
    target = FrozenTarget.load(TargetConfig(**parse_recipe(words).as_dict()["target"]), "cpu")
    assert plan(words).trained == built(words, target)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_plans_the_draft_that_is_built(name: str, tmp_path: Path) -> None:
    """Beside a target of the same family and depth, and narrow."""
    model = target_model(TargetConfig(f"Qwen/Qwen3-{name.removeprefix('qwen3_').upper()}"))
    config = model.config
    for key, value in {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
                       "intermediate_size": 40, "vocab_size": 97, "eos_token_id": 2}.items():  # fmt: skip
        setattr(config, key, value)
    config.save_pretrained(tmp_path)
    target = FrozenTarget(Qwen3ForCausalLM(config), parse_taps(name), name="narrow")
    flags = ["--config", str(CONFIGS / f"{name}.yaml"), "--draft.mask_token_id", "96"]
    found = plan([*flags, "--target_config", str(tmp_path / "config.json")])
    assert found.trained == built(flags, target)
    assert found.frozen == sum(p.numel() for p in target.model.parameters())


def parse_taps(name: str) -> list[int]:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["target"]["layer_ids"]


@pytest.mark.parametrize("name", RECIPES)
def test_the_papers_recipes(name: str) -> None:
    found = plan_of(name, flags=ON_THE_PAPERS_DATA)
    assert found.trained == RECIPES[name]
    assert found.ranks == 8
    assert found.accumulation == 512 // (found.load.sequences * 8)
    assert found.steps == 10 * 2540


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_lie_on_a_recipe(overlay: str) -> None:
    alone, over = plan_of("qwen3_4b"), plan_of("qwen3_4b", overlay)
    assert over.trained == alone.trained
    assert (over.stage > 0) == overlay.startswith("zero")
    assert (over.memory["optimiser"] == 0) == (overlay == "zero3_offload")
    assert (over.flops["target"] == 0) == (overlay == "feature_cache")
    assert over.steps == (12 if overlay == "debug_profile" else alone.steps)


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["quickstart", "debug_overfit"])
def test_the_embedded_targets_recipes_plan_the_draft_that_is_built(name: str) -> None:
    flags = ["--config", str(CONFIGS / f"{name}.yaml"), "--data.path", str(CONFIGS.parent / data_of(name))]
    found = plan(flags)
    assert found.trained == built(flags)
    assert not any("upper bound" in note or "assumed" in note for note in found.notes)


def data_of(name: str) -> str:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["data"]["path"]


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--draft.vocab_size", "40"],
        ["--draft.vocab_coverage", "0.9"],
        ["--draft.num_key_value_heads", "4", "--draft.intermediate_size", "24"],
        ["--draft.confidence_head", "false", "--target.layer_ids", "[0,2]"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_every_choice_counts(recipe: Path, head: str, flags: list[str]) -> None:
    words = ["--config", str(recipe), "--draft.head", head, *flags]
    if head == "none":
        words += ["--draft.markov_rank", "0", "--draft.confidence_with_markov", "false"]
    found = plan(words)
    assert found.trained == built(words)
    assert found.frozen == sum(p.numel() for p in tiny_model().parameters())


def test_a_vocabulary_that_the_data_decide_is_an_upper_bound_without_them(recipe: Path) -> None:
    words = ["--config", str(recipe), "--draft.vocab_coverage", "0.5"]
    known, bound = plan(words), plan([*words, "--data.path", "nowhere"])
    assert known.trained < bound.trained == plan([*words[:2], "--data.path", "nowhere"]).trained
    assert any("upper bounds" in note for note in bound.notes)
    assert not any("upper bounds" in note for note in known.notes)


def test_sequences_and_their_length_are_those_of_the_data(recipe: Path) -> None:
    words = ["--config", str(recipe)]
    data = DSparkDataModule(**parse_recipe(words).as_dict()["data"])
    target = TargetConfig(**parse_recipe(words).as_dict()["target"])
    data.tokenizer = FrozenTarget.load(target, "cpu").tokenizer
    lengths = data.store("train").lengths
    found = plan(words)
    assert found.load.tokens == round(2 * lengths.mean())
    assert found.epochs == round(6 / -(-len(lengths) // 4), 2)
    given = plan([*words, "--length", "50", "--samples", "8", "--answer_share", "0.1"])
    assert (given.load.tokens, given.load.blocks, given.epochs) == (100, 8, 3.0)


def test_the_prepared_set_is_read_without_a_tokenizer(recipe: Path, tmp_path: Path) -> None:
    words = ["--config", str(recipe)]
    first = plan(words)
    (folder,) = (recipe.parent / "cache").iterdir()
    settings = json.loads((recipe.parent / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings))
    again = plan([*words, "--data.path", str(folder), "--target.name_or_path", str(tmp_path)])
    assert (again.load, again.epochs) == (first.load, first.epochs)


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    found = plan_of("qwen3_4b", flags=ON_THE_PAPERS_DATA)
    limit = int(GPUS["h100"][1] * 1e9)
    assert found.largest is not None

    def fitting(size: int) -> bool:
        wider = plan_of(
            "qwen3_4b", flags=[*ON_THE_PAPERS_DATA, f"--data.micro_batch_size={size}",
                               f"--data.global_batch_size={8 * size}"]
        )  # fmt: skip
        return fits(wider.cost, wider.peak, wider.stage, wider.ranks, limit)

    assert fitting(found.largest)
    assert not fitting(found.largest + 1)


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data.micro_batch_size=7"], "micro_batch_size × ranks = 7 × 8"),
        (["--gpu=x"], "gpu 'x' is not known"),
        (["--draft.num_layer=3"], r"'draft.num_layer' \(did you mean 'draft.num_layers'"),
        (["--gpus=h100"], r"'gpus' \(did you mean 'gpu'"),
        (["--draft.head=lstm"], "draft.head"),
        (["--draft.head=none"], "head none needs markov_rank 0"),
        (["--target.layer_ids=[40]"], "target.layer_ids"),
        (["--config=absent.yaml"], "absent.yaml"),
        (["--run.options={decode: {polices: fixed}}"], "has no option 'polices'"),
    ],
)
def test_what_fit_refuses_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan_of("qwen3_4b", flags=words)


@pytest.mark.parametrize("content", ["{}", '{"model_type": "vit"}'])
def test_a_config_of_no_language_model_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"give --target_config|no causal language model"):
        plan_of("qwen3_4b", flags=["--target_config", str(tmp_path / "config.json")])


def test_known_targets_have_the_published_sizes() -> None:
    sizes = {"Qwen/Qwen3-4B": 4_022_468_096, "Qwen/Qwen3-8B": 8_190_735_360, "Qwen/Qwen3-14B": 14_768_307_200}
    for name in KNOWN_TARGETS:
        model = target_model(TargetConfig(name))
        assert sum(parameter.numel() for parameter in model.parameters()) == sizes[name]
        assert all(parameter.device == torch.device("meta") for parameter in model.parameters())


def test_a_length_costs_its_tokens_and_no_more_than_its_anchors() -> None:
    """Beyond the most anchors of a sequence, memory grows by states alone."""
    found = plan_of("qwen3_4b", flags=ON_THE_PAPERS_DATA)
    (short, _), (long, flops) = found.by_length[16_384], found.by_length[32_768]
    config, item = found.cost.draft.config, 2
    keys = 4 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    states = (
        found.cost.target.pass_bytes(1, len(config.layer_ids), item) + (keys + 3 * config.hidden_size) * item
    )
    assert long - short == pytest.approx(16_384 * states, rel=0.01)
    assert flops > 2 * found.by_length[16_384][1] * 0.9
    assert "one sequence of    1k" in str(found)


def test_experts_and_the_drafts_own_shape_are_counted(tmp_path: Path) -> None:
    """DeepSeek V3, as published: 671 B parameters, 37 B of them for each token."""
    AutoConfig.for_model("deepseek_v3").save_pretrained(tmp_path)
    flags = ["--target.name_or_path", "deepseek", "--target_config", str(tmp_path / "config.json")]
    flags += ["--target.layer_ids", "[1,15,29,43,58]", "--draft.sliding_window", "2048"]
    found = plan_of("qwen3_4b", flags=[*flags, "--draft.full_attention_layers", "[4]", "--draft.rope", YARN])
    assert found.frozen == 671_026_404_352
    assert found.cost.target.active == pytest.approx(37.5e9, rel=0.01)
    assert found.flops["target"] == pytest.approx(plan_tokens(found) * 2 * 37.5e9, rel=0.2)
    for said in (
        "5, hidden size 7,168, feed-forward 18,432 (silu)",
        "56 heads of 128, 8 of keys and values, rope theta 10,000 (yarn, factor 4.0",
        "2,048 positions in layers 0, 1, 2, 3, causal within a block",
        "671,026.4 M, 37,552.3 M per token",
    ):
        assert said in str(found)


YARN = "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 4096}"


def plan_tokens(found: Plan) -> float:
    return found.load.tokens * found.accumulation * found.ranks


def test_the_command_prints_every_part(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[Any] = ["--config", CONFIGS / "qwen3_8b.yaml", "--config", CONFIGS / "zero3.yaml"]
    words += ["--gpu", "h200", "--samples", "1000", "--length", "500"]
    monkeypatch.setattr(sys, "argv", ["dspark-train", "plan", *map(str, words)])
    main()
    text = capsys.readouterr().out
    for word in (
        "trained parameters",
        "under ZeRO-3",
        "by stage",
        "FLOPs per step",
        "optimiser steps",
        "h200",
        "feature cache",
        "largest",
    ):
        assert word in text


def test_help_names_its_own_options_and_those_of_fit(capsys: pytest.CaptureFixture[str]) -> None:
    from dspark_train.cli import plan as module

    module.main(["plan", "--help"])
    text = capsys.readouterr().out
    assert "every option of" in text
    assert "`fit` too" in text
    assert all(f"--{name}" in text for name in ("gpu", "samples", "length", "answer_share", "target_config"))


def machine_of(name: str) -> tuple[int, str]:
    """Number and kind of the GPUs that a recipe's header names."""
    text = (CONFIGS / f"{name}.yaml").read_text()
    found = re.search(r"^# Machine: (\d+) × ([\w-]+)", text, re.M)
    assert found is not None, f"{name}.yaml names no machine"
    return int(found[1]), found[2]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_the_machine_that_its_header_names(name: str) -> None:
    """In its longest micro-batch, all sequences of the maximum length, with a tenth to spare."""
    count, gpu = machine_of(name)
    found = plan_of(name, flags=["--gpu", gpu, "--trainer.devices", str(count)])
    assert found.peak.tokens == found.peak.sequences * 4096
    assert found.total_memory * 1.1 < GPUS[gpu][1] * 1e9
    assert (found.largest or 0) >= found.load.sequences


@pytest.mark.parametrize("overlay", ["zero1", "zero2", "zero3", "zero3_offload"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_machine_with_every_sharding_too(name: str, overlay: str) -> None:
    count, gpu = machine_of(name)
    found = plan_of(name, overlay, flags=["--gpu", gpu, "--trainer.devices", str(count)])
    assert found.total_memory * 1.1 < GPUS[gpu][1] * 1e9


def test_memory_is_that_of_the_longest_sequences_and_time_that_of_average_ones(recipe: Path) -> None:
    found = plan(["--config", str(recipe)])
    lengths = found.peak.length
    assert lengths > found.load.length
    assert found.memory == found.cost.memory(found.peak, found.stage, found.ranks)
