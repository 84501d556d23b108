"""Figures: what each one is over, what it marks, and that a file holds it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TypeVar

import pytest
from example_run import make_trace

from dspark_train.calibration.fit import calibrate_traces
from dspark_train.decoding.acceptance import acceptance_by_position
from dspark_train.decoding.cost import CostTable
from dspark_train.files import read_result
from dspark_train.report import figures, learning_figures, sections, study_sections
from dspark_train.report.drawing import save_png
from dspark_train.report.page import Figure, Page, Section, Table, render
from dspark_train.report.results import decoded
from dspark_train.run import Run
from dspark_train.studies.online_threshold import ThresholdDriftStudy
from dspark_train.studies.reliability import ReliabilityStudy
from dspark_train.studies.rounds import AcceptanceStudy, DriftStudy, ThresholdStudy
from dspark_train.studies.simulate import LoadStudy, throughput_at

Study = TypeVar("Study")
OF = {"split": "heldout", "sampling_temperature": 0.0, "rounds": 1500}


@pytest.fixture(scope="module")
def run(run_folder: Path) -> Run:
    return Run.existing(run_folder)


@pytest.fixture(scope="module")
def thresholds(run: Run) -> ThresholdStudy:
    return stored(run, "threshold_sweep", ThresholdStudy)


@pytest.fixture(scope="module")
def load_study(run: Run) -> LoadStudy:
    return stored(run, "simulate", LoadStudy)


def stored(run: Run, name: str, kind: type[Study]) -> Study:
    study = read_result(run.study_path(name), kind)
    assert study is not None
    return study


def test_curves_say_what_they_are_over(run: Run, thresholds: ThresholdStudy, load_study: LoadStudy) -> None:
    assert figures.over(thresholds) == "1,500 held-out rounds, greedy"
    assert {picture.description for picture in figures.thresholds(thresholds)} == {
        "1,500 held-out rounds, greedy"
    }
    labels = [line.label for line in figures.acceptance(stored(run, "acceptance", AcceptanceStudy))[0].series]
    whole = acceptance_by_position(make_trace(1))[0]
    assert labels[0] == f"all (1,500), τ {whole.tau:.2f}"
    greedy = figures.decoded_acceptance(sections.named(decoded(run).modes), "heldout")[0]
    assert greedy.series[0].label == "Greedy, 40 prompts"
    assert greedy.description == "decoding held-out prompts"
    for section in (study_sections.thresholds(thresholds), study_sections.load(load_study)):
        assert section is not None
        assert "1,500 held-out rounds, greedy" in section.lead


def test_validation_by_decoding_is_named_as_it_was_configured() -> None:
    callback = {
        "class_path": "dspark_train.decoding.callback.DecodeValidation",
        "init_args": {"prompts": 4, "temperature": 1.0, "split": "heldout"},
    }
    config = {"trainer": {"callbacks": [{"class_path": "other"}, callback]}}
    assert sections.decoded_validation(config) == "decoding 4 held-out prompts, temperature 1"
    assert sections.decoded_validation({"trainer": {"callbacks": True}}) == "by decoding"
    curve = [(1.0, 1.1), (2.0, 1.2)]
    pictures = learning_figures.learning({"decode/tau": curve, "decode/speedup": curve}, "decoding 4 prompts")
    assert pictures[0].series[-1].label == "decoding 4 prompts"
    assert "Measured speedup, decoding 4 prompts" in [p.title for p in pictures if p.drawable]


def test_extrapolated_load_is_drawn_as_rings(load_study: LoadStudy) -> None:
    for line in figures.load(load_study)[0].series:
        assert line.hollow == [False] * 8 + [True] * 2
    section = study_sections.load(load_study)
    assert section is not None
    assert "Rings: passes beyond the 128 measured rows." in section.figures[0].caption


def test_load_is_read_out_at_promised_speeds_against_one_draft_token(load_study: LoadStudy) -> None:
    """Policies of the example give gain · 21 · R together, and each user 1 / (1 + waste · R / 40) of that."""
    section = study_sections.load(load_study)
    assert section is not None
    for said in ("Poisson arrivals", "prompts of 80 tokens", "90,000 positions", "taken as in the record"):
        assert said in section.lead
    promised, equal = section.tables
    assert promised.header[1:] == list(load_study.policies) == equal.header[1:]
    assert [row[0] for row in promised.rows] == ["20.0", "30.0"]
    base, scheduled = (
        throughput_at(load_study.policies[name], 20.0) for name in ("one draft token", "scheduled")
    )
    assert base
    assert scheduled
    assert promised.rows[0][5] == f"{scheduled:,.0f} ({scheduled / base - 1:+.0%})"
    assert promised.rows[1][1] == "–"  # plain decoding never gives 30 tokens a second
    budget = section.figures[1].table
    assert budget is not None
    assert {row[1] for row in budget.rows} == {"1.0"}
    earlier = dataclasses.replace(load_study, arrivals="")
    assert "arrivals" not in study_sections.load(earlier).lead  # type: ignore[union-attr]


def test_drift_marks_the_place_of_the_change(run: Run) -> None:
    drift = stored(run, "online", DriftStudy)
    picture = figures.drift(drift)
    last = [point.rounds for point in drift.points if point.phase == drift.first][-1]
    assert picture.turn == (last, drift.first, drift.second)


def test_a_threshold_that_follows_is_drawn_beside_the_wanted_share(run: Run) -> None:
    study = stored(run, "online_threshold", ThresholdDriftStudy)
    picture = figures.threshold_drift(study)
    assert [line.label for line in picture.series] == [
        f"threshold {study.start:g}",
        "following online",
        "wanted",
    ]
    assert list(picture.series[1].points) == [(point.rounds, point.online) for point in study.points]
    assert {y for _, y in picture.series[2].points} == {0.8}
    section = study_sections.threshold_drift(study)
    assert section is not None
    assert f"begin at {study.start:g}" in section.lead


def test_a_figure_with_one_point_is_left_out_and_its_numbers_are_kept(thresholds: ThresholdStudy) -> None:
    one = {"all": thresholds.groups["all"][:1]}
    section = study_sections.thresholds(dataclasses.replace(thresholds, groups=one))
    assert section is not None
    assert section.drawn == []
    assert [table.folded for table in section.listed] == [False] * 4
    assert "<svg" not in render(Page("t", "k", "", sections=[section]))
    table = Table("numbers", ["", "a"], [["x", "1"]], folded=True)
    both = Section("k", "t", figures=[Figure(figures.thresholds(thresholds)[0], table=table)])
    assert len(both.drawn) == 1
    assert both.listed == []


def test_reliability_of_every_position_in_a_file(tmp_path: Path) -> None:
    result = calibrate_traces(make_trace(0), make_trace(1))
    study = ReliabilityStudy.of(
        result.heldout, **(OF | {"temperatures": list(result.fitted.best.temperatures)})
    )
    figures.save_reliability(tmp_path / "reliability.png", study)
    assert (tmp_path / "reliability.png").stat().st_size > 10_000
    squares = figures.reliability(study)
    assert len(squares) == 7
    counted = sum(entry.count for entry in study.bins_after[0])
    assert counted == 1500
    drawn = [point for line in squares[0].series if line.colour == 0 for point in line.points]
    assert sorted(drawn) == sorted((entry.confidence, entry.accepted) for entry in study.bins_after[0])


def test_costs_of_a_pass_and_of_the_parts(tmp_path: Path) -> None:
    seconds = (1.0, 1.5, 3.0)
    bare = CostTable(128, (1, 2, 8), seconds, seconds, seconds)
    assert [picture.drawable for picture in figures.costs(bare)] == [True, False]
    full = dataclasses.replace(
        bare, requests=(1, 2, 8), single_row_seconds_median=seconds, draft_seconds_median=(0.2, 0.3, 0.6)
    )
    target, parts = figures.costs(full)
    assert target.series[0].points[-1] == (8.0, 3000.0)
    assert [line.label for line in parts.series] == ["single row", "draft"]
    for costs in (bare, full):
        save_png(tmp_path / "cost.png", figures.costs(costs))
        assert (tmp_path / "cost.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("acceptance", AcceptanceStudy),
        ("threshold_sweep", ThresholdStudy),
        ("simulate", LoadStudy),
    ],
)
def test_files_of_earlier_versions_are_read(run_folder: Path, tmp_path: Path, name: str, kind: type) -> None:
    """They hold the same layout, without a version, and may lack what their rounds were."""
    stored = json.loads((run_folder / "studies" / f"{name}.json").read_text())
    assert stored.pop("version") == 1
    groups = "policies" if name == "simulate" else "groups"
    (tmp_path / "old.json").write_text(json.dumps({groups: stored[groups], "further": 1}))
    old = read_result(tmp_path / "old.json", kind)
    new = read_result(run_folder / "studies" / f"{name}.json", kind)
    assert getattr(old, groups) == getattr(new, groups)
    assert figures.over(old) == ""  # type: ignore[arg-type]
