"""Puts the recipes and the quickstart's data into the wheel; everything else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHIPPED = ("configs/*", "data_prep/*.yaml", "data_prep/quickstart/*.jsonl")


class BuildWithRecipes(build_py):
    """Copies them to ``dspark_train/shipped``, where ``cli/recipes.py`` looks."""

    def run(self) -> None:
        """Build the package, then add the files."""
        super().run()
        if self.editable_mode:
            return  # they are read from the clone
        for pattern in SHIPPED:
            for source in ROOT.glob(pattern):
                to = Path(self.build_lib) / "dspark_train" / "shipped" / source.relative_to(ROOT)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, to)


setup(cmdclass={"build_py": BuildWithRecipes})
