"""The second stage: the target answers every prompt itself, so that the draft learns from its own
distribution.

Every conversation is answered turn by turn, each turn on the regenerated history. Finished conversations are
appended to ``regenerated.partial.jsonl`` at once, one line and one flush each, by one writer; a later run
skips what is there, recognised by a hash of content and options. At the end the file is written once more in
the order of the collected one, so that an interrupted run ends with the same file as an undisturbed one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

from dspark_train.data.conversations import BadConversation, Conversation, Turn, conversation_from_row
from dspark_train.errors import UserError
from dspark_train.files import file_digest, read_json, write_json
from dspark_train.lists import Names

if TYPE_CHECKING:
    from dspark_train.data.tokenize import ConversationEncoder


COLLECTED = "collected"
"""Key of ``regenerated.json``: digest of the file whose conversations were answered."""

_SAME_PROMPT, _OTHER_PROMPT = "prompt read as the target reads it", "prompt read otherwise"
_PROMPTS_COMPARED = 8
"""Prompts that must differ before the stage stops: some templates put the date into them."""


@dataclass(frozen=True)
class Regenerate:
    """How the target answers."""

    servers: list[str] | Names = field(default_factory=list)
    """Addresses of OpenAI-compatible servers (http://host:port, without /v1), with commas between; none: in
    this process."""
    model: str | None = None
    """Name that the servers know the target by; None asks them."""
    max_tokens: int = 2048
    """Most tokens of one answer."""
    temperature: float | None = None
    """None leaves it, and the next three, to the target's own generation config."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int = 0
    """Each turn is drawn with a seed made of this and its prompt, so that order and interruptions change
    nothing.
    """
    thinking: bool | None = None
    """Passed to the chat template as ``enable_thinking``; None leaves it alone."""
    keep_thinking: bool = True
    """Keep what the target thought; else it is removed from the answers, and their exact tokens with it."""
    concurrency: int = 64
    """Requests in flight per server; sequences per batch in this process."""
    timeout: float = 600.0
    """Seconds until a request counts as failed."""
    retries: int = 5
    """How often a request is tried again where a server answers, but wrongly."""
    backoff: float = 1.0
    """Seconds before the first retry; doubles each time, up to 30 times as much."""
    dead_after: int = 3
    """Consecutive failures after which a server is left alone."""
    revive_after: float = 15.0
    """Seconds after which a dead server is tried again."""
    give_up_after: float = 600.0
    """Stop where no server has answered for this many seconds."""
    max_failed_share: float = 0.01
    """The stage fails where more than this share of the conversations got no answer."""
    api_key_variable: str | None = None
    """Environment variable that holds the servers' API key."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "concurrency", "dead_after"):
            if getattr(self, name) < 1:
                raise UserError(f"regenerate.{name} is {getattr(self, name)}: it must be at least 1")
        for server in self.servers:
            if not server.startswith(("http://", "https://")):
                raise UserError(f"regenerate.servers: {server!r} is no address; expected http://host:port")

    def delay(self, attempt: int) -> float:
        """Seconds to wait after the ``attempt``-th wrong answer in a row (from 1)."""
        return self.backoff * min(2 ** (attempt - 1), 30)

    def sampling(self) -> dict[str, Any]:
        """The sampling settings that are set."""
        names = ("temperature", "top_p", "top_k", "min_p")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class Answer:
    """One generated turn."""

    content: str
    stop: Literal["stop", "length", "tool_calls"]
    """Whether the target ended by itself, was cut, or ended with the call of a tool."""
    thinking: str | None = None
    """What a server's reasoning parser took out of the content."""
    prompt_ids: Sequence[int] | None = None
    answer_ids: Sequence[int] | None = None
    """Exact tokens, end token included, where they are known."""
    usage: dict[str, int] | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """Calls that a server's parser took out of the content; their arguments are objects."""


class Generate(Protocol):
    """Generation in this process: a batch of prompts in, one ``(ids, finished)`` each out."""

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: dict[str, Any],
        seeds: Sequence[int],
    ) -> Sequence[tuple[Sequence[int], bool]]:
        """Continue each prompt; ``ids`` include the end token where ``finished``."""
        ...


class Progressing:
    """A conversation on its way: messages so far, and the user turns that are still to be answered."""

    def __init__(self, conversation: Conversation, options: Regenerate) -> None:
        self.conversation, self._options = conversation, options
        self.messages: list[dict[str, Any]] = []
        self._queue = [dict(message) for message in conversation.messages if message["role"] != "assistant"]
        tools = [index for index, message in enumerate(self._queue) if message["role"] == "tool"]
        if tools:  # the answer to a tool's result cannot follow a call that was never made
            self._queue = self._queue[: tools[0]]
        self._answers: list[Answer] = []
        self._advance()

    def _advance(self) -> None:
        while self._queue:
            message = self._queue.pop(0)
            self.messages.append(message)
            if message["role"] == "user" and not (self._queue and self._queue[0]["role"] != "user"):
                return

    @property
    def template(self) -> dict[str, Any]:
        """Template arguments of the next request."""
        thinking = {} if self._options.thinking is None else {"enable_thinking": self._options.thinking}
        return {**self.conversation.template, **thinking}

    @property
    def seed(self) -> int:
        """Of the next answer."""
        content = json.dumps([self._options.seed, self.messages], sort_keys=True, default=str)
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:4], "big") % 2**31

    def receive(self, answer: Answer) -> bool:
        """Take the answer to the last turn; return whether the conversation is complete."""
        content, thinking = answer.content, answer.thinking
        if not self._options.keep_thinking and (thinking or "<think>" in content or "</think>" in content):
            content = content.rpartition("</think>")[2].lstrip("\n")
            content = content.partition("<think>")[
                0
            ]  # of an answer that was cut while thinking nothing is left
            thinking = None
            answer = replace(answer, prompt_ids=None, answer_ids=None)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["reasoning_content"] = thinking
        if answer.tool_calls:
            message["tool_calls"] = [dict(call) for call in answer.tool_calls]
        self.messages.append(message)
        self._answers.append(answer)
        if answer.stop != "stop":  # nothing can follow an answer that was cut, or a call without its result
            return True
        answered = len(self.messages)
        self._advance()
        if self.messages[-1]["role"] == "user" and len(self.messages) > answered:
            return False
        del self.messages[answered:]
        return True

    def row(self, key: str) -> dict[str, Any]:
        """The finished conversation."""
        turns = [
            Turn(answer.prompt_ids, answer.answer_ids, answer.stop != "length")
            for answer in self._answers
            if answer.prompt_ids is not None and answer.answer_ids is not None
        ]
        finished = replace(
            self.conversation,
            messages=self.messages,
            template=self.template,
            finished=self._answers[-1].stop != "length",
            turns=turns if len(turns) == len(self._answers) else (),
        )
        extra = {"key": key, "stop": [answer.stop for answer in self._answers]}
        return finished.to_row() | extra | {"usage": [answer.usage for answer in self._answers]}


def request_key(conversation: Conversation, options: Regenerate, target: str | None) -> str:
    """Name what is asked for: the content, who is asked, and the options that the answer depends on."""
    asked = [message for message in conversation.messages if message["role"] != "assistant"]
    names = (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "thinking",
        "keep_thinking",
        "model",
    )
    parts = [
        target,
        conversation.id,
        asked,
        conversation.tools,
        conversation.template,
        {name: getattr(options, name) for name in names},
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]


class AnswerFile:
    """The append-only file of answered conversations, with one writer.

    Args:
        path: a last line that a crash cut short is removed from it.

    Raises:
        UserError: another process writes to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.places: dict[str, int] = {}
        """Byte offset of each answered conversation, by key."""
        self._file: IO[bytes] = path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise UserError(f"another process is regenerating into {path}: wait for it or stop it") from error
        self._file.seek(0)
        offset = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                self.places[json.loads(line)["key"]] = offset
            except (json.JSONDecodeError, KeyError, UnicodeDecodeError):
                break
            offset += len(line)
        self._file.truncate(offset)
        self._end = offset

    def append(self, key: str, row: dict[str, Any]) -> None:
        """Write one conversation; once this returns, a crash of the process does not lose it."""
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        self.places[key] = self._end
        self._end += len(line)

    def line(self, key: str) -> bytes:
        """Read one back."""
        self._file.seek(self.places[key])
        return self._file.readline()

    def close(self) -> None:
        """Sync and release the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def regenerate(
    collected: Path,
    folder: Path,
    options: Regenerate,
    *,
    target: str | None = None,
    encoder: ConversationEncoder | None = None,
    generate: Generate | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write ``folder/regenerated.jsonl``: the collected conversations, answered by the target.

    Args:
        collected: what the first stage wrote.
        folder: output folder of the recipe.
        options: see :class:`Regenerate`.
        target: name of the target; the answers of another one are not taken for its own.
        encoder: of the target; needed in this process, and to check re-tokenization where servers give no
            tokens.
        generate: generation in this process, where no servers are named.
        progress: told (conversations, answer tokens) more after each one.

    Raises:
        UserError: no server answers, or too many conversations failed. What was answered stays.
    """
    if not options.servers and (generate is None or encoder is None):
        raise UserError(
            "regenerate: name servers in regenerate.servers, or a target to generate with in this process"
        )
    out = folder / "regenerated.jsonl"
    answers = AnswerFile(folder / "regenerated.partial.jsonl")
    tally: Counter[str] = Counter()
    doubtful: list[tuple[Progressing, str, dict[str, Any]]] = []
    # whose answers the file of a former run holds, which an interrupted run leaves there
    answered = read_json(folder / "regenerated.json").get(COLLECTED)
    bad_path = folder / "regenerated.bad.jsonl"
    try:
        with bad_path.open("w") as bad:

            def done(item: Progressing, key: str) -> None:
                row = item.row(key)
                if (
                    encoder is None
                    or not options.servers
                    or "turns" not in row
                    or check_prompt(row["turns"][0]["prompt_ids"], item, encoder, tally)
                ):
                    keep(item, key, row)
                    return
                doubtful.append((item, key, row))
                if (
                    len(doubtful) >= _PROMPTS_COMPARED
                ):  # others, as many at least, were read as they should be
                    keep_doubtful()

            def keep_doubtful() -> None:
                while doubtful:
                    keep(*doubtful.pop(0))

            def keep(item: Progressing, key: str, row: dict[str, Any]) -> None:
                answers.append(key, row)
                tally["answered"] += 1
                for stop, usage in zip(row["stop"], row["usage"], strict=True):
                    tally[f"stop: {stop}"] += 1
                    tally["answer tokens"] += (usage or {}).get("completion_tokens", 0)
                if "turns" in row:
                    tally["with exact tokens"] += 1
                elif encoder is not None:
                    tally.update(retokenization(item, row["usage"], encoder))
                if progress:
                    progress(1, sum((usage or {}).get("completion_tokens", 0) for usage in row["usage"]))

            def failed(conversation: Conversation, error: BadConversation) -> None:
                tally["failed"] += 1
                tally[f"failed: {error.reason}"] += 1
                bad.write(
                    json.dumps({"id": conversation.id, "reason": error.reason, "detail": error.detail}) + "\n"
                )
                bad.flush()

            todo = _unanswered(collected, options, target, answers, tally, progress)
            if options.servers:
                from dspark_train.prepare.servers import answer_over_http

                answer_over_http(todo, options, done, failed)
            else:
                assert generate is not None
                assert encoder is not None
                _answer_in_process(todo, options, encoder, generate, done, failed)
            keep_doubtful()
        total = _write_in_order(collected, options, target, answers, out)
        answered = file_digest(collected)
    finally:
        answers.close()
        write_json(folder / "regenerated.json", {**tally, COLLECTED: answered})
    if tally["failed"] > options.max_failed_share * (total + tally["failed"]):
        reasons = ", ".join(
            f"{name[8:]}: {count}" for name, count in tally.items() if name.startswith("failed: ")
        )
        out.unlink()
        raise UserError(
            f"{tally['failed']} conversations got no answer, more than max_failed_share {options.max_failed_share:g} "
            f"allows ({reasons}); see {bad_path}. Run the stage again to try only those"
        )
    return out


def check_collected(regenerated: Path, collected: Path) -> None:
    """Raise UserError where the answers were given to other conversations than ``collected`` holds."""
    known = read_json(regenerated.with_suffix(".json")).get(COLLECTED)
    if known is not None and collected.exists() and known != file_digest(collected):
        raise UserError(
            f"{regenerated} answers another {collected.name} than the one beside it: run the stage 'regenerate' again, "
            "or remove it to train on the collected answers"
        )


def check_prompt(
    found: Sequence[int], item: Progressing, encoder: ConversationEncoder, tally: Counter[str]
) -> bool:
    """Whether the tokens that a server read before its first answer are those that the target would read.

    Raises:
        UserError: most of the first prompts differ, so that another model answers, or another template.
    """
    first = next(index for index, message in enumerate(item.messages) if message["role"] == "assistant")
    asked = replace(item.conversation, messages=item.messages[:first], template=item.template)
    same = encoder.continue_ids(asked) == list(found)
    tally[_SAME_PROMPT if same else _OTHER_PROMPT] += 1
    others = tally[_OTHER_PROMPT]
    if others >= _PROMPTS_COMPARED and others > tally[_SAME_PROMPT]:
        raise UserError(
            f"the server read other tokens than {encoder.tokenizer.name_or_path} makes of the same messages, {others} "
            f"times (the same ones {tally[_SAME_PROMPT]} times): it serves another model, or another chat template. "
            "None of these answers is kept; name the target that is served, or serve the target"
        )
    return same


def retokenization(
    item: Progressing, usage: Sequence[dict[str, int] | None], encoder: ConversationEncoder
) -> Counter[str]:
    """Compare the number of tokens that the server counted with that of the answer's text, tokenized
    again.
    """
    found: Counter[str] = Counter()
    counted = sum((each or {}).get("completion_tokens", 0) for each in usage)
    conversation = replace(item.conversation, messages=item.messages, template=item.template)
    try:
        examples = encoder.encode(conversation)
    except BadConversation as error:
        found[f"not tokenized again: {error.reason}"] += 1
        return found
    again = sum(int(example.loss_mask.sum()) for example in examples)
    found["tokenized again: same" if again == counted else "tokenized again: different length"] += 1
    return found


def _unanswered(
    collected: Path,
    options: Regenerate,
    target: str | None,
    answers: AnswerFile,
    tally: Counter[str],
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[str, Conversation]]:
    asked: set[str] = set()
    for conversation in _read(collected):
        key = request_key(conversation, options, target)
        if key in answers.places or key in asked:
            tally["answered before"] += 1
            if progress:
                progress(1, 0)
        else:
            asked.add(key)
            yield key, conversation


def _read(path: Path) -> Iterator[Conversation]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            yield conversation_from_row(json.loads(line), f"{path.name}:{number}")


def _write_in_order(
    collected: Path, options: Regenerate, target: str | None, answers: AnswerFile, out: Path
) -> int:
    written = 0
    with open(f"{out}.tmp", "wb") as file:
        for conversation in _read(collected):
            key = request_key(conversation, options, target)
            if key in answers.places:
                file.write(answers.line(key))
                written += 1
    os.replace(f"{out}.tmp", out)
    return written


Done = Callable[[Progressing, str], None]
Failed = Callable[[Conversation, BadConversation], None]


def _answer_in_process(
    todo: Iterator[tuple[str, Conversation]],
    options: Regenerate,
    encoder: ConversationEncoder,
    generate: Generate,
    done: Done,
    failed: Failed,
) -> None:
    """Answer in batches of similar prompt length, within windows of the file."""
    window = 16 * options.concurrency
    while items := list(islice(todo, window)):
        active: list[tuple[str, Progressing, list[int]]] = []
        for key, conversation in items:
            item = Progressing(conversation, options)
            with _failing(conversation, failed):
                active.append((key, item, _prompt_ids(item, encoder)))
        while active:
            active.sort(key=lambda entry: len(entry[2]))
            batch, active = active[: options.concurrency], active[options.concurrency :]
            results = generate(
                [ids for _, _, ids in batch],
                max_tokens=options.max_tokens,
                sampling=options.sampling(),
                seeds=[item.seed for _, item, _ in batch],
            )
            for (key, item, prompt), (ids, finished) in zip(batch, results, strict=True):
                usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
                stop: Literal["stop", "length"] = "stop" if finished else "length"
                text = encoder.decode_answer(ids, finished)
                if item.receive(Answer(text, stop, None, prompt, [int(i) for i in ids], usage)):
                    done(item, key)
                    continue
                with _failing(item.conversation, failed):
                    active.append((key, item, _prompt_ids(item, encoder)))


def _prompt_ids(item: Progressing, encoder: ConversationEncoder) -> list[int]:
    conversation = replace(item.conversation, messages=item.messages, template=item.template)
    return encoder.continue_ids(conversation)


@contextmanager
def _failing(conversation: Conversation, failed: Failed) -> Iterator[None]:
    try:
        yield
    except BadConversation as error:
        failed(conversation, error)
