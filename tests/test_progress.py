"""Long work is never silent: lines off a terminal, a bar on one."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest

from dspark_train import progress
from dspark_train.progress import Stage, clock, duration, say, stage


def test_a_line_comes_at_once_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("calibrating", 3, "prompts") as shown:
        assert "calibrating  0 of 3 prompts" in capsys.readouterr().out
        for _ in range(3):
            shown.advance(1, "τ 2.0")
    assert "calibrating  3 of 3 prompts  τ 2.0" in capsys.readouterr().out


def test_nothing_that_moves_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    with stage("training", 100, "steps") as shown:
        for _ in range(5):
            shown.advance()
    assert capsys.readouterr().out.count("training") >= 6


def test_nothing_that_stands_still_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single long call: lines come from beside it."""
    monkeypatch.setattr(progress, "SILENCE", 0.5)
    with stage("loading"):
        time.sleep(3.5)
    assert capsys.readouterr().out.count("loading") >= 3


def test_a_failure_is_not_told_as_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no"), stage("work", 2):
        raise ValueError("no")
    assert capsys.readouterr().out.count("work") == 1
    assert not progress._display.stages


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with stage("work", 2) as shown:
        shown.advance()
        say("words")
    assert capsys.readouterr().out == ""


def test_pace_and_time_left() -> None:
    shown = Stage("training", 110, "steps", done=10)
    shown._began -= 20
    shown.done = 20
    assert shown.left() == pytest.approx(180, rel=0.01)
    assert "2.0 s a step  3.0 min left" in shown.describe()
    assert Stage("x", 5).left() is None
    assert (duration(48), duration(192), duration(7200)) == ("48 s", "3.2 min", "2.0 h")
    assert (clock(250), clock(3850)) == ("04:10", "1:04:10")


def test_a_terminal_sees_a_bar() -> None:
    code = (
        "import time\nfrom dspark_train.progress import stage, say\n"
        "with stage('training', 2, 'steps') as s:\n"
        "    for _ in range(2): time.sleep(0.7); s.advance(1, 'loss 1.0'); say('a line')\n"
    )
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=theirs, env=os.environ | {"TERM": "xterm"}
    ) as process:
        process.wait()
        seen = os.read(ours, 100_000).decode()
    assert "━" in seen
    assert "a line" in seen
    assert "1/2" in seen
