"""JSON, JSONL, and work that is stopped and continued."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dspark_train.errors import UserError
from dspark_train.files import (
    BadLine,
    Journal,
    Shards,
    differences,
    locked,
    read_json,
    read_lines,
    write_json,
)


def test_json_is_read_or_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert read_json(path) == {}
    with pytest.raises(UserError, match=r"x\.json: no such file; make it"):
        read_json(path, missing="make it")
    write_json(path, {"a": "é"})
    assert read_json(path) == {"a": "é"}
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_json(path) == {"a": "é"}
    for content, message in (("{", "not JSON"), ("[1]", "holds a list"), ("[" * 100_000, "not JSON")):
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            read_json(path)
    with pytest.raises(UserError, match="100000 bytes; a file of this kind has at most 10"):
        read_json(path, most=10)


def test_lines_are_numbered_whatever_ends_them(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \r\n"b\xe2\x80\xa8c"\n{broken\n"\xff"\n[1]')
    lines = list(read_lines(path))
    assert [(line.where, line.number) for line in lines] == [(f"x.jsonl:{n}", n) for n in (1, 4, 5, 6, 7)]
    assert [lines[0].value(), lines[1].value(), lines[3].value()] == [{"a": 1}, "b\u2028c", "\udcff"]
    assert lines[4].value() == [1]  # a last line without a line break
    with pytest.raises(BadLine, match=r"x\.jsonl:5: Expecting"):
        lines[2].value()
    assert list(read_lines(path, lines[2].offset, 5)) == lines[2:]
    with pytest.raises(UserError, match=r"nowhere\.jsonl: no such file"):
        list(read_lines(tmp_path / "nowhere.jsonl"))


def test_differences_are_named_with_dots() -> None:
    assert differences({"a": {"b": 1, "c": [1]}, "d": 1}, {"a": {"b": 2, "c": [1]}, "e": 1}) == [
        "a.b",
        "d",
        "e",
    ]
    assert differences(1, 2) == ["everything"]


def rows_of(journal: Journal) -> list[Any]:
    return [line.value() for line in journal.lines()]


def test_an_unfinished_last_line_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with Journal(path) as journal:
        assert [journal.append({"n": n}) for n in range(3)] == [0, 9, 18]
        assert journal.line(9) == b'{"n": 1}\n'
        assert rows_of(journal) == [{"n": 0}, {"n": 1}, {"n": 2}]
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with Journal(path) as journal:
        assert rows_of(journal) == [{"n": 0}, {"n": 1}]
        assert path.read_bytes() == whole[:-3]  # it may be someone else's, until something is written
        journal.append({"n": 2})
    assert path.read_bytes() == whole
    with Journal(path) as journal:
        journal.cut(9)
        journal.append({"n": 9})
        assert rows_of(journal) == [{"n": 0}, {"n": 9}]
    path.write_bytes(b"x" * 200_000)
    with Journal(path) as journal:
        assert rows_of(journal) == []


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with Journal(path), pytest.raises(UserError, match="it is in use"):
        Journal(path, busy="it is in use")
    Journal(path, busy="it is in use").close()


def make(folder: Path, count: int = 5, identity: Any = "me", **options: Any) -> Shards:
    return Shards(folder, count, identity, foreign="parts of others", **options)


def work(shards: Shards, stop_at: int | None = None) -> list[int]:
    done = []
    for shard in shards.missing():
        shard.aside(f"{shard.name}.txt").write_text(f"part {shard.index}")
        if shard.index == stop_at:
            raise KeyboardInterrupt
        shard.finish({"length": 6})
        done.append(shard.index)
    return done


def test_finished_parts_are_kept_and_the_manifest_comes_last(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        work(make(tmp_path), stop_at=3)
    with pytest.raises(AssertionError, match="are not finished"):
        make(tmp_path).finish(tmp_path / "manifest.json", {})
    (tmp_path / "shard-00001.txt").write_text("cut")
    (tmp_path / "shard-00002.txt").unlink()
    shards = make(tmp_path)
    assert [shards.finished(index) for index in range(5)] == [True, False, False, False, False]
    assert work(shards) == [1, 2, 3, 4]
    assert [(tmp_path / f"shard-0000{n}.txt").read_text() for n in range(5)] == [
        f"part {n}" for n in range(5)
    ]
    assert shards.record(3) == {"length": 6}
    assert work(make(tmp_path)) == []
    shards.finish(tmp_path / "manifest.json", {"parts": 5})
    assert read_json(tmp_path / "manifest.json") == {"parts": 5}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".lock", "identity.json", "manifest.json"} | {
        f"shard-0000{n}.{suffix}" for n in range(5) for suffix in ("json", "txt")
    }


def test_records_without_sizes_count(tmp_path: Path) -> None:
    """They were not always written."""
    work(make(tmp_path, 2))
    (tmp_path / "shard-00001.json").write_text('{"length": 6}')
    assert work(make(tmp_path, 2)) == []
    assert make(tmp_path, 2).record(1) == {"length": 6}


def test_parts_of_another_identity_are_refused(tmp_path: Path) -> None:
    work(make(tmp_path / "text"))
    with pytest.raises(UserError, match=r"text holds parts of others: choose another output folder"):
        make(tmp_path / "text", identity="you")
    identity = {"a": {"size": 1}, "b": 2}
    work(make(tmp_path / "names", identity=identity))
    make(tmp_path / "names", identity=identity)
    with pytest.raises(UserError, match=r"holds parts of others \(differs in a\.size\)"):
        make(tmp_path / "names", identity={"a": {"size": 3}, "b": 2})
    (tmp_path / "names" / "identity.json").unlink()
    with pytest.raises(UserError, match="holds parts of others"):  # nobody knows of what
        make(tmp_path / "names", identity=identity)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    shards = make(tmp_path, checksums=True)
    work(shards)
    shards.check()
    file = tmp_path / "shard-00002.txt"
    file.write_text("part 9")
    shards.check(verify=False)
    with pytest.raises(UserError, match=r"shard-00002\.txt is corrupt .* delete .*shard-00002\.json"):
        shards.check()
    file.write_text("part")
    with pytest.raises(UserError, match=r"shard-00002\.txt is truncated \(4 of 6 bytes\)"):
        shards.check(verify=False)
    file.unlink()
    with pytest.raises(UserError, match=r"shard-00002\.txt is missing"):
        shards.check()


def test_a_part_in_work_is_left_to_its_process(tmp_path: Path) -> None:
    shards, seen = make(tmp_path), list[int]()
    with locked(tmp_path / ".shard-00001.lock") as mine:
        assert mine
        thread = threading.Thread(target=lambda: seen.extend(work(shards)))
        thread.start()
        deadline = time.monotonic() + 30
        while not shards.finished(4) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [shards.finished(index) for index in range(5)] == [True, False, True, True, True]
    thread.join(30)
    assert seen == [0, 2, 3, 4, 1]  # whoever held the lock did not finish it


KILLED = """
import os, signal, sys
from pathlib import Path
from dspark_train.files import Shards
for shard in Shards(Path(sys.argv[1]), 5, "me", foreign="parts of others").missing():
    with shard.aside(f"{shard.name}.txt").open("w") as file:
        file.write("part")
        file.flush()
        if shard.index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        file.write(f" {shard.index}")
    shard.finish({"length": 6})
"""


def test_a_killed_process_leaves_whole_parts_and_no_lock(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert work(make(tmp_path)) == [2, 3, 4]
    assert [(tmp_path / f"shard-0000{n}.txt").read_text() for n in range(5)] == [
        f"part {n}" for n in range(5)
    ]


def test_records_say_what_their_files_are(tmp_path: Path) -> None:
    work(make(tmp_path, 1))
    record = json.loads((tmp_path / "shard-00000.json").read_text())
    assert record == {"length": 6, "files": {"shard-00000.txt": {"bytes": 6}}}
