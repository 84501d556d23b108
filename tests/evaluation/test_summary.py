"""Records and their table: hand-checkable numbers, resuming, and comparison on common prompts only."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from dspark_train.calibration.reliability import measure_reliability
from dspark_train.errors import UserError
from dspark_train.evaluation import paper
from dspark_train.evaluation.context import context_edges
from dspark_train.evaluation.records import Record, RecordFile, count_trace
from dspark_train.evaluation.summary import Bootstrap, EvaluationResult, summarise
from dspark_train.files import read_result, write_result
from dspark_train.report.page import render
from dspark_train.report.suite_section import suites_section
from dspark_train.report.tables import evaluation_markdown
from dspark_train.structures import DecodingTrace

METHODS = [
    {"key": "plain", "label": "plain"},
    {"key": "draft", "label": "draft"},
    {"key": "b", "label": "other"},
]
BOOT = Bootstrap(resamples=200)


def record(
    method: str, index: int, *, suite: str = "gsm8k", committed: int = 20, seconds: float = 1.0
) -> Record:
    speculative = method != "plain"
    return Record(
        method=method,
        temperature=0.0,
        suite=suite,
        index=index,
        domain="math" if suite == "gsm8k" else "chat",
        tokens=21,
        seconds=seconds,
        rounds=10 if speculative else 0,
        committed=committed if speculative else 0,
        reached=[10, 5] if speculative else [],
        kept=[5, 4] if speculative else [],
        digest="same",
    )


def test_counts_of_a_trace_by_hand() -> None:
    trace = DecodingTrace(
        request=torch.zeros(4, dtype=torch.int64),
        anchor=torch.arange(4),
        proposed=torch.zeros(4, 3, dtype=torch.int64),
        confidence_logits=torch.full((4, 3), float("nan")),
        verify_length=torch.tensor([3, 3, 1, 0]),
        accepted=torch.tensor([3, 1, 1, 0]),
        committed=torch.tensor([4, 2, 2, 1]),
    )
    counts = count_trace(trace)
    # slot 1 was verified in three rounds; slot 2 reached in two of them and kept in one; slot 3 in that one
    positions = {"anchors": [0, 1, 2, 3], "gained": [4, 2, 2, 1]}
    expected = {"rounds": 4, "committed": 9, "reached": [3, 2, 1], "kept": [3, 1, 1], "bins": []}
    assert counts == expected | positions


def test_calibration_error_of_records_is_that_of_the_joined_trace() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 3, generator=generator)
    accepted = (torch.rand(300, 3, generator=generator) < (logits * 0.5).sigmoid()).int().cumprod(1).sum(1)
    whole = DecodingTrace(
        request=torch.zeros(300, dtype=torch.int64),
        anchor=torch.arange(300),
        proposed=torch.zeros(300, 3, dtype=torch.int64),
        confidence_logits=logits,
        verify_length=torch.full((300,), 3),
        accepted=accepted,
        committed=accepted + 1,
    )
    parts = []
    for start in (0, 100, 200):
        names = (
            "request",
            "anchor",
            "proposed",
            "confidence_logits",
            "verify_length",
            "accepted",
            "committed",
        )
        cut = {name: getattr(whole, name)[start : start + 100] for name in names}
        counts = count_trace(dataclasses.replace(whole, **cut), [1.5, 1.2, 1.1])
        parts.append(dataclasses.replace(record("draft", start), **counts))
    table = summarise(parts, METHODS[1:2], {}, BOOT)
    expected = measure_reliability(whole, [1.5, 1.2, 1.1]).mean_ece
    assert table.results[0].suites["gsm8k"].methods["draft"].ece == pytest.approx(expected, abs=1e-9)


def test_numbers_of_the_table_by_hand() -> None:
    records = [record("plain", i, seconds=2.0) for i in range(4)]
    records += [record("draft", i, committed=20 + i) for i in range(4)]
    records += [record("b", i, committed=19 + i) for i in range(4)]
    records += [
        record(m, i, suite="mt-bench", committed=30) for m in ("plain", "draft", "b") for i in range(2)
    ]
    result = summarise(records, METHODS, {}, BOOT).results[0]
    gsm8k = result.suites["gsm8k"]
    assert gsm8k.prompts == 4
    assert gsm8k.methods["draft"].tau.value == pytest.approx(2.15)
    assert gsm8k.methods["draft"].speedup is not None
    assert gsm8k.methods["draft"].speedup.value == pytest.approx(2.0)
    assert gsm8k.methods["draft"].conditional == [0.5, 0.8]
    assert gsm8k.methods["draft"].identical == 4
    assert gsm8k.methods["plain"].tau.value == 1.0
    macro = result.macro["draft"]
    assert macro.tau.value == pytest.approx((2.15 + 3.0) / 2)
    assert macro.speedup is not None
    assert macro.speedup.value == pytest.approx((2.0 + 1.0) / 2)
    assert result.domains["chat"].methods["draft"].tau.value == pytest.approx(3.0)
    difference = result.differences[0]
    assert (difference.first, difference.second) == ("draft", "b")
    # 0.1 tokens on every prompt of one suite and none on the other: no spread at all, as the pairs agree
    assert difference.macro.value == pytest.approx(0.05)
    assert difference.macro.low == pytest.approx(0.05)
    assert difference.suites["gsm8k"].high == pytest.approx(0.1)


def test_accepted_length_by_position_by_hand(tmp_path: Path) -> None:
    anchors, gained = [5, 1023, 1024, 4000, 9000], [4, 2, 3, 1, 1]
    records = [record("plain", i) for i in range(3)]
    for i in range(3):
        for method, more in (("draft", 0), ("b", 1)):
            whole = {"anchors": anchors, "gained": [value + more for value in gained], "rounds": 5}
            records.append(dataclasses.replace(record(method, i), **whole))
    edges = context_edges(["1k", "4k", "8192", "16K"])
    assert edges == [1024, 4096, 8192, 16384]
    result = summarise(records, METHODS, {}, BOOT, edges)
    found = result.results[0].contexts
    assert [(c.first, c.last) for c in found] == [(0, 1023), (1024, 4095), (8192, 16383)]
    assert [c.tau["draft"].value for c in found] == [3.0, 2.0, 1.0]
    assert [c.tau["b"].value for c in found] == [4.0, 3.0, 2.0]
    assert [c.rounds["draft"] for c in found] == [6, 6, 3]
    assert sum(c.rounds["draft"] * (c.tau["draft"].value or 0) for c in found) == 3 * sum(gained)
    write_result(tmp_path / "suites.json", result)
    assert read_result(tmp_path / "suites.json", EvaluationResult) == result
    text = evaluation_markdown(result)
    assert re.search(r"\| 1,024 to 4,095 \| 2\.00 \(2\.00.*2\.00\) \| 6 \|", text)
    section = suites_section("suites", result)
    assert section is not None
    assert any("by position of the anchor" in table.caption for table in section.tables)
    assert not summarise(records, METHODS, {}, BOOT).results[0].contexts


@pytest.mark.parametrize("words", [["1m"], ["4k", "1k"], ["0"], ["1k", "1024"], ["-1"]])
def test_ranges_that_are_none_are_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match="must be ascending positions"):
        context_edges(words)


def test_records_without_positions_are_refused_by_position() -> None:
    with pytest.raises(UserError, match="hold no positions"):
        summarise([record("draft", 0)], METHODS[1:2], {}, BOOT, [1024])


def test_a_stored_evaluation_is_the_computed_one(tmp_path: Path) -> None:
    records = [
        record(m, i, suite=s) for s in ("gsm8k", "aime") for m in ("plain", "draft", "b") for i in (0, 1)
    ]
    result = summarise(records, METHODS, {"seed": 0, "too_long": {"gsm8k": [3]}}, BOOT)
    write_result(tmp_path / "suites.json", result)
    assert read_result(tmp_path / "suites.json", EvaluationResult) == result


def test_prompts_that_a_method_has_not_decoded_are_left_out() -> None:
    records = [record("plain", 0), record("draft", 0), record("b", 0), record("plain", 1), record("draft", 1)]
    result = summarise(records, METHODS, {}, BOOT).results[0]
    assert result.suites["gsm8k"].prompts == 1
    assert summarise(records[3:], METHODS, {}, BOOT).results == []


def test_table_becomes_a_section_of_the_report() -> None:
    records = [record(m, i, seconds=2.0 - (m != "plain")) for m in ("plain", "draft", "b") for i in range(3)]
    section = suites_section("suites", summarise(records, METHODS, {}, BOOT))
    assert section is not None
    assert section.tables[0].rows[0][:2] == ["gsm8k", "math"]
    assert suites_section("suites", EvaluationResult({}, [], [])) is None
    positions = section.figures[-1].table
    assert positions is not None
    assert positions.rows == [
        ["draft", "gsm8k", "50.0\u202f%", "80.0\u202f%"],
        ["other", "gsm8k", "50.0\u202f%", "80.0\u202f%"],
    ]
    from dspark_train.report.page import Page

    assert "gsm8k" in render(Page("t", "k", "", sections=[section]))


def test_domains_positions_and_calibration_are_shown_by_suite() -> None:
    suites = ("gsm8k", "mt-bench", "alpaca")
    records = [record(m, i, suite=s) for s in suites for m in ("plain", "draft", "b") for i in range(2)]
    sure = [
        [1.0, 0.0, 4.0, 3.0, 2.0],
        [2.0, 0.0, 4.0, 2.0, 2.0],
    ]  # off by 1/4 at one position, right at the other
    records = [dataclasses.replace(r, bins=sure) if r.method == "draft" else r for r in records]
    table = summarise(records, METHODS, {}, BOOT)
    section = suites_section("suites", table)
    assert section is not None
    tau = section.tables[0].rows
    assert [row[0] for row in tau] == ["gsm8k", "mt-bench", "alpaca", "all chat", "macro average"]
    error = next(t for t in section.tables if t.caption.startswith("Calibration error"))
    assert error.header == ["Suite", "Domain", "draft"]
    assert {row[2] for row in error.rows} == {"12.5\u202f%"}
    positions = section.figures[-1].table
    assert positions is not None
    assert [row[:2] for row in positions.rows[:4]] == [["draft", name] for name in (*suites, "macro average")]
    text = evaluation_markdown(table)
    assert "| mt-bench | draft | 50.0\u202f% | 80.0\u202f% | 12.5\u202f% |" in text
    assert "| mt-bench | other | 50.0\u202f% | 80.0\u202f% | – |" in text


def test_records_survive_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "suites.records.jsonl"
    file = RecordFile(path, {"seed": 0})
    file.append(record("plain", 0))
    file.append(record("plain", 1))
    whole = path.read_text()
    path.write_text(whole[:-20])
    reopened = RecordFile(path, {"seed": 0})
    assert list(reopened.records) == [("plain", 0.0, "gsm8k", 0)]
    reopened.append(record("plain", 1))
    assert path.read_text() == whole


def test_further_drafts_may_join_but_none_may_change(tmp_path: Path) -> None:
    path = tmp_path / "more.jsonl"
    file = RecordFile(path, {"drafts": {"a": 1}})
    file.append(record("plain", 0))
    assert RecordFile(path, {"drafts": {"b": 2}}).records == file.records
    content = path.read_text()
    assert RecordFile(path, {"drafts": {"a": 1, "b": 2}}).records == file.records
    assert path.read_text() == content  # nothing new is written
    with pytest.raises(UserError, match=r"differs: drafts\.b"):
        RecordFile(path, {"drafts": {"b": 3}})
    with pytest.raises(UserError, match=r"differs: drafts\.a"):
        RecordFile(path, {"drafts": {"a": 2}})


def test_records_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "suites.records.jsonl"
    RecordFile(path, {"seed": 0, "max_new_tokens": 64}).append(record("plain", 0))
    with pytest.raises(UserError, match=r"differs: max_new_tokens"):
        RecordFile(path, {"seed": 0, "max_new_tokens": 65})
    path.write_text(json.dumps({"something": "else"}) + "\n")
    with pytest.raises(UserError, match="no evaluation records"):
        RecordFile(path, {"seed": 0})


def test_a_domain_is_the_mean_of_its_suites() -> None:
    """However many prompts each has."""
    records = [record("plain", i) for i in range(4)] + [record("draft", i, committed=20) for i in range(4)]
    other = [record(m, 0, suite="math500", committed=40) for m in ("plain", "draft")]
    records += [dataclasses.replace(one, domain="math") for one in other]
    math = summarise(records, METHODS[:2], {}, BOOT).results[0].domains["math"]
    assert math.prompts == 5
    assert math.methods["draft"].tau.value == pytest.approx((2.0 + 4.0) / 2)


def test_the_papers_numbers_have_the_papers_gains() -> None:
    """Its macro means: +30.9, +26.7 and +30.0 % over Eagle3, +16.3, +18.4 and +18.3 % over DFlash."""
    for other, gains in (("Eagle3", (30.9, 26.7, 30.0)), ("DFlash", (16.3, 18.4, 18.3))):
        for target, gain in zip(("Qwen3-4B", "Qwen3-8B", "Qwen3-14B"), gains, strict=True):
            rows = paper.ACCEPTED_LENGTH[target]
            assert 100 * (sum(rows["DSpark"]) / sum(rows[other]) - 1) == pytest.approx(gain, abs=0.06)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("Qwen/Qwen3-4B", "Qwen3-4B"),
        ("models/qwen3-14b", "Qwen3-14B"),
        ("google/gemma4-12b-it", "Gemma4-12B"),
        ("smollm2-135m-instruct", None),
        ("Qwen3-0.6B", None),
    ],
)
def test_targets_of_the_paper_are_known_by_name(name: str, row: str | None) -> None:
    assert paper.row_of(name) == row


def test_every_deviation_is_named_and_none_without_one() -> None:
    settings: dict[str, object] = {
        "protocol": "paper",
        "target": "Qwen3-4B",
        "temperatures": [1.0],
        "template": '{"enable_thinking": false}',
        "trained_with": '{"enable_thinking": false}',
        "template_share": 1.0,
        "sizes": {"gsm8k": {"prompts": 1319, "whole": 1319}},
        "too_long": {},
        "max_new_tokens": 2048,
        "top_k": 0,
        "top_p": 1.0,
        "policy": "fixed",
        "turns": 1,
        "block_sizes": {"run": 7},
    }
    assert paper.deviations(settings) == paper.deviations({}) == []
    changes: list[tuple[dict[str, object], str]] = [
        ({"template": "{}", "trained_with": "{}"}, "thinking is not switched off"),
        ({"trained_with": "{}"}, "prompts rendered with"),
        ({"template_share": 0.9}, "as 90% of training's"),
        ({"sizes": {"gsm8k": {"prompts": 20, "whole": 1319}}}, "20 of gsm8k's 1,319 prompts"),
        ({"sizes": {"mine": {"prompts": 2, "whole": 2}}}, "mine is no suite of the paper"),
        ({"max_new_tokens": 256}, "256 new tokens at most, not 2,048"),
        ({"temperatures": [0.0]}, "nothing is sampled at temperature 1"),
        ({"top_k": 20}, "top-k 20"),
        ({"policy": "scheduled"}, "policy scheduled"),
        ({"turns": 2}, "up to 2 turns"),
        ({"block_sizes": {"run": 5}}, "run drafts 5 tokens, not 7"),
    ]
    for change, named in changes:
        [found] = paper.deviations(settings | change)
        assert named in found
