"""The commands on a small run folder, from the command line's own entry point; and the card that export writes."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_train.calibration.fit import calibrate_traces, write_report
from dspark_train.calibration.io import Calibration, WithBias
from dspark_train.calibration.sts import Scalings
from dspark_train.cli.main import run as command_line
from dspark_train.draft.model import DSparkDraft
from dspark_train.errors import UserError
from dspark_train.evaluation.records import Record
from dspark_train.evaluation.summary import Bootstrap, summarise
from dspark_train.files import write_result
from dspark_train.interchange.temperature import fit_single, single_temperature
from dspark_train.report.redaction import redact
from dspark_train.run import Run
from dspark_train.structures import DecodingTrace
from dspark_train.target.frozen import FrozenTarget

SECRET = "hf_AbCdEfGhIjKlMnOpQrSt"


def trace(seed: int, temperature: float = 3.0, rounds: int = 400, slots: int = 4) -> DecodingTrace:
    """Rounds whose confidences are too sure by one temperature at every slot."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rounds, slots, generator=generator) + 0.5
    drawn = torch.rand(rounds, slots, generator=generator) < logits.sigmoid()
    accepted = drawn.long().cumprod(-1).sum(-1)
    zeros = torch.zeros(rounds, dtype=torch.int64)
    return DecodingTrace(
        request=zeros,
        anchor=torch.arange(rounds),
        proposed=torch.zeros(rounds, slots, dtype=torch.int64),
        confidence_logits=logits * temperature,
        verify_length=torch.full((rounds,), slots),
        accepted=accepted,
        committed=accepted + 1,
    )


@pytest.fixture
def run(
    make_target: Callable[..., FrozenTarget], make_draft: Callable[..., DSparkDraft], tmp_path: Path
) -> Path:
    """A finished run with a target of its own, calibrated and decoded."""
    target, folder = make_target("qwen3"), tmp_path / "run"
    target.model.save_pretrained(tmp_path / "target")
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(53)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(tmp_path / "target")
    draft = make_draft("vanilla", of=target)
    (folder / "traces").mkdir(parents=True)
    (folder / "plots").mkdir()
    (folder / "plots" / "learning_curve.png").write_bytes(b"png")
    draft.save(folder / "draft")
    config = {
        "seed_everything": 0,
        "target": {
            "name_or_path": str(tmp_path / "target"),
            "layer_ids": [0, 2],
            "dtype": "float32",
            "device": "cpu",
        },
        "draft": {"num_layers": 2, "block_size": 4},
        "objective": {"decay": 4.0},
        "optimizer": {"lr": 0.00123},
        "data": {"path": str(tmp_path / "chats.jsonl"), "global_batch_size": 8},
        "trainer": {"max_steps": 77, "logger": {"init_args": {"api_key": SECRET, "tags": [SECRET]}}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.json").write_text(json.dumps({"versions": {"torch": "9.8.7"}, "commit": "abc1234"}))
    fit, heldout = trace(1), trace(2)
    fit.save(folder / "traces" / "calibration_greedy.safetensors")
    heldout.save(folder / "traces" / "heldout_greedy.safetensors")
    result = calibrate_traces(fit, heldout)
    for name in ("calibration.json", "calibration_greedy.json"):
        result.calibration("chats").save(folder / name)
    write_report(folder / "calibration_report.json", [result])
    return folder


def test_export_writes_everything_that_an_engine_needs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command_line(["export", str(run)])
    folder, printed = run / "export" / "native", capsys.readouterr().out
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "calibration.json", "tokenizer.json"} <= names
    assert {"generation_config.json", "tokenizer_config.json", "plots"} <= names
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert (folder / "calibration.json").read_text() == (run / "calibration.json").read_text()
    assert "read back: 16 draft tokens equal" in printed
    assert "vllm serve" in printed
    assert "--speculative-num-draft-tokens 5" in printed
    assert f"--speculative-dspark-confidence-sts-path {folder}/calibration.json" in printed
    assert "enable_adaptive_verification" not in printed
    assert DSparkDraft.load(folder).config.block_size == 4


def test_the_card_says_what_files_back_and_no_more(run: Path) -> None:
    command_line(["export", str(run), "--format", "speculators", "--dtype", "bfloat16"])
    card = (run / "export" / "speculators" / "README.md").read_text()
    report = json.loads((run / "calibration_report.json").read_text())
    for value in report["temperatures"]:
        assert f"{value:.3f}" in card
    assert f"{100 * report['ece_before'][0]:.2f} %" in card
    assert "| trainer.max_steps | `77` |" in card
    assert "| optimizer.lr | `0.00123` |" in card
    assert "plots/learning_curve.png" in card
    assert "torch 9.8.7" in card
    assert "commit abc1234" in card
    assert "weights: bfloat16" in card
    assert "vllm serve" in card
    assert "sglang.launch_server" not in card
    assert "## Measured" not in card
    assert "## Benchmark suites" not in card
    assert SECRET not in card
    assert str(run.parent / "chats.jsonl") not in card
    sections = re.split(r"^## .*$", card, flags=re.MULTILINE)
    assert len(sections) > 4
    assert all(section.strip() for section in sections)


def test_numbers_of_decoding_reach_the_card(run: Path) -> None:
    mode = {
        "temperature": 0.0,
        "tau": 2.718,
        "acceptance": {"conditional": [0.811, 0.722, 0.633, 0.544], "cumulative": [0.8, 0.6, 0.4, 0.2]},
        "speedup": {"value": 1.57},
        "prompts": 12,
        "domains": {"math": {"tau": 3.141}},
    }
    (run / "decode.json").write_text(json.dumps({"modes": {"greedy": mode}}))
    command_line(["export", str(run)])
    card = (run / "export" / "native" / "README.md").read_text()
    for shown in ("## Measured", "2.718", "1.57×", "| 12 |", "0.811", "0.544", "| math | 3.141 |"):
        assert shown in card


def test_suites_reach_the_card_by_position(run: Path) -> None:
    records = [
        Record("draft", 0.0, suite, i, "math", 21, 1.0, 10, 20 + 3 * (suite == "own"), [10, 5], [5, 4])
        for suite in ("gsm8k", "own")
        for i in range(2)
    ]
    (run / "evaluation").mkdir()
    table = summarise(records, [{"key": "draft", "label": "this draft"}], {}, Bootstrap(resamples=50))
    write_result(run / "evaluation" / "suites.json", table)
    command_line(["export", str(run)])
    card = (run / "export" / "native" / "README.md").read_text()
    assert "## Benchmark suites" in card
    assert "| own | math | 2.30 (2.30 to 2.30) |" in card
    assert "| this draft | own | 50.0\u202f% | 80.0\u202f% |" in card


def test_data_that_the_run_names_reach_the_card(run: Path) -> None:
    command_line(["export", str(run)])
    assert "## Data" not in (run / "export" / "native" / "README.md").read_text()
    facts = {"conversations": {"train": 3707, "heldout": 288}, "token": SECRET}
    (run / "run.json").write_text(json.dumps({"data": facts}))
    command_line(["export", str(run)])
    card = (run / "export" / "native" / "README.md").read_text()
    assert "| conversations.train | 3707 |" in card.partition("## Data")[2]
    assert SECRET not in card


def test_the_card_names_the_template_that_the_draft_was_trained_with(run: Path) -> None:
    (run / "run.json").write_text(json.dumps({"data": {"template": {"enable_thinking": False}}}))
    command_line(["export", str(run)])
    card = (run / "export" / "native" / "README.md").read_text()
    assert (
        '`chat_template_kwargs: {"enable_thinking": false}`'
        in card.partition("## Serving")[2].partition("##")[0]
    )


def test_an_engine_that_cannot_serve_the_draft_is_named_first(
    run: Path, make_draft: Callable[..., DSparkDraft], capsys: pytest.CaptureFixture[str]
) -> None:
    make_draft("rnn").save(run / "draft")
    command_line(["export", str(run)])
    printed = capsys.readouterr().out
    assert printed.index("vanilla heads only, not rnn") < printed.index("wrote ")
    assert printed.count("vanilla heads only, not rnn") == 1


def test_one_temperature_is_folded_and_its_cost_is_said(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command_line(["export", str(run), "--fold_temperature", "true", "--output", str(run / "folded")])
    printed, cost = (
        capsys.readouterr().out,
        single_temperature(Run(run), Calibration.load(run / "calibration.json")),
    )
    assert cost.temperature == pytest.approx(3.0, rel=0.25)
    assert cost.ece_single < cost.ece_raw / 2
    assert cost.sentence() in printed
    assert cost.sentence() in (run / "folded" / "README.md").read_text()
    assert not (run / "folded" / "calibration.json").exists()
    assert '"enable_adaptive_verification": true' in printed
    assert "sts-path" not in printed
    command_line(["export", str(run)])
    folded, raw = DSparkDraft.load(run / "folded"), DSparkDraft.load(run / "export" / "native")
    torch.testing.assert_close(
        folded.confidence_head.proj.weight * cost.temperature, raw.confidence_head.proj.weight
    )
    (run / "traces" / "heldout_greedy.safetensors").unlink()
    with pytest.raises(UserError, match="calibrate"):
        command_line(["export", str(run), "--fold_temperature", "true"])


def test_a_bias_is_folded_into_a_copy_for_its_own_sampling(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = Calibration.load(run / "calibration.json")
    with_bias = WithBias(-0.75, (2.0, 2.1, 2.2, 2.3), 0.01)
    dataclasses.replace(held, with_bias=with_bias).save(run / "calibration_greedy.json")
    trained = (run / "draft" / "model.safetensors").read_bytes()
    line = ["export", str(run), "--temperature", "0", "--fold_bias", "true", "--output", str(run / "folded")]
    command_line(line)
    printed, written = capsys.readouterr().out, Calibration.load(run / "folded" / "calibration.json")
    assert "a bias of -0.75 is added to the confidence head; it holds for greedy decoding alone" in printed
    assert (written.temperatures, written.folded_bias) == (with_bias.temperatures, -0.75)
    assert written.with_bias is None
    assert "the bias of -0.750 in these weights" in (run / "folded" / "README.md").read_text()
    assert (run / "draft" / "model.safetensors").read_bytes() == trained
    folded, raw = DSparkDraft.load(run / "folded"), DSparkDraft.load(run / "draft")
    moved = folded.confidence_head.proj.bias - raw.confidence_head.proj.bias
    assert moved.item() == pytest.approx(-0.75, abs=1e-6)
    assert torch.equal(folded.confidence_head.proj.weight, raw.confidence_head.proj.weight)
    with pytest.raises(UserError, match=r"not calibrated for t1.0_k20"):
        command_line(["export", str(run), "--temperature", "1", "--top_k", "20"])
    dataclasses.replace(held, with_bias=None).save(run / "calibration.json")
    with pytest.raises(UserError, match="holds no bias"):
        command_line(["export", str(run), "--fold_bias", "true"])


def test_one_temperature_is_1_where_confidences_are_right() -> None:
    found = fit_single(trace(3, temperature=1.0), trace(4, temperature=1.0), Scalings((1.0,) * 4))
    assert found.temperature == pytest.approx(1.0, rel=0.25)
    assert found.ece_raw == pytest.approx(found.ece_sequential)


def test_import_from_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command_line(["export", str(run), "--format", "speculators"])
    source, target = run / "export" / "speculators", run.parent / "target"
    command_line(["import", str(source), str(run.parent / "in"), str(target), "--dtype", "float32"])
    printed = capsys.readouterr().out
    assert "as speculators" in printed
    assert "note: filled in num_target_layers 4 from the target" in printed
    assert "compared with the source: 16 draft tokens equal" in printed
    with pytest.raises(UserError, match="is not empty"):
        command_line(["import", str(source), str(run.parent / "in"), str(target)])


def test_serve_check_from_the_command_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is the server running"):
        command_line(["serve-check", str(run), "http://127.0.0.1:9"])


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("mask_token_id", 5, True),
        ("max_new_tokens", 64, True),
        ("tokenizer", "qwen", True),
        ("monkey", "yes", True),
        ("hf_token", "x", False),
        ("token", "x", False),
        ("api_key", "x", False),
        ("WANDB_API_KEY", "x", False),
        ("password", "x", False),
        ("note", f"use {SECRET} please", False),
        ("url", "https://me:pass@host/data", False),
        ("key", None, True),
    ],
)
def test_secrets_are_left_out(name: str, value: Any, kept: bool) -> None:
    found = redact({"outer": [{name: value}]})["outer"][0][name]
    assert (found == value) is kept
    assert kept or "(left out)" in found
