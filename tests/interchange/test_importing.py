"""Drafts made elsewhere: detected, checked against the target, completed, compared; and as a start for training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_train.draft.config import Sight
from dspark_train.draft.model import DSparkDraft
from dspark_train.errors import UserError
from dspark_train.interchange.detect import detect, read_draft
from dspark_train.interchange.export import TargetWeights, export_draft
from dspark_train.interchange.importing import import_folder, warm_start
from dspark_train.interchange.readback import PlainDraft
from dspark_train.target.frozen import FrozenTarget

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"


def as_specforge(native: Path, folder: Path, **nested: Any) -> Path:
    """Rewrite a native folder as SpecForge writes it: nested fields, older rope keys, no embedding and no head."""
    raw = json.loads((native / "config.json").read_text())
    fields = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    inner = {
        name: raw.pop(name) for name in (*fields, "enable_confidence_head", "confidence_head_with_markov")
    }
    raw["dflash_config"] = {"projector_type": "dspark", **inner, **nested}
    raw |= {"architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}}
    raw |= {"rope_scaling": None}
    for name in ("rope_parameters", "sample_from_anchor"):
        raw.pop(name)
    return write(folder, raw, native, drop=("embed_tokens", "lm_head"))


def as_zlab_dflash(native: Path, folder: Path) -> Path:
    """Rewrite a native folder as a published DFlash draft: anchor-conditioned, no heads."""
    raw = json.loads((native / "config.json").read_text())
    raw["dflash_config"] = {name: raw.pop(name) for name in ("mask_token_id", "target_layer_ids")}
    raw |= {"architectures": ["DFlashDraftModel"], "block_size": raw["block_size"] + 1}
    for name in list(raw):
        if name.startswith(("markov", "confidence", "enable_confidence", "sample_from", "sliding")):
            raw.pop(name)
    return write(folder, raw, native, drop=("embed_tokens", "lm_head", "markov_head", "confidence_head"))


def write(folder: Path, raw: dict[str, Any], native: Path, drop: tuple[str, ...]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(native / "model.safetensors")
    save_file(
        {name: t for name, t in tensors.items() if not name.startswith(drop)}, folder / "model.safetensors"
    )
    return folder


@pytest.fixture
def native(make_draft: Callable[..., DSparkDraft], target_weights: TargetWeights, tmp_path: Path) -> Path:
    export_draft(make_draft("vanilla"), target_weights, tmp_path / "native")
    return tmp_path / "native"


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "parallel"])
def test_reference_checkpoints_are_native(kind: str) -> None:
    assert detect(GOLDEN / kind / "checkpoint") == "native"
    checkpoint = read_draft(GOLDEN / kind / "checkpoint")
    assert checkpoint.config["target_layer_ids"] == [0, 2, 4]
    assert checkpoint.config["markov_head_type"] == ("none" if kind == "parallel" else kind)
    assert checkpoint.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}


def test_a_default_draft_of_speculators_comes_in_with_its_window(
    make_draft: Callable[..., DSparkDraft],
    target: FrozenTarget,
    target_weights: TargetWeights,
    tmp_path: Path,
) -> None:
    """A window in every layer, causal within a block, and nothing said of causality."""
    export_draft(make_draft("vanilla"), target_weights, tmp_path / "source", "speculators")
    path = tmp_path / "source" / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("sliding_window_non_causal")
    raw["transformer_layer_config"] |= {
        "layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 2048
    }  # fmt: skip
    path.write_text(json.dumps(raw))
    imported = import_folder(tmp_path / "source", tmp_path / "in", target)
    assert imported.read_back is not None
    assert DSparkDraft.load(tmp_path / "in").config.sights == (Sight(2048, causal=True),) * 2


def test_dflash_drafts_may_ask_for_windows_in_their_own_way(native: Path, tmp_path: Path) -> None:
    source = as_zlab_dflash(native, tmp_path / "dflash")
    path = source / "config.json"
    raw = json.loads(path.read_text())
    raw["dflash_config"] |= {"use_swa": True, "swa_window_size": 16}
    path.write_text(json.dumps(raw))
    config = read_draft(source).config
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert (config["sliding_window"], config["sliding_window_non_causal"]) == (16, True)


def test_specforge_drafts_come_in_without_running_their_code(
    native: Path, target: FrozenTarget, tmp_path: Path
) -> None:
    source = as_specforge(native, tmp_path / "specforge")
    (source / "dspark.py").write_text("raise SystemExit('ran')")
    result = import_folder(source, tmp_path / "in", target)
    assert result.layout == "specforge"
    assert result.read_back is not None
    assert any("auto_map" in note for note in result.notes)
    assert any("embed_tokens.weight is not in the folder" in note for note in result.notes)
    imported, original = (
        load_file(tmp_path / "in" / "model.safetensors"),
        load_file(native / "model.safetensors"),
    )
    assert set(imported) == set(original)
    assert all(torch.equal(imported[name], original[name]) for name in original)


def test_published_dflash_drafts_are_a_start_only(native: Path, target: FrozenTarget, tmp_path: Path) -> None:
    source = as_zlab_dflash(native, tmp_path / "dflash")
    result = import_folder(source, tmp_path / "in", target)
    assert result.layout == "dflash"
    assert result.read_back is None
    assert any("--model.init_from" in note for note in result.notes)
    assert any("block_size 5 counts the anchor: 4 draft tokens" in note for note in result.notes)
    with pytest.raises(UserError, match="sample_from_anchor"):
        DSparkDraft.load(tmp_path / "in")
    with pytest.raises(UserError, match="their own positions"):
        PlainDraft(source, target.embedding_weight, target.head_weight)


@pytest.mark.parametrize("stated", [True, False, None])
def test_both_slot_layouts_of_speculators_are_told_apart(
    make_draft: Callable[..., DSparkDraft],
    target: FrozenTarget,
    target_weights: TargetWeights,
    tmp_path: Path,
    stated: bool | None,
) -> None:
    folder = tmp_path / "spec"
    export_draft(make_draft("vanilla", 20), target_weights, folder, "speculators")
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("sample_from_anchor")
    if stated is not None:
        raw["sample_from_anchor"] = stated
    (folder / "config.json").write_text(json.dumps(raw))
    result = import_folder(folder, tmp_path / "in", target) if stated is not None else None
    checkpoint = read_draft(folder)
    assert checkpoint.config["sample_from_anchor"] is (stated is not False)
    assert checkpoint.config["block_size"] == (3 if stated is False else 4)
    assert any("vLLM takes it as false" in note for note in checkpoint.notes) is (stated is None)
    if result is not None:
        assert (result.read_back is None) is (not stated)
        assert any("num_target_layers 4" in note for note in result.notes)


def test_a_draft_for_another_target_is_refused_with_every_reason(
    native: Path, make_target: Callable[..., FrozenTarget], tmp_path: Path
) -> None:
    other = make_target("llama", vocab_size=60, num_hidden_layers=6)
    with pytest.raises(UserError, match=r"vocab_size 53 .* 60.*num_target_layers 4 .* 6"):
        import_folder(native, tmp_path / "in", other)
    assert not (tmp_path / "in").exists()


def test_a_draft_of_a_same_shaped_target_is_found_out_by_its_copies(
    native: Path, make_target: Callable[..., FrozenTarget], tmp_path: Path
) -> None:
    other = make_target("llama")
    with pytest.raises(UserError, match=r"(embed_tokens|lm_head)\.weight of the draft differs"):
        import_folder(native, tmp_path / "in", other)


def test_an_import_that_fails_the_comparison_leaves_nothing(
    native: Path, target: FrozenTarget, tmp_path: Path, sabotage: Callable[[Any, str], None]
) -> None:
    from dspark_train.interchange import importing

    sabotage(importing, "layers.0.mlp.up_proj.weight")
    with pytest.raises(UserError, match="gives another draft"):
        import_folder(native, tmp_path / "in", target)
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_frozen_copies_are_nan_until_they_are_loaded(
    make_draft: Callable[..., DSparkDraft], native: Path
) -> None:
    new = DSparkDraft(make_draft("vanilla").config)
    for name, value in new.named_parameters():
        frozen = name in ("embed_tokens.weight", "lm_head.weight")
        assert bool(value.isnan().all() if frozen else value.isfinite().all()), name
    assert all(bool(value.isfinite().all()) for value in DSparkDraft.load(native).parameters())


def test_missing_rope_settings_come_from_the_target(
    native: Path, target: FrozenTarget, tmp_path: Path
) -> None:
    path = native / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("rope_parameters"), raw.pop("rope_theta")
    path.write_text(json.dumps(raw))
    assert read_draft(native).config["rope_parameters"] is None
    result = import_folder(native, tmp_path / "in", target)
    assert any("filled in the rope settings from the target" in note for note in result.notes)
    written = json.loads((tmp_path / "in" / "config.json").read_text())
    assert written["rope_theta"] == target.config.rope_parameters["rope_theta"]


# -- warm start -----------------------------------------------------------------------------------------------------


def parameters(draft: DSparkDraft) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in draft.named_parameters()}


def test_dflash_gives_the_backbone_and_leaves_the_heads_new(
    native: Path, make_draft: Callable[..., DSparkDraft], tmp_path: Path
) -> None:
    source = as_zlab_dflash(native, tmp_path / "dflash")
    draft = make_draft("gated", block_size=6)
    draft.fc.weight.data.zero_()
    before = parameters(draft)
    report = warm_start(draft, source)
    stored, after = load_file(source / "model.safetensors"), parameters(draft)
    assert set(report.fresh) == {
        name for name in before if name.startswith(("markov_head", "confidence_head"))
    }
    assert set(report.copied) | set(report.fresh) == set(before)
    assert all(torch.equal(after[name], stored[name]) for name in report.copied)
    assert all(torch.equal(after[name], before[name]) for name in report.fresh)
    assert any("learn to predict the next ones" in note for note in report.notes)
    assert any("block_size was 4, is 6" in note for note in report.notes)


def test_the_same_kind_of_draft_is_taken_whole(native: Path, make_draft: Callable[..., DSparkDraft]) -> None:
    draft = make_draft("vanilla")
    for parameter in draft.parameters():
        parameter.data.zero_()
    report = warm_start(draft, native)
    assert report.fresh == []
    stored = load_file(native / "model.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in parameters(draft).items())


def test_specforge_drafts_are_a_start_too(
    native: Path, make_draft: Callable[..., DSparkDraft], tmp_path: Path
) -> None:
    source = as_specforge(native, tmp_path / "specforge")
    draft = make_draft("vanilla")
    for parameter in draft.parameters():
        parameter.data.zero_()
    report = warm_start(draft, source)
    assert (report.layout, report.fresh) == ("specforge", [])
    stored = load_file(source / "model.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in parameters(draft).items())


def test_other_rope_settings_are_said(native: Path, make_draft: Callable[..., DSparkDraft]) -> None:
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    report = warm_start(make_draft("vanilla", rope_parameters=linear), native)
    assert any("rope settings were" in note and "'factor': 4.0" in note for note in report.notes)
    assert not any("rope" in note for note in warm_start(make_draft("vanilla"), native).notes)


def test_rows_of_another_vocabulary_are_copied_by_token(
    make_draft: Callable[..., DSparkDraft], target_weights: TargetWeights, tmp_path: Path
) -> None:
    source = make_draft("vanilla", 20)
    export_draft(source, target_weights, tmp_path / "spec", "speculators")
    draft = make_draft("vanilla", 30)
    warm_start(draft, tmp_path / "spec")
    theirs = dict(zip(source.draft_token_ids.tolist(), source.markov_head.markov_w2.weight.data, strict=True))
    for token, row in zip(
        draft.draft_token_ids.tolist(), draft.markov_head.markov_w2.weight.data, strict=True
    ):
        assert torch.equal(row, theirs.get(token, torch.zeros(8)))


def test_a_head_of_another_kind_stays_new(native: Path, make_draft: Callable[..., DSparkDraft]) -> None:
    draft = make_draft("rnn")
    before = parameters(draft)
    report = warm_start(draft, native)
    assert any(name == "markov_head.markov_w1.weight" for name in report.fresh)
    assert all(torch.equal(parameters(draft)[name], before[name]) for name in report.fresh)
    assert "new: confidence_head, markov_head" in report.notes


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_layer_ids": [0, 1]}, r"target_layer_ids \[0, 2\] \(this run: \[0, 1\]\)"),
        ({"num_hidden_layers": 1}, r"num_hidden_layers 2 \(this run: 1\)"),
        ({"intermediate_size": 40}, r"intermediate_size 48 \(this run: 40\)"),
    ],
)
def test_a_backbone_of_another_shape_is_refused(
    native: Path, make_draft: Callable[..., DSparkDraft], fields: dict[str, Any], said: str
) -> None:
    draft = make_draft("vanilla", **fields)
    before = parameters(draft)
    with pytest.raises(UserError, match=said):
        warm_start(draft, native)
    assert all(torch.equal(parameters(draft)[name], before[name]) for name in before)


def test_a_source_with_nan_is_refused(native: Path, make_draft: Callable[..., DSparkDraft]) -> None:
    tensors = load_file(native / "model.safetensors")
    tensors["layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, native / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight missing or not finite"):
        warm_start(make_draft("vanilla"), native)
