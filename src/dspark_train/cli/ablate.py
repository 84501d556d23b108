"""The ``ablate`` command: a small grid of recipes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dspark_train.errors import UserError
from dspark_train.evaluation.ablation import Ablation, Cell, fit_arguments, read_ablation


@dataclass(frozen=True)
class AblateOptions:
    """Options of ``ablate``."""

    grid: Path
    """YAML file with the recipe, the axes and the studies."""
    dry_run: bool = False
    """Only print the runs and their commands."""


def ablate(options: AblateOptions) -> None:
    """Train a small grid of recipes, run by run, and compare them in a table, plots and a page.

    Runs that are finished are kept, an interrupted one goes on, a failed one is named and stops no other: the
    same command continues an ablation.
    """
    from dspark_train.evaluation.ablate import train_cells
    from dspark_train.report.ablation_page import write_results

    ablation = read_ablation(options.grid)
    if options.dry_run:
        for cell in ablation.cells():
            print(f"{cell.name}: {' '.join(fit_arguments(ablation, cell))}")
        return
    check_recipes(ablation)

    def show(number: int, total: int, cell: Cell, state: str) -> None:
        print(f"[{number}/{total}] {cell.name}: {state}", flush=True)

    failures = train_cells(ablation, show)
    print(write_results(ablation, failures))
    print(f"ablation: {ablation.folder}")
    if failures:
        text = "; ".join(f"{name}: {line}" for name, line in failures.items())
        raise UserError(f"{len(failures)} runs failed ({text}); their logs are in {ablation.folder / 'logs'}")


def check_recipes(ablation: Ablation) -> None:
    """Parse the recipe of every run as ``fit`` will.

    Raises:
        UserError: names the first run whose recipe ``fit`` would refuse, and why.
    """
    from dspark_train.cli.recipe import parse_recipe

    for cell in ablation.cells():
        try:
            parse_recipe(fit_arguments(ablation, cell)[1:])
        except UserError as error:
            raise UserError(f"run {cell.name}: {error}") from error
