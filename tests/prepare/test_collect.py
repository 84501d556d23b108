from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_train.data.conversations import BadConversation, SplitShares, conversation_from_row
from dspark_train.errors import UserError
from dspark_train.prepare.collect import CollectOptions, Deduplicate, Filters, collect
from dspark_train.prepare.sources import Source, conversation_of, count_rows, read_source


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pair(prompt: str, response: str = "fine") -> dict[str, str]:
    return {"prompt": prompt, "response": response}


def read(row: Any, **options: Any) -> list[tuple[str, Any]]:
    conversation = conversation_of(row, Source("x.jsonl", **options), "x.jsonl:1")
    return [(message["role"], message["content"]) for message in conversation.messages]


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, {}, [("user", "a")]),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "b"},
                ]
            },
            {},
            [("system", "s"), ("user", "a"), ("assistant", "b")],
        ),
        (
            {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {},
            [("user", "a"), ("assistant", "b")],
        ),
        ({"messages": '[{"role": "user", "content": "a"}]'}, {"format": "messages"}, [("user", "a")]),
        ({"instruction": "a", "output": "b"}, {}, [("user", "a"), ("assistant", "b")]),
        (
            {"q": "a", "context": "c", "best": "b", "sys": "s"},
            {"columns": {"prompt": ["q", "context"], "response": "best", "system": "sys"}},
            [("system", "s"), ("user", "a\n\nc"), ("assistant", "b")],
        ),
        ({"question": "a"}, {}, [("user", "a")]),
        (
            {"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]},
            {"columns": {"messages": "chosen"}},
            [("user", "a")],
        ),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "a"}]},
            {},
            [("system", "s"), ("user", "a")],
        ),
        (
            {
                "system": "s",
                "messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}],
            },
            {},
            [("system", "own"), ("user", "a")],
        ),
        (
            {
                "text": "<|im_start|>user\na\n<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant\n"
            },
            {"template": "chatml"},
            [("user", "a\n"), ("assistant", "b")],
        ),
        (
            {"text": "### Instruction:\ndo it\n\n### Input:\nwith this\n\n### Response:\ndone"},
            {"template": "alpaca"},
            [("user", "do it\n\nwith this"), ("assistant", "done")],
        ),
        (
            {"text": "USER: hi ASSISTANT: hello</s>USER: more? ASSISTANT: no</s>"},
            {"template": "vicuna"},
            [("user", "hi"), ("assistant", "hello"), ("user", "more?"), ("assistant", "no")],
        ),
        (
            {"text": "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"},
            {"template": "gemma"},
            [("user", "a"), ("assistant", "b")],
        ),
    ],
)
def test_formats(row: Any, options: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert read(row, **options) == expected


def test_tokens_tools_domain_and_split_are_read() -> None:
    tokens = conversation_of({"input_ids": [1, 2], "loss_mask": [0, 1]}, Source("x.jsonl"), "w")
    assert (tokens.input_ids, tokens.loss_mask) == ([1, 2], [0, 1])
    row = pair("a") | {"source": "gsm8k", "split": "test", "tools": '[{"type": "function"}]', "uid": 7}
    source = Source("x.jsonl", columns={"id": "uid"}, domains={"gsm8k": "math"})
    found = conversation_of(row, source, "w")
    assert (found.id, found.domain, found.split, found.tools) == (
        "7",
        "math",
        "test",
        [{"type": "function"}],
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (3, "row is not an object"),
        ({}, "no conversation in this row"),
        ({"messages": [{"role": "user", "content": None}]}, "null content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role"),
        ({"conversations": [{"from": "wizard", "value": "x"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is not text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "content is not valid Unicode"),
        ({"prompt": "", "response": "x"}, "empty prompt"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "do not fit"),
        ({"input_ids": ["1", "2"], "loss_mask": [0, 1]}, "input_ids is not a list of whole numbers"),
        ({"input_ids": [1, 2**40], "loss_mask": [0, 1]}, "input_ids is not a list of whole numbers"),
        ({"input_ids": 3, "loss_mask": 3}, "row cannot be read"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "unknown role"),
        (pair("a") | {"tools": "weather"}, "tools are not a list"),
        (pair("a") | {"tools": {"name": "weather"}}, "tools are not a list of objects"),
        ({"messages": [{"role": "user", "content": "a"}], "turns": [3]}, "row cannot be read"),
        ({"turns": [{"prompt_ids": [1], "answer_ids": "x"}]}, "answer_ids is not a list of whole numbers"),
        ({"prompt_ids": [1], "answer_ids": [2], "template": "x"}, "template is not an object"),
        (pair("a") | {"split": "dev"}, "unknown split"),
    ],
)
def test_bad_rows(row: Any, reason: str) -> None:
    with pytest.raises(BadConversation, match=reason):
        conversation_of(row, Source("x.jsonl"), "x.jsonl:1")


KEYS = [
    "messages",
    "conversations",
    "prompt",
    "response",
    "system",
    "tools",
    "split",
    "id",
    "domain",
    "input_ids",
    "loss_mask",
    "turns",
    "prompt_ids",
    "answer_ids",
    "template",
]
TURN_KEYS = st.sampled_from(["role", "content", "from", "value", "prompt_ids", "answer_ids", "tool_calls"])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just("user")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TURN_KEYS, inner, max_size=3)),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5),
    st.sampled_from(["auto", "messages", "conversations", "pairs", "prompts", "tokens"]),
)
def test_no_row_stops_a_run(row: dict[str, Any], kind: Any) -> None:
    source = Source("x.jsonl", format=kind)
    for read_one in (lambda: conversation_of(row, source, "w"), lambda: conversation_from_row(row, "w")):
        try:
            conversation = read_one()
        except BadConversation:
            continue
        assert conversation.messages or conversation.exact
        Filters().apply(conversation)


def test_rows_that_cannot_be_written_go_to_the_side_file(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes(
        b'{"prompt": "a"}\n'
        b'{"prompt": "b", "domain": "\xff"}\n'  # no UTF-8
        b'{"prompt": "c", "domain": "\\ud800"}\n'
        b'{"prompt": ' + b"1" * 5000 + b"}\n" + b"[" * 100_000 + b"\n"
    )
    out = collect(CollectOptions([Source(str(tmp_path / "s.jsonl"))], max_error_share=0.9), tmp_path)
    assert [row["messages"][0]["content"] for row in rows_of(out)] == ["a"]
    reasons = [row["reason"] for row in rows_of(tmp_path / "collected.bad.jsonl")]
    assert reasons == ["row cannot be written as JSON"] * 2 + ["line is not JSON"] * 2


def test_hub_ids_are_read_with_subset_split_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(path: str, name: str | None, **options: Any) -> list[Any]:
        asked.append((path, name, options))
        if path == "no/where":
            raise ValueError("no such data set")
        return [pair("a"), pair("b")]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(read_source(Source("some/data", subset="main", split="test", revision="abc"))) == [
        ("some/data:1", pair("a")),
        ("some/data:2", pair("b")),
    ]
    assert asked == [("some/data", "main", {"split": "test", "revision": "abc", "streaming": True})]
    with pytest.raises(UserError, match=r"no/where: cannot be read from the hub .no such data set"):
        list(read_source(Source("no/where")))
    assert count_rows(Source("some/data")) is None


def test_rows_are_counted_before_they_are_read(tmp_path: Path) -> None:
    rows = [pair(f"question {index}") for index in range(7)]
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "a.jsonl", rows)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "folder" / "b.parquet")
    for name, count in (("folder/a.jsonl", 7), ("folder/b.parquet", 7), ("folder", 14)):
        assert count_rows(Source(str(tmp_path / name))) == count
        assert count_rows(Source(str(tmp_path / name), limit=3)) == 3
    (tmp_path / "broken.parquet").write_text("PAR")
    assert count_rows(Source(str(tmp_path / "broken.parquet"))) is None
    with pytest.raises(UserError, match="is no sound Parquet file"):
        list(read_source(Source(str(tmp_path / "broken.parquet"))))


def test_files_folders_and_saved_sets_give_the_same_rows(tmp_path: Path) -> None:
    rows = [pair(f"question {index}") for index in range(7)]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=table).save_to_disk(tmp_path / "dict")
    (tmp_path / "folder").mkdir()
    table.to_parquet(tmp_path / "folder" / "b.parquet")
    for name in ("a.jsonl", "a.json", "a.parquet", "saved", "dict", "folder"):
        assert [row for _, row in read_source(Source(str(tmp_path / name)))] == rows
    assert len(list(read_source(Source(str(tmp_path / "saved"), limit=3)))) == 3


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.csv").write_text("a,b")
    for path, message in [
        ("nowhere.jsonl", "no such file"),
        (str(tmp_path / "empty"), "no .jsonl or .parquet"),
        (str(tmp_path / "x.csv"), "unknown kind of file"),
    ]:
        with pytest.raises(UserError, match=message):
            list(read_source(Source(path)))
    with pytest.raises(UserError, match="unknown column keys"):
        Source("x.jsonl", columns={"promt": "q"})
    with pytest.raises(UserError, match="format text needs a template"):
        Source("x.jsonl", format="text")


def test_collect_counts_what_it_leaves_out(tmp_path: Path) -> None:
    rows: list[Any] = [pair(f"what is {index} plus one") for index in range(40)]
    rows += [
        pair("What  is 3 PLUS one"),
        pair("hm"),
        pair("long " * 500),
        {"messages": [{"role": "user", "content": None}]},
    ]
    source = Source(write(tmp_path / "s.jsonl", rows) + "")
    (tmp_path / "s.jsonl").open("a").write("{broken\n")
    filters = Filters(min_prompt_chars=4, max_chars=1000)
    out = collect(CollectOptions([source], filters), tmp_path)
    assert len(rows_of(out)) == 40
    [tally] = json.loads((tmp_path / "collected.json").read_text())["sources"].values()
    assert tally == {
        "rows": 45,
        "kept": 40,
        "bad": 2,
        "bad: null content": 1,
        "bad: line is not JSON": 1,
        "left out: duplicate": 1,
        "left out: prompt too short": 1,
        "left out: too long": 1,
    }
    assert [row["where"] for row in rows_of(tmp_path / "collected.bad.jsonl")] == ["s.jsonl:44", "s.jsonl:45"]
    with pytest.raises(UserError, match=r"2 of 45 rows cannot be read, more than max_error_share 0\.01"):
        collect(CollectOptions([source], filters, max_error_share=0.01), tmp_path / "strict")


def test_near_duplicates(tmp_path: Path) -> None:
    text = "a train leaves the city at noon and drives north at sixty miles an hour for three hours how far does it get"
    rows = [
        pair(text),
        pair(text + " today"),
        pair("write a poem about the sea and the wind in autumn please"),
    ]
    source = Source(write(tmp_path / "s.jsonl", rows))
    near = collect(CollectOptions([source], deduplicate=Deduplicate(near=0.8)), tmp_path / "near")
    assert len(rows_of(near)) == 2
    assert len(rows_of(collect(CollectOptions([source]), tmp_path / "exact"))) == 3


def mixture(tmp_path: Path, weights: tuple[float, ...] = (3.0, 1.0)) -> list[Source]:
    return [
        Source(
            write(tmp_path / f"{name}.jsonl", [pair(f"{name} question {index}") for index in range(count)]),
            domain=name,
            weight=weight,
        )
        for name, count, weight in zip(("math", "chat"), (90, 50), weights, strict=True)
    ]


def test_mixture_follows_the_weights(tmp_path: Path) -> None:
    sources = mixture(tmp_path)
    rows = rows_of(collect(CollectOptions(sources), tmp_path / "all"))
    assert Counter(row["domain"] for row in rows) == {"math": 90, "chat": 30}
    assert {row["domain"] for row in rows[:10]} == {"math", "chat"}
    some = rows_of(collect(CollectOptions(sources, size=40), tmp_path / "some"))
    assert Counter(row["domain"] for row in some) == {"math": 30, "chat": 10}
    with pytest.raises(
        UserError, match=r"needs 150 conversations of .*math\.jsonl, which gives 90: at most size 120"
    ):
        collect(CollectOptions(sources, size=200), tmp_path / "too_many")
    with pytest.raises(UserError, match="some sources have a weight"):
        CollectOptions([sources[0], Source("x.jsonl")])


def test_result_depends_on_seed_and_content_not_on_row_order(tmp_path: Path) -> None:
    rows = [pair(f"question {index}") for index in range(50)]
    orders = []
    for name, content, seed in (("a", rows, 0), ("b", rows[::-1], 0), ("a", rows, 1)):
        folder = tmp_path / f"{name}{seed}"
        folder.mkdir()
        source = Source(write(folder / "s.jsonl", content))
        orders.append(
            [row["id"] for row in rows_of(collect(CollectOptions([source], size=20, seed=seed), folder))]
        )
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_splits_are_by_prompt_and_of_the_right_size(tmp_path: Path) -> None:
    rows = [pair(f"question {index}") for index in range(2000)]
    shares = SplitShares(calibration=0.1, heldout=0.2)
    out = collect(CollectOptions([Source(write(tmp_path / "s.jsonl", rows))], shares=shares), tmp_path)
    counts = Counter(row["split"] for row in rows_of(out))
    assert abs(counts["validation"] - 200) < 45
    assert abs(counts["test"] - 200) < 45
    assert abs(counts["calibration"] - 200) < 45
    with pytest.raises(UserError, match="their sum below 1"):
        SplitShares(0.5, 0.5)


@given(st.text(), st.integers(0, 5))
def test_a_larger_held_out_share_moves_nothing_out_of_it(key: str, seed: int) -> None:
    before = SplitShares(calibration=0.1, heldout=0.4, seed=seed).split_of(key)
    if before in ("validation", "test"):
        assert SplitShares(calibration=0.1, heldout=0.8, seed=seed).split_of(key) == before


def test_interrupted_collect_goes_on_with_the_next_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = mixture(tmp_path)
    options = CollectOptions(sources)
    whole = collect(options, tmp_path / "whole").read_bytes()
    from dspark_train.prepare import collect as module

    calls = []

    def interrupted(source: Source) -> Any:
        calls.append(source.name)
        if source.name == "chat" and calls.count("chat") == 1:
            raise KeyboardInterrupt
        return read_source(source)

    monkeypatch.setattr(module, "read_source", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collect(options, tmp_path / "cut")
    assert not (tmp_path / "cut" / "collected.jsonl").exists()
    told: list[int] = []
    assert collect(options, tmp_path / "cut", told.append).read_bytes() == whole
    assert (told[0], sum(told)) == (90, 140)  # what was read before counts as read
    assert calls == ["math", "chat", "chat"]
    with pytest.raises(UserError, match="collected by another recipe"):
        collect(CollectOptions(sources, size=4), tmp_path / "cut")


def test_files_that_changed_since_are_noticed(tmp_path: Path) -> None:
    options = CollectOptions([Source(write(tmp_path / "s.jsonl", [pair("one"), pair("two")]))])
    out = collect(options, tmp_path)
    assert collect(options, tmp_path) == out
    write(tmp_path / "s.jsonl", [pair("one"), pair("six")])
    with pytest.raises(UserError, match="from files that have changed since"):
        collect(options, tmp_path)
    out.unlink()
    with pytest.raises(UserError, match=r"holds parts .* of files that have changed since"):
        collect(options, tmp_path)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(), "s u a u a u"),
        (Filters(prompts_only=True), "s u u u"),
        (Filters(keep_system=False), "u a u a u"),
        (Filters(max_turns=1), "s u a"),
        (Filters(require_answer=True), "s u a u a u"),
    ],
)
def test_filters(filters: Filters, expected: str) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [
        {"role": names[letter], "content": f"{letter}{index}"} for index, letter in enumerate("suauau")
    ]
    conversation = conversation_of({"messages": messages}, Source("x.jsonl"), "w")
    kept = filters.apply(conversation)
    assert not isinstance(kept, str)
    assert [message["role"][0] for message in kept.messages] == expected.split()
    alone = conversation_of({"messages": messages[1:2]}, Source("x.jsonl"), "w")
    assert Filters(require_answer=True).apply(alone) == "no assistant turn"
    assert (
        Filters().apply(conversation_of({"messages": messages[:1]}, Source("x.jsonl"), "w")) == "no user turn"
    )
