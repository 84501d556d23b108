"""The ``serve-check`` command: a server's acceptance beside this project's."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dspark_train.data.conversations import BadConversation, check_messages
from dspark_train.errors import UserError
from dspark_train.files import BadLine, read_lines

if TYPE_CHECKING:
    from dspark_train.run import Run


@dataclass(frozen=True)
class ServeCheckOptions:
    """Options of ``serve-check``."""

    run: Path
    """Folder of the run whose draft is served."""
    url: str
    """Address of the server, such as http://localhost:8000."""
    plain_url: str | None = None
    """Address of a server of the same target without a draft, to compare completions with."""
    prompts: Path | None = None
    """JSONL file with one ``{"prompt_token_ids": [...]}``, ``{"messages": [...]}`` (rendered with the chat-template
    arguments that the run was trained with) or ``{"prompt": "..."}`` (no template) a line; left out: the run's test
    prompts."""
    limit: int = 8
    """Prompts to use."""
    max_new_tokens: int = 64
    """Longest completion."""
    key_variable: str | None = None
    """Name of the environment variable that holds the server's key, where it wants one."""
    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """That the server computes in: two greedy decodings agree token for token only in one dtype. Left out: the
    run's."""
    output: Path | None = None
    """JSON file for the numbers; left out: ``RUN/serve_check.json``."""


def serve_check(options: ServeCheckOptions) -> None:
    """Compare what a running vLLM or SGLang server accepts with this project's decoder, on the same prompts.

    Greedy, one request at a time, fixed verify length. Run nothing else on the server meanwhile: its
    counters are read before and after.
    """
    from dspark_train.interchange.native import dtype_name
    from dspark_train.interchange.serve_check import (
        Server,
        ask,
        compare,
        own_rounds,
        side_by_side,
        target_notes,
        to_json,
    )
    from dspark_train.run import Run

    server = Server(options.url, options.key_variable)
    server.engine()
    plain_server = Server(options.plain_url, options.key_variable) if options.plain_url else None
    run = Run(options.run, options.dtype)
    if options.prompts is None:
        run.data.setup()
        ids = [list(prompt.ids) for prompt in run.data.prompts("test")[: options.limit]]
    else:
        ids = read_prompts(options.prompts, run)[: options.limit]
    if not ids:
        raise UserError("serve-check: there is no prompt; name a file with `--prompts`")
    tokens, trace = own_rounds(run.target, run.draft, ids, options.max_new_tokens)
    served = ask(server, ids, options.max_new_tokens)
    plain = ask(plain_server, ids, options.max_new_tokens) if plain_server else None
    comparison = compare(served, tokens, trace, plain)
    print("\n".join(side_by_side(comparison)))
    for note in target_notes(served.target, run.target):
        print(f"note: {note}")
    if comparison.identical < comparison.prompts and options.dtype is None:
        kind = dtype_name(run.target.dtype)
        print(f"this project decoded in {kind}; name the server's dtype with --dtype where it is another")
    path = options.output or options.run / "serve_check.json"
    path.write_text(json.dumps(to_json(comparison), indent=2) + "\n", encoding="utf-8")
    if comparison.other_positions is not None:
        print(f"error: {comparison.other_positions}", file=sys.stderr)
        raise SystemExit(1)


def read_prompts(path: Path, run: Run) -> list[list[int]]:
    """Read token ids of prompts from a JSONL file; bare texts go through the tokenizer without a chat template."""
    found: list[list[int]] = []
    for line in read_lines(path):
        try:
            row = line.value()
            if "prompt_token_ids" in row:
                found.append(row["prompt_token_ids"])
            elif "messages" in row:
                found.append(run.encoder.prompt_ids(check_messages(row["messages"])))
            else:
                found.append(run.target.tokenizer(row["prompt"])["input_ids"])
        except (BadLine, KeyError, TypeError, BadConversation) as error:
            raise UserError(
                f"{path}:{line.number}: expected prompt_token_ids, messages or prompt ({error})"
            ) from error
    return found
