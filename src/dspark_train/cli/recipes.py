"""The recipes that come with the package: listed, shown, copied, and taken by name as configs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import dspark_train
from dspark_train.errors import UserError


def shipped() -> Path:
    """Folder of ``configs/`` and ``data_prep/``: inside an installed package, else the clone's."""
    package = Path(dspark_train.__file__).parent
    inside = package / "shipped"
    return inside if inside.is_dir() else package.parents[1]


def recipes_of(folder: str) -> dict[str, Path]:
    """Recipes of ``configs`` or ``data_prep`` by name."""
    return {path.stem: path for path in sorted((shipped() / folder).glob("*.yaml"))}


def config_file(given: str, folder: str = "configs") -> str:
    """What ``--config`` names: a file, or else a recipe that comes with the package."""
    path = Path(given)
    if path.exists():
        return given
    known = recipes_of(folder)
    if given in known:
        return str(known[given])
    inside = shipped() / path  # as the documentation writes it: configs/quickstart.yaml
    return str(inside) if not path.is_absolute() and inside.is_file() else given


def data_file(given: Path) -> Path:
    """A recipe's data: a path of the user's, or else one that comes with the package."""
    inside = shipped() / given
    return inside if not given.is_absolute() and not given.exists() and inside.exists() else given


@dataclass(frozen=True)
class RecipesOptions:
    """Options of ``recipes``."""


def recipes(options: RecipesOptions) -> None:
    """List the recipes that come with the package, for ``--config NAME``."""
    for folder, command in (("configs", "fit"), ("data_prep", "prepare")):
        print(f"{command} --config NAME")
        for name, path in recipes_of(folder).items():
            print(f"  {name:<20} {_summary(path)}")


def _summary(path: Path) -> str:
    """First sentence of a recipe's opening comment."""
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words += line.lstrip("# ").split()
    return " ".join(words).split(". ")[0].rstrip(".")[:84]


@dataclass(frozen=True)
class ShowRecipeOptions:
    """Options of ``recipes show``."""

    name: str
    """Of the recipe, as ``recipes`` lists it."""
    prepare: bool = False
    """A recipe of ``prepare`` instead of one of ``fit``."""


def show(options: ShowRecipeOptions) -> None:
    """Print a recipe."""
    print(_recipe(options.name, options.prepare).read_text(encoding="utf-8"), end="")


@dataclass(frozen=True)
class CopyRecipeOptions:
    """Options of ``recipes copy``."""

    name: str
    """Of the recipe, as ``recipes`` lists it."""
    to: Path | None = None
    """File to write; left out, ``NAME.yaml`` here."""
    prepare: bool = False
    """A recipe of ``prepare`` instead of one of ``fit``."""


def copy(options: CopyRecipeOptions) -> None:
    """Copy a recipe, to be changed and given to ``--config``."""
    source = _recipe(options.name, options.prepare)
    to = options.to or Path(source.name)
    if to.exists():
        raise UserError(f"{to} exists already: name another file with --to")
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, to)
    print(f"{'prepare' if options.prepare else 'fit'} --config {to}")


def _recipe(name: str, prepare: bool) -> Path:
    from dspark_train.cli.parsing import nearest

    known = recipes_of("data_prep" if prepare else "configs")
    if name not in known:
        raise UserError(f"there is no recipe {name!r}{nearest(name, list(known))}; `recipes` lists them")
    return known[name]
