"""Tokenising with exact masks: speed against plain tokenisation and against re-tokenised prefixes, and memory.

usage: python benchmarks/data.py [--conversations 400] [--repeats 5] [--memory 200000] [--write]

Speed is processor time of one process, the best of the repeats, over the same conversations: plain
``apply_chat_template`` in one batched call and one by one (no masks), this project's encoder, and the usual way to
masks that tokenises every prefix of a conversation again. ``--memory N`` makes a file of N conversations, prepares it
by the command, and samples the resident memory of all its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from dspark_train.cli.prepare import load_tokenizer
from dspark_train.data.conversations import Conversation
from dspark_train.data.tokenize import ConversationEncoder

TARGET = "smollm2-135m-instruct"
SOURCE = Path(__file__).parent.parent / "data_prep" / "quickstart" / "conversations.jsonl"
CHUNK = 64


def conversations(count: int, turns: int) -> list[list[dict[str, Any]]]:
    """Conversations of ``turns`` question-and-answer pairs, put together from the quickstart's."""
    rows = [json.loads(line)["messages"] for line in SOURCE.open()]
    generator = random.Random(0)
    return [[message for row in generator.choices(rows, k=turns) for message in row] for _ in range(count)]


def best(function: Callable[[], Any], repeats: int) -> float:
    """Least processor seconds of several runs."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return min(seconds)


def with_prefixes(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Ids and mask by tokenising each prefix again: quadratic in the number of turns."""
    ids = tokenizer.apply_chat_template(messages)["input_ids"]
    mask = [0] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True)["input_ids"]
            whole = tokenizer.apply_chat_template(messages[: index + 1])["input_ids"]
            mask[len(prompt) : len(whole)] = [1] * (len(whole) - len(prompt))
    return ids, mask


def speed(count: int, repeats: int) -> list[str]:
    """Rows of the table."""
    tokenizer = load_tokenizer(TARGET)
    lines = [
        "| turns | tokens | plain, batched | plain, one by one | masks (ours) | masks by prefixes "
        "| ours / plain batched | ours / plain one by one |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for turns in (1, 2, 5, 10):
        chats = conversations(count, turns)
        wrapped = [Conversation(str(index), chat) for index, chat in enumerate(chats)]
        encoder = ConversationEncoder(tokenizer, max_length=1_000_000)

        def ours(wrapped: list[Conversation] = wrapped, encoder: ConversationEncoder = encoder) -> None:
            for start in range(0, len(wrapped), CHUNK):
                list(encoder.encode_many(wrapped[start : start + CHUNK]))

        def prefixes(chats: list[list[dict[str, Any]]] = chats) -> None:
            for chat in chats:
                with_prefixes(tokenizer, chat)

        def one_by_one(chats: list[list[dict[str, Any]]] = chats) -> None:
            for chat in chats:
                tokenizer.apply_chat_template(chat)

        def batched(chats: list[list[dict[str, Any]]] = chats) -> None:
            tokenizer.apply_chat_template(chats)

        tokens = sum(len(ids) for ids in tokenizer.apply_chat_template(chats)["input_ids"])
        seconds = [best(each, repeats) for each in (batched, one_by_one, ours)]
        seconds.append(best(prefixes, max(1, repeats // 3)))
        rates = [f"{count / each:,.0f}/s, {tokens / each / 1e3:,.0f} k tok/s" for each in seconds]
        ratios = f"{seconds[0] / seconds[2]:.2f} | {seconds[1] / seconds[2]:.2f}"
        lines.append(f"| {turns} | {tokens:,} | {' | '.join(rates)} | {ratios} |")
        print(lines[-1], flush=True)
    return lines


def resident(pid: int) -> int:
    """Resident bytes of a process and all its descendants."""
    total, waiting = 0, [pid]
    while waiting:
        process = waiting.pop()
        try:
            status = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += (
                next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Pss:")) * 1024
            )
            children = Path(f"/proc/{process}/task/{process}/children").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError, StopIteration):
            continue
        waiting += [int(child) for child in children.split()]
    return total


def memory(count: int) -> list[str]:
    """Prepare a large file with one and with two processes, and sample memory."""
    lines = ["| conversations | processes | conversations/s | peak memory |", "|---|---|---|---|"]
    rows = [json.loads(line) for line in SOURCE.open()]
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "many.jsonl"
        with source.open("w") as file:
            for index in range(count):
                messages = [dict(message) for message in rows[index % len(rows)]["messages"]]
                messages[0]["content"] = f"({index}) {messages[0]['content']}"
                file.write(json.dumps({"id": str(index), "messages": messages}) + "\n")
        for processes in (1, 2):
            command = [sys.executable, "-m", "dspark_train", "prepare", "--output", f"{scratch}/{processes}"]
            command += ["--sources", json.dumps([{"path": str(source)}]), "--target", TARGET]
            command += ["--tokenization.workers", str(processes), "--tokenization.max_length", "1024"]
            start, peak = time.monotonic(), 0
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
                while process.poll() is None:
                    peak = max(peak, resident(process.pid))
                    time.sleep(0.2)
            if process.returncode:
                raise SystemExit(f"prepare failed with status {process.returncode}")
            rate = count / (time.monotonic() - start)
            lines.append(
                f"| {count:,} | {processes} | {rate:,.0f} (collect and tokenize) | {peak / 2**20:,.0f} MiB |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--memory", type=int, default=0, help="conversations of the memory run; 0 leaves it out"
    )
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    arguments = parser.parse_args()
    lines = speed(arguments.conversations, arguments.repeats)
    if arguments.memory:
        lines += ["", *memory(arguments.memory)]
    if arguments.write:
        from table import machine, write_table

        command = "python benchmarks/data.py " + " ".join(sys.argv[1:])
        caption = f"Tokenising with exact masks, {arguments.conversations} conversations. {machine()}"
        write_table("data", command, caption, lines)


if __name__ == "__main__":
    main()
