"""Fixtures of this folder."""

from example_run import run_folder  # noqa: F401
