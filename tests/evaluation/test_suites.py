"""Suites: every row shape, the choice of prompts, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_train.errors import UserError
from dspark_train.evaluation.suites import HUB, load_suite, read_suite


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def test_every_row_shape_gives_what_the_user_says(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u1"}]
    messages += [{"role": "assistant", "content": "a1"}, {"role": "user", "content": "u2"}]
    rows = [{"turns": ["one", "two"]}, {"prompt": "three", "domain": "code"}, {"messages": messages}]
    prompts = read_suite(write(tmp_path / "own.jsonl", rows), "chat")
    assert [prompt.turns for prompt in prompts] == [("one", "two"), ("three",), ("u1", "u2")]
    assert [prompt.domain for prompt in prompts] == ["chat", "code", "chat"]
    assert [prompt.index for prompt in prompts] == [0, 1, 2]


@pytest.mark.parametrize("row", [{}, [], "text", {"turns": []}, {"turns": [3]}, {"turns": ["", "b"]}])
def test_a_row_without_turns_is_named_by_its_line(tmp_path: Path, row: object) -> None:
    path = write(tmp_path / "bad.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2"):
        read_suite(path)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n\n{"prompt": ')
    with pytest.raises(UserError, match="line 3"):
        read_suite(path)


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    """Unicode's own separators may stand unescaped inside a JSON text."""
    text = "one\u2028two\u0085three"
    path = tmp_path / "suite.jsonl"
    path.write_text(json.dumps({"turns": [text]}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [prompt.turns for prompt in read_suite(path)] == [(text,)]


def test_prompts_are_drawn_by_seed_and_name_in_order(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k.jsonl", [{"prompt": f"p{i}"} for i in range(50)])
    write(tmp_path / "mine.jsonl", [{"prompt": f"p{i}"} for i in range(50)])
    one = load_suite("gsm8k", folder=tmp_path, limit=10, seed=3)
    again = load_suite(f"gsm8k={tmp_path / 'gsm8k.jsonl'}", limit=10, seed=3)
    assert one == again
    indices = [prompt.index for prompt in one.prompts]
    assert indices == sorted(set(indices))
    assert len(indices) == 10
    assert one.domain == "math"
    other = load_suite("mine", folder=tmp_path, limit=10, seed=3)
    assert [prompt.index for prompt in other.prompts] != indices
    assert load_suite(str(tmp_path / "mine.jsonl"), limit=1000).prompts[49].turns == ("p49",)


def test_what_cannot_be_found_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown suite 'gsm9k'.*known are gsm8k"):
        load_suite("gsm9k", folder=tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        load_suite("gsm8k=absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="has no prompts"):
        load_suite(str(tmp_path / "empty.jsonl"))
    write(tmp_path / "one.jsonl", [{"prompt": "p"}])
    with pytest.raises(UserError, match="at least 1"):
        load_suite("one", folder=tmp_path, limit=0)


def test_rows_of_the_hub_become_prompts() -> None:
    rows = {
        "gsm8k": {"question": "How many?"},
        "math500": {"problem": "Find x."},
        "aime25": {"problem": "Find y."},
        "humaneval": {"prompt": "def f():\n"},
        "mbpp": {"prompt": "Write g.", "test_list": ["assert g() == 1"]},
        "livecodebench": {"question_content": "Sort.", "starter_code": "class S:"},
        "mt-bench": {"prompt": ["first", "second"]},
        "alpaca": {"instruction": "Translate.", "input": "Haus"},
        "arena-hard-v2": {"prompt": "Explain."},
    }
    assert set(rows) == set(HUB)
    turns = {name: list(HUB[name].turns(row)) for name, row in rows.items()}
    assert turns["mt-bench"] == ["first", "second"]
    assert turns["gsm8k"][0].startswith("How many?\n")
    assert "\\boxed{}" in turns["gsm8k"][0]
    assert "```python\ndef f():" in turns["humaneval"][0]
    assert turns["alpaca"] == ["Translate.\n\nInput:\nHaus"]
    assert list(HUB["alpaca"].turns({"instruction": "Sing.", "input": ""})) == ["Sing."]
    assert turns["mbpp"] == ["Write g."]
    assert turns["livecodebench"][0].endswith(
        "the program\n\n### Question:\nSort.\n\n### Format: Use the following code structure:\n```python\nclass S:\n"
        "```\n\n### Answer: (use the provided format with backticks)"
    )
    free = HUB["livecodebench"].turns({"question_content": "Sort.", "starter_code": ""})[0]
    assert "### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```" in free


def test_the_first_turn_is_taken_unless_more_are_wanted(tmp_path: Path) -> None:
    write(tmp_path / "mt-bench.jsonl", [{"turns": ["one", "two", "three"]}, {"turns": ["four"]}])
    turns = [
        [prompt.turns for prompt in load_suite("mt-bench", folder=tmp_path, turns=count).prompts]
        for count in (1, 2)
    ]
    assert turns == [[("one",), ("four",)], [("one", "two"), ("four",)]]


def test_without_a_network_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*arguments: object, **named: object) -> None:
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match=r"no route to host\); without a network give gsm8k=file\.jsonl"):
        load_suite("gsm8k")
