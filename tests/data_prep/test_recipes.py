"""Every recipe of data_prep/ fits the command line and names what a recipe must name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dspark_train.cli.parsing import run_command
from dspark_train.cli.prepare import prepare
from dspark_train.errors import UserError

FOLDER = Path(__file__).resolve().parents[2] / "data_prep"
RECIPES = sorted(path.name for path in FOLDER.glob("*.yaml"))


def test_there_is_a_recipe_for_each_purpose() -> None:
    assert {"quickstart.yaml", "open_perfectblend.yaml", "template.yaml"} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_accepted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(prepare, ["--config", str(FOLDER / name), "--print_config"], "prepare")
    assert ended.value.code in (0, None)
    resolved: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    assert resolved["notes"]
    assert resolved["target"]
    assert resolved["output"]
    assert all(source["license"] for source in resolved["sources"])


def test_unknown_keys_are_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((FOLDER / "template.yaml").read_text() + "\nshuffle: true\n")
    with pytest.raises(UserError, match="shuffle"):
        run_command(prepare, ["--config", str(recipe)], "prepare")
