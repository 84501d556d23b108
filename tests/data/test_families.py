# ruff: noqa: E501 - chat templates are written as their authors write them
"""Masks under the templates of model families, each written for these tests from its description."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tiny_masks import TOOLS, assistant, spans, texts, user
from tiny_tokenizers import make_tokenizer

from dspark_train.data.build import BuildOptions, build_set
from dspark_train.data.conversations import (
    BadConversation,
    Conversation,
    SplitShares,
    conversation_from_row,
)
from dspark_train.data.tokenize import ConversationEncoder

HARMONY = (
    "<|start|>system<|message|>You are ChatGPT.{% if strftime_now is defined %}\nCurrent date: {{ strftime_now('%Y-%m-%d') }}{% endif %}<|end|>"
    "{% set last = namespace(final=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{% set last.final = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.index0 >= last.final %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
R1 = (
    "<bos>{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<Assistant>{{ m.content.split('</think>')[-1].lstrip('\n') }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<Assistant><think>\n{% endif %}"
)
QWEN35 = (
    "{% set n = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set n.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > n.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '<think>\n' }}{% endif %}"
)
KIMI = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>\n{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GEMMA4 = (
    "<bos>{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% if m.reasoning and loop.last %}<|channel>thought\n{{ m.reasoning }}\n<channel|>{% endif %}"
    "{{ m.content | trim }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
ONCE = "<|channel|>final<|message|>"
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}


def family(template: str) -> tuple[ConversationEncoder, Any]:
    tokenizer = make_tokenizer(template)
    found = re.findall(r"<\|?\w+\|?>|<\w+\|>", re.sub(r"\{.*?\}", "", template))
    markers = sorted({*found, "<|return|>", "<|call|>", "<|im_assistant|>", "<|im_user|>"} - {"<think>"})
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    return ConversationEncoder(tokenizer, max_length=1000), tokenizer


def told(template: str, *messages: dict[str, Any], **more: Any) -> list[str]:
    encoder, tokenizer = family(template)
    return texts(encoder.encode(Conversation("c", messages, **more)), tokenizer)


@pytest.mark.parametrize(
    ("template", "said", "expected"),
    [
        (HARMONY, {}, ONCE + "hello<|return|>"),
        (
            HARMONY,
            {"thinking": "hmm"},
            "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant" + ONCE + "hello<|return|>",
        ),
        (QWEN35, {}, "hello<|im_end|>"),
        (QWEN35, {"reasoning_content": "hmm"}, "hmm\n</think>\n\nhello<|im_end|>"),
        (KIMI, {}, "hello<|im_end|>"),
        (KIMI, {"reasoning_content": "hmm"}, "<think>hmm</think>hello<|im_end|>"),
        (GLM, {}, "hello"),
        (GLM, {"reasoning_content": "hmm"}, "<think>hmm</think>\nhello"),
        (GEMMA4, {}, "hello<turn|>"),
        (GEMMA4, {"reasoning": "hmm"}, "<|channel>thought\nhmm\n<channel|>hello<turn|>"),
    ],
)
def test_what_a_family_generates_is_supervised(template: str, said: dict[str, str], expected: str) -> None:
    assert told(template, user("why?"), assistant("hello", **said)) == [expected]


def test_harmonys_turns_end_as_they_were_generated_not_as_history_shows_them() -> None:
    found = told(HARMONY, user("why?"), assistant("hello"), user("and?"), assistant("yes"))
    assert found == [ONCE + "hello<|return|>", ONCE + "yes<|return|>"]


def test_harmonys_calls_end_with_a_token_of_their_own() -> None:
    asked = assistant(None, tool_calls=[CALL])
    found = told(HARMONY, user("hot?"), asked, {"role": "tool", "content": "yes"}, assistant("It is."))
    call = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
    assert found == [call, ONCE + "It is.<|return|>"]


def test_a_thought_that_the_prompt_opens_and_history_drops_is_trained() -> None:
    thought = "<think>\nhmm\n</think>\n\nhello"
    encoder, tokenizer = family(R1)
    examples = encoder.encode(
        Conversation("c", [user("a"), assistant(thought), user("b"), assistant(thought)])
    )
    assert [spans(one, tokenizer) for one in examples] == [["hmm\n</think>\n\nhello<eos>"]] * 2
    read = tokenizer.decode(examples[1].input_ids[: int(examples[1].loss_mask.argmax())])
    assert read == "<bos><User>a<Assistant>hello<eos><User>b<Assistant><think>\n"
    with pytest.raises(BadConversation, match=r"opens '<think>', and no answer does: let the target answer"):
        encoder.encode(Conversation("c", [user("a"), assistant("hello")]))


@pytest.mark.parametrize("template", [TOOLS, QWEN35, HARMONY], ids=["tojson", "items", "harmony"])
def test_arguments_as_json_text_give_the_ids_of_objects(template: str) -> None:
    encoder, _ = family(template)
    text = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    rows = [
        {"id": "c", "messages": [user("hot?"), assistant(None, tool_calls=[call])]} for call in (CALL, text)
    ]
    objects, strings = (encoder.encode(conversation_from_row(row, "rows:1")) for row in rows)
    assert [one.input_ids.tolist() for one in objects] == [one.input_ids.tolist() for one in strings]
    assert [one.loss_mask.tolist() for one in objects] == [one.loss_mask.tolist() for one in strings]


def test_arguments_reach_templates_that_join_text() -> None:
    joining = (
        "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}<end>{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
    )
    assert told(joining, user("hot?"), assistant(None, tool_calls=[CALL])) == [
        'weather {"city": "Paris"}<end>'
    ]


def test_arguments_that_are_no_json_are_named() -> None:
    call = {"function": {"name": "weather", "arguments": "{city"}}
    row = {"messages": [user("hot?"), assistant(None, tool_calls=[call])]}
    with pytest.raises(BadConversation, match="tool-call arguments are not JSON"):
        conversation_from_row(row, "rows:1")


CLOCK = (
    "{{ strftime_now('%H:%M:%S.%f') }}{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def test_a_clock_stands_still_for_a_set_and_the_time_is_recorded(tmp_path: Path) -> None:
    rows = [
        {"id": str(i), "messages": [user("a"), assistant("yes"), user("b"), assistant("no")]}
        for i in range(3)
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer(CLOCK)
    options = BuildOptions(max_length=1000, shares=SplitShares(0, 0))
    built = build_set(source, tmp_path / "set", tokenizer, options)
    moment = datetime.fromisoformat(built.manifest.clock)
    for index in range(3):
        example = built.split("train")[index]
        assert tokenizer.decode(example.input_ids).startswith(moment.strftime("%H:%M:%S.%f"))
        assert spans(example, tokenizer) == ["yes<end>", "no<end>"]
