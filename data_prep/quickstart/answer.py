"""Ask an OpenAI-compatible server for the target's own answer to every quickstart prompt.

usage: python data_prep/quickstart/answer.py --url http://127.0.0.1:8000 --out conversations.jsonl

The server (vLLM) applies the target's chat template and returns the exact token ids of prompt and answer.
Each finished request is appended to --out as one line and flushed; a second call skips the ids already
there, so an interrupted run continues where it stopped. At the end the file is rewritten in the order of the
prompts. Fields: id, domain, split, messages, prompt_ids, answer_ids (end token included where `finished`: the
model ended by itself, within MAX_TOKENS), finished.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from dspark_train.files import Journal

sys.path.insert(0, str(Path(__file__).resolve().parent))
from prompts import Prompt, generate_prompts

TEMPERATURE = 0.2  # the model card's recommended sampling
TOP_P = 0.9
MAX_TOKENS = 192
TIMEOUT_SECONDS = 900


def post_json(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST `body` as JSON and return the decoded reply; an HTTP error carries the server's own message."""
    reply = httpx.post(url, json=body, timeout=TIMEOUT_SECONDS)
    if reply.is_error:
        raise RuntimeError(f"{url} answered {reply.status_code}: {reply.text[:500]}")
    decoded: dict[str, Any] = reply.json()
    return decoded


def answer(url: str, model: str, prompt: Prompt) -> dict[str, Any]:
    """One conversation row: the prompt and the answer the server sampled for it, as text and as token ids."""
    messages = [{"role": "user", "content": prompt.text}]
    reply = post_json(
        f"{url}/v1/chat/completions",
        {
            "model": model,
            "messages": messages,
            "temperature": TEMPERATURE,
            "top_p": TOP_P,
            "max_tokens": MAX_TOKENS,
            "seed": int(prompt.id, 16) % 2**31,  # the same prompt is sampled the same way in every order
            "return_token_ids": True,
        },
    )
    choice = reply["choices"][0]
    return {
        "id": prompt.id,
        "domain": prompt.domain,
        "split": prompt.split,
        "messages": [*messages, {"role": "assistant", "content": choice["message"]["content"]}],
        "prompt_ids": reply["prompt_token_ids"],
        "answer_ids": choice["token_ids"],
        "finished": choice["finish_reason"] == "stop",
    }


def in_flight(
    pool: ThreadPoolExecutor, url: str, model: str, prompts: list[Prompt], limit: int
) -> Iterator[dict[str, Any]]:
    """Rows as they finish, with never more than `limit` requests waiting."""
    todo = iter(prompts)
    pending: set[Future[dict[str, Any]]] = {
        pool.submit(answer, url, model, prompt) for prompt in islice(todo, limit)
    }
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()
        pending |= {pool.submit(answer, url, model, prompt) for prompt in islice(todo, len(done))}


def write_in_order(path: Path, prompts: list[Prompt], rows: dict[str, dict[str, Any]]) -> None:
    """Rewrite `path` with one row per prompt, in the prompts' order; rows of other prompts are left out."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps(rows[prompt.id], ensure_ascii=False, separators=(",", ":")) + "\n")
    os.replace(temporary, path)


def main() -> None:
    """Answer every prompt that has no row yet, then put the file in order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server, without /v1")
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="the name the server serves the target by"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--concurrency", type=int, default=96, help="requests in flight")
    args = parser.parse_args()

    prompts = generate_prompts()
    start, tokens = time.monotonic(), 0
    with ThreadPoolExecutor(args.concurrency) as pool, Journal(args.out) as journal:
        rows = {row["id"]: row for row in (line.value() for line in journal.lines())}
        todo = [prompt for prompt in prompts if prompt.id not in rows]
        print(f"{len(prompts)} prompts, {len(prompts) - len(todo)} answered before", flush=True)
        for count, row in enumerate(in_flight(pool, args.url, args.model, todo, args.concurrency), 1):
            journal.append(row)
            rows[row["id"]] = row
            tokens += len(row["answer_ids"])
            if count % 50 == 0 or count == len(todo):
                rate = tokens / (time.monotonic() - start)
                print(f"{count}/{len(todo)} answers, {tokens} tokens, {rate:.0f} tokens/s", flush=True)
    write_in_order(args.out, prompts, rows)


if __name__ == "__main__":
    main()
