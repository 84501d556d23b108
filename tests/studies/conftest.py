"""Fixtures of this folder."""

from tiny_traces import trace  # noqa: F401
