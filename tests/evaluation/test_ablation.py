"""Ablations: the grid, its faults, and runs in processes (a stand-in for `fit`, as training is tested elsewhere)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from dspark_train.cli.ablate import AblateOptions, ablate
from dspark_train.errors import UserError
from dspark_train.evaluation.ablate import AblationResult, study_lines, study_places, train_cells
from dspark_train.evaluation.ablation import Ablation, Cell, fit_arguments, read_ablation
from dspark_train.files import read_result
from dspark_train.report.ablation_page import collect, write_results

ROOT = Path(__file__).parents[2]

FIT = """
import json, pathlib, sys
flags = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[1:] if a.startswith("--") and "=" in a)
folder = pathlib.Path(flags["run.folder"])
print("fit", sys.argv[1:])
if (folder / "fail").exists():
    print("error: something was wrong", file=sys.stderr)
    raise SystemExit(2)
folder.mkdir(parents=True, exist_ok=True)
(folder / "runs").open("a").write("x")
layers, head = int(flags["draft.num_layers"]), flags.get("draft.head", "vanilla")
tau = 1.5 + 0.2 * layers + 0.3 * (head != "none")
mode = {"temperature": 0.0, "tau": tau, "prompts": 4, "acceptance": {"conditional": [0.5, 0.4]},
        "speculative": {"round_milliseconds": 40.0 + layers, "milliseconds": {"head": 0.5}, "tokens_per_second": 9.0},
        "plain": {"tokens_per_second": 5.0}, "speedup": {"value": tau * 0.7}}
(folder / "metrics.csv").write_text(f"step,val/tau\\n9,1.0\\n19,{tau - 0.1}\\n")
(folder / "decode.json").write_text(json.dumps({"modes": {"greedy": mode}}))
(folder / "config.yaml").write_text(f"draft: {{num_layers: {layers}, head: {head}}}")
(folder / "run.json").write_text(json.dumps({"finished": True, "wall_seconds": {"fit": 12.0}}))
"""

GRID = {
    "config": "configs/quickstart.yaml",
    "overrides": {"trainer.max_steps": 20, "data.template": {"a": [1, True]}},
    "axes": {
        "layers": {"setting": "draft.num_layers", "values": [1, 2, 3]},
        "head": {
            "none": {"draft.head": "none", "draft.markov_rank": 0},
            "vanilla": {"draft.head": "vanilla"},
        },
    },
    "base": {"layers": 2, "head": "vanilla"},
    "studies": {"layers": {"x": "layers", "lines": "head"}, "head": {"x": {"head": ["none", "vanilla"]}}},
}


def write_grid(folder: Path, **changes: object) -> Path:
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(GRID | {"folder": str(folder / "ablation")} | changes, sort_keys=False))
    return path


@pytest.fixture
def grid(tmp_path: Path) -> Ablation:
    return read_ablation(write_grid(tmp_path))


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "fit.py").write_text(FIT)
    return [sys.executable, str(tmp_path / "fit.py")]


def test_runs_that_studies_share_are_trained_once(grid: Ablation) -> None:
    names = [cell.name for cell in grid.cells()]
    assert names[0] == "base"
    assert sorted(names[1:]) == [
        "head-none",
        "layers-1",
        "layers-1_head-none",
        "layers-3",
        "layers-3_head-none",
    ]
    assert [cell.name for cell in grid.grid(grid.studies[1])] == ["head-none", "base"]


def test_arguments_of_fit_carry_every_setting(grid: Ablation) -> None:
    cell = grid.cell({"layers": "3", "head": "none"})
    assert fit_arguments(grid, cell) == [
        "fit",
        "--config",
        "configs/quickstart.yaml",
        "--trainer.max_steps=20",
        '--data.template={"a": [1, true]}',
        "--draft.num_layers=3",
        "--draft.head=none",
        "--draft.markov_rank=0",
        "--run.trial=true",
        f"--run.folder={grid.folder / 'layers-3_head-none'}",
    ]


def test_all_faults_of_the_file_are_named_at_once(tmp_path: Path) -> None:
    changes = {
        "overides": {},
        "base": {"layer": 2, "head": "vanila"},
        "axes": {**GRID["axes"], "taps": [1, 2]},  # type: ignore[dict-item]
        "studies": {"a": {"x": "layrs"}, "b": {"lines": "head"}, "c": {"x": {"layers": [2, 9]}}},
    }
    with pytest.raises(UserError) as caught:
        read_ablation(write_grid(tmp_path, **changes, sort_keys=False))
    text = str(caught.value)
    for part in (
        "unknown 'overides' (did you mean 'overrides'?)",
        "base.layer: unknown 'layer' (did you mean 'layers'?)",
        "base.head: unknown 'vanila' (did you mean 'vanilla'?)",
        "axes.taps must be",
        "studies.a.x: unknown 'layrs'",
        "studies.b must be",
        "studies.c.x.layers: unknown '9'",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("content", "message"),
    [("- 1", "must hold a mapping"), ("a: [", "not valid YAML"), ("{}", "must hold|is missing")],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "grid.yaml").write_text(content)
    with pytest.raises(UserError, match=message):
        read_ablation(tmp_path / "grid.yaml")
    with pytest.raises(UserError, match="does not exist"):
        read_ablation(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": [1]}, "config must be a path"),
        ({"overrides": [1]}, "overrides must be a mapping"),
        ({"base": "layers"}, "base must be a mapping"),
        ({"axes": ["layers"]}, "axes must be a mapping"),
        ({"axes": {"layers": {"setting": 1, "values": [1]}}}, "axes.layers must be"),
        ({"axes": {"layers": {"setting": "draft.num_layers", "values": []}}}, "axes.layers must be"),
        ({"studies": {"a": {"x": "layers", "line": "head"}}}, "studies.a must be"),
        ({"studies": {"a": {"x": {"layers": 2}}}}, "studies.a must be"),
        (
            {"studies": {"a": {"x": {"layers": [2], "head": ["none"]}}}},
            "must name one axis, not layers, head",
        ),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_ablation(write_grid(tmp_path, **changes))


def test_settings_reach_fit_as_they_are_written(tmp_path: Path) -> None:
    """Nothing is read into them here: a class path stays one, text stays text, and names stay as written."""
    callback = {
        "class_path": "dspark_train.training.cache_builder.CacheFeatures",
        "init_args": {"folder": "f"},
    }
    axes = {
        "lr": {"setting": "optimizer.lr", "values": ["1e-3", 0.002, "true", None]},
        "cache": {1: {"trainer.callbacks": [callback]}, "off": {"trainer.callbacks": []}},
    }
    grid = read_ablation(write_grid(tmp_path, axes=axes, base={}, studies={"lr": {"x": "lr"}}))
    assert list(grid.axes["lr"]) == ["1e-3", "0.002", "true", "None"]
    assert list(grid.axes["cache"]) == ["1", "off"]
    assert grid.base == {"lr": "1e-3", "cache": "1"}
    flags = fit_arguments(grid, grid.cell({}))
    assert "--optimizer.lr=1e-3" in flags
    assert f"--trainer.callbacks={json.dumps([callback])}" in flags


def test_a_recipe_that_fit_would_refuse_stops_the_grid_before_it_begins(tmp_path: Path) -> None:
    axes = {"layers": {"setting": "draft.num_layer", "values": [1, 2]}}
    grid = write_grid(tmp_path, axes=axes, base={}, studies={"layers": {"x": "layers"}})
    with pytest.raises(UserError, match=r"run base: unknown key 'draft\.num_layer'"):
        ablate(AblateOptions(grid))
    assert not (tmp_path / "ablation").exists()


def test_failed_runs_are_named_and_the_rest_goes_on(grid: Ablation, command: list[str]) -> None:
    states: list[tuple[str, str]] = []

    def note(number: int, total: int, cell: Cell, state: str) -> None:
        states.append((cell.name, state))

    broken = grid.folder / "layers-3"
    broken.mkdir(parents=True)
    (broken / "fail").touch()
    failures = train_cells(grid, note, command)
    assert failures == {"layers-3": "error: something was wrong"}
    assert ("layers-3", "failed") in states
    assert set(collect(grid)) == {cell.name for cell in grid.cells()} - {"layers-3"}
    (broken / "fail").unlink()
    assert train_cells(grid, note, command) == {}
    assert ("base", "finished before") in states
    assert (grid.folder / "base" / "runs").read_text() == "x"  # trained once
    lines = study_lines(grid, grid.studies[0], collect(grid))
    assert study_places(grid.studies[0]) == {"1": 1.0, "2": 2.0, "3": 3.0}
    assert study_places(grid.studies[1]) == {"none": 0.0, "vanilla": 1.0}
    found = {line.label: [round(r.tau or 0, 2) for _, r in line.points] for line in lines}
    assert found == {"head none": [1.7, 1.9, 2.1], "head vanilla": [2.0, 2.2, 2.4]}


def test_table_plots_and_page_of_an_ablation(
    grid: Ablation,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UserError, match=r"no run in .* is finished"):
        write_results(grid, {})
    train_cells(grid, lambda *_: None, command)
    table = write_results(grid, {})
    assert "| layers-3_head-none | 3 | none | 2.00 | 2.10 | – | 1.47× | 43.0 | 1.2 % | – |" in table
    content = json.loads((grid.folder / "ablation.json").read_text())
    assert len(content["results"]) == 6
    stored = read_result(grid.folder / "ablation.json", AblationResult)
    assert stored is not None
    assert {result.name: result for result in stored.results} == collect(grid)
    for name in ("layers", "head"):
        assert (grid.folder / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (grid.folder / "ablation.html").read_text()
    assert "Study: layers" in page
    assert "draft.num_layers" in page
    ablate(AblateOptions(tmp_path / "grid.yaml", dry_run=True))
    printed = capsys.readouterr().out
    assert printed.count("fit --config configs/quickstart.yaml") == 6
    monkeypatch.setattr("dspark_train.evaluation.ablate.train_cells", lambda *_: {"layers-3": "error: no"})
    with pytest.raises(UserError, match=r"1 runs failed \(layers-3: error: no\)"):
        ablate(AblateOptions(tmp_path / "grid.yaml"))


def test_shipped_grid_holds_settings_that_fit_accepts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dspark_train.cli.fit import main

    monkeypatch.chdir(ROOT)
    ablation = read_ablation(Path("configs/ablate_quickstart.yaml"))
    assert {study.name for study in ablation.studies} == {"layers", "draft_length", "head", "taps"}
    lengths = ablation.axes["draft_length"].items()  # with the anchor, as in the paper
    assert all(settings == {"draft.block_size": int(length) - 1} for length, settings in lengths)
    cell = ablation.cell({axis: next(iter(choices)) for axis, choices in ablation.axes.items()})
    with pytest.raises(SystemExit) as ended:
        main([*fit_arguments(ablation, cell), "--print_config"])
    assert ended.value.code in (0, None)
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["draft"]["head"] == "none"
    assert resolved["target"]["layer_ids"] == [28]


@pytest.mark.parametrize("name", ["ablate_objectives", "compare_quickstart"])
def test_every_cell_of_the_other_grids_is_a_recipe(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dspark_train.cli.planning import parse_recipe

    monkeypatch.chdir(ROOT)
    ablation = read_ablation(Path(f"configs/{name}.yaml"))
    (axis,) = ablation.axes
    for choice in ablation.axes[axis]:
        words = fit_arguments(ablation, ablation.cell({axis: choice}))[1:]
        assert parse_recipe(words).as_dict()["trainer"]["max_steps"] in (100, 300)
