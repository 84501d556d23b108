"""The ``import`` command: a draft made elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dspark_train.errors import UserError


@dataclass(frozen=True)
class ImportOptions:
    """Options of ``import``."""

    source: str
    """Folder or hub id (owner/name, owner/name@revision) of the draft, in any known layout."""
    output: Path
    """Folder to write."""
    target: str
    """Folder or hub id of the target."""
    layout: Literal["auto", "native", "speculators", "dflash", "specforge"] = "auto"
    """Of the source; ``auto`` detects it."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the target."""
    trust_remote_code: bool = False
    """Run Python code that the target's folder brings along. Only for sources that you trust."""


def import_draft(options: ImportOptions) -> None:
    """Read a draft made elsewhere, check it against its target, and write it as a native folder.

    No code that the draft's folder brings along is ever run.
    """
    from dspark_train.hub import local_folder
    from dspark_train.interchange.detect import detect, read_draft
    from dspark_train.interchange.importing import import_folder
    from dspark_train.target.config import TargetConfig
    from dspark_train.target.frozen import FrozenTarget

    source, output = local_folder(options.source), options.output
    if output.exists() and any(output.iterdir()):
        raise UserError(f"output {output} is not empty; choose another folder")
    chosen = detect(source) if options.layout == "auto" else options.layout
    taps = read_draft(source, chosen).config["target_layer_ids"]
    config = TargetConfig(
        options.target, layer_ids=taps, dtype=options.dtype, trust_remote_code=options.trust_remote_code
    )
    result = import_folder(source, output, FrozenTarget.load(config), chosen)
    print(f"read {source} as {result.layout}; wrote {output}")
    for note in result.notes:
        print(f"note: {note}")
    if result.read_back is not None:
        gap = result.read_back
        print(f"compared with the source: {gap.drafts} draft tokens equal, logits within {gap.logits:.1e}")
