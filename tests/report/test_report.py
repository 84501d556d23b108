"""The report: every number has a file behind it, absent files leave no trace, broken ones are named."""

from __future__ import annotations

import colorsys
import dataclasses
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from dspark_train.errors import UserError
from dspark_train.machine import Choice
from dspark_train.report import pictures, text
from dspark_train.report.comparison_page import comparison_page, flatten, labels, write_comparison
from dspark_train.report.learning_figures import smooth, thin
from dspark_train.report.page import render
from dspark_train.report.run_page import run_page, write_report
from dspark_train.run import Run

VOID = {"meta", "link", "br", "hr", "img", "input"}
FILES = {
    "learning": "metrics.csv",
    "speed": "decode.json",
    "drift": "studies/online.json",
    "threshold-drift": "studies/online_threshold.json",
    "suites": "evaluation/suites.json",
    "reliability": "calibration_report.json",
    "threshold": "studies/threshold_sweep.json",
    "load": "studies/simulate.json",
}


class Outline(HTMLParser):
    """Checks that tags close in order, and collects headings, ids and link targets."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name == "href" and str(value).startswith("#"):
                self.links.append(str(value)[1:])
            elif name in ("href", "src"):
                self.addresses.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outline(html: str) -> Outline:
    parser = Outline()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture
def copy(run_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path / "copy"))


def test_page_is_well_formed_and_self_contained(run_folder: Path, tmp_path: Path) -> None:
    html = write_report(run_folder, tmp_path / "page.html").read_text(encoding="utf-8")
    page = outline(html)
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(page.headings, page.headings[1:], strict=False))
    assert len(set(page.ids)) == len(page.ids)
    assert set(page.links) <= set(page.ids)
    assert page.addresses == ["data:,"]
    assert "http" not in html.replace("http-equiv", "")
    assert "default-src 'none'" in html
    assert len(html) < 400_000


def test_report_lands_in_the_run_folder(copy: Path) -> None:
    for folder in ("studies", "evaluation"):
        shutil.rmtree(copy / folder)
    assert write_report(copy) == copy / "report.html"
    assert not list(copy.glob("*.part"))


def test_summary_shows_the_numbers_of_the_files(run_folder: Path) -> None:
    decode = json.loads((run_folder / "decode.json").read_text())
    page = run_page(Run.existing(run_folder))
    values = {fact.label: fact.value for fact in page.facts}
    assert values["Accepted length τ, greedy"] == f"{decode['modes']['greedy']['tau']:.2f}"
    assert values["Speedup, greedy"] == f"{decode['modes']['greedy']['speedup']['value']:.2f}×"
    assert values["Training time"] == "16 min 52 s"
    assert values["Peak memory"] == "3.76 GB"
    assert next(fact for fact in page.facts if fact.label == "Identical output").good is True
    assert "on all 40 prompts" in page.summary


def test_keys_in_a_configuration_never_reach_a_page(copy: Path, tmp_path: Path) -> None:
    before = run_page(Run.existing(copy)).sections[-1].listing
    assert before == (copy / "config.yaml").read_text()  # comments and order are kept where nothing is hidden
    other = Path(shutil.copytree(copy, tmp_path / "other"))
    secrets = {
        "api_key": "plain-secret",
        "tags": ["hf_AbCdEfGhIjKlMnOpQrSt"],
        "Authorization": "Bearer sesame",
    }
    config = yaml.safe_load(before) | {"logger": secrets, "mirror": "https://me:opensesame@host/data"}
    (copy / "config.yaml").write_text(yaml.safe_dump(config) + "# hf_ZzYyXxWwVvUuTtSsRrQq\n")
    run = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(run | {"machine": "of ghp_AbCdEfGhIjKlMnOpQr"}))
    pages = [write_report(copy), write_comparison([copy, other], tmp_path / "comparison.html")]
    for page in pages:
        html = page.read_text()
        assert "(left out)" in html
        for secret in ("plain-secret", "hf_", "sesame", "ghp_"):
            assert secret not in html


def test_output_that_differs_is_said_plainly(copy: Path) -> None:
    decode = json.loads((copy / "decode.json").read_text())
    for failures, good, text_part in (
        (1, False, "on 38 of 40 prompts."),
        (0, True, "differs within rounding"),
    ):
        decode["modes"]["greedy"]["identical"] = {"prompts": 38, "failures": failures}
        (copy / "decode.json").write_text(json.dumps(decode))
        page = run_page(Run.existing(copy))
        assert next(fact for fact in page.facts if fact.label == "Identical output").good is good
        assert text_part in page.summary


@pytest.mark.parametrize(("key", "file"), FILES.items())
def test_a_missing_file_leaves_its_section_out(copy: Path, key: str, file: str) -> None:
    assert key in {section.key for section in run_page(Run.existing(copy)).sections}
    (copy / file).unlink()
    page = run_page(Run.existing(copy))
    assert key not in {section.key for section in page.sections}
    undrawn = [dataclasses.replace(section, figures=()) for section in page.sections]
    assert f'href="#{key}"' not in render(dataclasses.replace(page, sections=undrawn))


def test_acceptance_needs_one_of_two_files(copy: Path) -> None:
    (copy / "studies" / "acceptance.json").unlink()
    acceptance = {section.key: section for section in run_page(Run.existing(copy)).sections}["acceptance"]
    assert acceptance.source == "decode.json"
    (copy / "decode.json").unlink()
    assert "acceptance" not in {section.key for section in run_page(Run.existing(copy)).sections}


def test_a_run_that_does_not_say_how_long_it_trained(copy: Path) -> None:
    (copy / "run.json").unlink()
    assert Run.existing(copy).fit_seconds is None


def test_no_section_is_empty_even_with_one_file(copy: Path) -> None:
    for entry in copy.iterdir():
        if entry.name != "metrics.csv":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    page = run_page(Run.existing(copy))
    assert [section.key for section in page.sections] == ["learning"]
    assert page.summary == ""
    outline(render(page))


@pytest.mark.parametrize(
    "file", ["decode.json", "run.json", "studies/simulate.json", "calibration_report.json"]
)
def test_a_broken_file_is_named(copy: Path, file: str) -> None:
    (copy / file).write_text("{")
    with pytest.raises(UserError, match=re.escape(Path(file).name)):
        write_report(copy)


@pytest.mark.parametrize("file", ["decode.json", "studies/simulate.json", "evaluation/suites.json"])
def test_a_foreign_layout_is_named(copy: Path, file: str) -> None:
    foreign = {"modes": {"greedy": {}}, "policies": {"plain": [{}]}, "results": [{}], "methods": []}
    (copy / file).write_text(json.dumps(foreign))
    with pytest.raises(UserError, match=re.escape(Path(file).name)):
        write_report(copy)


def test_thinning_keeps_the_mean_and_smoothing_a_constant() -> None:
    curve = [(float(i), float(i % 7)) for i in range(1000)]
    thinned = thin(curve, 100)
    assert len(thinned) == 100
    assert sum(y for _, y in thinned) / 100 == pytest.approx(sum(y for _, y in curve) / 1000)
    assert smooth([(float(i), 2.0) for i in range(200)]) == [(float(i), 2.0) for i in range(200)]


def test_comparison_shows_both_runs_and_only_what_differs(
    run_folder: Path, copy: Path, tmp_path: Path
) -> None:
    config = (copy / "config.yaml").read_text().replace("num_layers: 2", "num_layers: 5")
    (copy / "config.yaml").write_text(config)
    html = write_comparison([run_folder, copy], tmp_path / "comparison.html").read_text()
    outline(html)
    runs = [Run.existing(run_folder), Run.existing(copy)]
    settings = next(s for s in comparison_page(runs).sections if s.key == "settings")
    assert settings.tables[0].rows == [["draft.num_layers", "2", "5"]]
    with pytest.raises(UserError, match="twice"):
        labels([runs[0], runs[0]])
    with pytest.raises(UserError, match="at least two"):
        comparison_page(runs[:1])


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [1, 2]}}, "e": None}) == {
        "a.b": "1",
        "a.c.d": "[1, 2]",
        "e": "None",
    }


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, two: str) -> float:
    high, low = sorted((_luminance(one), _luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_have_the_contrast_that_wcag_asks_for() -> None:
    import dspark_train.report.page as module

    style = (Path(module.__file__).parent / "templates" / "report.css").read_text()
    schemes = [
        dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.S)
    ]
    assert len(schemes) == 2
    light = [schemes[0][f"c{i}"] for i in range(6)]
    assert light == list(pictures.PALETTE)
    named = [schemes[0][name] for name in ("page", "ink", "soft", "hair")]
    assert named == [pictures.PAGE, pictures.INK, pictures.SOFT, pictures.HAIR]
    assert (schemes[0]["ramp-from"], schemes[0]["ramp-to"]) == pictures.RAMP
    for scheme in schemes:
        for ink in ("ink", "soft", "link", "yes", "no"):
            assert _contrast(scheme[ink], scheme["page"]) >= 4.5, ink
        for fill in ("draft-fill", "target-fill", "panel"):
            assert _contrast(scheme["ink"], scheme[fill]) >= 4.5, fill
        for mark in ("c0", "c1", "c2", "c3", "c4", "c5", "draft-edge", "target-edge"):
            assert _contrast(scheme[mark], scheme["page"]) >= 3.0, mark
        hues = [
            colorsys.rgb_to_hls(*(int(scheme[f"c{i}"][j : j + 2], 16) / 255 for j in (1, 3, 5)))[0]
            for i in range(5)
        ]
        assert len({round(hue, 2) for hue in hues}) == 5


@pytest.mark.parametrize(
    ("seconds", "written"), [(3.21, "3.2 s"), (42, "42 s"), (1012.4, "16 min 52 s"), (7322, "2 h 2 min")]
)
def test_durations(seconds: float, written: str) -> None:
    assert text.duration(seconds) == written


def test_numbers_as_text() -> None:
    assert text.size(4.13e9) == "4.13 GB"
    assert text.quantity(14_213_633) == "14.2 million"
    assert text.share(0.0123) == "1.2\u202f%"
    assert text.signed(-0.5) == "−0.50"


def test_a_page_says_what_was_chosen_for_the_machine_and_what_the_time_allowed(
    run_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    choice = Choice("training (188 rows of 576)", "float32", {"float32": 10.0, "bfloat16": 55.0})
    Run(folder).update(
        steps={"made": 599, "recipe": 1100, "minutes": 25.0}, chosen={choice.purpose: choice.to_json()}
    )
    page = render(run_page(Run(folder)))
    assert "of the recipe's 1,100: 25 minutes allow no more on this machine".replace("'", "&#39;") in page
    assert "Chosen here for training (188 rows of 576)" in page
    assert "float32 (5.5 times as fast as bfloat16)" in page
