"""The seam for how a target is run while decoding: which pass a target gets, and what both hold to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_families import tiny_family
from tiny_models import tiny_draft, tiny_model, tiny_target
from transformers.cache_utils import LinearAttentionLayer

from dspark_train.decoding.decoder import generate
from dspark_train.decoding.general_pass import GeneralPass
from dspark_train.decoding.layout import RowLayout
from dspark_train.decoding.pass_choice import choose_pass, open_pass, window
from dspark_train.decoding.target_pass import TargetPass
from dspark_train.errors import UserError
from dspark_train.target.frozen import FrozenTarget

CPU = torch.device("cpu")


def own_greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding by the model's own forward pass, without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "kind", ["llama", "gpt_oss", "qwen3_5_text", "mamba", "lfm2", "falcon_h1", "deepseek_v4"]
)
def test_plain_decoding_is_the_models_own(kind: str) -> None:
    target = FrozenTarget(tiny_family(kind), name=kind)
    prompts = [list(range(5, 14)), [60, 3, 41], list(range(30, 60, 2))]
    result = generate(target, None, prompts, max_new_tokens=12, stop_token_ids=[], batch_size=2)
    assert result.tokens == [own_greedy(target.model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("by_token", [False, True])
def test_speculative_decoding_over_the_models_own_cache_is_lossless(by_token: bool, monkeypatch) -> None:
    """A target that could run ragged: the same tokens and the same rounds over its own cache."""
    target = tiny_target("gemma3")
    draft = tiny_draft(target)
    prompts = [list(range(5, 25)), [60, 3, 41]]
    options = {"max_new_tokens": 24, "stop_token_ids": [], "batch_size": 2}
    ragged = generate(target, draft, prompts, **options)
    monkeypatch.setattr(
        "dspark_train.decoding.decoder.open_pass",
        lambda target, slots, length, features, *_: GeneralPass(target, slots, length, features, by_token),
    )
    general = generate(target, draft, prompts, **options)
    assert general.tokens == ragged.tokens
    assert torch.equal(general.trace.accepted, ragged.trace.accepted)
    assert ragged.trace.accepted.sum() < ragged.trace.verify_length.sum(), "nothing was rejected"


@given(
    rounds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=6),
    kind=st.sampled_from(["qwen3_5_text", "mamba"]),
)
@settings(deadline=None, max_examples=12)
def test_states_after_any_rejections(rounds: list[tuple[int, int]], kind: str) -> None:
    """``rounds``: rows of each, and how many of them are wrong and taken back."""
    if kind not in _targets:
        _targets[kind] = FrozenTarget(tiny_family(kind), name=kind)
    target = _targets[kind]
    ids = torch.randint(97, (40,), generator=torch.Generator().manual_seed(len(rounds)))
    expected = target.states(ids[None])
    at = 4
    with torch.inference_mode(), open_pass(target, 1, 48, True) as run:
        run(ids[:at], RowLayout([at], [0], CPU))
        for count, wrong in rounds:
            wrong = min(wrong, count - 1)
            given_ids = ids[at : at + count].clone()
            given_ids[count - wrong :] = 96 - given_ids[count - wrong :]
            hidden, features = run(given_ids, RowLayout([count], [at], CPU))
            right = slice(at, at + count - wrong)
            torch.testing.assert_close(
                hidden[: count - wrong], expected.last_hidden[0, right], atol=1e-4, rtol=1e-4
            )
            torch.testing.assert_close(
                features[: count - wrong], expected.features[0, right], atol=1e-4, rtol=1e-4
            )
            at += count - wrong


_targets: dict[str, FrozenTarget] = {}


def test_replays_stay_short() -> None:
    """Every round rejects: what is run again does not grow with the text."""
    target = FrozenTarget(tiny_family("qwen3_5_text"), name="tiny")
    ids = torch.randint(97, (90,), generator=torch.Generator().manual_seed(0))
    expected = target.states(ids[None]).last_hidden[0]
    sizes: list[int] = []
    handle = target.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with torch.inference_mode(), GeneralPass(target, 1, 96, False) as run:
        run(ids[:4], RowLayout([4], [0], CPU))
        for at in range(4, 80, 3):
            wrong = torch.cat([ids[at : at + 3], 96 - ids[at + 3 : at + 6]])
            hidden, _ = run(wrong, RowLayout([6], [at], CPU))
            torch.testing.assert_close(hidden[:3], expected[at : at + 3], atol=1e-4, rtol=1e-4)
    handle.remove()
    assert max(sizes) <= 16 + 6


@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1", "lfm2", "mamba2"])
def test_a_lost_state_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent and convolution states zeroed on purpose: no pass is taken."""

    def lose(name: str) -> None:
        kept = getattr(LinearAttentionLayer, name)

        def zeroed(self, *args, **kwargs):
            result = kept(self, *args, **kwargs)
            for states in (self.recurrent_states, self.conv_states):
                for state in states.values():
                    if state is not None:
                        state.zero_()
            return result

        monkeypatch.setattr(LinearAttentionLayer, name, zeroed)

    target = FrozenTarget(tiny_family(kind), name=kind)
    lose("update_recurrent_state" if kind != "lfm2" else "update_conv_state")
    with pytest.raises(UserError, match=f"{kind} cannot be decoded here.*logits differ"):
        choose_pass(target)


@pytest.mark.parametrize("broken", ["rows", "rollback", "window"])
def test_the_probe_sees_a_broken_pass(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ragged pass with a fault of one kind is not chosen."""
    target = FrozenTarget(tiny_model("gemma3"), [0, 2])
    if broken == "window":
        attend = TargetPass.__call__.__globals__["RaggedStep"].attend
        monkeypatch.setattr(
            "dspark_train.decoding.cache.RaggedStep.attend",
            lambda self, layer, q, k, v, scale, window=None, *rest, **named: attend(
                self, layer, q, k, v, scale, None, *rest, **named
            ),
        )
    else:
        call = TargetPass.__call__

        def faulty(self, ids, layout):
            if broken == "rollback" and min(layout.starts) > 0:
                layout = RowLayout(
                    layout.counts, [s + 1 for s in layout.starts], CPU, first_slot=layout.first_slot
                )
            elif broken == "rows" and layout.requests > 1:
                ids = ids.flip(0)
            return call(self, ids, layout)

        monkeypatch.setattr(TargetPass, "__call__", faulty)
    choice = choose_pass(target)
    assert choice.name == "general"
    assert "logits differ" in choice.reason


def test_choice_is_made_once_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    assert choose_pass(target).name == "ragged"
    monkeypatch.setattr("dspark_train.decoding.pass_choice.Probe", None)
    again = FrozenTarget(target.model, [0], name="other taps")
    assert choose_pass(again).name == "ragged"


def test_half_precision_gets_the_ragged_pass_too() -> None:
    model = tiny_model("qwen3").bfloat16()
    assert choose_pass(FrozenTarget(model, [0, 1])).name == "ragged"


def test_graphs_need_the_ragged_pass() -> None:
    target = FrozenTarget(tiny_family("mamba"), name="mamba")
    with pytest.raises(UserError, match="decode without graphs"):
        generate(target, None, [[5, 6]], max_new_tokens=2, graphs=True)


def test_the_model_is_left_as_it_was() -> None:
    target = FrozenTarget(tiny_family("qwen3_5_text"), name="tiny")
    ids = torch.tensor([[4, 5, 6]])
    before = target.states(ids)
    generate(target, None, [[5, 6]], max_new_tokens=3)
    after = target.states(ids)
    assert torch.equal(before.last_hidden, after.last_hidden)
    assert not any(module._forward_hooks for module in target.model.modules())


def test_windows_are_found() -> None:
    assert window(tiny_model("gemma3").config) == 16
    assert window(tiny_model("llama").config) == 0


@pytest.mark.parametrize("kind", ["falcon_h1", "granite", "nanochat", "granitemoehybrid"])
def test_a_draft_for_any_target_is_lossless(kind: str) -> None:
    """Scaled and capped logits are the draft's too; a hybrid's states survive rejections."""
    target = FrozenTarget(tiny_family(kind), name=kind)
    draft = tiny_draft(target)
    hidden = target.states(torch.arange(5, 20)[None]).last_hidden
    torch.testing.assert_close(draft.base_logits(hidden), target.lm_head(hidden))
    prompts = [list(range(5, 25)), [60, 3, 41]]
    result = generate(target, draft, prompts, max_new_tokens=12, stop_token_ids=[], batch_size=2)
    assert result.tokens == [own_greedy(target.model, prompt, 12) for prompt in prompts]
    assert result.trace.accepted.sum() < result.trace.verify_length.sum()


def test_prompts_with_images_are_refused() -> None:
    target = tiny_target()
    target.model.config.image_token_id = 90
    with pytest.raises(UserError, match="prompt 1 has token 90, which stands for an image"):
        generate(target, None, [[5], [5, 90, 6]])
