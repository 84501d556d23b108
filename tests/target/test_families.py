"""Every causal language model of the installed transformers: how it is run, or why it is refused.

The expected results are listed: a new version of transformers that changes one fails here. A few kinds of every sort
are tried in each run; ``pytest -m families`` tries all (half a minute).
"""

from __future__ import annotations

import random

import pytest
import torch
from tiny_families import NOT_TINY, family_names, tiny_family

from dspark_train.decoding.layout import RowLayout
from dspark_train.decoding.pass_choice import choose_pass, open_pass
from dspark_train.errors import UserError
from dspark_train.machine import LayerShape
from dspark_train.target.config import refusal, text_config
from dspark_train.target.frozen import FrozenTarget, distances


def names(text: str) -> list[str]:
    """Words of a text."""
    return text.split()


RAGGED = names(
    """
    afmoe apertus apertus1p5_text arcee aria_text axk1 beam biogpt bitnet codegen cohere cohere2
    cohere2_moe cohere_compass_text ctrl cwm deepseek_v2 deepseek_v3 doge dots1 ernie4_5 ernie4_5_moe
    exaone exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
    gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss gptj
    granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
    hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama longcat_flash mellum
    mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral moshi nanochat olmo olmo2 olmo3
    olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_mla sarvam_moe seed_oss
    smollm3 solar_open starcoder2 vaultgemma youtu
    """
)
GENERAL = names(
    """
    axk2 bailing_hybrid bamba bloom deepseek_v32 deepseek_v4 diffllama dory dots3_note_text falcon
    falcon_h1 glm_moe_dsa gpt_neo gpt_neox_japanese granitemoehybrid hy_v4 inkling2_loop_text
    inkling2_text inkling_text kimi_linear lara_mini lfm2 lfm2_moe lfm3 llama4_text mamba2 minimax
    minimax_m3_vl_text mpt nemotron nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next
    qwen4_exp_text rwkv stablelm trocr xglm zamba2 zaya
    """
)
BY_TOKEN = names(
    """
    falcon_mamba jamba mamba zamba
    """
)
"""Their layers take several tokens only into an empty state."""
REFUSED = {
    "bert": "left to right",
    "bert-generation": "left to right",
    "big_bird": "left to right",
    "camembert": "left to right",
    "cpmant": "left to right",
    "data2vec-text": "left to right",
    "electra": "left to right",
    "ernie": "left to right",
    "hrm_text": "no list of decoder layers",
    "megatron-bert": "left to right",
    "modernbert-decoder": "more than the last hidden state",
    "openai-gpt": "takes no cache",
    "recurrent_gemma": "gives no cache back",
    "rembert": "left to right",
    "roberta": "left to right",
    "roberta-prelayernorm": "left to right",
    "roformer": "left to right",
    "xlm": "left to right",
    "xlm-roberta": "left to right",
    "xlm-roberta-xl": "left to right",
    "xlstm": "matC_old has wrong shape",
    "xmod": "set_default_language",
}
"""Words of the refusal."""

WORKS = {
    **dict.fromkeys(RAGGED, "ragged"),
    **dict.fromkeys(GENERAL, "general"),
    **dict.fromkeys(BY_TOKEN, "general, by token"),
}
CORE = names(
    """
    llama gemma3_text gpt_oss deepseek_v3 cohere2 gemma4_text gpt2 qwen3_5_text falcon_h1 deepseek_v4
    llama4_text lfm2 bloom jamba bert recurrent_gemma openai-gpt
    """
)
"""One of each sort, tried in every run of the tests."""


def test_every_kind_is_listed_once() -> None:
    listed = [*WORKS, *REFUSED, *NOT_TINY]
    assert sorted(listed) == sorted(set(listed))
    assert set(listed) == set(family_names()), "transformers has other models than these tests know"
    assert len(WORKS) >= 60


def check(kind: str) -> None:
    """Whether a kind does what is expected of it, and decodes as the model itself does."""
    model = tiny_family(kind)
    shape = LayerShape.of(text_config(model.config))
    assert shape.parameters > 0
    if kind in REFUSED:
        with pytest.raises(UserError, match=REFUSED[kind]):
            choose_pass(FrozenTarget(model, name=kind))
        return
    assert refusal(model.config) is None
    target = FrozenTarget(model, name=kind)
    assert choose_pass(target).name == WORKS[kind]
    draws = random.Random(kind)
    ids = torch.tensor([[draws.randrange(3, 97) for _ in range(60)] for _ in range(2)])
    with torch.no_grad():
        expected = [model(input_ids=row[None], use_cache=False).logits[0] for row in ids]
        changed = ids[:1, :30].clone()
        changed[0, 22] = (changed[0, 22] + 1) % 97
        other = model(input_ids=changed, use_cache=False).logits[0, 29]
    # the states of earlier tokens matter to the logits far beyond what is called equal below
    assert distances(other, expected[0][29]) > 5e-3, "weights too weak to tell"
    at = [7, 19]
    with torch.inference_mode(), open_pass(target, 2, 64, True) as run:
        run(torch.cat([ids[0, :7], ids[1, :19]]), RowLayout(at, [0, 0], ids.device))
        while max(at) < 52:
            counts = [draws.randint(1, 6), draws.randint(1, 6)]
            wrong = [draws.randrange(count) for count in counts]
            rows = [ids[i, at[i] : at[i] + counts[i]].clone() for i in (0, 1)]
            for row, count in zip(rows, wrong, strict=True):
                row[len(row) - count :] = 99 - row[len(row) - count :]
            hidden, _ = run(torch.cat(rows).clamp(0, 96), RowLayout(counts, list(at), ids.device))
            for i, own in enumerate(hidden.split(counts)):
                right = counts[i] - wrong[i]
                gap = distances(target.lm_head(own[:right]), expected[i][at[i] : at[i] + right])
                assert gap.max() < 2e-4, f"request {i}, {counts} rows at {at}, {wrong} of them rejected"
                at[i] += right


@pytest.mark.parametrize("kind", CORE)
def test_core(kind: str) -> None:
    check(kind)


@pytest.mark.families
@pytest.mark.parametrize("kind", sorted({*WORKS, *REFUSED} - {*CORE}))
def test_all(kind: str) -> None:
    check(kind)
