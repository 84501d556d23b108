"""dspark-train: train DSpark drafts for lossless speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["DSparkConfig", "DSparkDraft", "FrozenTarget", "TargetConfig", "generate"]

if TYPE_CHECKING:
    from dspark_train.decoding.decoder import generate
    from dspark_train.draft.config import DSparkConfig
    from dspark_train.draft.model import DSparkDraft
    from dspark_train.target.config import TargetConfig
    from dspark_train.target.frozen import FrozenTarget

_HOMES = {
    "DSparkConfig": "draft.config",
    "DSparkDraft": "draft.model",
    "FrozenTarget": "target.frozen",
    "TargetConfig": "target.config",
    "generate": "decoding.decoder",
}


def __getattr__(name: str) -> Any:
    """Import the public names at their first use, so that ``--help`` loads nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dspark_train' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"dspark_train.{_HOMES[name]}"), name)
