"""Pages that the program writes about itself: every command's help, as it prints it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    """Add the page of commands."""
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    return files


def commands_page() -> str:
    """Markdown: the overview, then a section per command."""
    from dspark_train.cli.main import COMMANDS, usage

    parts = ["# Commands", _block(usage())]
    group = ""
    for name, command in COMMANDS.items():
        if command.group != group:
            group = command.group
            parts.append(f"## {group}")
        parts.append(f"### {name}\n\n{command.summary[:1].upper()}{command.summary[1:]}.")
        parts.append(_block(_help(name)))
    return "\n\n".join(parts) + "\n"


def _help(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dspark_train", *name.split(), "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "100"},
    )
    return done.stdout


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"
