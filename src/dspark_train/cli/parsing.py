"""Command lines and configs: parsed by jsonargparse, refused in one clear line."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import takewhile
from typing import Any, get_type_hints

import jsonargparse
from jsonargparse.typing import register_type

from dspark_train.errors import UserError
from dspark_train.lists import Integers, Names, Numbers
from dspark_train.run import Stages

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)  # help of dataclasses' fields
for _listed in (Numbers, Integers, Names, Stages):
    register_type(_listed, list, _listed.parse)

STRICT: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
"""Arguments of every parser: errors come as exceptions, and a flag is only what its whole name says."""


def nearest(word: str, words: Sequence[str]) -> str:
    """A hint that names the closest of ``words``, or an empty string."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def valid_keys(parser: jsonargparse.ArgumentParser) -> list[str]:
    """Every key that a config of ``parser`` may hold, with dots."""
    return sorted({action.dest for action in parser._actions if action.dest not in ("help", "print_config")})


def explain(error: argparse.ArgumentError, parser: jsonargparse.ArgumentParser) -> UserError:
    """Turn a parser's complaint into one line that names the key, the value, and the nearest valid key."""
    text = " ".join(str(error).split())
    keys = valid_keys(parser)
    unknown = re.search(
        r"does not accept (?:option|nested key) '([^']+)'|Key '([^']+)' is not expected", text
    )
    flag = re.search(r"[Uu]nrecognized arguments: --([\w.+-]+)", text)
    if unknown or flag:
        key = next(part for part in (*(unknown.groups() if unknown else ()), flag and flag.group(1)) if part)
        return UserError(f"unknown key {key!r}{nearest(key, keys)}; --help lists the keys")
    missing = re.search(r"following arguments are required: (.+)", text)
    if missing:
        names = re.sub(r"\b(fit|validate)\.", "", missing.group(1))
        return UserError(f"missing: {names}; give it in a --config file or as a flag")
    return UserError(re.sub(r"Not of type \w+: ", "", text.replace('Parser key "', 'key "')))


def configs_first(words: Sequence[str], recipes: str = "configs") -> list[str]:
    """A command line with its ``--config`` files first, so that every flag wins over them.

    Args:
        words: after the command's name.
        recipes: folder of the package's recipes (:mod:`dspark_train.cli.recipes`) whose names stand for files.
    """
    from dspark_train.cli.recipes import config_file

    files: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name != "--config":
            rest.append(word)
        elif equals or (value := next(left, "")):
            files += [name, config_file(value, recipes)]
        else:
            files.append(name)
    return files + rest


def options_of(function: Callable[..., None]) -> type:
    """The dataclass of options that a command's function takes."""
    return next(iter(get_type_hints(function).values()))


def command_parser(function: Callable[..., None], name: str) -> jsonargparse.ArgumentParser:
    """Parser of a command: its options are the fields of the dataclass, those without a default positional.

    Args:
        function: takes that dataclass.
        name: of the command, for its help.
    """
    parser = jsonargparse.ArgumentParser(
        prog=f"dspark-train {name}", description=(function.__doc__ or "").strip().split("\n")[0], **STRICT
    )
    parser.add_argument("--config", action="config", help="YAML file with options; flags win over it")
    parser.add_class_arguments(options_of(function), as_group=False, as_positional=True)
    return parser


def run_command(function: Callable[..., None], arguments: Sequence[str], name: str) -> None:
    """Call a command's function with options from the command line.

    Args:
        function: takes a dataclass, whose fields and their docstrings make the options and their help.
        arguments: command line after the command's name.
        name: of the command, for its help.

    Raises:
        UserError: the arguments do not fit.
    """
    parser = command_parser(function, name)
    recipes = "data_prep" if name.startswith("prepare") else "configs"
    try:
        parsed = parser.parse_args(_in_place(configs_first(arguments, recipes), options_of(function)))
    except argparse.ArgumentError as error:
        raise explain(error, parser) from error
    function(_made(function, parser, parsed))


def _in_place(arguments: Sequence[str], options: type) -> list[str]:
    """Arguments without the names of positional ones, which may be written as flags too: ``--suites gsm8k``."""
    required = [f.name for f in fields(options) if f.default is MISSING and f.default_factory is MISSING]
    flags = {f"--{name}": name for name in required}
    named: dict[str, str] = {}
    rest, words = [], iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in flags:
            named[flags[flag]] = value if equals else next(words, "")
        else:
            rest.append(word)
    front = list(takewhile(named.__contains__, required))
    back = [name for name in required[len(front) :] if name in named]
    return [*(named[name] for name in front), *rest, *(named[name] for name in back)]


def stage_options(function: Callable[..., None], name: str, run: str, given: Mapping[str, Any]) -> Any:
    """Options of a stage after training, from ``run.options`` of the training's config.

    Args:
        function: of the stage, as for :func:`run_command`.
        name: of the stage.
        run: the run's folder.
        given: options as in a YAML file.

    Raises:
        UserError: an option that the stage does not have, or a value of another type.
    """
    known = [field.name for field in fields(options_of(function)) if field.name != "run"]
    for option in given:
        if option not in known:
            raise UserError(
                f"run.options.{name} has no option {option!r}{nearest(option, known)}; `{name} --help` lists them"
            )
    parser = command_parser(function, name)
    try:
        parsed = parser.parse_object({"run": run, **given})
    except argparse.ArgumentError as error:
        raise UserError(f"run.options.{name}: {explain(error, parser)}") from error
    return _made(function, parser, parsed)


def _made(
    function: Callable[..., None], parser: jsonargparse.ArgumentParser, parsed: jsonargparse.Namespace
) -> Any:
    values = vars(parser.instantiate(parsed))
    values.pop("config")
    return options_of(function)(**values)
