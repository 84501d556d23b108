"""The command line: which commands there are, and how their errors look. Nothing heavy is imported here."""

from __future__ import annotations

import errno
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark_train import __version__
from dspark_train.errors import UserError


@dataclass(frozen=True)
class Command:
    """A command: where its function is, and one line of help."""

    function: str
    """``module:function``, imported when the command runs."""
    summary: str
    group: str
    own_parser: bool = False
    """The function takes the words of the command line, the command's name first; else a dataclass of options."""


COMMANDS = {
    "prepare": Command(
        "dspark_train.cli.prepare:prepare", "prompts or chats to a training set with exact masks", "Data"
    ),
    "prepare show": Command(
        "dspark_train.cli.prepare:show", "conversations with supervised tokens coloured", "Data"
    ),
    "prepare stats": Command(
        "dspark_train.cli.prepare:stats", "lengths, masks, anchors, drops, cost of an epoch", "Data"
    ),
    "recipes": Command("dspark_train.cli.recipes:recipes", "the recipes in the package", "Training"),
    "recipes show": Command("dspark_train.cli.recipes:show", "print one", "Training"),
    "recipes copy": Command("dspark_train.cli.recipes:copy", "copy one, to be changed", "Training"),
    "plan": Command(
        "dspark_train.cli.plan:main",
        "what a recipe will need, from configs alone",
        "Training",
        own_parser=True,
    ),
    "fit": Command(
        "dspark_train.cli.fit:main",
        "train a draft; then calibrate, decode and report",
        "Training",
        own_parser=True,
    ),
    "validate": Command(
        "dspark_train.cli.fit:main",
        "the training metrics on validation conversations",
        "Training",
        own_parser=True,
    ),
    "calibrate": Command("dspark_train.cli.calibrate:calibrate", "fit the temperatures of a run", "A run"),
    "decode": Command("dspark_train.cli.decode:decode", "plain against speculative decoding", "A run"),
    "chat": Command(
        "dspark_train.cli.chat:chat", "talk to the target, and watch the draft speed it up", "A run"
    ),
    "generate": Command("dspark_train.cli.chat:generate", "answer a prompt, or a file of prompts", "A run"),
    "export": Command("dspark_train.cli.export:export", "write the draft for vLLM or SGLang", "A run"),
    "report": Command("dspark_train.cli.report:report", "one HTML page about one or more runs", "A run"),
    "evaluate": Command(
        "dspark_train.cli.evaluate:evaluate", "accepted length and speedup by suite", "Studies"
    ),
    "ablate": Command(
        "dspark_train.cli.ablate:ablate", "train a small grid of recipes and compare", "Studies"
    ),
    "profile": Command("dspark_train.cli.profile:profile", "time target steps against batch size", "Studies"),
    "studies": Command(
        "dspark_train.cli.studies:studies", "threshold sweep, acceptance, reliability", "Studies"
    ),
    "simulate": Command("dspark_train.cli.simulate:simulate", "throughput under load, by policy", "Studies"),
    "import": Command(
        "dspark_train.cli.import_draft:import_draft", "read a draft made elsewhere", "Exchange"
    ),
    "serve-check": Command(
        "dspark_train.cli.serve_check:serve_check", "measured against served acceptance", "Exchange"
    ),
    "doctor": Command("dspark_train.cli.doctor:doctor", "what is here, and what would stop a run", "Help"),
}
"""Every command, in the order of the help."""


def resolve(command: Command) -> Callable[..., Any]:
    """Import the function behind a command."""
    module, name = command.function.split(":")
    return getattr(importlib.import_module(module), name)


def usage() -> str:
    """Text of ``--help``."""
    lines = [
        f"dspark-train {__version__}: train DSpark drafts for lossless speculative decoding",
        "",
        "usage: python -m dspark_train COMMAND [OPTIONS]      (COMMAND --help lists its options)",
    ]
    groups = dict.fromkeys(command.group for command in COMMANDS.values())
    for group in groups:
        lines += ["", f"{group}:"]
        lines += [
            f"  {name:<14} {command.summary}" for name, command in COMMANDS.items() if command.group == group
        ]
    lines += ["", "Start with:  python -m dspark_train fit --config quickstart"]
    return "\n".join(lines)


def run(arguments: Sequence[str]) -> None:
    """Run one command line."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return
    if arguments[0] in ("--version", "version"):
        print(f"dspark-train {__version__}")
        return
    name, rest = arguments[0], list(arguments[1:])
    if rest and f"{name} {rest[0]}" in COMMANDS:
        name, rest = f"{name} {rest[0]}", rest[1:]
    if rest and f"{name} {rest[0]}" in COMMANDS:
        name = f"{name} {rest.pop(0)}"
    command = COMMANDS.get(name)
    if command is None:
        from dspark_train.cli.parsing import nearest

        raise UserError(f"unknown command {name!r}{nearest(name, list(COMMANDS))}; --help lists the commands")
    quiet_libraries()
    bound_memory()
    if not command.own_parser:
        from dspark_train.cli.parsing import run_command

        run_command(resolve(command), rest, name)
    elif rest in (["--help"], ["-h"]):
        from dspark_train.cli.kept_help import help_of

        print(help_of(name, lambda: resolve(command)([name, "--help"])), end="")
    else:
        resolve(command)([name, *rest])


def quiet_libraries() -> None:
    """Keep other libraries' notices off the terminal unless the user asks for them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DS_LOG_LEVEL", "warning")


def bound_memory() -> None:
    """Keep oneDNN's compiled kernels few: one for every shape it meets, 1,024 of them, would take gigabytes."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


def reader_left() -> bool:
    """Whether nobody reads the output any more (``… | head``); what is left of it is then dropped."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in watch.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
    return True


def main() -> None:
    """Entry point: one clear line and status 2 for what the user can fix."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of other libraries; ours say what they say
    try:
        run(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        if isinstance(error, BrokenPipeError) and reader_left():
            raise SystemExit(128 + signal.SIGPIPE) from None
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        print(
            f"error: the disk is full{where}: free some space and run the same command again", file=sys.stderr
        )
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
