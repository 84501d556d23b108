"""What a run's folder holds, read when it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from example_run import write_run
from tiny_traces import make_trace

from dspark_train.errors import UserError
from dspark_train.run import Run, RunConfig, Stages, open_run, read_metrics, sampling_label


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    run_folder = write_run(tmp_path / "quickstart")
    run = Run.existing(run_folder)
    assert run.name == run_folder.name
    assert run.config["draft"]["block_size"] == run.draft_config["block_size"] > 0
    assert run.config_text == (run_folder / "config.yaml").read_text()
    assert run.facts["versions"]["torch"]
    assert run.metrics["val/tau"][-1][0] == max(step for step, _ in run.metrics["val/tau"])
    written = {path.relative_to(run_folder) for path in run_folder.rglob("*.json")}
    named = [run.decode_path, run.calibration_report_path, *run.evaluation_paths.values()]
    named += [
        run.study_path(name)
        for name in ("acceptance", "threshold_sweep", "online", "online_threshold", "simulate")
    ]
    assert {path.relative_to(run_folder) for path in named} <= written
    assert set(run.evaluation_paths) == {"suites"}


def test_what_a_run_has_not_made_is_empty(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed_everything: 1\n")
    run = Run.existing(tmp_path)
    assert run.config == {"seed_everything": 1}
    for value in (run.facts, run.metrics, run.draft_config, run.evaluation_paths):
        assert value == {}
    assert run.trace("heldout", "greedy") is None
    assert run.trace_paths == []
    assert run.trained_parameters == run.confidence_shift == 0
    assert not run.finished


def test_rounds_of_an_earlier_version_stand_for_the_test_splits(tmp_path: Path) -> None:
    run = Run(tmp_path)
    held_out, test = (make_trace(5, [1.0, 1.0], seed) for seed in (0, 1))
    run.trace_path("heldout", "greedy").parent.mkdir()
    held_out.save(run.trace_path("heldout", "greedy"))
    found = run.trace("test", "greedy")
    assert found is not None
    assert torch.equal(found.confidence_logits, held_out.confidence_logits)
    assert run.trace("validation", "greedy") is None
    test.save(run.trace_path("test", "greedy"))
    found = run.trace("test", "greedy")
    assert found is not None
    assert torch.equal(found.confidence_logits, test.confidence_logits)


def test_facts_are_merged_and_read_anew(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.update(wall_seconds={"fit": 1.5}, commit="abc")
    run.update(wall_seconds={"decode": 2.0}, finished=True)
    assert run.facts == {"wall_seconds": {"fit": 1.5, "decode": 2.0}, "commit": "abc", "finished": True}
    assert json.loads((tmp_path / "run.json").read_text()) == run.facts
    assert run.finished


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        Run.existing(tmp_path / "absent")
    with pytest.raises(UserError, match="holds nothing of a run"):
        Run.existing(tmp_path)
    with pytest.raises(UserError, match=r"no run folder: it holds no config\.yaml"):
        Run(tmp_path).target  # noqa: B018


def test_the_draft_is_missed_before_the_target_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("target:\n  name_or_path: nowhere/no-such-model\n")
    with pytest.raises(UserError, match="holds no exported draft"):
        Run(tmp_path).target  # noqa: B018


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", "{", "not JSON"),
        ("run.json", "[1]", "holds a list; expected a JSON object"),
        ("config.yaml", "a: [", "not valid YAML"),
        ("config.yaml", "- 1", "must hold a mapping, not list"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        _ = (Run(tmp_path).facts, Run(tmp_path).config)
    assert name in str(caught.value)


def test_a_damaged_draft_is_named(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="export the draft again"):
        Run(tmp_path).trained_parameters  # noqa: B018


def test_metrics_keep_the_later_of_two_rows_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,train/loss,val/tau\n1,3.0,\n2,2.0,\n2,,1.5\n2,1.9,\n3,nan,\n")
    assert read_metrics(path) == {"train/loss": [(1.0, 3.0), (2.0, 1.9)], "val/tau": [(2.0, 1.5)]}
    path.write_text("epoch,loss\n1,2\n")
    with pytest.raises(UserError, match="no column 'step'"):
        read_metrics(path)


@pytest.mark.parametrize(
    ("sampling", "label"),
    [
        ((0.0,), "greedy"),
        ((0.0, 20, 0.9), "greedy"),
        ((1,), "t1.0"),
        ((0.7, 0, 1.0), "t0.7"),
        ((0.7, 20), "t0.7_k20"),
        ((1.0, 0, 0.95), "t1.0_p0.95"),
        ((1.0, 20, 0.95), "t1.0_k20_p0.95"),
    ],
)
def test_every_way_of_sampling_has_its_own_name(sampling: tuple, label: str) -> None:
    assert sampling_label(*sampling) == label


def test_stages_are_named_with_commas_or_as_a_list() -> None:
    assert (
        Stages.parse("calibrate, report") == Stages.parse(["calibrate", "report"]) == ("calibrate", "report")
    )
    assert Stages.parse([]) == ()
    with pytest.raises(ValueError, match=r"'decod' must be stages \(calibrate, decode, report\) with commas"):
        Stages.parse("decod")


def test_an_unfinished_run_of_the_same_config_goes_on(tmp_path: Path) -> None:
    config, resolved = RunConfig(folder=str(tmp_path / "run")), {"draft": {"num_layers": 2}}
    assert open_run(config, resolved) is None
    assert open_run(config, resolved) == tmp_path / "run" / "trainer"
    with pytest.raises(UserError, match=r"another configuration \(differs in draft\.num_layers\)"):
        open_run(config, {"draft": {"num_layers": 3}})
    Run(tmp_path / "run").update(finished=True)
    with pytest.raises(UserError, match="a finished run"):
        open_run(config, resolved)
    config.overwrite = True
    assert open_run(config, resolved) is None
    assert not Run(tmp_path / "run").finished


def test_an_unfinished_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """One that lacks an option, or has one that is gone; but not one whose values differ."""
    config = RunConfig(folder=str(tmp_path / "run"))
    before = {"run": {"save_every": 5, "gone": 1, "options": {}}, "data": {"template": None}}
    now = {"run": {"save_every": 5, "minutes": None, "options": {}}, "data": {"template": None}}
    assert open_run(config, before) is None
    assert open_run(config, now) == tmp_path / "run" / "trainer"
    for section, key, value in (
        ("run", "options", {"decode": {"seconds": 5}}),
        ("data", "template", {"a": 1}),
    ):
        other = now | {section: now[section] | {key: value}}
        with pytest.raises(UserError, match=rf"differs in {section}.{key}"):
            open_run(config, other)


def test_a_machine_without_git_has_no_commit_to_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dspark_train.run import environment

    monkeypatch.setenv("PATH", str(tmp_path))
    found = environment()
    assert found["commit"] is None
    assert found["versions"]["torch"]
