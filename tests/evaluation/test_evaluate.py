"""Evaluation of a tiny run, really decoded: resumable, comparable, and the command around it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from tiny_data import tiny_conversations, write_rows, write_target
from tiny_models import tiny_draft

from dspark_train.calibration.io import Calibration
from dspark_train.cli.evaluate import evaluate
from dspark_train.cli.parsing import run_command
from dspark_train.cli.report import report
from dspark_train.decoding.decoder import generate
from dspark_train.errors import UserError
from dspark_train.evaluation.options import EvaluateOptions
from dspark_train.evaluation.records import Record
from dspark_train.evaluation.session import draft_folder, evaluate_run, retap
from dspark_train.report.tables import evaluation_markdown
from dspark_train.run import Run
from dspark_train.target.config import TargetConfig
from dspark_train.target.frozen import FrozenTarget


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny run with suites beside it, a draft with other taps, and a parallel draft."""
    base = tmp_path_factory.mktemp("evaluate")
    model = write_target(base / "target")
    target = FrozenTarget.load(TargetConfig(str(model), [0, 1, 2], "float32"))
    run = base / "runs" / "tiny"
    tiny_draft(target).save(run / "draft")
    config = {
        "seed_everything": 0,
        "target": {"name_or_path": str(model), "layer_ids": [0, 1, 2], "dtype": "float32"},
        "draft": {"block_size": 4},
        "objective": {"decay": 4.0},
        "data": {"path": str(write_rows(base / "rows.jsonl", tiny_conversations()))},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    Calibration((1.5, 1.2, 1.1, 0.9), "tiny", 10, 0.1, 0.05).save(run / "calibration_greedy.json")
    other = FrozenTarget(target.model, [0, 2], name="other taps")
    tiny_draft(other, seed=4, head="none").save(base / "parallel")
    suites = base / "suites"
    suites.mkdir()
    words = "w1 w2 w3 w4 w5"
    write_rows(suites / "gsm8k.jsonl", [{"turns": [f"w{i} {words}"]} for i in range(5)])
    write_rows(suites / "mt-bench.jsonl", [{"turns": [f"w{i}", f"w{i + 1} {words}"]} for i in range(4)])
    return {"run": run, "suites": suites, "parallel": base / "parallel", "target": model}


def options(folders: dict[str, Path], **changes: object) -> EvaluateOptions:
    base = EvaluateOptions(
        run=folders["run"],
        suites=["gsm8k", "mt-bench"],
        suites_dir=folders["suites"],
        prompts=2,
        drafts=[f"parallel={folders['parallel']}"],
        max_new_tokens=14,
        resamples=100,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def without_seconds(records: Path) -> list[dict]:
    rows = [json.loads(line) for line in records.read_text().splitlines()[1:]]
    return sorted(({**row, "seconds": 0} for row in rows), key=json.dumps)


def test_an_evaluation_that_was_stopped_goes_on_to_the_same_records(folders: dict[str, Path]) -> None:
    whole = evaluate_run(options(folders, name="whole"))
    methods = [method["key"] for method in whole.methods]
    assert methods == ["plain", "draft:tiny", "draft:parallel", "head_off:tiny", "prompt_lookup"]
    seen: list[int] = []

    def stop(done: int, total: int, record: Record | None) -> None:
        if done == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_run(options(folders, name="parts"), stop)
    table = evaluate_run(options(folders, name="parts"), lambda done, total, record: seen.append(done))
    assert seen == list(range(11, 41))  # 2 suites × 2 prompts × 2 temperatures × 5 methods
    folder = folders["run"] / "evaluation"
    assert without_seconds(folder / "parts.records.jsonl") == without_seconds(folder / "whole.records.jsonl")
    for one, other in zip(table.results, whole.results, strict=True):
        for key in methods:
            assert one.macro[key].tau == other.macro[key].tau
            assert one.macro[key].conditional == other.macro[key].conditional


def test_the_table_says_what_decoding_gives(folders: dict[str, Path]) -> None:
    table = evaluate_run(options(folders, name="whole"))
    greedy, sampled = table.results
    assert (greedy.temperature, sampled.temperature) == (0.0, 1.0)
    for suite in ("gsm8k", "mt-bench"):
        entry = greedy.suites[suite]
        assert entry.prompts == 2
        for cell in entry.methods.values():
            assert cell.identical == 2  # greedy, fp32: every method gives the target's own tokens
            assert cell.speedup is not None
            assert (cell.speedup.value or 0) > 0
        assert entry.methods["draft:tiny"].ece is not None
        assert entry.methods["draft:parallel"].ece is not None
        assert entry.methods["head_off:tiny"].ece is None
        assert sampled.suites[suite].methods["draft:tiny"].identical is None
    assert set(greedy.domains) == {"math", "chat"}
    assert [d.second for d in greedy.differences] == [
        "draft:parallel",
        "head_off:tiny",
        "prompt_lookup",
    ]
    # one suite of one turn, by hand
    target = FrozenTarget.load(TargetConfig(str(folders["target"]), [0, 1, 2], "float32"))
    draft = tiny_draft(target)
    rows = [json.loads(line) for line in (folders["run"] / "evaluation" / "whole.records.jsonl").open()][1:]
    chosen = {row["index"] for row in rows if row["suite"] == "gsm8k"}
    committed = rounds = 0
    for index in chosen:
        message = {"role": "user", "content": f"w{index} w1 w2 w3 w4 w5"}
        ids = target.tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        result = generate(target, draft, [ids], max_new_tokens=14)
        committed += int(result.trace.committed.sum())
        rounds += result.trace.committed.numel()
    assert greedy.suites["gsm8k"].methods["draft:tiny"].tau.value == pytest.approx(committed / rounds)


def test_what_the_context_cannot_hold_is_left_out_and_named(folders: dict[str, Path]) -> None:
    suites = folders["suites"].parent / "long"
    suites.mkdir()
    many = " ".join(f"w{i % 40}" for i in range(300))
    most = " ".join(f"w{i % 40}" for i in range(215))
    rows = [{"turns": ["w1 w2"]}, {"turns": [many]}, {"turns": [most, "w3 w4 w5 w6", most]}]
    write_rows(suites / "long.jsonl", rows)
    chosen = {
        "suites": ["long"],
        "suites_dir": suites,
        "drafts": (),
        "temperatures": [0.0],
        "turns": 3,
        "prompts": "all",
    }
    table = evaluate_run(options(folders, name="long", **chosen))
    assert table.settings["too_long"] == {"long": [1]}
    assert table.results[0].suites["long"].prompts == 2
    assert "long: 1 prompt was longer than the target's context" in evaluation_markdown(table)
    write_rows(suites / "endless.jsonl", [{"turns": [many]}])
    with pytest.raises(UserError, match="suite endless: no prompt fits"):
        evaluate_run(options(folders, name="endless", **(chosen | {"suites": ["endless"]})))


def test_other_settings_need_another_name_or_a_restart(folders: dict[str, Path]) -> None:
    small = options(
        folders, suites=["gsm8k"], prompts=1, temperatures=[0.0], baselines=["plain"], name="small"
    )
    evaluate_run(small)
    with pytest.raises(UserError, match="differs: max_new_tokens"):
        evaluate_run(dataclasses.replace(small, max_new_tokens=6))
    table = evaluate_run(dataclasses.replace(small, max_new_tokens=6, restart=True))
    assert table.settings["max_new_tokens"] == 6
    more = evaluate_run(dataclasses.replace(small, max_new_tokens=6, suites=["gsm8k", "mt-bench"]))
    assert set(more.results[0].suites) == {"gsm8k", "mt-bench"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baselines": ["plane"]}, "'plane' is none of"),
        ({"suites": []}, "name at least one"),
        ({"temperatures": [-1.0]}, "must be numbers"),
        ({"confidence": 95}, "between 0 and 1"),
        ({"max_new_tokens": 1}, "at least 2"),
        ({"name": "a/b"}, "plain file name"),
        ({"suites": ["gsm9k"]}, "unknown suite"),
        ({"policy": "greedy"}, "policy 'greedy'"),
        ({"drafts": ["nowhere"]}, "no such folder, and no hub id"),
        ({"run": Path("nowhere")}, "is no run folder"),
    ],
)
def test_what_cannot_work_is_refused(folders: dict[str, Path], changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate_run(options(folders, **changes))


def test_two_drafts_of_one_name_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="have one name"):
        evaluate_run(options(folders, drafts=[f"tiny={folders['parallel']}"]))


def test_weights_that_can_run_code_are_never_opened(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folders["parallel"] / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(UserError, match=r"no model\.safetensors; other weight files are never opened"):
        evaluate_run(options(folders, drafts=[f"other={tmp_path}"]))


def test_command_writes_table_and_the_report_shows_it(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(folders["run"]), "gsm8k,mt-bench", f"--suites_dir={folders['suites']}", "--prompts=2"]
    arguments += ["--temperatures=0", "--baselines=plain,head_off", "--max_new_tokens=8", "--resamples=50"]
    arguments += ["--by_context=1k"]
    run_command(evaluate, arguments, "evaluate")
    printed = capsys.readouterr().out
    assert "| macro average |" in printed
    assert "| 0 to 1,023 |" in printed
    assert (folders["run"] / "evaluation" / "suites.md").read_text() in printed
    run_command(report, [str(folders["run"])], "report")
    html = (folders["run"] / "report.html").read_text()
    assert "Benchmark suites" in html
    assert "tiny, head off" in html
    with pytest.raises(UserError, match="numbers with commas"):
        run_command(evaluate, [str(folders["run"]), "gsm8k", "--temperatures=0;1"], "evaluate")
    with pytest.raises(UserError, match=r"must end in \.html"):
        run_command(report, [str(folders["run"]), "--output=report.pdf"], "report")


def test_trained_parameters_leave_out_what_the_target_owns(folders: dict[str, Path]) -> None:
    target = FrozenTarget.load(TargetConfig(str(folders["target"]), [0, 1, 2], "float32"))
    count = sum(parameter.numel() for parameter in tiny_draft(target).parameters())
    assert Run.existing(folders["run"]).trained_parameters == count


def test_tapping_elsewhere_shares_the_model(folders: dict[str, Path]) -> None:
    target = FrozenTarget.load(TargetConfig(str(folders["target"]), [0, 1, 2], "float32"))
    assert retap(target, (0, 1, 2)) is target
    other = retap(target, (0, 2))
    assert other.model is target.model
    assert other.layer_ids == (0, 2)
    assert draft_folder(folders["run"]) == folders["run"] / "draft"
    assert draft_folder(folders["parallel"]) == folders["parallel"]
