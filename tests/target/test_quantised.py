"""Quantised targets: what a checkpoint means, how it is loaded, and what cannot be."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny import TinyData, fit, tiny_module, tiny_trainer
from tiny_models import tiny_draft, tiny_model
from tiny_quantised import SCHEMES, write_quantised

from dspark_train.decoding.decoder import generate
from dspark_train.errors import UserError
from dspark_train.interchange.export import TargetWeights, export_draft
from dspark_train.target.frozen import FrozenTarget
from dspark_train.target.packed import PackedLinears
from dspark_train.target.quantised import is_plain, plain_vocabulary, quantisation_of
from dspark_train.training.feature_cache import identity_of

IDS = torch.arange(3, 20)[None]
NEEDS = {"int8": "compressed_tensors", "w4a16": "compressed_tensors"}
"""Packages without which a scheme's test is skipped."""


def load(folder: Path) -> FrozenTarget:
    return FrozenTarget.load(str(folder), "cpu", layer_ids=[0, 1, 2], dtype="float32")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_means_what_its_layout_says(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if scheme in NEEDS:
        pytest.importorskip(NEEDS[scheme])
    plain = write_quantised(tmp_path / "target", scheme)
    target = load(tmp_path / "target")
    assert target.quantisation is not None
    assert target.quantisation.dequantised == (scheme in ("fp8", "gptq", "awq"))
    words = "dequantised while loading" if target.quantisation.dequantised else "run as they are stored"
    assert words in "".join(capsys.readouterr())
    expected = plain.model(input_ids=IDS, use_cache=False).last_hidden_state
    found = target.states(IDS)
    assert found.features.dtype == torch.float32
    error = float((found.last_hidden - expected).norm() / expected.norm())
    assert error < (2e-2 if scheme == "int8" else 2e-3)  # int8 rounds activations, too; half-precision scales
    if scheme == "int8":
        assert error > 1e-4


def test_a_draft_is_trained_for_a_quantised_target(tmp_path: Path) -> None:
    write_quantised(tmp_path / "target", "fp8")
    target = load(tmp_path / "target")
    module = tiny_module()
    module.target = target
    fit(module, TinyData(), tiny_trainer(tmp_path, max_steps=5))
    assert module.draft is not None
    prompt = [5, 9, 11, 40]
    decoded = [
        generate(target, draft, [prompt], max_new_tokens=24, stop_token_ids=[]).tokens
        for draft in (module.draft, None)
    ]
    assert decoded[0] == decoded[1]
    exported = export_draft(module.draft, TargetWeights.of(target), tmp_path / "draft")
    assert any("quantised (fp8)" in note for note in exported.notes)


@pytest.mark.parametrize("head", [False, True])
def test_torchao(head: bool, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    plain = tiny_model("qwen3", hidden_size=64, intermediate_size=96, tie_word_embeddings=False)
    plain.save_pretrained(tmp_path / "plain")
    settings = transformers.TorchAoConfig(
        quantization.Int8WeightOnlyConfig(), include_input_output_embeddings=head
    )
    _requantise(tmp_path, settings)
    target = load(tmp_path / "target")
    assert type(target.head_weight) is torch.nn.Parameter
    assert type(target.embedding_weight) is torch.nn.Parameter
    assert PackedLinears(target.decoder).forwards == {}  # quantised layers multiply in their own way
    plain_target = FrozenTarget(plain, [0, 1, 2])
    assert identity_of(target).target not in ("", identity_of(plain_target).target)  # of its feature cache
    gap = float((target.head_weight - plain.lm_head.weight).norm() / plain.lm_head.weight.norm())
    assert (1e-4 < gap < 2e-2) if head else gap == 0
    _decodes(target)


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}  # kernels of 64 columns
    plain = tiny_model("llama", tie_word_embeddings=False, **sizes)
    plain.save_pretrained(tmp_path / "plain")
    form: dict[str, Any] = {"load_in_4bit": True} if bits == 4 else {"load_in_8bit": True}
    _requantise(tmp_path, transformers.BitsAndBytesConfig(**form))
    target = load(tmp_path / "target")
    assert target.quantisation is not None
    assert target.quantisation.scheme == "bitsandbytes"
    assert identity_of(target).dtype == "float32"
    assert target.states(IDS).features.dtype == torch.float32
    _decodes(target)


class CodedEmbedding(torch.nn.Embedding):
    """Embeddings as int8 numbers with one scale a row, and Gemma's factor on top."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(*table.shape)
        self.embed_scale = torch.tensor(8.0)
        self.scales = table.abs().amax(1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((table / self.scales).round().to(torch.int8), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids].float() * self.scales[ids] * self.embed_scale


def test_a_quantised_embedding_keeps_its_factor() -> None:
    model = tiny_model("qwen3", tie_word_embeddings=False)
    coded = CodedEmbedding(model.model.embed_tokens.weight.detach())
    model.set_input_embeddings(coded)
    before = model.model(input_ids=IDS, use_cache=False).last_hidden_state
    plain_vocabulary(model)
    plain = model.get_input_embeddings()
    assert is_plain(plain)
    torch.testing.assert_close(plain.weight, coded.weight.float() * coded.scales)
    torch.testing.assert_close(model.model(input_ids=IDS, use_cache=False).last_hidden_state, before)
    assert FrozenTarget(model, [0, 1, 2]).embedding_scale == pytest.approx(8.0)


def _requantise(folder: Path, settings: Any) -> None:
    """Let the scheme's own package write ``target`` from ``plain``."""
    loader = transformers.AutoModelForCausalLM
    options = {"dtype": torch.float32, "device_map": {"": "cpu"}}
    loader.from_pretrained(folder / "plain", quantization_config=settings, **options).save_pretrained(
        folder / "target"
    )


def _decodes(target: FrozenTarget) -> None:
    """Plain decoding agrees with the model's own uncached forward; a draft changes nothing."""
    prompt, ids = [5, 9, 11, 40], torch.tensor([[5, 9, 11, 40]])
    for _ in range(12):
        logits = target.model(input_ids=ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    for draft in (None, tiny_draft(target)):
        found = generate(target, draft, [prompt], max_new_tokens=12, stop_token_ids=[])
        assert found.tokens[0] == ids[0, 4:].tolist()


def test_mxfp4_experts(tmp_path: Path) -> None:
    """gpt-oss as it is published: its experts in blocks of 32 four-bit numbers and a power of two."""
    config = transformers.GptOssConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    plain: Any = transformers.GptOssForCausalLM(config).float().eval()
    stored, values = {}, torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if not name.endswith(("gate_up_proj", "down_proj")):
                stored[name] = parameter.detach().clone()
                continue
            experts, inputs, outputs = parameter.shape
            shape = (experts, outputs, inputs // 32)
            codes = torch.randint(0, 16, (*shape, 32), generator=generator)
            scales = torch.randint(121, 124, shape, generator=generator)
            stored[name + "_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
            stored[name + "_scales"] = scales.to(torch.uint8)
            meant = values[codes] * torch.exp2(scales.float() - 127)[..., None]
            parameter.copy_(meant.flatten(2).transpose(1, 2))
    from safetensors.torch import save_file

    folder = tmp_path / "target"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    written = {**config.to_dict(), "architectures": ["GptOssForCausalLM"], "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(written))
    target = FrozenTarget.load(str(folder), "cpu", layer_ids=[0, 1, 2], dtype="float32", attention="eager")
    assert target.quantisation is not None
    assert target.quantisation.dequantised
    expected = plain.model(input_ids=IDS, use_cache=False).last_hidden_state
    torch.testing.assert_close(target.states(IDS).last_hidden, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "modelopt"}, "modelopt"),
        ({"quant_method": "gptq", "bits": 3}, "gptq, 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"bits": 4}, "unknown scheme"),
    ],
)
def test_what_cannot_be_loaded_is_one_line_before_weights(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(UserError, match=words) as refused:
        load(tmp_path)
    assert "\n" not in str(refused.value)
    assert "quantised" in str(refused.value)


@pytest.mark.parametrize("package", ["torchao", "compressed_tensors", "bitsandbytes"])
def test_a_missing_package_is_named(package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    settings = {"quant_method": package.replace("_", "-"), "load_in_8bit": package == "bitsandbytes"}
    if package == "compressed_tensors":
        settings = SCHEMES["int8"][1]
    config = SimpleNamespace(quantization_config=settings)
    with pytest.raises(UserError, match=rf"`pip install .*{package.replace('_', '-')}"):
        quantisation_of(config, torch.device("cpu"), "a target")
