"""Every layout, head and vocabulary out and in again: weights, logits, confidences and greedy drafts unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_train.draft.model import DSparkDraft
from dspark_train.errors import UserError
from dspark_train.interchange.detect import read_draft
from dspark_train.interchange.engines import ExportFormat
from dspark_train.interchange.export import TargetWeights, export_draft
from dspark_train.interchange.importing import import_folder
from dspark_train.interchange.readback import PlainDraft, rope_frequencies
from dspark_train.structures import Blocks, DraftOutput
from dspark_train.target.frozen import FrozenTarget

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"
ALLOWED = [
    ("vanilla", None, "native"),
    ("vanilla", None, "speculators"),
    ("vanilla", None, "sglang"),
    ("vanilla", 20, "native"),
    ("vanilla", 20, "speculators"),
    ("gated", None, "native"),
    ("gated", 20, "sglang"),
    ("rnn", None, "sglang"),
    ("rnn", 20, "native"),
    ("none", None, "native"),
    ("none", 20, "speculators"),
    ("none", None, "dflash"),
]
"""Head, draft vocabulary, layout."""


def passes(draft: DSparkDraft) -> tuple[torch.Tensor, DraftOutput]:
    """Logits and outputs on two fixed blocks."""
    generator = torch.Generator().manual_seed(11)
    config = draft.config
    features = torch.randn(1, 12, len(config.layer_ids) * config.hidden_size, generator=generator)
    labels = torch.randint(config.vocab_size, (2, config.block_size + 1), generator=generator)
    slots = torch.full((2, config.block_size), config.mask_token_id)
    slots[:, 0] = labels[:, 0]
    blocks = Blocks(
        sequence=torch.zeros(2, dtype=torch.int64),
        anchor=torch.tensor([3, 9]),
        slot_ids=slots,
        labels=labels[:, 1:],
        previous=labels[:, :-1],
        supervised=torch.ones_like(slots, dtype=torch.bool),
    )
    with torch.no_grad():
        output = draft(features, blocks)
        return draft.logits(output.hidden, output.latent), output


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "parallel", "gemma4", "gemma4_kv_shared"])
def test_the_independent_reader_agrees_with_the_reference_implementation(kind: str) -> None:
    folder = GOLDEN / kind
    plain = PlainDraft(folder / "checkpoint")
    inputs, decoded = (
        load_file(folder / "train_forward.safetensors"),
        load_file(folder / "decode.safetensors"),
    )
    for number, expected in enumerate(json.loads((folder / "expected.json").read_text())["decode_rounds"]):
        context = inputs["target_features"][0, : expected["context_rows"][1]]
        found = plain.propose(context, expected["anchor_token"], expected["anchor_position"])
        assert found.tokens.tolist() == expected["greedy_draft"]
        torch.testing.assert_close(found.hidden, decoded[f"hidden_{number}"][0], rtol=0, atol=1e-4)
        confidence = decoded[f"confidence_logits_{number}"][0]
        torch.testing.assert_close(found.confidence_logits, confidence, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("head", "reduced", "layout"), ALLOWED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_and_import_give_the_same_draft(
    make_draft: Callable[..., DSparkDraft],
    target: FrozenTarget,
    target_weights: TargetWeights,
    tmp_path: Path,
    head: str,
    reduced: int | None,
    layout: ExportFormat,
    dtype: torch.dtype,
) -> None:
    draft = make_draft(head, reduced)
    result = export_draft(draft, target_weights, tmp_path / "out", layout, dtype)
    assert result.read_back.drafts == 16
    assert result.read_back.logits < 1e-5
    assert read_draft(tmp_path / "out").config["dtype"] == str(dtype).removeprefix("torch.")
    if dtype != torch.float32:
        return
    import_folder(tmp_path / "out", tmp_path / "in", target)
    loaded = DSparkDraft.load(tmp_path / "in")
    loaded.borrow(target)
    (before, original), (after, returned) = passes(draft), passes(loaded.eval())
    assert torch.equal(original.hidden, returned.hidden)
    ids = draft.draft_token_ids
    folded = reduced is not None and layout != "speculators"
    if not folded:
        assert torch.equal(before, after)
    else:
        assert ids is not None
        torch.testing.assert_close(after[..., ids], before, rtol=0, atol=1e-5)
        assert torch.equal(after.argmax(-1), ids[before.argmax(-1)])
        outside = torch.ones(draft.config.vocab_size, dtype=torch.bool).index_fill(0, ids, False)
        assert float(after[..., outside].max()) < -1000
    if layout == "dflash":
        assert returned.confidence_logits is None
    else:
        torch.testing.assert_close(returned.confidence_logits, original.confidence_logits, rtol=0, atol=1e-6)


FAMILIES: list[tuple[str, dict[str, Any], tuple[ExportFormat, ...]]] = [
    ("llama", {"tie_word_embeddings": True}, ("native", "speculators", "sglang")),
    ("mistral", {"sliding_window": None}, ("native", "speculators", "sglang")),
    ("qwen3", {"tie_word_embeddings": True}, ("native", "speculators", "sglang")),
    (
        "gemma2",
        {"tie_word_embeddings": True, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 32},
        ("native",),
    ),
    ("gemma3", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}, ("native", "speculators")),
]
"""Family of the target, its settings, and the layouts that hold its drafts."""


@pytest.mark.parametrize(("family", "settings", "layouts"), FAMILIES, ids=[name for name, *_ in FAMILIES])
def test_drafts_of_every_family_come_back_exactly(
    make_target: Callable[..., FrozenTarget],
    make_draft: Callable[..., DSparkDraft],
    tmp_path: Path,
    family: str,
    settings: dict[str, Any],
    layouts: tuple[ExportFormat, ...],
) -> None:
    target = make_target(family, **settings)
    draft = make_draft(
        "vanilla",
        of=target,
        embedding_scale=target.embedding_scale,
        final_logit_softcapping=target.logit_softcap,
    )
    (before, original) = passes(draft)
    for layout in layouts:
        export_draft(draft, TargetWeights.of(target), tmp_path / layout, layout)
        import_folder(tmp_path / layout, tmp_path / f"{layout}-in", target)
        loaded = DSparkDraft.load(tmp_path / f"{layout}-in")
        loaded.borrow(target)
        (after, returned) = passes(loaded.eval())
        assert torch.equal(before, after)
        assert torch.equal(original.hidden, returned.hidden)
        assert original.confidence_logits is not None
        assert torch.equal(original.confidence_logits, returned.confidence_logits)


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_a_head_that_vllm_cannot_load_is_refused_or_named(
    make_draft: Callable[..., DSparkDraft], target_weights: TargetWeights, tmp_path: Path, head: str
) -> None:
    with pytest.raises(UserError, match=f"vanilla heads only, not {head}"):
        export_draft(make_draft(head), target_weights, tmp_path / "a", "speculators")
    assert not (tmp_path / "a").exists()
    result = export_draft(make_draft(head), target_weights, tmp_path / "b", "native")
    assert any(line.startswith("vLLM") and head in line for line in result.warnings)
    assert all("vllm serve" not in command for command in result.commands)


def test_dflash_holds_no_head_and_says_who_cannot_serve_it(
    make_draft: Callable[..., DSparkDraft], target_weights: TargetWeights, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no sequential head"):
        export_draft(make_draft("vanilla"), target_weights, tmp_path / "a", "dflash")
    with pytest.raises(UserError, match="no reduced vocabulary"):
        export_draft(make_draft("none", 20), target_weights, tmp_path / "a", "dflash")
    capped = make_draft("none")
    capped.config.final_logit_softcapping = 5.0
    with pytest.raises(UserError, match=r"no soft-cap, and this target caps its logits at 5\.0"):
        export_draft(capped, target_weights, tmp_path / "a", "dflash")
    assert not (tmp_path / "a").exists()
    result = export_draft(make_draft("none"), target_weights, tmp_path / "b", "dflash")
    assert "format dflash holds no confidence head: it was left out" in result.notes
    assert "sample_from_anchor" in result.warnings[0]
    assert json.loads((tmp_path / "b" / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]


def test_warnings_come_before_anything_is_written(
    make_draft: Callable[..., DSparkDraft], target_weights: TargetWeights, tmp_path: Path
) -> None:
    seen: list[tuple[str, int]] = []

    def warn(line: str) -> None:
        seen.append((line, len(list(tmp_path.iterdir()))))

    export_draft(make_draft("rnn"), target_weights, tmp_path / "out", warn=warn)
    assert len(seen) == 1
    assert "vanilla heads only, not rnn" in seen[0][0]
    assert seen[0][1] == 0


def test_shards_are_cut_at_the_limit_and_read_back(
    make_draft: Callable[..., DSparkDraft], target_weights: TargetWeights, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    export_draft(make_draft("vanilla"), target_weights, folder, max_shard_bytes=20_000)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 21_000 + 4096 for shard in shards)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    many = read_draft(folder).tensors
    export_draft(make_draft("vanilla"), target_weights, folder)
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]
    one = read_draft(folder).tensors
    assert set(one) == set(many)
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_a_draft_that_diverged_is_not_exported(
    make_draft: Callable[..., DSparkDraft], target_weights: TargetWeights, tmp_path: Path
) -> None:
    draft = make_draft("vanilla")
    draft.norm.weight.data[0] = float("nan")
    with pytest.raises(UserError, match=r"norm\.weight not finite"):
        export_draft(draft, target_weights, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_written_configurations_name_every_field_that_engines_read(
    make_draft: Callable[..., DSparkDraft], target_weights: TargetWeights, tmp_path: Path
) -> None:
    export_draft(make_draft("vanilla"), target_weights, tmp_path / "native")
    native = json.loads((tmp_path / "native" / "config.json").read_text())
    assert native["architectures"] == ["Qwen3DSparkModel"]
    assert native["model_type"] == "qwen3"
    assert native["sample_from_anchor"] is True
    assert native["confidence_head_with_markov"] is True
    assert native["block_size"] == 4
    assert native["rope_theta"] == native["rope_parameters"]["rope_theta"] == 10000.0
    assert native["layer_types"] == ["full_attention"] * 2
    assert native["tie_word_embeddings"] is False
    assert "draft_vocab_size" not in native
    export_draft(make_draft("vanilla", 20), target_weights, tmp_path / "spec", "speculators")
    spec = json.loads((tmp_path / "spec" / "config.json").read_text())
    assert "model_type" not in spec
    assert spec["speculators_model_type"] == "dspark"
    assert spec["architectures"] == ["DSparkDraftModel"]
    assert spec["aux_hidden_state_layer_ids"] == [1, 3]
    assert spec["sample_from_anchor"] is True
    assert spec["draft_vocab_size"] == 20
    assert spec["transformer_layer_config"]["vocab_size"] == native["vocab_size"]
    assert spec["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    stored = load_file(tmp_path / "spec" / "model.safetensors")
    assert stored["d2t"].dtype == torch.int64
    assert stored["lm_head.weight"].shape[0] == 20
    ids = stored["d2t"] + torch.arange(20)
    assert stored["t2d"].dtype == torch.bool
    assert torch.equal(stored["t2d"].nonzero().flatten(), ids)


WINDOWS: list[dict[str, Any]] = [
    {"layer_types": ["sliding_attention", "sliding_attention"]},
    {"layer_types": ["sliding_attention", "full_attention"]},
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window_non_causal": True},
]


@pytest.mark.parametrize("layout", ["native", "speculators", "sglang", "dflash"])
@pytest.mark.parametrize("fields", WINDOWS, ids=["all", "some", "both ways"])
def test_windows_survive(
    make_draft: Callable[..., DSparkDraft],
    target: FrozenTarget,
    target_weights: TargetWeights,
    tmp_path: Path,
    layout: ExportFormat,
    fields: dict[str, Any],
) -> None:
    fields = {"use_sliding_window": True, "sliding_window": 6, **fields}
    draft = make_draft("none" if layout == "dflash" else "vanilla", **fields)
    other = make_draft("none" if layout == "dflash" else "vanilla", **{**fields, "sliding_window": 7})
    if layout == "sglang" and "sliding_window_non_causal" in fields:
        with pytest.raises(UserError, match="causal within a block"):
            export_draft(draft, target_weights, tmp_path / "out", layout)
        return
    result = export_draft(draft, target_weights, tmp_path / "out", layout)
    assert result.read_back.logits < 1e-5
    import_folder(tmp_path / "out", tmp_path / "in", target)
    loaded = DSparkDraft.load(tmp_path / "in")
    assert loaded.config.sights == draft.config.sights
    loaded.borrow(target)
    assert torch.equal(passes(draft)[0], passes(loaded.eval())[0])
    assert not torch.equal(passes(draft)[0], passes(other)[0])


@pytest.mark.parametrize("wrong", [{"sliding_window": 7}, {"layer_types": ["full_attention"] * 2}])
def test_a_window_that_is_written_wrongly_is_found(
    make_draft: Callable[..., DSparkDraft],
    target_weights: TargetWeights,
    tmp_path: Path,
    wrong: dict[str, Any],
) -> None:
    from dspark_train.interchange.verify import verify_folder

    draft = make_draft(
        "vanilla", use_sliding_window=True, sliding_window=6, layer_types=["sliding_attention"] * 2
    )
    export_draft(draft, target_weights, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    with pytest.raises(UserError, match="another draft"):
        verify_folder(tmp_path, draft, target_weights.embedding, target_weights.head, torch.float32)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 8.0,
        "truncate": False,
    },
]
UNSHARED_ROPES: list[dict[str, Any]] = [
    ROPES[-1] | {"mscale": 1.0, "mscale_all_dim": 0.5},
    ROPES[-1] | {"attention_factor": 1.5},
]
"""Computed as the draft does by this project's reader, not by every engine."""


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rope_scaling_survives(
    make_draft: Callable[..., DSparkDraft],
    target: FrozenTarget,
    target_weights: TargetWeights,
    tmp_path: Path,
    rope: dict[str, Any],
) -> None:
    draft = make_draft("vanilla", rope_parameters=dict(rope))
    plain = make_draft("vanilla", rope_parameters={"rope_type": "default", "rope_theta": rope["rope_theta"]})
    assert not torch.equal(passes(draft)[0], passes(plain)[0])
    for layout in ("native", "speculators"):
        result = export_draft(draft, target_weights, tmp_path / layout, layout)
        assert result.read_back.logits < 1e-5
        import_folder(tmp_path / layout, tmp_path / f"{layout}-in", target)
        loaded = DSparkDraft.load(tmp_path / f"{layout}-in")
        loaded.borrow(target)
        assert torch.equal(passes(draft)[0], passes(loaded.eval())[0])


@pytest.mark.parametrize("rope", [*ROPES, *UNSHARED_ROPES], ids=lambda rope: rope["rope_type"])
def test_rope_frequencies_are_those_of_the_draft(
    make_draft: Callable[..., DSparkDraft], rope: dict[str, Any]
) -> None:
    draft = make_draft("vanilla", rope_parameters=dict(rope))
    frequencies, factor = rope_frequencies(rope, draft.config.head_dim)
    torch.testing.assert_close(frequencies, draft.rotary.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(draft.rotary.attention_scaling, rel=1e-6)


def test_a_scaled_embedding_is_folded_for_vllm_and_refused_for_sglang(
    make_target: Callable[..., FrozenTarget], make_draft: Callable[..., DSparkDraft], tmp_path: Path
) -> None:
    target = make_target(
        "gemma2", tie_word_embeddings=True, final_logit_softcapping=None, query_pre_attn_scalar=32
    )
    assert target.embedding_scale == pytest.approx(32**0.5, rel=1e-3)
    draft = make_draft("vanilla", of=target, embedding_scale=target.embedding_scale)
    weights = TargetWeights.of(target)
    result = export_draft(draft, weights, tmp_path / "out", "speculators")
    assert any("embedding scale" in note for note in result.notes)
    stored = load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"]
    torch.testing.assert_close(stored, target.embedding_weight * target.embedding_scale)
    with pytest.raises(UserError, match="scales its embeddings"):
        export_draft(draft, weights, tmp_path / "refused", "sglang")
    import_folder(tmp_path / "out", tmp_path / "in", target)
    loaded = DSparkDraft.load(tmp_path / "in")
    assert loaded.config.embedding_scale == pytest.approx(target.embedding_scale)
    loaded.borrow(target)
    torch.testing.assert_close(passes(loaded.eval())[0], passes(draft)[0], rtol=0, atol=1e-5)


def test_a_soft_cap_survives_in_the_native_layout_and_is_refused_for_one_engine(
    make_target: Callable[..., FrozenTarget], make_draft: Callable[..., DSparkDraft], tmp_path: Path
) -> None:
    target = make_target(
        "gemma2", tie_word_embeddings=True, final_logit_softcapping=5.0, query_pre_attn_scalar=32
    )
    draft = make_draft(
        "vanilla", of=target, embedding_scale=target.embedding_scale, final_logit_softcapping=5.0
    )
    weights = TargetWeights.of(target)
    for layout in ("speculators", "sglang"):
        with pytest.raises(UserError, match="soft-cap"):
            export_draft(draft, weights, tmp_path / "refused", layout)
    result = export_draft(draft, weights, tmp_path / "out", "native")
    assert sum("soft-cap" in line for line in result.warnings) == 2
    assert result.read_back.logits < 1e-5
    import_folder(tmp_path / "out", tmp_path / "in", target)
    loaded = DSparkDraft.load(tmp_path / "in")
    assert loaded.config.final_logit_softcapping == 5.0


def test_a_wrong_rewrite_is_caught_by_reading_back(
    make_draft: Callable[..., DSparkDraft],
    target_weights: TargetWeights,
    tmp_path: Path,
    sabotage: Callable[[Any, str], None],
) -> None:
    from dspark_train.interchange import export

    sabotage(export, "layers.0.self_attn.k_proj.weight")
    with pytest.raises(UserError, match="gives another draft"):
        export_draft(make_draft("vanilla"), target_weights, tmp_path / "out")
    assert not (tmp_path / "out").exists()
