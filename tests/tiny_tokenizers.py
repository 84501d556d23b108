"""Small tokenizers made on the spot, and files of conversations."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog.\n\nIt was the best of times, it was the worst of times.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # 3\n",
    "user assistant system tool ASSISTANT: USER: [INST] [/INST] ### Response:\n think answer hello there yes "
    "no ok",
    '{"name": "weather", "arguments": {"city": "Paris"}} <tool_call> </tool_call>',
] * 8
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start|>",
    "<|eot|>",
    "<|bos|>",
    "</s>",
    "<s>",
    "<turn>",
    "<end>",
    "<pad>",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@lru_cache
def _backend(kind: str) -> str:
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(CORPUS, trainer)
        return str(tokenizer.to_str())
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
        max_token_length=8,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())


@lru_cache
def make_tokenizer(template: str | None, kind: str = "byte_level", end: str | None = "<|im_end|>") -> Any:
    tokenizer = Tokenizer.from_str(_backend(kind))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        eos_token=end,
        pad_token="<pad>",
        bos_token="<|bos|>",
    )


@pytest.fixture(scope="session")
def build_tokenizer() -> Callable[..., Any]:
    """``build_tokenizer(template, kind, end)``: kinds ``byte_level`` and ``sentencepiece``."""
    return make_tokenizer


@pytest.fixture(scope="session")
def chatml() -> Any:
    """A byte-level tokenizer with a plain ChatML template."""
    return make_tokenizer(CHATML)


@pytest.fixture(scope="session")
def conversations_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 conversations of different lengths in three domains, with splits."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    splits = [*["train"] * 8, "calibration", "validation", *["train"] * 8, "calibration", "test"]
    with path.open("w") as file:
        for index in range(300):
            messages = []
            for turn in range(1 + index % 3):
                messages.append(
                    {"role": "user", "content": f"question {index} {turn} " + "why " * (index % 7)}
                )
                messages.append(
                    {"role": "assistant", "content": f"answer {index} " + "because " * (index * 13 % 17)}
                )
            row = {
                "id": f"c{index}",
                "domain": ("math", "code", "chat")[index % 3],
                "split": splits[index % 20],
            }
            file.write(json.dumps(row | {"messages": messages}) + "\n")
    return path
