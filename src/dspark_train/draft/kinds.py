"""The kinds of drafts there are, and how a folder's draft is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark_train.draft.eagle3 import ARCHITECTURE, Eagle3Config, Eagle3Draft
from dspark_train.draft.model import DSparkDraft
from dspark_train.files import read_json
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
    config = read_json(Path(folder) / "config.json", missing="a draft's folder has one")
    return (Eagle3Draft if is_eagle3(config) else DSparkDraft).load(folder, **kwargs)


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether the ``config.json`` of a draft is that of an Eagle3 draft."""
    return ARCHITECTURE in (config.get("architectures") or ())


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
