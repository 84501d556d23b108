"""Which layout a checkpoint folder has, from its ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from dspark_train.errors import UserError
from dspark_train.interchange.checkpoint import DraftCheckpoint, read_config
from dspark_train.interchange.dflash import read_dflash
from dspark_train.interchange.native import ARCHITECTURES, read_native
from dspark_train.interchange.specforge import read_specforge
from dspark_train.interchange.speculators import read_speculators

Layout = Literal["native", "speculators", "dflash", "specforge"]

READERS: dict[Layout, Callable[[Path], DraftCheckpoint]] = {
    "native": read_native,
    "speculators": read_speculators,
    "dflash": read_dflash,
    "specforge": read_specforge,
}


def detect(folder: Path) -> Layout:
    """Return the layout of a checkpoint folder.

    Raises:
        UserError: no folder, or none of the known layouts.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; a draft is a folder with config.json and safetensors weights"
        )
    config = read_config(folder / "config.json")
    given = config.get("architectures")
    names = given if isinstance(given, list) else []
    if "speculators_model_type" in config:
        return "speculators"
    if any(name in names for name in ARCHITECTURES):
        return "native"
    nested = config.get("dflash_config")
    if "DSparkDraftModel" in names and isinstance(nested, dict):
        return "specforge"
    if isinstance(nested, dict) or any(str(name).startswith("DFlash") for name in names):
        return "dflash"
    if "markov_rank" in config:
        return "native"
    raise UserError(
        f"{folder}: architectures {names or 'missing'}; expected a DSpark draft (native, "
        "speculators or SpecForge) or a DFlash draft"
    )


def read_draft(folder: Path, layout: Layout | None = None) -> DraftCheckpoint:
    """Read a draft in any known layout into native names.

    Args:
        folder: the checkpoint.
        layout: skips detection.
    """
    return READERS[layout or detect(folder)](folder)
