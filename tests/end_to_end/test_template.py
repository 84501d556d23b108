"""A template with a switch, as Qwen3 has for thinking: the prepared set keeps it, and every later prompt obeys."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_data import tiny_recipe, tiny_tokenizer, write_rows

from dspark_train.cli.main import main
from dspark_train.cli.serve_check import read_prompts
from dspark_train.decoding import measure
from dspark_train.decoding.decoder import Decoder
from dspark_train.decoding.measure import compare
from dspark_train.errors import UserError
from dspark_train.run import Run

pytestmark = pytest.mark.end_to_end

TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% if enable_thinking is defined and not enable_thinking %}"
    "w70 w71 {% endif %}{% endif %}"
)
EMPTY = [78, 79]
"""Ids of w70 and w71, the empty block that switches thinking off."""


def call(*words: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dspark-train", *map(str, words)])
        main()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts that the target answered without thinking, tokenized, and a draft trained on them."""
    folder = tmp_path_factory.mktemp("template")
    config = tiny_recipe(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    splits = ("train", "train", "calibration", "validation", "test")
    rows = [{"prompt": f"w{i} w{i + 1} w{i + 2}", "split": splits[i % 5]} for i in range(40)]
    recipe = {
        "output": str(folder / "set"),
        "target": str(folder / "target"),
        "stages": ["collect", "regenerate", "tokenize"],
        "sources": [{"path": str(write_rows(folder / "prompts.jsonl", rows))}],
        "regeneration": {
            "thinking": False,
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 20,
            "max_tokens": 8,
        },
        "tokenization": {"max_length": 64},
        "max_error_share": 0.5,  # the tiny model has ids that its tokenizer has not
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    call("prepare", "--config", folder / "recipe.yaml")
    config["data"]["path"] = str(folder / "set" / "tokenized")
    config |= {
        "trainer": {"accelerator": "cpu", "precision": "32-true", "max_steps": 2, "log_every_n_steps": 1},
        "run": {"folder": str(folder / "run"), "after": []},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    call("fit", "--config", folder / "tiny.yaml")
    return folder / "run"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Every prompt that a decoder is given."""
    seen: list[list[int]] = []
    requests = Decoder.requests

    def spy(self: Decoder, prompts: Any, *others: Any) -> Any:
        seen.extend(list(prompt) for prompt in prompts)
        return requests(self, prompts, *others)

    monkeypatch.setattr(Decoder, "requests", spy)
    return seen


@pytest.fixture
def suites(tmp_path: Path) -> Path:
    write_rows(tmp_path / "gsm8k.jsonl", [{"turns": [f"w{i} w{i + 3}"]} for i in range(5)])
    return tmp_path


def test_the_run_records_the_template_and_the_sampling_of_its_answers(run: Path) -> None:
    facts = json.loads((run / "run.json").read_text())["data"]
    assert facts["template"] == {"enable_thinking": False}
    assert facts["answers"] == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    for split in ("train", "validation", "test"):
        assert all(prompt.ids[-2:] == tuple(EMPTY) for prompt in Run(run).data.prompts(split))


def test_evaluation_asks_the_question_that_training_answered(
    run: Path, suites: Path, asked: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    call(
        "evaluate",
        run,
        "--protocol",
        "paper",
        "--suites",
        "gsm8k",
        "--suites_dir",
        suites,
        "--max_new_tokens",
        6,
    )
    assert len({tuple(prompt) for prompt in asked}) == 5  # the whole suite
    assert all(prompt[-4:] == [1, 6, *EMPTY] for prompt in asked)
    printed = capsys.readouterr().out
    assert "| Suite | run τ | speedup |" in printed
    head, table = printed.split("beside the paper's Table 1")
    assert (
        "Not as in the paper's Table 1: target target, which the paper has not; 6 new tokens at most" in head
    )
    assert "of gsm8k's" not in head
    assert "rendered with" not in head
    assert "| Suite | run | paper's DSpark, Qwen3-4B | paper's DFlash, Qwen3-4B |" in table
    assert "| 6.11 | 5.40 | 5.14 |" in table


def test_another_wish_is_named_in_the_result(
    run: Path, suites: Path, asked: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--template",
        '{"enable_thinking": true}',
        "--name",
        "thinking",
        "--prompts",
        2,
        "--baselines",
        "plain",
    ]
    call("evaluate", run, "gsm8k", "--suites_dir", suites, "--max_new_tokens", 6, "--temperatures", 0, *words)
    assert all(prompt[-2:] == [1, 6] for prompt in asked)
    named = 'prompts rendered with {"enable_thinking": true}, training\'s with {"enable_thinking": false}'
    assert named in (printed := capsys.readouterr().out), printed
    assert "2 of gsm8k's 5 prompts" in printed


def test_new_prompts_are_decoded_as_training_rendered_them(
    run: Path, suites: Path, asked: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedily and at temperature 1, half of the time each."""
    given: list[float] = []

    def spy(*arguments: Any) -> Any:
        given.append(arguments[-1])
        return compare(*arguments)

    monkeypatch.setattr(measure, "compare", spy)
    prompt = {"messages": [{"role": "user", "content": "w3"}]}
    bare = {"prompt": "w3"}
    own = read_prompts(write_rows(suites / "own.jsonl", [prompt, bare]), Run(run))  # of serve-check
    assert own == [[1, 5, 11, 2, 1, 6, *EMPTY], [11]]
    words = ["--policy", "fixed", "--max_new_tokens", 6, "--temperatures", "0,1", "--seconds", 40]
    call("decode", run, "--prompts_file", suites / "gsm8k.jsonl", *words)
    assert given == [20.0, 20.0]
    assert {tuple(prompt) for prompt in asked} == {
        (1, 5, 8 + i, 8 + i + 3, 2, 1, 6, *EMPTY) for i in range(5)
    }
    written = json.loads((run / "decode.json").read_text())
    assert written["split"] == "gsm8k.jsonl"
    assert set(written["modes"]) == {"greedy", "t1.0"}


def test_a_run_that_records_no_template_asks_its_data(run: Path, tmp_path: Path) -> None:
    (tmp_path / "draft").symlink_to(run / "draft")
    text = (run / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text)
    assert Run(tmp_path).template == {"enable_thinking": False}
    (tmp_path / "config.yaml").write_text(text.replace("/tokenized", "/gone"))
    with pytest.raises(
        UserError, match=r"does not record which chat-template arguments .* give them with --template"
    ):
        Run(tmp_path).template  # noqa: B018
