"""The frozen target: its states and logits are the model's own, for several families."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_families import tiny_config, tiny_family
from tiny_models import FAMILIES, tiny_model, tiny_target
from torch import Tensor, nn

from dspark_train.errors import UserError
from dspark_train.target.config import TargetConfig, check_layer_ids, spread_layer_ids
from dspark_train.target.frozen import FrozenTarget, distances, tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_logits_are_the_models_own(family: str) -> None:
    target = tiny_target(family, (-1, 0, 2))
    ids = torch.randint(3, 90, (2, 11))
    states = target.states(ids)
    with torch.no_grad():
        output = target.model(input_ids=ids, output_hidden_states=True)
    expected = torch.cat([output.hidden_states[i] for i in (0, 1, 3)], dim=-1)
    torch.testing.assert_close(states.features, expected)
    torch.testing.assert_close(target.lm_head(states.last_hidden), output.logits)
    torch.testing.assert_close(target.embed(ids), output.hidden_states[0])


def test_soft_cap_and_embedding_scale_are_found() -> None:
    target = tiny_target("gemma3")
    assert target.logit_softcap == 10.0
    assert target.embedding_scale == pytest.approx(32**0.5, rel=1e-3)
    assert tiny_target("llama").embedding_scale == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_the_right_reaches_no_real_token(family: str) -> None:
    target = tiny_target(family)
    ids = torch.randint(3, 90, (1, 9))
    padded = torch.cat([ids, torch.randint(3, 90, (1, 4))], dim=1)
    torch.testing.assert_close(target.states(padded).features[:, :9], target.states(ids).features)


@pytest.mark.parametrize("family", FAMILIES)
def test_lm_head_is_not_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(family)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the LM head ran")

    monkeypatch.setattr(target.model.get_output_embeddings(), "forward", refuse)
    target.states(torch.tensor([[5, 6, 7]]))


def test_never_part_of_a_module() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.target = tiny_target()

    holder = Holder()
    assert not list(holder.parameters())
    assert not holder.state_dict()
    assert not any(parameter.requires_grad for parameter in holder.target.model.parameters())


def test_paper_taps() -> None:
    assert spread_layer_ids(36) == [1, 9, 17, 25, 33]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([0, 3], "last decoder layer"),
        ([2, 1], "strictly increasing"),
        ([1, 1], "strictly increasing"),
        ([], "non-empty"),
        ([-2, 1], "must lie in"),
        ([1, 9], "must lie in"),
    ],
)
def test_bad_taps_are_refused(ids: list[int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_layer_ids(ids, 4)


def changed(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``model``, its logits changed after its own head."""
    original = model.forward

    def forward(*args: object, **kwargs: object) -> Any:
        output = original(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    model.forward = forward
    return model


def test_a_model_with_other_logits_is_refused() -> None:
    with pytest.raises(UserError, match="not supported"):
        FrozenTarget(changed(tiny_model(), lambda logits: logits + logits.roll(1, -1)), [0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.125, 3.0])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("shift", [False, True])
def test_scale_bias_and_cap_of_the_logits_are_found(
    dtype: torch.dtype, scale: float, cap, shift: bool
) -> None:
    bias = torch.randn(97, generator=torch.Generator().manual_seed(0)).to(dtype)

    def change(logits: Tensor) -> Tensor:
        logits = logits * scale + (bias if shift else 0.0)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    target = FrozenTarget(changed(tiny_model().to(dtype), change), [0, 1])
    assert target.logit_scale == pytest.approx(scale, rel=1e-4 if dtype == torch.float32 else 4e-3)
    assert target.logit_softcap == (None if cap is None else pytest.approx(cap, rel=1e-2))
    ids = torch.arange(5, 14)[None]
    hidden = target.states(ids).last_hidden
    gap = distances(target.lm_head(hidden), target.model(input_ids=ids).logits)
    assert gap.max() < tolerance(dtype)
    if shift:
        with pytest.raises(UserError, match="bias to its logits"):
            _ = target.head_weight
    else:
        logits = (hidden @ target.head_weight.T).float()
        logits = logits if cap is None else target.logit_softcap * torch.tanh(logits / target.logit_softcap)
        assert distances(logits, target.lm_head(hidden)).max() < tolerance(dtype)


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen3_5"])
def test_the_text_part_of_a_multimodal_checkpoint_is_loaded_alone(kind: str, tmp_path) -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    text = tiny_config({"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "mistral3": "mistral"}[kind])
    vision = CONFIG_MAPPING[kind]().vision_config.to_dict()
    small = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2,
             "head_dim": 16, "image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 32,
             "num_position_embeddings": 16}  # fmt: skip
    vision |= {name: value for name, value in small.items() if name in vision}
    config = CONFIG_MAPPING[kind](text_config=text.to_dict(), vision_config=vision)
    torch.manual_seed(0)
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval()
    model.save_pretrained(tmp_path)
    target = FrozenTarget.load(TargetConfig(name_or_path=str(tmp_path), dtype="float32"))
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    torch.testing.assert_close(target.lm_head(target.states(ids).last_hidden), expected)
    held = sum(parameter.numel() for parameter in target.model.parameters())
    parts = (target.decoder, target.model.get_output_embeddings())
    used = {parameter for part in parts for parameter in part.parameters()}
    assert held == sum(parameter.numel() for parameter in used)


def test_a_model_that_sees_what_follows_is_refused() -> None:
    with pytest.raises(UserError, match="left to right"):
        FrozenTarget(tiny_family("bert"))


def test_what_cannot_be_a_target_is_refused_before_weights_are_read(tmp_path) -> None:
    """No weights lie there: only the config is looked at."""
    from transformers import CLIPConfig, T5Config

    for config, words in ((T5Config(), "encoder"), (CLIPConfig(), "no causal language model")):
        folder = tmp_path / config.model_type
        config.save_pretrained(folder)
        (folder / "model.safetensors").write_bytes(b"")
        with pytest.raises(UserError, match=words):
            FrozenTarget.load(TargetConfig(name_or_path=str(folder), dtype="float32"))
    folder = tmp_path / "remote"
    folder.mkdir()
    text = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}}
    (folder / "config.json").write_text(json.dumps(text))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"target\.trust_remote_code"):
        FrozenTarget.load(TargetConfig(name_or_path=str(folder), dtype="float32"))


def test_folder_errors(tmp_path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        FrozenTarget.load(TargetConfig(name_or_path=str(tmp_path / "absent")))
    with pytest.raises(UserError, match=r"no config\.json"):
        FrozenTarget.load(TargetConfig(name_or_path=str(tmp_path)))
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no weights"):
        FrozenTarget.load(TargetConfig(name_or_path=str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(UserError, match="cannot be loaded"):
        FrozenTarget.load(TargetConfig(name_or_path=str(tmp_path)))
    model.save_pretrained(tmp_path)
    loaded = FrozenTarget.load(TargetConfig(name_or_path=str(tmp_path), layer_ids=[0, 1], dtype="float32"))
    ids = torch.tensor([[4, 5, 6]])
    torch.testing.assert_close(
        loaded.states(ids).last_hidden, FrozenTarget(model, [0, 1]).states(ids).last_hidden
    )
