"""The ``chat`` and ``generate`` commands: answers as they are written, with the draft's tokens coloured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_train.errors import UserError

HELP = """/plain   switch the draft off and on again
/reset   forget the conversation
/help    this list
/quit    leave (Ctrl-D does, too)"""


@dataclass(frozen=True)
class WriterOptions:
    """Options of ``chat`` and ``generate``."""

    draft: str
    """Folder of a run or of a draft, or a hub id (owner/name, owner/name@revision)."""
    target: str | None = None
    """Folder or hub id of the target; left out, the one that the run or the draft names."""
    temperature: float = 0.0
    """Of the sampling; 0 is greedy."""
    top_k: int = 0
    """Tokens kept by sampling; 0 keeps all."""
    top_p: float = 1.0
    """Nucleus kept by sampling; 1 keeps all."""
    max_new_tokens: int = 512
    """Longest answer, in tokens."""
    policy: str = "auto"
    """How much of a block is verified, as for ``decode``."""
    system: str = ""
    """System message."""
    seed: int = 0
    """Of the sampling."""


@dataclass(frozen=True)
class GenerateOptions(WriterOptions):
    """Options of ``generate``."""

    prompt: str | None = None
    """What to answer; ``-`` reads it from standard input."""
    file: Path | None = None
    """Prompts instead: a text file with one a line, or JSONL whose rows hold ``prompt`` or ``messages``."""
    output: Path | None = None
    """JSONL to write; left out, answers go to the terminal."""


def chat(options: WriterOptions) -> None:
    """Talk to the target while the draft speeds it up: see which tokens the draft wrote, and how fast it went."""
    from dspark_train.cli.writer import Writer

    writer = Writer(options)
    writer.screen.note(f"{writer.name}\nDraft's tokens are coloured. /help lists what you can type.")
    messages = writer.opening()
    for line in _lines():
        if line in ("/quit", "/exit"):
            return
        if line == "/help":
            writer.screen.note(HELP)
        elif line == "/plain":
            writer.plainly = not writer.plainly
            writer.screen.note("decoding plainly" if writer.plainly else "decoding with the draft")
        elif line == "/reset":
            messages = writer.opening()
            writer.screen.note("the conversation begins anew")
        elif line.startswith("/"):
            writer.screen.note(f"unknown command {line.split()[0]}\n{HELP}")
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                messages = [*asked, {"role": "assistant", "content": writer.answer(asked)}]
            except UserError as error:  # a conversation beyond the target's context: it can begin anew
                writer.screen.note(f"{error}\n/reset forgets the conversation")
            except KeyboardInterrupt:
                writer.screen.note("stopped")


def generate(options: GenerateOptions) -> None:
    """Answer one prompt or a file of prompts, with the draft."""
    from dspark_train.cli.writer import Writer

    prompts = _prompts(options)
    writer = Writer(options, quiet=options.output is not None)
    rows = []
    for messages in prompts:
        text = writer.answer([*writer.opening(), *messages])
        rows.append({"messages": [*messages, {"role": "assistant", "content": text}]})
        if options.output is not None:
            with options.output.open("a" if len(rows) > 1 else "w", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1], ensure_ascii=False) + "\n")
    if options.output is not None:
        print(f"{writer.summary()}\nwrote {options.output}")


def _lines() -> Iterator[str]:
    """What the user types, line by line, until the end of the input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - arrow keys and history at the prompt
    while True:
        try:
            line = input("\n› " if sys.stdin.isatty() else "")
        except EOFError:
            return
        yield line.strip()


def _prompts(options: GenerateOptions) -> list[list[dict[str, Any]]]:
    if (options.prompt is None) == (options.file is None):
        raise UserError("generate: give either --prompt TEXT or --file FILE")
    if options.prompt is not None:
        text = sys.stdin.read().strip() if options.prompt == "-" else options.prompt
        return [[{"role": "user", "content": text}]]
    file = options.file
    assert file is not None
    if not file.is_file():
        raise UserError(f"generate: --file {file} does not exist")
    lines = [line for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if file.suffix not in (".jsonl", ".json"):
        return [[{"role": "user", "content": line}] for line in lines]
    return [_row(line, f"{file}, line {number}") for number, line in enumerate(lines, 1)]


def _row(line: str, where: str) -> list[dict[str, Any]]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: a row needs a text under `prompt` or a list under `messages`")
    asked = messages[:-1] if messages[-1].get("role") == "assistant" else messages
    return [dict(message) for message in asked]
