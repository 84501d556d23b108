"""Opens a target and its draft from whatever names the draft: a run, a draft's folder, or a hub id."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_train.calibration.io import Calibration
from dspark_train.errors import UserError
from dspark_train.files import read_json
from dspark_train.hub import local_folder
from dspark_train.run import STS_FILE, Dtype, Run

if TYPE_CHECKING:
    from dspark_train.draft.kinds import Draft
    from dspark_train.target.frozen import FrozenTarget


@dataclass(frozen=True, eq=False)
class Pair:
    """A target and the draft that proposes for it."""

    target: FrozenTarget
    draft: Draft
    run: Run | None
    """The run that the draft is from; None for a draft on its own."""
    calibration: Calibration | None
    """Beside a draft on its own; None where there is none, or where the run has it."""


def open_pair(source: str, target: str | None = None, dtype: Dtype | None = None) -> Pair:
    """Open a draft with its target.

    Args:
        source: folder of a run, folder of a draft in any known layout, or a hub id with, behind ``@``, a revision.
        target: folder or hub id of the target; None takes the run's, or the one that the draft's folder names.
        dtype: of target and draft; None takes the run's, else the faster one here.

    Raises:
        UserError: nothing there, no target named, or a pair that does not fit.
    """
    folder = local_folder(source)
    if (folder / "config.yaml").is_file():
        run = Run(folder, dtype)
        if target is not None and target != run.config.get("target", {}).get("name_or_path"):
            raise UserError(
                f"{source} is a run and names its own target; leave --target out, or give {folder / 'draft'}"
            )
        return Pair(run.target, run.draft, run, None)
    return _open_draft(folder, target or named_target(folder), dtype)


def named_target(folder: Path) -> str:
    """Target that a draft's folder names: in a speculators configuration, or in its model card.

    Raises:
        UserError: it names none.
    """
    config = read_json(folder / "config.json", missing=f"{folder} holds neither a run nor a draft")
    verifier = config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
    named = verifier or card_fields(folder).get("base_model")
    if not isinstance(named, str) or not named:
        raise UserError(f"{folder} does not say which target it is for: give it with --target")
    return named


def card_fields(folder: Path) -> dict[str, Any]:
    """Front matter of a folder's model card; empty without one."""
    import yaml

    path = folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    try:
        fields = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError as error:
        raise UserError(
            f"{path}: its front matter is not valid YAML: {str(error).splitlines()[0]}"
        ) from error
    return fields if isinstance(fields, dict) else {}


def _open_draft(folder: Path, target_name: str, dtype: Dtype | None) -> Pair:
    from dspark_train.draft.kinds import is_eagle3, load_draft
    from dspark_train.interchange.detect import read_draft
    from dspark_train.interchange.importing import import_folder
    from dspark_train.target.config import TargetConfig
    from dspark_train.target.frozen import FrozenTarget

    described = read_json(folder / "config.json", missing=f"{folder} holds neither a run nor a draft")
    chain = is_eagle3(described)
    config = described if chain else read_draft(folder).config
    settings = TargetConfig(target_name, layer_ids=config["target_layer_ids"], dtype=dtype or "auto")
    slots = config["ttt_length"] if chain else config["block_size"]
    target = FrozenTarget.load(settings, rows=slots + 1)
    with tempfile.TemporaryDirectory() as made:
        native = folder
        if not chain:
            native = Path(made) / "draft"
            import_folder(folder, native, target)
        draft: Any = load_draft(native, dtype=target.dtype)
    draft.to(target.device).eval()
    draft.borrow(target)
    scalings = folder / STS_FILE
    return Pair(target, draft, None, Calibration.load(scalings) if scalings.is_file() else None)
