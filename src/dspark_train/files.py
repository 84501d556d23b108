"""Files that are either whole or not there, and folders with one owner at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Write JSON aside and move it into place."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False))
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where there is no file."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def count_lines(path: Path) -> int:
    """Lines of a file; only a newline ends one."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file: processes that make the same thing wait for the first one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
