"""The tree is what the documents say it is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "dspark_train"
ORDER = (
    "structures",
    "errors",
    "lists",
    "files",
    "progress",
    "machine",
    "hub",
    "data",
    "target",
    "draft",
    "run",
    "training",
    "calibration",
    "decoding",
    "studies",
    "evaluation",
    "report",
    "interchange",
    "prepare",
    "cli",
)
"""Each imports only from those before it."""


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dspark_train."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found.update(
                name.name.split(".")[1] for name in node.names if name.name.startswith("dspark_train.")
            )
    return found


def files_of(name: str) -> list[Path]:
    return sorted((SOURCE / name).rglob("*.py")) if (SOURCE / name).is_dir() else [SOURCE / f"{name}.py"]


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_one_way(name: str) -> None:
    allowed = set(ORDER[: ORDER.index(name) + 1])
    for path in files_of(name):
        assert imports(path) <= allowed, f"{path.relative_to(ROOT)} imports {sorted(imports(path) - allowed)}"


def test_every_room_is_known() -> None:
    found = {path.stem for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert found - {"__pycache__", "__init__", "__main__"} == set(ORDER)


def test_the_readme_maps_the_tree() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ORDER:
        assert re.search(rf"^\s*(.* )?{name}(/|\b.*) ", readme, re.M), f"README.md does not describe {name}"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['dspark-train', '--help']; from dspark_train.__main__ import main; main();"
        "print('HEAVY', sorted({'torch', 'transformers', 'lightning', 'jsonargparse'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout


def test_every_command_exists() -> None:
    from dspark_train.cli.main import COMMANDS, resolve

    for command in COMMANDS.values():
        assert callable(resolve(command)), command


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_parses(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    assert content
    if "base" in content or path.stem.startswith(("ablate", "compare")) or path.stem == "sweep":
        return
    base = (
        []
        if "data" in content and "path" in content["data"]
        else ["--config", str(ROOT / "configs/quickstart.yaml")]
    )
    command = [sys.executable, "-m", "dspark_train", "fit", *base, "--config", str(path), "--print_config"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert yaml.safe_load(done.stdout)["draft"]


def test_no_machine_path_and_no_shared_folder_in_the_tree() -> None:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    words = re.compile(r"/work/|/root/|\.\./shared")
    for name in listed.splitlines():
        path = ROOT / name
        if (
            path.suffix in (".py", ".md", ".yaml", ".toml", ".html", ".json")
            and path.is_file()
            and path != Path(__file__)
        ):
            assert not words.search(path.read_text(errors="ignore")), name
