# ruff: noqa: E501 - chat templates are written as their authors write them
"""Masks against expected text, for template shapes in use (each written for these tests)."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_masks import TOOLS, assistant, spans, texts, user

from dspark_train.data.conversations import BadConversation, Conversation, DroppedConversation, Turn
from dspark_train.data.tokenize import ConversationEncoder


@dataclass(frozen=True)
class Shape:
    template: str
    end: str
    """What the target generates after the content."""
    joint: bool | None = True
    """One example holds all turns; None where that depends on where tokens end."""
    kind: str = "byte_level"
    before: str = ""
    """White space that the target generates before the content."""
    eos: str | None = None


SHAPES = {
    "chatml": Shape(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    "header_and_eot": Shape(
        "<|bos|>{% for m in messages %}<|start|>{{ m.role }}<|start|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant<|start|>\n\n{% endif %}",
        "<|eot|>",
    ),
    "system_folded_into_user": Shape(
        "<s>{% if messages[0].role == 'system' %}{% set sys = messages[0].content ~ '\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if m.role == 'user' %}[INST] {{ sys if loop.first else '' }}{{ m.content }} [/INST]"
        "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}",
        "</s>",
        before=" ",
        eos="</s>",
    ),
    "system_in_last_user": Shape(  # the system turn moves when a later user turn comes
        "<s>{% set last = messages | selectattr('role', 'equalto', 'user') | list | length %}"
        "{% set n = namespace(users=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set n.users = n.users + 1 %}"
        "[INST]{% if n.users == last %}{{ 'Be brief.\n' }}{% endif %}{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}",
        "</s>",
        joint=False,
        eos="</s>",
    ),
    "drops_earlier_thinking": Shape(
        "{% set n = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set n.last = loop.index0 %}"
        "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and '</think>' in m.content and loop.index0 < n.last %}"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    "inserts_empty_think_block": Shape(  # in the last turn only, as thinking models with thinking switched off
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking | default(true) %}"
        "<think>\n\n</think>\n\n{% endif %}{% endif %}",
        "<|im_end|>",
    ),
    "generation_tags": Shape(
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}"
        "<|im_end|>{% endgeneration %}\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    "no_end_token": Shape(
        "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }}\n{% elif m.role == 'assistant' %}"
        "ASSISTANT:{{ ' ' ~ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
        "",
        before=" ",
        eos=None,
    ),
    "two_tokens_after_the_end": Shape(
        "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant\n{% else %}</s>{% endif %}",
        "<end>",
        eos="</s>",
    ),
    "space_before_the_end": Shape(
        "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content | trim }} </s>{% endif %}{% endfor %}",
        " </s>",
        before=" ",
        eos="</s>",
    ),
    "boundary_in_token_byte_level": Shape(  # the prompt ends with a space that belongs to the answer's first token
        "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }}<eos>{% elif m.role == 'assistant' %}"
        "ASSISTANT: {{ m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}",
        "<|im_end|>",
        joint=None,
    ),
    "boundary_in_token_sentencepiece": Shape(
        "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% elif m.role == 'assistant' %}"
        "ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}",
        "</s>",
        joint=None,
        kind="sentencepiece",
        eos="</s>",
    ),
    "sentencepiece_newline": Shape(
        "<s>{% for m in messages %}<turn>{{ m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant\n{% endif %}",
        "<end>",
        kind="sentencepiece",
    ),
    "ignores_the_generation_prompt": Shape(
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}</s>\n{% endfor %}", "</s>", eos="</s>"
    ),
}
ANSWERS = ["hello there", "yes", "def add(a, b):\n    return a + b", "the quick brown fox", "no it was ok"]


@pytest.fixture
def encoder(build_tokenizer: Callable[..., Any]) -> Callable[..., tuple[ConversationEncoder, Any]]:
    def build(name: str, max_length: int = 10_000, **arguments: Any) -> tuple[ConversationEncoder, Any]:
        shape = SHAPES[name]
        tokenizer = build_tokenizer(shape.template, shape.kind, shape.eos or "<|im_end|>")
        return ConversationEncoder(tokenizer, max_length=max_length, arguments=arguments), tokenizer

    return build


def chat(turns: int, system: bool = False) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": "You are brief."}] if system else []
    for index in range(turns):
        messages += [user(f"why {index}?"), assistant(ANSWERS[index])]
    return messages


@pytest.mark.parametrize("turns", [1, 2, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_supervised_text_is_what_was_said(encoder: Any, name: str, turns: int) -> None:
    build, tokenizer = encoder(name)
    shape = SHAPES[name]
    examples = build.encode(Conversation("c", chat(turns, system=name == "system_folded_into_user")))
    expected = [shape.before + answer + shape.end for answer in ANSWERS[:turns]]
    found = texts(examples, tokenizer)
    if shape.kind == "sentencepiece":  # its decoder strips one leading space of any piece
        found, expected = [text.lstrip() for text in found], [text.lstrip() for text in expected]
    if shape.joint is None:
        assert sorted(found) == sorted(expected)
        assert turns < 5 or build.counts["boundary inside a token: prompt and answer tokenized apart"]
    else:
        assert found == expected
        assert len(examples) == (1 if shape.joint else turns)
    assert not any(reason.startswith("generation tags") for reason in build.counts)


@pytest.mark.parametrize("name", SHAPES)
def test_every_supervised_turn_follows_exactly_its_own_prompt(encoder: Any, name: str) -> None:
    build, tokenizer = encoder(name)
    messages = chat(3)
    prompts = []
    for turn in (1, 3, 5):
        prompt = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids)
    found = []
    for example in build.encode(Conversation("c", messages)):
        starts = np.flatnonzero(np.diff(np.concatenate([[0], example.loss_mask.astype(np.int8)])) == 1)
        found += [example.input_ids[:start].tolist() for start in starts]
    if SHAPES[name].joint is None:
        assert sorted(found) == sorted(prompts)
        return
    if (
        name == "ignores_the_generation_prompt"
    ):  # there the header is in no prompt: it is read, but not supervised
        assert [tokens[: len(prompt)] for tokens, prompt in zip(found, prompts, strict=True)] == prompts
    elif name == "inserts_empty_think_block":
        inserted = tokenizer.backend_tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False).ids
        assert found == [*prompts[:2], prompts[2] + inserted]
    else:
        assert found == prompts


def test_empty_think_block_in_every_prompt_gives_an_example_per_turn(encoder: Any) -> None:
    build, tokenizer = encoder("inserts_empty_think_block", enable_thinking=False)
    examples = build.encode(Conversation("c", chat(3)))
    assert [spans(example, tokenizer) for example in examples] == [
        [text + "<|im_end|>"] for text in ANSWERS[:3]
    ]
    for example in examples:
        text = tokenizer.decode(example.input_ids)
        assert text.count("<think>") == 1
    assert build.counts["turns cut into examples of their own"] == 2


@pytest.mark.parametrize("content", ["think", "\n", "t", "<", ">\n\n", "k>", "<think>\n\n</think>\n\nok yes"])
def test_content_that_also_occurs_in_what_the_template_inserts(encoder: Any, content: str) -> None:
    build, tokenizer = encoder("inserts_empty_think_block")
    [example] = build.encode(Conversation("c", [user("hi"), assistant(content + " yes")]))
    assert spans(example, tokenizer) == [content + " yes<|im_end|>"]
    [example] = build.encode(
        Conversation("c", [user("hi"), assistant("yes ok"), user("and?"), assistant(content)])
    )
    assert spans(example, tokenizer)[-1] == content + "<|im_end|>"


def test_dropped_thinking_is_trained_in_an_example_of_its_own(encoder: Any) -> None:
    build, tokenizer = encoder("drops_earlier_thinking")
    thinking = "<think>\nhmm\n</think>\n\nhello"
    messages = [user("a"), assistant(thinking), user("b"), assistant("yes"), user("c"), assistant(thinking)]
    examples = build.encode(Conversation("c", messages))
    assert [spans(example, tokenizer) for example in examples] == [
        [thinking + "<|im_end|>"],
        ["yes<|im_end|>", thinking + "<|im_end|>"],
    ]
    assert "hmm" not in tokenizer.decode(examples[1].input_ids[: len(examples[1].input_ids) // 2])


@pytest.mark.parametrize("content", [None, "", "let me see"])
def test_tool_calls_are_supervised_and_tool_results_are_not(
    build_tokenizer: Any, content: str | None
) -> None:
    tokenizer = build_tokenizer(TOOLS)
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = [
        user("weather?"),
        assistant(content, tool_calls=[call]),
        {"role": "tool", "content": "hot <|im_end|> yes"},
        assistant("It is hot."),
        user("thanks"),
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    build = ConversationEncoder(tokenizer, max_length=1000)
    [example] = build.encode(Conversation("c", messages, tools=tools))
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
    assert spans(example, tokenizer) == [
        (content + "\n" if content else "") + written,
        "It is hot.<|im_end|>",
    ]
    assert '"parameters"' in tokenizer.decode(example.input_ids)


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_tool_calls_over_several_turns(build_tokenizer: Any, turns: int) -> None:
    tokenizer = build_tokenizer(TOOLS)
    cities = ["Paris", "Rome", "Oslo", "Lima", "Bonn"][:turns]
    messages, expected = [], []
    for city, answer in zip(cities, ANSWERS, strict=False):
        call = {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        messages += [user(f"how is {city}?"), assistant(None, tool_calls=[call])]
        messages += [{"role": "tool", "content": f"{city} is hot"}, assistant(answer)]
        said = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
        expected += [said + "<|im_end|>", answer + "<|im_end|>"]
    [example] = ConversationEncoder(tokenizer, max_length=10_000).encode(Conversation("c", messages))
    assert spans(example, tokenizer) == expected


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_dropped_thinking_over_several_turns(encoder: Any, turns: int) -> None:
    build, tokenizer = encoder("drops_earlier_thinking")
    said = [f"<think>\nhmm {index}\n</think>\n\n{ANSWERS[index]}" for index in range(turns)]
    messages = [m for index, text in enumerate(said) for m in (user(f"why {index}?"), assistant(text))]
    examples = build.encode(Conversation("c", messages))
    assert [spans(example, tokenizer) for example in examples] == [[text + "<|im_end|>"] for text in said]
    for example in examples:
        assert tokenizer.decode(example.input_ids).count("<think>") == 1


def test_a_template_of_another_model_is_counted(build_tokenizer: Any) -> None:
    template = SHAPES["chatml"].template.replace("<|im_", "<|turn_")  # no tokens of this tokenizer
    build = ConversationEncoder(build_tokenizer(template), max_length=1000)
    [example] = build.encode(Conversation("c", chat(2)))
    assert spans(example, build.tokenizer) == ["hello there", "yes"]
    assert build.counts["the template ends turns with no special token of the tokenizer"] == 1
    sound = ConversationEncoder(build_tokenizer(SHAPES["chatml"].template), max_length=1000)
    sound.encode(Conversation("c", chat(2)))
    assert not sound.counts


def test_reasoning_field_is_supervised(build_tokenizer: Any) -> None:
    template = SHAPES["chatml"].template.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}",
    )
    tokenizer = build_tokenizer(template)
    messages = [user("a"), assistant("yes", reasoning_content="because"), user("b"), assistant("no")]
    [example] = ConversationEncoder(tokenizer, max_length=1000).encode(Conversation("c", messages))
    assert spans(example, tokenizer) == ["<think>\nbecause\n</think>\n\nyes<|im_end|>", "no<|im_end|>"]


def test_generation_tags_that_disagree_are_counted(build_tokenizer: Any) -> None:
    template = SHAPES["generation_tags"].template.replace(
        "{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}"
    )
    build = ConversationEncoder(build_tokenizer(template), max_length=1000)
    build.encode(Conversation("c", chat(1)))
    assert build.counts["generation tags disagree"] == 1


WORDS = st.lists(
    st.one_of(
        st.sampled_from(
            ["the", "user", "assistant\n", "think", " ", "\n\n", "  ", "[INST]", "ASSISTANT:", "yes", "3"]
        ),
        st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=4),
        st.sampled_from(["😀", "👩‍👩‍👧", "שלום", "مرحبا", "你好", "ﬁ", "e\u0301", "\u200f", "<", "|>"]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([name for name in SHAPES if SHAPES[name].kind == "byte_level"]),
    st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4),
    st.booleans(),
)
def test_supervised_text_over_random_conversations(
    encoder: Any, name: str, turns: list[tuple[list[str], list[str]]], last_by_user: bool
) -> None:
    build, tokenizer = encoder(name)
    shape = SHAPES[name]
    said = ["".join(answer) for _, answer in turns]
    messages = [
        m
        for (asked, _), answer in zip(turns, said, strict=True)
        for m in (user("".join(asked)), assistant(answer))
    ]
    trims = "trim" in shape.template
    expected = [shape.before + (answer.strip() if trims else answer) + shape.end for answer in said]
    alone = sum(
        len(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids) < 2 for text in expected
    )
    try:
        examples = build.encode(Conversation("c", messages + [user("bye")] * last_by_user))
    except DroppedConversation:
        assert alone == len(expected)
        return
    found = texts(examples, tokenizer)
    assert not any(reason.startswith("turn unsupervised") for reason in build.counts)
    assert len(found) >= len(expected) - alone  # a turn of one token in an example of its own has no anchor
    assert not Counter(found) - Counter(expected)
    if build.counts.keys() <= {"turns cut into examples of their own"}:
        remaining = iter(expected)
        assert all(text in remaining for text in found)  # in order


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(WORDS, WORDS)
def test_supervised_text_of_sentencepiece_like_tokens(
    encoder: Any, asked: list[str], answer: list[str]
) -> None:
    build, tokenizer = encoder("boundary_in_token_sentencepiece")
    said = "".join(answer).replace("▁", "")  # to this kind of tokenizer the same as a space
    try:
        [example] = build.encode(Conversation("c", [user("".join(asked)), assistant(said)]))
    except DroppedConversation:
        assert said == ""
        return
    except BadConversation:
        assert build.counts["turn unsupervised: its boundary falls inside a token"]
        return
    start = int(np.argmax(example.loss_mask))
    decode = tokenizer.backend_tokenizer.decode
    assert decode(example.input_ids.tolist(), skip_special_tokens=False).endswith(f"ASSISTANT: {said}</s>")
    assert decode(example.input_ids[:start].tolist(), skip_special_tokens=False).endswith("ASSISTANT: ")
    assert example.loss_mask[start:].all()


def test_one_token_prompt_and_three_token_answer() -> None:
    ids = Conversation("c", turns=(Turn([5], [6, 7, 8]),))
    [example] = exact_encoder().encode(ids)
    assert example.input_ids.tolist() == [5, 6, 7, 8]
    assert example.loss_mask.tolist() == [False, True, True, True]
    assert example.eligible_anchors == 2


def exact_encoder(max_length: int = 100) -> ConversationEncoder:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {str(index): index for index in range(20)}
    return ConversationEncoder(
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="0"))),
        max_length=max_length,
    )


def test_exact_turns_are_joined_where_they_continue_each_other() -> None:
    joined = Conversation("c", turns=(Turn([1, 2], [3, 4]), Turn([1, 2, 3, 4, 5], [6, 7])))
    [example] = exact_encoder().encode(joined)
    assert example.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert example.loss_mask.tolist() == [False, False, True, True, False, True, True]
    apart = Conversation("c", turns=(Turn([1, 2], [3, 4]), Turn([1, 2, 9, 5], [6, 7])))
    assert [example.input_ids.tolist() for example in exact_encoder().encode(apart)] == [
        [1, 2, 3, 4],
        [1, 2, 9, 5, 6, 7],
    ]


def test_pretokenized_rows_keep_their_mask() -> None:
    row = Conversation("c", input_ids=[1, 2, 3, 4, 5, 6], loss_mask=[0, 1, 1, 0, 1, 1])
    [example] = exact_encoder().encode(row)
    assert example.loss_mask.tolist() == [False, True, True, False, True, True]


@pytest.mark.parametrize(
    ("conversation", "kind", "reason"),
    [
        (Conversation("c", turns=(Turn([5], [6]),)), DroppedConversation, "no eligible anchor"),
        (Conversation("c", turns=(Turn([], [6, 7]),)), BadConversation, "every token is supervised"),
        (Conversation("c", input_ids=[1, 2], loss_mask=[0, 0]), BadConversation, "no supervised token"),
        (Conversation("c", input_ids=[1, 2], loss_mask=[1, 1]), BadConversation, "every token is supervised"),
        (
            Conversation("c", turns=(Turn([5, 99], [6, 7]),)),
            BadConversation,
            "token id outside the vocabulary",
        ),
        (Conversation("c", turns=(Turn(list(range(9)), [6, 7]),)), DroppedConversation, "no anchor left"),
    ],
)
def test_rows_that_cannot_be_used(
    conversation: Conversation, kind: type[BadConversation], reason: str
) -> None:
    with pytest.raises(kind, match=reason) as caught:
        exact_encoder(max_length=10).encode(conversation)
    assert type(caught.value) is kind
    assert caught.value.__notes__ == ["conversation c"]


def test_truncation_keeps_what_fits_and_drops_context_after_the_last_answer(encoder: Any) -> None:
    whole, tokenizer = encoder("chatml")
    [full] = whole.encode(Conversation("c", chat(2)))
    ends = np.flatnonzero(np.diff(full.loss_mask.astype(np.int8)) == -1) + 1
    first_end, second_start = int(ends[0]), int(np.flatnonzero(full.loss_mask)[-1]) - 2
    for length in range(first_end, second_start):
        build, _ = encoder("chatml", max_length=length)
        [example] = build.encode(Conversation("c", chat(2)))
        assert spans(example, tokenizer)[0] == "hello there<|im_end|>"
        assert len(example.input_ids) <= length
        assert example.loss_mask[-1]
        assert build.counts["truncated to max_length"] == 1
    build, _ = encoder("chatml", max_length=5)
    with pytest.raises(DroppedConversation, match="no anchor left after truncation"):
        build.encode(Conversation("c", chat(1)))


def test_unfinished_answers_keep_no_end_token(encoder: Any) -> None:
    for name in ("chatml", "two_tokens_after_the_end", "no_end_token", "space_before_the_end"):
        build, tokenizer = encoder(name)
        [example] = build.encode(Conversation("c", chat(2), finished=False))
        shape = SHAPES[name]
        assert spans(example, tokenizer) == [
            shape.before + ANSWERS[0] + shape.end,
            shape.before + ANSWERS[1],
        ]


@pytest.mark.parametrize(
    "text",
    [
        "😀 👩‍👩‍👧‍👦 ok",
        "שלום עולם",
        "مرحبا بالعالم",
        "你好，世界。再见",
        "e\u0301 ﬁ Å",
        "\t tab\u00a0nbsp \u2028",
        "a" * 100_000,
    ],
    ids=["emoji", "hebrew", "arabic", "cjk", "combining", "spaces", "long"],
)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_unusual_text(build_tokenizer: Any, text: str, kind: str) -> None:
    tokenizer = build_tokenizer(SHAPES["chatml"].template, kind)
    build = ConversationEncoder(tokenizer, max_length=1_000_000)
    [example] = build.encode(Conversation("c", [user(text), assistant(text), user("x"), assistant(text)]))
    assert spans(example, tokenizer) == [text + "<|im_end|>"] * 2


def test_empty_assistant_turn_has_only_its_end_token(encoder: Any) -> None:
    build, tokenizer = encoder("chatml")
    [example] = build.encode(Conversation("c", [user("a"), assistant(""), user("b"), assistant("yes ok")]))
    assert spans(example, tokenizer) == ["<|im_end|>", "yes ok<|im_end|>"]
    with pytest.raises(DroppedConversation, match="no eligible anchor"):
        build.encode(Conversation("c", [user("a"), assistant("")]))


def test_last_turn_by_the_user_is_left_out(encoder: Any) -> None:
    build, tokenizer = encoder("chatml")
    [example] = build.encode(Conversation("c", [*chat(1), user("one more")]))
    assert spans(example, tokenizer) == ["hello there<|im_end|>"]
    assert "one more" not in tokenizer.decode(example.input_ids)
    with pytest.raises(BadConversation, match="no assistant turn"):
        build.encode(Conversation("c", [user("one more")]))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages %}<turn>{{ m.content | upper }}<end>{% endfor %}",
            "does not show assistant content",
        ),
        (
            "{% for m in messages %}<turn>{{ m.content[:4] }}<end>{% endfor %}",
            "does not show assistant content",
        ),
        (
            "{% for m in messages %}<turn>{{ m.content | replace('hello', 'goodbye') }}<end>{% endfor %}",
            "shows an assistant turn differently",
        ),
        ("{{ raise_exception('Only one user turn is supported') }}", "refuses it .Only one user turn"),
        (
            "{% for m in messages %}<turn>{{ m.content }}<end>{% endfor %}{{ messages[7].content }}",
            "refuses it",
        ),
        (
            "{% for m in messages %}<turn>{{ m.content }}<end>{% endfor %}"
            "{% if add_generation_prompt %}<turn><think>{% endif %}",
            "no assistant turn continues its generation prompt",
        ),
    ],
)
def test_templates_that_cannot_be_trusted(build_tokenizer: Any, template: str, reason: str) -> None:
    build = ConversationEncoder(build_tokenizer(template), max_length=1000)
    with pytest.raises(BadConversation, match=reason):
        build.encode(Conversation("c", chat(2)))


def test_a_batch_is_the_same_as_one_by_one(encoder: Any) -> None:
    generator = random.Random(0)
    conversations = [
        Conversation(str(i), chat(generator.randint(1, 5)) + [user("x")] * (i % 2)) for i in range(20)
    ] + [Conversation("bad", [user("x")])]
    build, _ = encoder("drops_earlier_thinking")
    results = list(build.encode_many(conversations))
    assert isinstance(results.pop(), BadConversation)
    for conversation, result in zip(conversations, results, strict=False):
        alone, _ = encoder("drops_earlier_thinking")
        assert not isinstance(result, BadConversation)
        [one], [other] = result, alone.encode(conversation)
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.loss_mask.tolist() == other.loss_mask.tolist()


def test_tokenizer_settings_are_left_alone(chatml: Any) -> None:
    before = json.loads(chatml.backend_tokenizer.to_str())
    chatml(["a", "b c"], truncation=True, max_length=2, padding=True)
    build = ConversationEncoder(chatml, max_length=1000)
    [example] = build.encode(Conversation("c", chat(1)))
    assert len(example.input_ids) > 2
    assert json.loads(chatml.backend_tokenizer.to_str())["model"] == before["model"]
