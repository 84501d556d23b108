"""The grammar that every command shares: help, lists, options from a file, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from docstring_parser import parse_from_object

from dspark_train.cli import kept_help
from dspark_train.cli.ablate import AblateOptions
from dspark_train.cli.calibrate import calibrate
from dspark_train.cli.decode import DecodeOptions, decode
from dspark_train.cli.kept_help import help_of
from dspark_train.cli.main import COMMANDS, resolve
from dspark_train.cli.parsing import options_of, run_command, stage_options
from dspark_train.cli.prepare import PrepareOptions
from dspark_train.cli.report import report
from dspark_train.errors import UserError
from dspark_train.evaluation.options import EvaluateOptions
from dspark_train.lists import Integers, Names, Numbers

HEAVY = ("torch", "transformers", "lightning", "deepspeed", "datasets", "matplotlib", "pandas", "scipy")
WITH_OPTIONS = [name for name, command in COMMANDS.items() if not command.own_parser]
WITH_A_PARSER = [name for name, command in COMMANDS.items() if command.own_parser]


def show_help(name: str, folder: Path) -> tuple[str, set[str]]:
    """Help of a command in a process of its own with its own cache, and the heavy modules it imported."""
    code = (
        "import sys\n"
        "from dspark_train.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code, ended.code\n"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *name.split(), "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"XDG_CACHE_HOME": str(folder), "COLUMNS": "80"},
    )
    return done.stdout, set(done.stderr.split())


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_help_loads_nothing_heavy_and_shows_every_docstring(name: str, tmp_path: Path) -> None:
    text, heavy = show_help(name, tmp_path)
    assert heavy == set()
    assert text.startswith(f"usage: dspark-train {name}")
    shown = "".join(text.split())  # argparse breaks lines at blanks and hyphens
    kind = options_of(resolve(COMMANDS[name]))
    documented = {
        param.arg_name: param.description
        for part in kind.__mro__[:-1]
        for param in parse_from_object(part).params
    }
    for field in fields(kind):
        assert documented[field.name], field.name
        assert "".join(documented[field.name].split()).rstrip(".") in shown, field.name


def test_help_of_lightnings_parser_is_made_once(tmp_path: Path) -> None:
    first, _ = show_help("fit", tmp_path)
    again, heavy = show_help("fit", tmp_path)
    assert heavy == set()
    assert first == again
    assert first.startswith("usage: dspark-train [options] fit")
    assert "--draft.num_layers" in first


@pytest.mark.parametrize("name", WITH_A_PARSER)
def test_kept_help_loads_nothing_heavy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    help_of(name, lambda: print("as kept"))
    assert show_help(name, tmp_path) == ("as kept\n", set())


def test_kept_help_is_made_again_where_anything_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parse() -> None:
        made.append(len(made))
        print("help", made[-1])
        raise SystemExit(0)

    made: list[int] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    assert [help_of("fit", parse) for _ in range(3)] == ["help 0\n"] * 3
    assert help_of("validate", parse) == "help 1\n"
    monkeypatch.setenv("COLUMNS", "60")
    assert help_of("fit", parse) == "help 2\n"
    monkeypatch.setenv("COLUMNS", "80")
    assert help_of("fit", parse) == "help 0\n"
    monkeypatch.setattr(kept_help, "version", lambda library: "another")
    assert help_of("fit", parse) == "help 3\n"
    assert len(list((tmp_path / "dspark-train" / "help").glob("fit-80-*"))) == 1
    source = tmp_path / "source" / "__init__.py"
    source.parent.mkdir()
    source.touch()
    monkeypatch.setattr(kept_help.dspark_train, "__file__", str(source))
    assert help_of("fit", parse) == "help 4\n"
    os.utime(source, (1, 1))
    assert help_of("fit", parse) == "help 5\n"
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # no folder: nothing can be kept
    assert [help_of("fit", parse) for _ in range(2)] == ["help 6\n", "help 7\n"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_required_options_are_places_of_the_command_line(name: str) -> None:
    with pytest.raises(UserError) as refused:
        run_command(resolve(COMMANDS[name]), ["--no_such_flag", "1"], name)
    assert "missing: " in str(refused.value) or "unknown key 'no_such_flag'" in str(refused.value)


class Called(Exception):  # noqa: N818 - carries what a command was called with
    def __init__(self, options: object) -> None:
        self.options = options


def parsed(kind: type, *arguments: str) -> object:
    """What a command with these options would be called with."""

    def command(options: object) -> None:
        raise Called(options)

    command.__annotations__ = {"options": kind}
    with pytest.raises(Called) as called:
        run_command(command, arguments, "trial")
    return called.value.options


@pytest.mark.parametrize("given", ["0,1", "[0.0, 1.0]", "[0,1]", " 0 , 1 ", "0,1,"])
def test_both_forms_of_a_list_mean_the_same(given: str, tmp_path: Path) -> None:
    wanted = (0.0, 1.0)
    assert parsed(DecodeOptions, "run", f"--temperatures={given}").temperatures == wanted
    assert parsed(DecodeOptions, "run", "--temperatures", given).temperatures == wanted
    assert parsed(EvaluateOptions, "run", "gsm8k", f"--temperatures={given}").temperatures == wanted
    (tmp_path / "options.yaml").write_text(f"temperatures: {given}\n")
    assert parsed(DecodeOptions, "run", f"--config={tmp_path / 'options.yaml'}").temperatures == wanted
    assert stage_options(decode, "decode", "run", {"temperatures": given}).temperatures == wanted
    assert stage_options(calibrate, "calibrate", "run", {"temperatures": [0, 1.0]}).temperatures == wanted


def test_lists_of_names_and_one_value_alone() -> None:
    options = parsed(EvaluateOptions, "run", "gsm8k, own=a.jsonl", "--temperatures=0", "--baselines=")
    assert options.suites == ("gsm8k", "own=a.jsonl")
    assert options.temperatures == (0.0,)
    assert options.baselines == ()
    assert parsed(EvaluateOptions, "run", "[gsm8k]", '--drafts=["a=b,c"]').drafts == ("a=b,c",)
    for given in ("collect,regenerate", "[collect, regenerate]"):
        stages = parsed(PrepareOptions, "--output=out", f"--stages={given}").stages
        assert list(stages) == ["collect", "regenerate"]
    servers = parsed(PrepareOptions, "--output=out", "--regeneration.servers=http://a:1,http://b:2")
    assert list(servers.regeneration.servers) == ["http://a:1", "http://b:2"]
    with pytest.raises(UserError, match="'colect' is none of collect, regenerate, tokenize"):
        PrepareOptions(Path("out"), stages=Names(("colect",)))


@pytest.mark.parametrize(
    ("kind", "given"),
    [(Numbers, "0;1"), (Numbers, [True]), (Numbers, [[0]]), (Integers, "1.5"), (Integers, [1.5]), (Names, {"a": 1})],
)  # fmt: skip
def test_what_is_no_such_list_is_refused(kind: type, given: object) -> None:
    with pytest.raises(ValueError, match=f"{kind.plural} with commas between"):
        kind.parse(given)


def test_refusals_name_the_key_the_value_and_what_is_expected() -> None:
    with pytest.raises(UserError) as refused:
        parsed_by_decode("--temperatures=0;1")
    expected = "key \"temperatures\": '0;1' must be numbers with commas between, or a list in brackets"
    assert str(refused.value) == expected
    with pytest.raises(UserError, match=r"unknown key 'temperature' \(did you mean 'temperatures'\?\)"):
        parsed_by_decode("--temperature=0")
    with pytest.raises(UserError, match="missing: run"):
        run_command(decode, [], "decode")


def parsed_by_decode(*arguments: str) -> None:
    run_command(decode, ["run", *arguments], "decode")


def test_a_printed_config_reads_as_what_it_was(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        parsed_by_decode("--temperatures=0.5,1", "--prompts=2", "--print_config")
    (tmp_path / "options.yaml").write_text(capsys.readouterr().out)
    assert yaml.safe_load((tmp_path / "options.yaml").read_text())["temperatures"] == [0.5, 1.0]
    again = parsed(DecodeOptions, f"--config={tmp_path / 'options.yaml'}")
    assert again == DecodeOptions(Path("run"), temperatures=Numbers((0.5, 1.0)), prompts=2)


def test_flags_win_over_a_file_and_both_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("prompts: 3\nbatch_size: 4\n")
    options = parsed(DecodeOptions, "run", f"--config={tmp_path / 'options.yaml'}", "--prompts=5")
    assert (options.prompts, options.batch_size, options.seed) == (5, 4, 0)
    assert parsed(AblateOptions, "grid.yaml", "--dry_run=true") == AblateOptions(Path("grid.yaml"), True)


def test_options_of_a_stage_are_checked_before_anything_runs() -> None:
    with pytest.raises(
        UserError, match=r"run\.options\.decode has no option 'prompt' \(did you mean 'prompts'"
    ):
        stage_options(decode, "decode", "run", {"prompt": 3})
    with pytest.raises(UserError, match=r"run\.options\.decode has no option 'run'"):
        stage_options(decode, "decode", "run", {"run": "other"})
    with pytest.raises(UserError, match=r"run\.options\.decode: .*prompts"):
        stage_options(decode, "decode", "run", {"prompts": "many"})
    with pytest.raises(UserError, match=r"must end in \.html"):
        stage_options(report, "report", "run", {"output": "page.pdf"})


@pytest.mark.parametrize(
    "words",
    [
        ["run", "gsm8k", "--prompts", "2"],
        ["run", "--prompts", "2", "--suites", "gsm8k"],
        ["--run", "run", "gsm8k", "--prompts", "2"],
        ["--suites=gsm8k", "--prompts", "2", "--run=run"],
    ],
)
def test_what_is_required_may_be_named(words: list[str]) -> None:
    given: list[EvaluateOptions] = []

    def command(options: EvaluateOptions) -> None:
        given.append(options)

    run_command(command, words, "evaluate")
    assert (str(given[0].run), list(given[0].suites), given[0].limit) == ("run", ["gsm8k"], 2)
