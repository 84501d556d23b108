"""Help of commands whose parser needs Lightning: what the parser printed is kept until something it reads changes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import dspark_train
from dspark_train.files import cache_folder

LIBRARIES = ("jsonargparse", "lightning", "torch", "docstring-parser")
"""Libraries whose signatures and docstrings the help shows, or which lay it out."""


def help_of(name: str, parse: Callable[[], None]) -> str:
    """Help of a command, from the user's cache or, where it is not there, from the parser.

    Args:
        name: of the command.
        parse: runs the parser on ``--help``; prints the help and exits.
    """
    shown = f"{name}-{shutil.get_terminal_size().columns}"
    kept = cache_folder() / "help" / f"{shown}-{_state()}.txt"
    with contextlib.suppress(OSError):
        return kept.read_text(encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        parse()
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        kept.parent.mkdir(parents=True, exist_ok=True)
        for old in kept.parent.glob(f"{shown}-*.txt"):
            old.unlink()
        aside = kept.with_suffix(f".{os.getpid()}")
        aside.write_text(printed.getvalue(), encoding="utf-8")
        aside.replace(kept)
    return printed.getvalue()


def _state() -> str:
    """Digest of what the help depends on: this package's source, the libraries, Python."""
    source = Path(dspark_train.__file__).parent
    files = [(str(path), path.stat().st_mtime_ns) for path in sorted(source.rglob("*.py"))]
    facts = (files, [_version(name) for name in LIBRARIES], sys.version)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
