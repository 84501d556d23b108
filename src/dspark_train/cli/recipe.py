"""A recipe as ``fit`` reads it, without anything being started: the same files, flags and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from dspark_train.cli.fit import DSparkCLI, check_options, measured_precision, run_cli
from dspark_train.errors import UserError


class RecipeCLI(DSparkCLI):
    """Parses, checks what can be checked without loading anything, and stops there."""

    own_options: type | None = None
    """Dataclass whose fields the command line may hold beside the recipe, without a prefix."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Declare the recipe's sections, and the command's own options."""
        super().add_arguments_to_parser(parser)
        if self.own_options is not None:
            parser.add_class_arguments(self.own_options)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """A recipe is what ``fit`` takes."""
        return {"fit": DSparkCLI.subcommands()["fit"]}

    def before_instantiate_classes(self) -> None:
        """Fill in the precision; the run's folder is left alone."""
        config = self.config["fit"]
        if config.trainer.precision is None:
            config.trainer.precision = "bf16-mixed"
            if config.trainer.accelerator == "cpu":
                config.trainer.precision = "32-true"
                with suppress(UserError):  # a target that is not here has no layers to measure
                    config.trainer.precision = measured_precision(config)
        check_options(self.config["fit"].run.options)

    def instantiate_classes(self) -> None:
        """Make nothing, and run nothing."""
        self.subcommand = None


def parse_recipe(arguments: Sequence[str], own_options: type | None = None) -> Namespace:
    """Parse ``--config`` files and flags as ``fit`` does.

    Args:
        arguments: command line after the command's name.
        own_options: dataclass of options that come on top.

    Raises:
        UserError: an unknown key, a value of another type, or something missing.
    """

    class Recipe(RecipeCLI):
        pass

    Recipe.own_options = own_options  # Lightning declares arguments while it constructs
    return run_cli(Recipe, ["fit", *arguments]).config["fit"]
