from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_train.data import build
from dspark_train.data.build import BuildOptions, build_set
from dspark_train.data.conversations import SPLITS, Conversation, SplitShares, half_of
from dspark_train.data.dataset import PreparedSet
from dspark_train.data.tokenize import ConversationEncoder, tokenizer_fingerprint
from dspark_train.errors import UserError
from dspark_train.files import file_digest


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SHARD_LINES", 40)


def contents(prepared: PreparedSet) -> dict[str, list[tuple[str, list[int], list[bool]]]]:
    found = {}
    for split in prepared.manifest.splits:
        store = prepared.split(split)
        examples = [store[index] for index in range(len(store))]
        found[split] = [(e.conversation, e.input_ids.tolist(), e.loss_mask.tolist()) for e in examples]
    return found


def test_set_holds_the_examples_of_its_file_in_order(
    conversations_file: Path, tmp_path: Path, chatml: Any
) -> None:
    prepared = build_set(conversations_file, tmp_path / "set", chatml, BuildOptions(max_length=200))
    encoder = ConversationEncoder(chatml, max_length=200)
    expected: dict[str, list[Any]] = {}
    for line in conversations_file.read_text().splitlines():
        row = json.loads(line)
        for example in encoder.encode(Conversation(row["id"], row["messages"], split=row["split"])):
            expected.setdefault(row["split"], []).append(
                (row["id"], example.input_ids.tolist(), example.loss_mask.tolist())
            )
    assert contents(prepared) == expected
    store = prepared.split("train")
    assert store.lengths.tolist() == [len(ids) for _, ids, _ in expected["train"]]
    assert store.column("supervised").tolist() == [sum(mask) for _, _, mask in expected["train"]]
    counts = prepared.manifest.splits["train"]
    assert counts.tokens == int(store.lengths.sum())
    assert counts.anchors == int(store.column("anchors").sum())
    assert np.array_equal(store.loss_mask(3), store[3].loss_mask)


@pytest.mark.usefixtures("small_shards")
def test_shards_processes_and_interruptions_change_nothing(
    conversations_file: Path, tmp_path: Path, chatml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BuildOptions(max_length=200)
    whole = build_set(conversations_file, tmp_path / "whole", chatml, options)
    assert len(whole.manifest.files["train"]) == 8
    expected = contents(whole)

    done: list[int] = []

    def interrupt(count: int, total: int) -> None:
        done.append(count)
        assert total == 300
        if sum(done) >= 150:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_set(conversations_file, tmp_path / "cut", chatml, options, progress=interrupt)
    assert len(list((tmp_path / "cut").glob("shard-*.json"))) == 3
    with pytest.raises(UserError, match="not a finished prepared set"):
        PreparedSet(tmp_path / "cut")
    with pytest.raises(UserError, match="unfinished set of another recipe"):
        build_set(conversations_file, tmp_path / "cut", chatml, BuildOptions(max_length=100))
    again = build_set(conversations_file, tmp_path / "cut", chatml, options, workers=2)
    assert contents(again) == expected
    assert again.manifest == whole.manifest
    with pytest.raises(UserError, match="already holds another set"):
        build_set(conversations_file, tmp_path / "cut", chatml, BuildOptions(max_length=100))


def test_faults_are_listed_and_too_many_stop_the_run(tmp_path: Path, chatml: Any) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes ok"}]}
    path = tmp_path / "x.jsonl"
    lines = [json.dumps(good | {"id": str(index)}) for index in range(20)]
    lines += ["{broken", json.dumps({"id": "q", "messages": [{"role": "user", "content": "b"}]})]
    lines += [json.dumps({"id": "short", "turns": [{"prompt_ids": [1], "answer_ids": [2]}]})]
    path.write_text("\n".join(lines) + "\n")
    options = BuildOptions(max_length=100, shares=SplitShares(0.2, 0.2), max_error_share=0.1)
    prepared = build_set(path, tmp_path / "set", chatml, options)
    assert prepared.manifest.errors == {"line is not JSON": 1, "no assistant turn": 1}
    assert prepared.manifest.dropped == {"no eligible anchor": 1}
    bad = [json.loads(line) for line in (tmp_path / "set" / "bad.jsonl").read_text().splitlines()]
    assert [(row["where"], row["id"]) for row in bad] == [
        ("x.jsonl:21", None),
        ("x.jsonl:22", "q"),
        ("x.jsonl:23", "short"),
    ]
    with pytest.raises(
        UserError, match=r"2 of 23 conversations .* are faulty, more than max_error_share 0\.05"
    ):
        build_set(path, tmp_path / "strict", chatml, BuildOptions(max_length=100))


def test_half_a_character_is_a_fault_of_its_row(tmp_path: Path, chatml: Any) -> None:
    messages = [{"role": "user", "content": "a \U0001f600"}, {"role": "assistant", "content": "yes ok"}]
    rows: list[dict[str, Any]] = [{"id": str(index)} for index in range(8)]
    rows += [{"id": "\ud800"}, {"id": "8", "domain": "\ud83d"}, {"id": "9", "tools": [{"name": "\udc00"}]}]
    path = tmp_path / "x.jsonl"
    lines = [json.dumps(row | {"messages": messages}).encode() for row in rows]
    path.write_bytes(b"\n".join([*lines, lines[0].replace(b'"0"', b'"\xff"')]))
    prepared = build_set(path, tmp_path / "set", chatml, BuildOptions(max_length=100, max_error_share=0.5))
    assert prepared.manifest.errors == {"row is not valid Unicode": 4}


def test_files_made_elsewhere_are_read(tmp_path: Path, chatml: Any, conversations_file: Path) -> None:
    """A byte order mark, line breaks of two characters, blank lines, and no line break at the end."""
    path = tmp_path / "x.jsonl"
    lines = conversations_file.read_bytes().splitlines()[:100]
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(lines))
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(b"\n".join(lines) + b"\n")
    options = BuildOptions(max_length=200)
    prepared = build_set(path, tmp_path / "set", chatml, options)
    assert prepared.manifest.errors == {}
    assert contents(prepared) == contents(build_set(plain, tmp_path / "plain", chatml, options))


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tiny_tokenizers import CHATML, make_tokenizer
from dspark_train.data import build
build.SHARD_LINES = 40
told = []

def kill(count, total):
    told.append(count)
    if sum(told) >= 150:
        os.kill(os.getpid(), signal.SIGKILL)

source, folder = map(Path, sys.argv[2:])
options = build.BuildOptions(max_length=200)
build.build_set(source, folder, make_tokenizer(CHATML), options, progress=kill)
"""


@pytest.mark.usefixtures("small_shards")
def test_a_killed_build_goes_on_and_two_share_the_work(
    conversations_file: Path, tmp_path: Path, chatml: Any
) -> None:
    options = BuildOptions(max_length=200)
    whole = build_set(conversations_file, tmp_path / "whole", chatml, options)
    words = [str(Path(__file__).parent.parent), str(conversations_file), str(tmp_path / "cut")]
    done = subprocess.run([sys.executable, "-c", KILLED, *words], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "cut").glob("shard-*.json"))) == 3
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(build_set, conversations_file, tmp_path / "cut", chatml, options) for _ in range(2)
        ]
        first, second = (each.result() for each in both)
    assert contents(first) == contents(second) == contents(whole)
    assert first.manifest == second.manifest == whole.manifest


def test_fingerprint_names_everything(
    conversations_file: Path, tmp_path: Path, chatml: Any, build_tokenizer: Callable[..., Any]
) -> None:
    other = build_tokenizer(chatml.chat_template + " ")
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(chatml)
    changed = tmp_path / "changed.jsonl"
    changed.write_text(conversations_file.read_text().replace("answer 7 ", "answer seven "))
    base = BuildOptions(max_length=100)
    variants = [
        (conversations_file, chatml, base, None),
        (conversations_file, other, base, None),
        (changed, chatml, base, None),
        (conversations_file, chatml, BuildOptions(max_length=101), None),
        (conversations_file, chatml, BuildOptions(100, {"enable_thinking": False}), None),
        (conversations_file, chatml, BuildOptions(100, shares=SplitShares(seed=1)), None),
        (conversations_file, chatml, base, {"name": "x"}),
    ]
    found = {
        build.new_manifest(path, file_digest(path), tokenizer, options, recipe).fingerprint
        for path, tokenizer, options, recipe in variants
    }
    assert len(found) == len(variants)


def test_fingerprint_names_the_code_version(
    conversations_file: Path, chatml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint() -> str:
        digest = file_digest(conversations_file)
        return build.new_manifest(conversations_file, digest, chatml, BuildOptions(), None).fingerprint

    before = fingerprint()
    monkeypatch.setattr(build, "TOKENIZE_VERSION", build.TOKENIZE_VERSION + 1)
    assert fingerprint() != before


def test_examples_of_one_conversation_share_its_split(
    conversations_file: Path, tmp_path: Path, build_tokenizer: Callable[..., Any]
) -> None:
    template = (  # the first header names the number of messages: no turn continues another one's text
        "{{ messages | length - (messages[-1].role == 'assistant') }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [json.loads(line) for line in conversations_file.read_text().splitlines()]
    source = tmp_path / "unsplit.jsonl"
    source.write_text("".join(json.dumps({"id": r["id"], "messages": r["messages"]}) + "\n" for r in rows))
    options = BuildOptions(max_length=500, shares=SplitShares(0.3, 0.3))
    prepared = build_set(source, tmp_path / "set", build_tokenizer(template), options)
    places: dict[str, list[str]] = {}
    for split in prepared.manifest.splits:
        for name in prepared.split(split).column("conversation").tolist():
            places.setdefault(name, []).append(split)
    assert sorted(map(len, places.values())) == sorted(len(row["messages"]) // 2 for row in rows)
    assert all(len(set(splits)) == 1 for splits in places.values())
    assert {splits[0] for splits in places.values() if len(splits) > 1} == set(SPLITS)


def test_a_set_of_an_earlier_version_has_its_held_out_split_halved(
    conversations_file: Path, tmp_path: Path, chatml: Any
) -> None:
    """By the id, so that the file that it was made from, read today, is divided alike."""
    rows = [json.loads(line) for line in conversations_file.read_text().splitlines()]
    for row in rows:
        row["split"] = {"validation": "heldout", "test": "heldout"}.get(row["split"], row["split"])
    source = tmp_path / "former.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    today = build_set(source, tmp_path / "today", chatml, BuildOptions(max_length=200))
    folder = tmp_path / "former"
    build_set(source, folder, chatml, BuildOptions(max_length=200))
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("templates", "answers"):
        del manifest[name]
    counts = [manifest["splits"].pop(split) for split in ("validation", "test")]
    manifest["splits"]["heldout"] = {key: sum(each[key] for each in counts) for key in counts[0]}
    manifest["files"]["heldout"] = [manifest["files"].pop(split)[0] for split in ("validation", "test")]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    former = PreparedSet(folder)
    assert former.splits == today.splits
    assert set(former.splits) == set(SPLITS)
    for split in SPLITS:
        one, other = former.split(split), today.split(split)
        assert one.lengths.tolist() == other.lengths.tolist()
        assert one.column("conversation").tolist() == other.column("conversation").tolist()
        assert [one.loss_mask(i).tolist() for i in range(len(one))] == [
            other[i].loss_mask.tolist() for i in range(len(other))
        ]
    assert all(half_of(key) == "test" for key in former.split("test").column("conversation"))
    assert former.template == {}


def test_a_set_knows_what_its_conversations_were_rendered_with(
    conversations_file: Path, tmp_path: Path, chatml: Any
) -> None:
    """A row's own arguments go over those for all; the most common ones are the set's."""
    rows = [json.loads(line) for line in conversations_file.read_text().splitlines()[:10]]
    for row in rows[:4]:
        row["template"] = {"enable_thinking": True}
    source = tmp_path / "mixed.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source.with_suffix(".json").write_text('{"sampling": {"temperature": 0.7}}')
    options = BuildOptions(max_length=200, template={"enable_thinking": False})
    prepared = build_set(source, tmp_path / "set", chatml, options)
    assert prepared.templates == [({"enable_thinking": False}, 0.6), ({"enable_thinking": True}, 0.4)]
    assert prepared.template == {"enable_thinking": False}
    assert prepared.manifest.answers == {"temperature": 0.7}


def test_damaged_sets_are_refused(conversations_file: Path, tmp_path: Path, chatml: Any) -> None:
    prepared = build_set(conversations_file, tmp_path / "set", chatml, BuildOptions(max_length=100))
    file = tmp_path / "set" / prepared.manifest.files["train"][0]
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"is damaged|holds \d+ examples"):
        PreparedSet(tmp_path / "set").split("train")
    (tmp_path / "set" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        PreparedSet(tmp_path / "set")
