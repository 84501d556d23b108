"""Drafts with Gemma 4's layers: the reference's own folders in and out, and a tiny target from training to serving."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from golden import FOLDER, GEMMA4, load_golden
from safetensors.torch import load_file, save_file
from tiny import TinyData, fit, tiny_module, tiny_trainer
from tiny_models import tiny_draft, tiny_model, tiny_target

from dspark_train.decoding.decoder import generate
from dspark_train.draft.initialise import initialise
from dspark_train.draft.linear_start import StartSamples, start_linearly
from dspark_train.draft.model import DSparkDraft, tensor_shapes
from dspark_train.draft.recipe import DraftRecipe, build_config
from dspark_train.errors import UserError
from dspark_train.interchange.detect import detect, read_draft
from dspark_train.interchange.export import TargetWeights, export_draft
from dspark_train.interchange.importing import import_folder, warm_start
from dspark_train.interchange.native import to_native
from dspark_train.interchange.verify import verify_folder

TAPS = (0, 1, 2)


@pytest.mark.parametrize("kind", GEMMA4)
def test_the_reference_s_folder_comes_out_as_it_went_in(kind: str) -> None:
    folder = FOLDER / kind / "checkpoint"
    assert detect(folder) == "native"
    config, tensors = to_native(read_draft(folder))
    reference = json.loads((folder / "config.json").read_text())
    rope = reference.pop("rope_parameters")
    for name in set(reference) - {"transformers_version"}:
        assert config[name] == reference[name], name
    kinds = ("full_attention", "sliding_attention")
    assert config["rope_parameters"] == {name: rope[name] for name in kinds}
    stored = load_file(folder / "model.safetensors")
    assert set(tensors) == set(stored)
    assert all(torch.equal(tensors[name], stored[name]) for name in stored)


@pytest.mark.parametrize("kind", GEMMA4)
def test_sizes_are_read_in_the_newer_form_too(kind: str, tmp_path: Path) -> None:
    """transformers 5.24 writes ``per_layer_config`` in place of the sizes of full-attention layers."""
    folder = tmp_path / "draft"
    shutil.copytree(FOLDER / kind / "checkpoint", folder)
    config = json.loads((folder / "config.json").read_text())
    own = {"head_dim": config.pop("global_head_dim")}
    heads = config.pop("num_global_key_value_heads")
    if config["attention_k_eq_v"]:
        own["num_key_value_heads"] = heads
    config["per_layer_config"] = {"0": own, "1": own}
    (folder / "config.json").write_text(json.dumps(config))
    golden, read = load_golden(kind), DSparkDraft.load(folder)
    outputs = [draft(golden.tensors["target_features"], golden.blocks) for draft in (golden.draft, read)]
    assert torch.equal(outputs[0].hidden, outputs[1].hidden)
    assert read_draft(folder).config["head_dim"] == 24


@pytest.mark.parametrize("family", GEMMA4)
def test_a_tiny_target_from_training_to_serving(family: str, tmp_path: Path) -> None:
    target = tiny_target(family, TAPS)
    with torch.no_grad():
        for layer in target.layers:
            layer.layer_scalar.fill_(0.8)
    module = tiny_module(head="vanilla")
    module.target = target
    fit(module, TinyData(), tiny_trainer(tmp_path, max_steps=5))
    draft = module.draft
    assert draft is not None
    assert draft.config.layer_family == "gemma4"
    assert (draft.layers[0].self_attn.v_proj is None) == (family == "gemma4_kv_shared")
    assert all(float(layer.layer_scalar) == 1.0 for layer in draft.layers)
    draft.layers[0].layer_scalar.fill_(0.5)  # a number that a reader must not leave out

    prompt = [5, 9, 11, 40] * 6
    speculative = generate(target, draft, [prompt], max_new_tokens=24, stop_token_ids=[])
    ids = torch.tensor([prompt])
    for _ in range(24):
        logits = target.model(input_ids=ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    assert speculative.tokens[0] == ids[0, len(prompt) :].tolist()

    weights = TargetWeights.of(target)
    for dtype in (torch.float32, torch.bfloat16):
        result = export_draft(draft, weights, tmp_path / str(dtype), dtype=dtype)
    assert result.read_back.drafts == 16
    assert result.config["architectures"] == ["Gemma4DSparkModel"]
    served = [engine for engine, problems in result.engines.items() if not problems]
    assert served == (["vllm"] if family == "gemma4_kv_shared" else [])
    read = transformers.AutoConfig.for_model(**result.config)
    assert isinstance(read, transformers.Gemma4TextConfig)
    assert read.per_layer_config[0].head_dim == 16
    assert read.per_layer_config[0].num_key_value_heads == draft.config.num_key_value_heads

    import_folder(tmp_path / str(torch.float32), tmp_path / "imported", target)
    back = DSparkDraft.load(tmp_path / "imported")
    assert {name: t.tolist() for name, t in back.state_dict().items() if name in draft.state_dict()} == {
        name: t.tolist() for name, t in draft.state_dict().items()
    }
    new = tiny_draft(target, intermediate_size=40)
    warm_start(new, tmp_path / "imported")
    assert float(new.layers[0].layer_scalar) == 0.5

    draft.save(tmp_path / "run")
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["global_head_dim"] == 16
    assert "layer_family" not in written
    again = DSparkDraft.load(tmp_path / "run")
    assert generate(
        target, again, [prompt], max_new_tokens=24, stop_token_ids=[]
    ).trace.proposed.tolist() == (speculative.trace.proposed.tolist())


@pytest.mark.parametrize("change", ["scalar", "rope", "cap", "scale"])
def test_reading_back_sees_every_part(change: str, tmp_path: Path) -> None:
    target = tiny_target("gemma4", TAPS)
    draft = tiny_draft(target)
    folder = export_draft(draft, TargetWeights.of(target), tmp_path / "draft", dtype=torch.float32).folder
    config, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    if change == "scalar":
        tensors["layers.0.layer_scalar"] = torch.tensor([0.5])
        save_file(tensors, folder / "model.safetensors")
    elif change == "rope":
        config["rope_parameters"]["full_attention"]["partial_rotary_factor"] = 1.0
    elif change == "cap":
        config["final_logit_softcapping"] = 3.0
    else:
        tensors["embed_tokens.weight"] *= draft.config.embedding_scale  # as other families fold it in
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="another draft"):
        verify_folder(
            folder, draft, target.embedding_weight.detach(), target.head_weight.detach(), torch.float32
        )


@pytest.mark.parametrize(
    ("layout", "words"),
    [("speculators", "Qwen3 layers"), ("dflash", "Qwen3 layers"), ("sglang", "no Gemma4")],
)
def test_other_layouts_are_refused(layout: Any, words: str, tmp_path: Path) -> None:
    target = tiny_target("gemma4", TAPS)
    with pytest.raises(UserError, match=words):
        export_draft(tiny_draft(target), TargetWeights.of(target), tmp_path / "draft", layout)
    assert not (tmp_path / "draft").exists()


def test_the_kind_of_layers_follows_the_target() -> None:
    dense, expert = tiny_model("gemma4").config, tiny_model("gemma4").config
    expert.enable_moe_block = True
    recipe = DraftRecipe(mask_token_id=96)
    config = build_config(recipe, dense, TAPS, embedding_scale=32**0.5)
    assert (config.layer_family, config.architectures) == ("gemma4", ["Gemma4DSparkModel"])
    assert config.target_text_config is not None
    assert config.target_text_config["head_dim"] == 8
    assert config.target_text_config["target_model_type"] == "gemma4"
    with pytest.raises(UserError, match="enable_moe_block True"):
        build_config(DraftRecipe(layers="gemma4"), expert, TAPS)
    with pytest.raises(UserError, match="model type llama"):
        build_config(DraftRecipe(layers="gemma4"), tiny_model("llama").config, TAPS)


def test_starting_points() -> None:
    target = tiny_target("gemma4", TAPS)
    draft = tiny_draft(target)
    initialise(draft, DraftRecipe(init="target_layers"), target)
    full = target.layers[1], target.layers[3]
    for layer, source in zip(draft.layers, full, strict=True):
        assert torch.equal(layer.self_attn.q_proj.weight, source.self_attn.q_proj.weight)
        assert torch.equal(layer.post_feedforward_layernorm.weight, source.post_feedforward_layernorm.weight)
    nothing = torch.zeros(0)
    with pytest.raises(UserError, match="init linear sets Qwen3 layers"):
        start_linearly(draft, StartSamples(nothing, nothing, nothing, nothing))
    three = tiny_draft(target, num_layers=3)
    with pytest.raises(UserError, match="only 2 layers of full attention"):
        initialise(three, DraftRecipe(init="target_layers"), target)


def test_the_papers_recipe() -> None:
    """Parameters counted by hand from the published sizes of Gemma 4 12B."""
    path = Path(__file__).parents[2] / "configs" / "gemma4_12b.yaml"
    written = yaml.safe_load(path.read_text())
    target = transformers.Gemma4UnifiedTextConfig(
        hidden_size=3840,
        intermediate_size=15360,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
    )
    taps = tuple(written["target"]["layer_ids"])
    config = build_config(DraftRecipe(**written["draft"]), target, taps, embedding_scale=3840**0.5)
    config.check()
    assert (config.head_dim, config.num_key_value_heads, config.vocab_size) == (512, 1, 262_144)
    sizes = {name: math.prod(shape) for name, shape in tensor_shapes(config).items()}
    own = sum(size for name, size in sizes.items() if name not in ("embed_tokens.weight", "lm_head.weight"))
    layer = 2 * 3840 * 8192 + 3840 * 512 + 3 * 3840 * 15360 + 4 * 3840 + 2 * 512 + 1
    heads = 2 * 262_144 * 256 + 3840 + 256 + 1
    assert own == 5 * layer + 5 * 3840 * 3840 + 2 * 3840 + heads
