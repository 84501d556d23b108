"""What the documentation names exists."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml

from dspark_train.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECTIONS = "target|draft|objective|optimizer|data|trainer|run"


@pytest.fixture(scope="module")
def keys():
    """Keys of a resolved configuration, with dots."""
    from dspark_train.cli.fit import main

    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit):
        main(["fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--print_config"])
    return set(_flat(yaml.safe_load(printed.getvalue())))


def _flat(value, prefix=""):
    for key, inner in value.items():
        yield f"{prefix}{key}"
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{key}.")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_key_exists(page, keys):
    for name in re.findall(rf"(?:`|--|\s)((?:{SECTIONS})\.[a-z_]+(?:\.[a-z_]+)*)\b(?!\()", page.read_text()):
        if name.endswith((".json", ".csv", ".yaml", ".html", ".sbatch", ".safetensors")):
            continue
        assert name in keys, f"{page.name} names {name}, which no configuration has"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_exists(page):
    known = {name.split()[0] for name in COMMANDS} | {"--help", "--version", "COMMAND"}
    for name in re.findall(r"(?:python -m dspark_train|`dspark-train) ([a-z-]+)", page.read_text()):
        assert name in known, f"{page.name} calls {name}, which is no command"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_it_points_to_exists(page):
    for name in re.findall(r"`((?:configs|benchmarks|data_prep|docs)/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} points to {name}"


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        assert str(page.relative_to(ROOT / "docs")) in text
