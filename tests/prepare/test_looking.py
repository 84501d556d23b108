from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_data import write_rows, write_target

from dspark_train.cli import prepare as commands
from dspark_train.data.build import BuildOptions, build_set
from dspark_train.data.conversations import SplitShares
from dspark_train.data.dataset import PreparedSet
from dspark_train.decoding.decoder import Decoder
from dspark_train.errors import UserError
from dspark_train.machine import Choice
from dspark_train.prepare.answers import Regenerate
from dspark_train.prepare.looking import SUPERVISED, coloured, examples_of, print_example, print_stats
from dspark_train.prepare.sources import Source
from dspark_train.target.frozen import FrozenTarget


def test_supervised_tokens_are_coloured_and_the_text_is_whole(tmp_path: Path, chatml: Any) -> None:
    messages = [{"role": "user", "content": "hi 😀"}, {"role": "assistant", "content": "yes 你好 ok"}]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"id": "c", "messages": messages}) + "\n")
    [(index, example)] = examples_of(path, chatml, "train", 0, 3, 100)
    text = coloured(chatml, example)
    green = "".join(text.plain[span.start : span.end] for span in text.spans if span.style in SUPERVISED)
    assert green == "yes 你好 ok<|im_end|>"
    assert text.plain.replace("⏎", "") == chatml.apply_chat_template(messages, tokenize=False)[:-1]
    console = Console(file=io.StringIO(), width=200)
    print_example(console, chatml, index, example)
    shown = console.file.getvalue()
    assert f"{int(example.loss_mask.sum())} supervised, {example.eligible_anchors} eligible anchors" in shown


def test_stats_count_what_the_set_holds(conversations_file: Path, tmp_path: Path, chatml: Any) -> None:
    prepared = build_set(conversations_file, tmp_path / "set", chatml, BuildOptions(max_length=60))
    console = Console(file=io.StringIO(), width=200)
    print_stats(console, tmp_path / "set", 7, 4, tmp_path / "plot.png")
    shown = console.file.getvalue()
    anchors = prepared.split("train").column("anchors")
    blocks = sum(min(4, count) for count in anchors.tolist())
    tokens = int(prepared.split("train").column("length").sum())
    rows = [line.split() for line in shown.replace("│", " ").splitlines()]
    assert ["train", f"{tokens:,}", f"{blocks:,}", f"{7 * blocks:,}"] in rows
    assert "truncated to max_length" in shown
    for domain in ("math", "code", "chat"):
        assert domain in shown
    assert "bad: null content" not in shown
    tally = {"rows": 309, "kept": 300, "bad": 2, "bad: null content": 2, "left out: duplicate": 7}
    (tmp_path / "collected.json").write_text(json.dumps({"sources": {"0:x": tally, "1:y": tally}}))
    (tmp_path / "regenerated.json").write_text(
        json.dumps({"answered": 9, "failed": 3, "failed: no valid answer": 3})
    )
    console = Console(file=io.StringIO(), width=200)
    print_stats(console, tmp_path / "set", 7, 4, tmp_path / "plot.png")
    table = [line.split() for line in console.file.getvalue().replace("│", " ").splitlines()]
    for row in (
        "collect bad: null content 4",
        "collect left out: duplicate 14",
        "regenerate failed: no valid answer 3",
    ):
        assert row.split() in table
    assert not any(row[:2] == ["regenerate", "answered"] for row in table)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_prepare_runs_its_stages_and_says_what_is_missing(
    tmp_path: Path, chatml: Any, conversations_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chatml.save_pretrained(tmp_path / "target")
    source, target = Source(str(conversations_file)), str(tmp_path / "target")
    with pytest.raises(UserError, match="output is not set"):
        commands.prepare(commands.PrepareOptions(sources=[source]))
    with pytest.raises(UserError, match="run the stage 'collect' first"):
        commands.prepare(commands.PrepareOptions(tmp_path / "a", [source], target, stages=["tokenize"]))
    with pytest.raises(UserError, match="target is not set"):
        commands.prepare(commands.PrepareOptions(tmp_path / "a", [source]))
    with pytest.raises(UserError, match="names no sources"):
        commands.prepare(commands.PrepareOptions(tmp_path / "a", [], target))
    with pytest.raises(UserError, match="no tokenizer can be loaded"):
        commands.prepare(commands.PrepareOptions(tmp_path / "a", [source], str(tmp_path / "nowhere")))
    for stage in ("collect", "tokenize"):  # one by one
        commands.prepare(commands.PrepareOptions(tmp_path / "b", [source], target, stages=[stage]))
    assert "tokenize  300 of 300 conversations" in capsys.readouterr().out
    assert PreparedSet(tmp_path / "b" / "tokenized").manifest.conversations == 300
    for _ in range(2):  # the second run finds everything done
        commands.prepare(commands.PrepareOptions(tmp_path / "a", [source], target))
        assert "240" in capsys.readouterr().out  # training examples
    commands.show(commands.ShowOptions(tmp_path / "a" / "tokenized", target, count=1))
    assert "eligible anchors" in capsys.readouterr().out


def test_prepare_lets_a_target_answer_in_this_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # float32 on every machine: in bfloat16 a tie may fall otherwise in a batch of five than alone
    monkeypatch.setattr("dspark_train.target.frozen.choose_form", lambda *_: Choice("", "float32"))
    target = str(write_target(tmp_path / "target"))
    rows = [{"messages": [{"role": "user", "content": f"w{index} w{index + 1}"}]} for index in range(12)]
    path = write_rows(tmp_path / "prompts.jsonl", rows)
    options = Regenerate(temperature=0.0, max_tokens=6, concurrency=5)
    commands.prepare(
        commands.PrepareOptions(
            tmp_path / "out",
            [Source(str(path))],
            target,
            stages=["collect", "regenerate", "tokenize"],
            shares=SplitShares(0.0, 0.0),
            regeneration=options,
        )
    )
    assert "tokenize  12 of 12 conversations" in capsys.readouterr().out
    answered = [
        json.loads(line) for line in (tmp_path / "out" / "regenerated.jsonl").read_text().splitlines()
    ]
    store = PreparedSet(tmp_path / "out" / "tokenized").split("train")
    assert len(answered) == len(store) == 12
    decoder = Decoder(FrozenTarget.load(target))
    for index, row in enumerate(answered):
        [turn] = row["turns"]
        alone = decoder.run(decoder.requests([turn["prompt_ids"]], 6, None))
        assert alone.tokens == [turn["answer_ids"]]
        assert store[index].input_ids.tolist() == turn["prompt_ids"] + turn["answer_ids"]


@pytest.mark.parametrize("chosen", [None, 0.9])
def test_sampling_in_this_process_is_the_targets_own_unless_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: float | None
) -> None:
    from dspark_train.decoding import decoder
    from dspark_train.decoding.sampling import SamplingRule

    target = write_target(tmp_path / "target")
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (target / "generation_config.json").write_text(json.dumps(own))
    rules: list[SamplingRule] = []
    monkeypatch.setattr(decoder, "Decoder", lambda target, rule: rules.append(rule))
    commands.in_process(str(target), Regenerate(temperature=chosen))
    assert rules == [SamplingRule(chosen or 0.6, 20, 0.95)]
    with pytest.raises(UserError, match=r"min_p is not known in this process"):
        commands.in_process(str(target), Regenerate(min_p=0.1))
