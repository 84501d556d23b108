"""A tiny tokenizer with a chat template, and conversations over it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(80)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level, 97 ids, ChatML-like template."""
    specials = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>", "<spare>"]
    words = [*specials, "user", "assistant", "system", *WORDS]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<spare>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_conversations(count: int = 24, seed: int = 0, longest: int = 14) -> list[dict[str, Any]]:
    """Rows with exact ids, answers of uneven length, all four splits."""
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        prompt = [1, 5, *(draw.randrange(8, 88) for _ in range(draw.randint(1, 5))), 2, 1, 6]
        answer = [draw.randrange(8, 88) for _ in range(draw.randint(2, longest))] + [2]
        split = {0: "calibration", 1: "validation", 6: "calibration", 7: "test"}.get(index % 12, "train")
        rows.append(
            {
                "id": f"c{index}",
                "domain": ("math", "chat")[index % 2],
                "split": split,
                "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
                "prompt_ids": prompt,
                "answer_ids": answer,
                "finished": True,
            }
        )
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """As JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_target(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """A tiny target with its tokenizer, as a Hugging Face folder."""
    from tiny_models import tiny_model

    tiny_model(family, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_recipe(folder: Path) -> dict[str, Any]:
    """Write a tiny target and conversations into ``folder``; returns a config's sections but trainer and run."""
    write_target(folder / "target")
    write_rows(folder / "rows.jsonl", tiny_conversations(36))
    return {
        "seed_everything": 0,
        "target": {"name_or_path": str(folder / "target"), "layer_ids": [0, 1, 2], "dtype": "float32"},
        "data": {
            "path": str(folder / "rows.jsonl"),
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "max_length": 64,
            "num_anchors": 4,
            "cache_dir": str(folder / "cache"),
        },
        "draft": {"num_layers": 1, "block_size": 3, "markov_rank": 4},
        "optimizer": {"lr": 3e-3},
    }
