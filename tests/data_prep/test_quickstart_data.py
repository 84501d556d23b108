"""The quickstart's committed conversations: made from data_prep/quickstart's prompts, split by their ids."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

QUICKSTART = Path(__file__).resolve().parents[2] / "data_prep" / "quickstart"
END_TOKEN = 2  # <|im_end|>
MAX_ANSWER_TOKENS = 192


def load_generator() -> ModuleType:
    """prompts.py as a module; data_prep is no package."""
    spec = importlib.util.spec_from_file_location("quickstart_prompts", QUICKSTART / "prompts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_generator()


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    with (QUICKSTART / "conversations.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_the_generator_gives_exactly_the_committed_prompts(
    generator: ModuleType, rows: list[dict[str, Any]]
) -> None:
    generated = [(p.id, p.domain, p.split, p.text) for p in generator.generate_prompts()]
    committed = [(r["id"], r["domain"], r["split"], r["messages"][0]["content"]) for r in rows]
    assert generated == committed


def test_splits_follow_from_the_ids_and_have_the_promised_sizes(
    generator: ModuleType, rows: list[dict[str, Any]]
) -> None:
    assert len(rows) >= 800
    assert len({r["id"] for r in rows}) == len(rows)
    assert len({r["messages"][0]["content"] for r in rows}) == len(rows)
    assert all(r["split"] == generator.split_of(r["id"]) for r in rows)
    sizes = Counter(r["split"] for r in rows)
    assert set(sizes) == {"train", "calibration", "validation", "test"}
    assert 150 <= sizes["calibration"] <= 350
    assert 100 <= min(sizes["validation"], sizes["test"]) <= max(sizes["validation"], sizes["test"]) <= 200
    for split in sizes:
        assert {r["domain"] for r in rows if r["split"] == split} == {"math", "code", "chat", "instruction"}


def test_no_two_prompts_are_near_duplicates(rows: list[dict[str, Any]]) -> None:
    """Jaccard similarity of word 5-grams; an index finds the pairs that share any."""
    index: dict[tuple[str, ...], list[int]] = defaultdict(list)
    grams: list[set[tuple[str, ...]]] = []
    shared: Counter[tuple[int, int]] = Counter()
    for number, row in enumerate(rows):
        words = re.findall(r"\w+", row["messages"][0]["content"].lower())
        own = {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}
        for gram in own:
            shared.update((other, number) for other in index[gram])
            index[gram].append(number)
        grams.append(own)
    similar = [
        (rows[a]["messages"][0]["content"], rows[b]["messages"][0]["content"])
        for (a, b), common in shared.items()
        if common / (len(grams[a]) + len(grams[b]) - common) >= 0.7
    ]
    assert similar == []


def test_token_ids_fit_the_conversation(rows: list[dict[str, Any]]) -> None:
    prefix = rows[0]["prompt_ids"][: rows[0]["prompt_ids"].index(END_TOKEN) + 1]  # the template's system turn
    suffix = rows[0]["prompt_ids"][-4:]  # end of the user's turn, start of the assistant's
    for row in rows:
        prompt_ids, answer_ids = row["prompt_ids"], row["answer_ids"]
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        assert prompt_ids[: len(prefix)] == prefix
        assert prompt_ids[-4:] == suffix
        assert len(prefix) + len(suffix) < len(prompt_ids) <= 140
        assert prompt_ids.count(END_TOKEN) == 2
        if row["finished"]:
            assert answer_ids.index(END_TOKEN) == len(answer_ids) - 1 < MAX_ANSWER_TOKENS
        else:
            assert END_TOKEN not in answer_ids
            assert len(answer_ids) == MAX_ANSWER_TOKENS
        assert len(answer_ids) > 0
