"""Files as people have them: byte-order marks, CRLF, packed, in tables."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from tiny_data import tiny_tokenizer

from dspark_train.data.build import BuildOptions, build_set
from dspark_train.data.conversations import SplitShares
from dspark_train.errors import UserError
from dspark_train.files import count_lines, read_lines
from dspark_train.prepare.sources import Source, conversation_of, count_rows, read_source

ROWS = [
    {
        "id": str(index),
        "messages": [{"role": "user", "content": f"w{index}"}, {"role": "assistant", "content": "w1 w2"}],
    }
    for index in range(5)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(content: bytes) -> bytes:
    return pa.Codec("zstd").compress(content, asbytes=True)


FORMS = {
    "rows.jsonl": LINES,
    "mark.jsonl": b"\xef\xbb\xbf" + LINES,
    "crlf.jsonl": b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"),
    "rows.jsonl.gz": gzip.compress(b"\xef\xbb\xbf" + LINES),
    "rows.jsonl.zst": zstd(LINES[: len(LINES) // 2]) + zstd(LINES[len(LINES) // 2 :]),  # in two frames
}


@pytest.mark.parametrize("name", FORMS)
def test_every_row_of_every_form_is_read_by_prepare_and_by_fit(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FORMS[name])
    source = Source(str(path))
    read = [conversation_of(row, source, where) for where, row in read_source(source)]
    assert [one.messages for one in read] == [row["messages"] for row in ROWS]
    assert count_rows(source) == count_lines(path) == 5
    third = next(line for line in read_lines(path) if line.number == 3)
    assert next(read_lines(path, third.offset, 3)) == third
    options = BuildOptions(max_length=64, shares=SplitShares(0, 0))
    built = build_set(path, tmp_path / "set", tiny_tokenizer(), options)
    assert built.manifest.conversations == 5
    assert built.manifest.errors == {}
    assert not list((tmp_path / "set").glob(".unpacked*"))
    again = build_set(path, tmp_path / "set", tiny_tokenizer(), options)
    assert again.manifest.fingerprint == built.manifest.fingerprint


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_utf_16_is_refused_by_name(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES.decode().encode(encoding))
    with pytest.raises(UserError, match=r"UTF-16 or UTF-32; save it as UTF-8"):
        list(read_source(Source(str(path))))
    with pytest.raises(UserError, match="UTF-16"):
        build_set(path, tmp_path / "set", tiny_tokenizer(), BuildOptions())


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst"])
def test_a_packed_file_that_was_cut_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FORMS[name][:-9])
    with pytest.raises(UserError, match=rf"{name}: damaged (gzip|zstd) file"):
        list(read_source(Source(str(path))))


def schema(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def test_a_tables_objects_have_their_own_keys_and_true_nulls(tmp_path: Path) -> None:
    """Arrow gives each object the keys of all; a key that is null in all was written as null by someone."""
    tools = [
        [schema("weather", {"city": {"type": "string", "default": None}})],
        [schema("add", {"a": {"type": "number"}, "b": {"enum": [1, 2]}}), schema("now", {})],
    ]
    calls: list[dict[str, Any]] = [{"city": "Paris", "unit": None}, {"a": 1, "b": 2}]
    rows = [
        {
            "messages": [
                {"role": "user", "content": "w1"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "f", "arguments": one}}],
                },
            ],
            "tools": listed,
        }
        for listed, one in zip(tools, calls, strict=True)
    ]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    source = Source(str(path))
    read = [conversation_of(row, source, where) for where, row in read_source(source)]
    assert read[1].tools == tools[1]
    assert read[0].tools == tools[0]
    said = [one.messages[1]["tool_calls"][0]["function"]["arguments"] for one in read]
    assert said[0] == {"city": "Paris", "unit": None}
    # "unit" is null in every row of the table: Arrow does not keep who wrote it
    assert said[1] == {"a": 1, "b": 2, "unit": None}
