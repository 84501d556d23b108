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
ORDER = ("data", "target", "draft", "training", "calibration", "decoding", "evaluation", "interchange")
SHARED = {"errors", "structures", "__init__"}
COMMAND_LINE = {"cli", "fit", "parsing", "prepare", "__main__"}
ALLOWED = {("data", "target")}  # the data's cache lies beside the embedded target's


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


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_only_from_steps_before_them(package: str) -> None:
    before = SHARED | set(ORDER[: ORDER.index(package) + 1]) | {b for a, b in ALLOWED if a == package}
    for path in (SOURCE / package).rglob("*.py"):
        assert imports(path) <= before, f"{path.relative_to(ROOT)} imports {sorted(imports(path) - before)}"


def test_every_package_is_known() -> None:
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    modules = {path.stem for path in SOURCE.glob("*.py")}
    assert packages == set(ORDER)
    assert modules == SHARED | COMMAND_LINE


def test_the_readme_maps_the_tree() -> None:
    readme = (ROOT / "README.md").read_text()
    for package in ORDER:
        assert re.search(rf"^\s*{package}/ ", readme, re.M), (
            f"README.md does not describe src/dspark_train/{package}/"
        )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['dspark-train', '--help']; from dspark_train.__main__ import main; main();"
        "print('HEAVY', sorted({'torch', 'transformers', 'lightning', 'jsonargparse'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout


def test_every_command_exists() -> None:
    from dspark_train.cli import COMMANDS, resolve

    for command in COMMANDS.values():
        assert callable(resolve(command)), command


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_parses(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    assert content
    if "base" in content or path.stem.startswith("ablate"):
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
