"""JSON and JSONL, digests and locks, and the two forms of work that can be stopped and continued.

:class:`Shards` is work that is cut into numbered parts, each finished as a whole. :class:`Journal` is work whose
results come one by one, a line each.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from dspark_train.errors import UserError

_BOM = b"\xef\xbb\xbf"
_FILES = "files"
"""Key of a part's record: sizes, and digests where wanted, of its files by name."""


def cache_folder() -> Path:
    """The project's folder in the user's cache (``XDG_CACHE_HOME`` is honoured)."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "dspark-train"


def write_json(path: Path, content: Any) -> None:
    """Write JSON aside and move it into place."""
    _write(path, _dump(content))


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _dump(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False)


def read_json(path: Path, *, missing: str | None = None, most: int | None = None) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: of the file.
        missing: what to say where there is no file; without it, no file reads as an empty object.
        most: the most bytes that such a file may have.

    Raises:
        UserError: no file, too large a file, no JSON, or no object.
    """
    if not path.is_file():
        if missing is None:
            return {}
        raise UserError(f"{path}: no such file; {missing}")
    if most is not None and path.stat().st_size > most:
        raise UserError(f"{path}: {path.stat().st_size} bytes; a file of this kind has at most {most}")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); fix it or make it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}; expected a JSON object")
    return content


class BadLine(ValueError):  # noqa: N818 - names what it holds
    """A line of a JSONL file that is no JSON; says where it is and why."""


class Line(NamedTuple):
    """One line of a JSONL file."""

    where: str
    """``file:line``, for messages."""
    number: int
    """From 1."""
    offset: int
    """Bytes before it in the file."""
    text: bytes
    """With its line break, where it has one."""

    def value(self) -> Any:
        """Decode the line; bytes that are no UTF-8 become lone surrogates.

        Raises:
            BadLine: it is no JSON.
        """
        text = self.text.removeprefix(_BOM) if not self.offset else self.text
        try:
            return json.loads(text.decode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError) as error:
            raise BadLine(f"{self.where}: {error}") from error


def read_lines(path: Path, offset: int = 0, number: int = 1) -> Iterator[Line]:
    """Yield the lines of a JSONL file, blank ones left out; only a newline ends a line.

    Args:
        path: of the file.
        offset: bytes to skip.
        number: of the first line after them.

    Raises:
        UserError: no such file.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; correct the path, or make it first")
    with open_text(path) as file:
        file.seek(offset)
        yield from _lines(file, path.name, offset, number)


_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def _packing(path: Path) -> str | None:
    """How a file is packed, by its first bytes: gzip, zstd, or None.

    Raises:
        UserError: its text is UTF-16 or UTF-32.
    """
    with path.open("rb") as file:
        head = file.read(4)
    if head.startswith(_GZIP):
        return "gzip"
    if head == _ZSTD:
        return "zstd"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in head:
        raise UserError(
            f"{path}: text in UTF-16 or UTF-32; save it as UTF-8, or convert it with `iconv -t UTF-8`"
        )
    return None


@contextmanager
def open_text(path: Path) -> Iterator[IO[bytes]]:
    """Open UTF-8 text for reading as bytes, unpacked where it is gzip or zstd.

    Raises:
        UserError: the text is UTF-16 or UTF-32, or what is packed is damaged.
    """
    packing = _packing(path)
    try:
        if packing is None:
            with path.open("rb") as file:
                yield file
        elif packing == "gzip":
            with gzip.open(path, "rb") as unpacked:
                yield unpacked  # type: ignore[misc]
        else:
            import pyarrow

            stream: Any = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
            with io.BufferedReader(stream, 2**20) as unpacked_zstd:
                yield _Forward(unpacked_zstd)  # type: ignore[misc]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged {packing} file ({error}); fetch it again") from error
    except OSError as error:
        if packing is None or error.errno is not None:
            raise
        raise UserError(f"{path}: damaged {packing} file ({error}); fetch it again") from error


class _Forward:
    """A stream that can only be read, with the ``seek`` of one that can."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._file)

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def seek(self, offset: int) -> None:
        """Skip bytes; called before anything was read."""
        while offset > 0:
            offset -= len(self._file.read(min(offset, 2**20))) or offset


@contextmanager
def unpacked(path: Path, folder: Path) -> Iterator[Path]:
    """A file whose offsets can be reached at once: itself, or for gzip and zstd a copy in ``folder`` meanwhile."""
    if _packing(path) is None:
        yield path
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacked-", dir=folder) as scratch:
        copy = Path(scratch) / path.stem
        with open_text(path) as source, copy.open("wb") as out:
            shutil.copyfileobj(source, out, 2**20)
        yield copy


def text_suffix(path: Path) -> str:
    """Suffix of a file without that of its packing: ``.jsonl`` of ``rows.jsonl.gz``."""
    packed = path.suffix in (".gz", ".gzip", ".zst", ".zstd")
    return Path(path.stem).suffix if packed else path.suffix


def _lines(file: IO[bytes], name: str, offset: int, number: int) -> Iterator[Line]:
    for text in file:
        if text.strip():
            yield Line(f"{name}:{number}", number, offset, text)
        offset += len(text)
        number += 1


def count_lines(path: Path) -> int:
    """Lines of a file; only a newline ends one."""
    with open_text(path) as file:
        return sum(1 for _ in file)


def nearest_folder(path: Path) -> Path:
    """``path`` or the nearest folder above it that exists: whose disk it will be on."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_made(path: Path, made: Mapping[str, Any], again: str, *, verify: bool = True) -> None:
    """Compare a file with what was noted when it was made: ``bytes``, and ``sha256`` where it was kept.

    Args:
        path: of the file.
        made: the note.
        again: what to do about a difference, for the message.
        verify: compare the SHA-256 too.

    Raises:
        UserError: it is missing, truncated or corrupt.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing: {again}")
    size = path.stat().st_size
    if size != made["bytes"]:
        raise UserError(f"{path} is truncated ({size} of {made['bytes']} bytes): {again}")
    if verify and "sha256" in made and file_digest(path) != made["sha256"]:
        raise UserError(f"{path} is corrupt (its SHA-256 has changed): {again}")


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock on a file, which is made where it does not exist.

    Args:
        path: of the file.
        wait: until other processes have released it; without it, False is given where one holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        yield _lock(file, wait)


def _lock(file: IO[Any], wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """Dotted names of the entries in which two JSON objects differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*before, *(key for key in now if key not in before)]
        return [
            name
            for key in keys
            for name in differences(before.get(key), now.get(key), f"{path}.{key}".strip("."))
        ]
    return [] if before == now else [path or "everything"]


class Shard:
    """One part of :class:`Shards`, to be worked on by this process.

    Args:
        folder: of the parts.
        index: from 0.
        name: of the part; its record is ``name.json``.
        checksums: keep the SHA-256 of its files.
    """

    def __init__(self, folder: Path, index: int, name: str, checksums: bool) -> None:
        self.folder, self.index, self.name = folder, index, name
        self._checksums = checksums
        self._files: list[str] = []

    def aside(self, file: str) -> Path:
        """Where to write a file of this part; :meth:`finish` moves it to its name."""
        self._files.append(file)
        return self.folder / f"{file}.tmp"

    def finish(self, record: Mapping[str, Any]) -> None:
        """Move the files into place, then write the record, which marks the part as finished."""
        files: dict[str, dict[str, Any]] = {}
        for file in self._files:
            written = self.folder / f"{file}.tmp"
            files[file] = {"bytes": written.stat().st_size}
            if self._checksums:
                files[file]["sha256"] = file_digest(written)
            os.replace(written, self.folder / file)
        write_json(self.folder / f"{self.name}.json", {**record, _FILES: files})


class Shards:
    """Work that is cut into numbered parts. Stopped at any moment, it continues after its finished parts.

    A folder holds, beside the files of the parts::

        identity.json     what the parts are made from; written first
        shard-00000.json  the record of a finished part; written after its files
        .lock             held for a moment by each process that begins
        .shard-00000.lock held by the process that works on the part; removed at the end

    Several processes may work in one folder: each part is made by one of them.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        identity: Mapping[str, Any] | str,
        *,
        foreign: str,
        claim: str = "identity.json",
        name: str = "shard-{:05d}",
        checksums: bool = False,
    ) -> None:
        """Claim a folder, or continue in it.

        Args:
            folder: of the parts; made where it does not exist.
            count: number of parts.
            identity: everything that the parts depend on.
            foreign: what a folder of another identity holds, for the message.
            claim: name of the identity's file.
            name: of a part, by its number.
            checksums: keep the SHA-256 of every file, for :meth:`check`.

        Raises:
            UserError: the folder holds parts of another identity.
        """
        self.folder, self.count = folder, count
        self.lock = folder / ".lock"
        self._name, self._checksums = name, checksums
        wanted = identity if isinstance(identity, str) else _dump(identity)
        path = folder / claim
        with locked(self.lock):
            found = path.read_text(encoding="utf-8") if path.is_file() else None
            if found is None and not any(self._record(index).exists() for index in range(count)):
                _write(path, wanted)
            elif found != wanted:
                different = _named_differences(found, wanted)
                raise UserError(
                    f"{folder} holds {foreign}{different}: choose another output folder, or remove this one"
                )

    def _record(self, index: int) -> Path:
        return self.folder / f"{self._name.format(index)}.json"

    def _lock_of(self, index: int) -> Path:
        return self.folder / f".{self._name.format(index)}.lock"

    def finished(self, index: int) -> bool:
        """Whether a part has its record, and the files that the record names have their sizes."""
        record = self._record(index)
        if not record.is_file():
            return False
        files = {self.folder / name: made for name, made in read_json(record).get(_FILES, {}).items()}
        return all(path.is_file() and path.stat().st_size == made["bytes"] for path, made in files.items())

    def missing(self, among: Iterable[int] | None = None) -> Iterator[Shard]:
        """Yield the parts that are not finished, each locked until the next one is asked for.

        Parts that other processes work on come last: they are waited for, and yielded only where such a process
        left them unfinished. So all parts are finished at the end.

        Args:
            among: numbers of the parts to look at; all by default.
        """
        rest = [
            index for index in (range(self.count) if among is None else among) if not self.finished(index)
        ]
        for wait in (False, True):
            held = []
            for index in rest:
                with locked(self._lock_of(index), wait=wait) as mine:
                    if not mine:
                        held.append(index)
                    elif not self.finished(index):
                        yield Shard(self.folder, index, self._name.format(index), self._checksums)
            rest = held

    def record(self, index: int) -> dict[str, Any]:
        """What was said of a part when it was finished."""
        record = read_json(self._record(index), missing="the part is not finished")
        record.pop(_FILES, None)
        return record

    def check(self, *, verify: bool = True) -> None:
        """Compare the files of all parts with their records.

        Args:
            verify: compare the SHA-256 too, where it was kept.

        Raises:
            UserError: names a file that is missing, truncated or corrupt.
        """
        for index in range(self.count):
            record = self._record(index)
            again = f"delete {record} and make the part again"
            for name, made in read_json(record, missing="the part is not finished").get(_FILES, {}).items():
                check_made(self.folder / name, made, again, verify=verify)

    def finish(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Write the manifest of the whole, once all parts are finished."""
        unfinished = [index for index in range(self.count) if not self.finished(index)]
        assert not unfinished, f"parts {unfinished} of {self.folder} are not finished"
        write_json(path, manifest)
        for index in range(self.count):
            self._lock_of(index).unlink(missing_ok=True)


def _named_differences(found: str | None, wanted: str) -> str:
    try:
        names = differences(json.loads(found or ""), json.loads(wanted))
    except ValueError:  # an identity that is a plain text has no names
        return ""
    return f" (differs in {', '.join(names[:5])})"


class Journal:
    """A JSONL file that grows by whole lines; an unfinished last one, which a crash left, does not count.

    Nothing of the file changes before something is written to it. Use it in a ``with`` statement: it is locked
    against other processes meanwhile.
    """

    def __init__(self, path: Path, *, busy: str | None = None) -> None:
        """Open a journal, or begin it.

        Args:
            path: of the file.
            busy: what to say where another process has it open; without it, that process is waited for.

        Raises:
            UserError: another process has it open.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        if not _lock(self._file, wait=busy is None):
            self._file.close()
            raise UserError(f"{busy}")
        self._end = _end_of_lines(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lines(self) -> Iterator[Line]:
        """Yield the whole lines."""
        self._file.seek(0)
        for line in _lines(self._file, self.path.name, 0, 1):
            if line.offset >= self._end:
                return
            yield line

    def line(self, offset: int) -> bytes:
        """Read the line at an offset."""
        self._file.seek(offset)
        return self._file.readline()

    def cut(self, offset: int) -> None:
        """Drop everything from an offset on."""
        self._file.truncate(offset)
        self._end = offset

    def append(self, row: Any) -> int:
        """Write a row and return its offset; once this returns, a crash of the process does not lose it."""
        offset = self._end
        self._file.truncate(offset)
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self._end = self._file.tell()
        return offset

    def close(self) -> None:
        """Sync and release the file."""
        os.fsync(self._file.fileno())
        self._file.close()


def _end_of_lines(file: IO[bytes]) -> int:
    """Bytes up to the last line break of a file."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 65_536)
        file.seek(start)
        place = file.read(end - start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0


# -- results: dataclasses that are computed, stored, read back and drawn -------------------------------------

RESULT_VERSION = 1
"""Of the layout of result files; those without a version are older and laid out alike."""

Result = TypeVar("Result")


def renamed(name: str, earlier: str) -> Any:
    """Annotation of a result's field ``name``: files of earlier versions have it under another key."""
    from pydantic import AliasChoices, Field

    return Field(validation_alias=AliasChoices(name, earlier))


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
    content = read_json(path)
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
