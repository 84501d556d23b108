"""The kinds of drafts there are, and how a folder's draft is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark_train.draft.eagle3 import ARCHITECTURE, Eagle3Config, Eagle3Draft
from dspark_train.draft.model import DSparkDraft
from dspark_train.errors import UserError
from dspark_train.target.frozen import FrozenTarget

Draft = DSparkDraft | Eagle3Draft


def load_draft(folder: str | Path, **kwargs: Any) -> Draft:
    """Read a draft of any kind, in the layout that training writes.

    Args:
        folder: with ``config.json`` and weights.
        kwargs: of ``from_pretrained``, such as ``dtype``.

    Raises:
        UserError: nothing there, or damaged.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no draft: config.json is missing")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    kind = Eagle3Draft if ARCHITECTURE in (config.get("architectures") or ()) else DSparkDraft
    return kind.load(folder, **kwargs)


def make_draft(config: Any, target: FrozenTarget, draft_token_ids: Tensor | None = None) -> Draft:
    """A fresh draft of the kind that ``config`` describes.

    Args:
        config: of the draft.
        target: whose embedding and head it borrows.
        draft_token_ids: ``[U]`` ascending target ids of a reduced vocabulary; None keeps the target's.
    """
    if isinstance(config, Eagle3Config):
        return Eagle3Draft(config, target=target)
    return DSparkDraft(config, target=target, draft_token_ids=draft_token_ids)
