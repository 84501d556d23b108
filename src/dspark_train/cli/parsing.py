"""Command lines and configs: parsed by jsonargparse, refused in one clear line."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonargparse

from dspark_train.cli.commands import nearest
from dspark_train.errors import UserError

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)  # help of dataclasses' fields

STRICT: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
"""Arguments of every parser: errors come as exceptions, and a flag is only what its whole name says."""


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
    return UserError(text.replace('Parser key "', 'key "'))


def join_configs(arguments: Sequence[str]) -> list[str]:
    """Turn repeated ``--config FILE`` into one list, in their order, for a function that takes several."""
    found: list[str] = []
    rest: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--config":
            found += [value for value in [next(waiting, None)] if value is not None]
        elif argument.startswith("--config="):
            found.append(argument.removeprefix("--config="))
        else:
            rest.append(argument)
    return [*rest, f"--config={json.dumps(found)}"] if found else rest


def run_command(function: Callable[..., Any], arguments: Sequence[str], name: str) -> Any:
    """Call a typed function with arguments from the command line.

    Args:
        function: whose signature and docstring make the options and their help.
        arguments: command line after the command's name.
        name: of the command, for its help.

    Raises:
        UserError: the arguments do not fit.
    """
    parser = jsonargparse.ArgumentParser(
        prog=f"dspark-train {name}", description=(function.__doc__ or "").strip().split("\n")[0], **STRICT
    )
    own_config = "config" in inspect.signature(function).parameters
    if own_config and str(inspect.signature(function).parameters["config"].annotation).startswith("list"):
        arguments = join_configs(arguments)
    if not own_config:
        parser.add_argument("--config", action="config", help="YAML file with options; flags win over it")
    parser.add_function_arguments(function, as_group=False, as_positional=not own_config)
    try:
        parsed = parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        raise explain(error, parser) from error
    values = parser.instantiate_classes(parsed).as_dict()
    if not own_config:
        values.pop("config", None)
    return function(**values)
