"""``plan``: what a recipe will need, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jsonargparse

from dspark_train.cli.parsing import STRICT


@dataclass
class PlanOptions:
    """What ``plan`` takes beside a recipe."""

    target_config: Path | None = None
    """The target's config.json, where it is not found by the target's name."""
    gpu: str | None = None
    """Estimate time and the largest micro-batch for this GPU."""
    samples: int | None = None
    """Training sequences; left out, those of the data."""
    length: float | None = None
    """Mean tokens per sequence; left out, that of the data, else a quarter of the maximum."""
    answer_share: float | None = None
    """Share of the tokens that the target generated; left out, that of the data, else 0.6."""


def main(arguments: Sequence[str]) -> None:
    """Run ``plan``.

    Args:
        arguments: command line, ``plan`` first.
    """
    if {"-h", "--help"} & set(arguments):
        print(usage())
        return
    from dspark_train.cli.planning import plan

    print(plan(arguments[1:]))


def usage() -> str:
    """Text of ``plan --help``."""
    parser = jsonargparse.ArgumentParser(
        prog="dspark-train plan",
        description="Say what a recipe will need, before anything is loaded. Takes every option of `fit` too.",
        **STRICT,
    )
    parser.add_argument("--config", help="YAML file of a recipe, as often as needed; later ones win")
    parser.add_class_arguments(PlanOptions)
    return parser.format_help()
