"""Files that are either whole or not there, and folders with one owner at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from dspark_train.errors import UserError


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


# -- results: dataclasses that are computed, stored, read back and drawn -------------------------------------

RESULT_VERSION = 1
"""Of the layout of result files; those without a version are older and laid out alike."""

Result = TypeVar("Result")


def write_result(path: Path, result: Any) -> None:
    """Write a dataclass as JSON with a version; NaN becomes null."""
    from pydantic import TypeAdapter

    plain = json.loads(TypeAdapter(type(result)).dump_json(result))
    write_json(path, {"version": RESULT_VERSION, **plain})


def read_result(path: Path, kind: type[Result]) -> Result | None:
    """Read what :func:`write_result` wrote; keys that the dataclass does not know are left out.

    Args:
        path: of the file.
        kind: dataclass that it holds.

    Returns:
        The result; None where there is no file.

    Raises:
        UserError: the file is no JSON, or of another layout.
    """
    from pydantic import TypeAdapter, ValidationError

    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); remove it or make it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(content).__name__}")
    version = content.get("version", 0)
    if not isinstance(version, int) or version > RESULT_VERSION:
        raise UserError(
            f"{path} has layout {version}, this version reads up to {RESULT_VERSION}; "
            "read it with the version that wrote it, or make it again"
        )
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise UserError(
            f"{path} is not laid out as this version writes it ({place}: {fault['msg']}); make it again"
        ) from error
