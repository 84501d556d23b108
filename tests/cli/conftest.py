"""Fixtures of this folder."""

from tiny_drafts import make_draft, make_target, sabotage, target, target_weights  # noqa: F401
