"""The second stage: the target answers every prompt itself, so that the draft learns the target's distribution.

Every conversation is answered turn by turn, each turn on the regenerated history. A finished conversation is
appended to ``regenerated.partial.jsonl`` at once. A later run skips what is there, by a hash of content and
options. At the end ``regenerated.jsonl`` is written in the order of ``collected.jsonl``, so that an interrupted
run ends with the same file as an undisturbed one.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dspark_train.data.conversations import SAMPLING, BadConversation, Conversation, read_conversations
from dspark_train.errors import UserError
from dspark_train.files import BadLine, Journal, file_digest, read_json, write_json
from dspark_train.prepare.answers import Progressing, Regenerate, request_key
from dspark_train.progress import say

if TYPE_CHECKING:
    from dspark_train.data.tokenize import ConversationEncoder
    from dspark_train.prepare.in_process import Generate

COLLECTED = "collected"
"""Key of ``regenerated.json``: digest of the file whose conversations were answered."""

_SAME_PROMPT, _OTHER_PROMPT = "prompt read as the target reads it", "prompt read otherwise"
_PROMPTS_COMPARED = 8
"""Prompts that must differ before the stage stops: some templates put the date into them."""


class AnswerFile:
    """The answered conversations, appended one by one, with one writer.

    Args:
        path: of the file; from a line on that a crash damaged, it is cut.

    Raises:
        UserError: another process writes to it.
    """

    def __init__(self, path: Path) -> None:
        self._journal = Journal(
            path, busy=f"another process is regenerating into {path}: wait for it or stop it"
        )
        self.places: dict[str, int] = {}
        """Byte offset of each answered conversation, by key."""
        for line in self._journal.lines():
            try:
                key = line.value()["key"]
            except (BadLine, KeyError, TypeError):
                self._journal.cut(line.offset)
                break
            self.places[key] = line.offset

    def append(self, key: str, row: dict[str, Any]) -> None:
        """Write one conversation; once this returns, a crash of the process does not lose it."""
        self.places[key] = self._journal.append(row)

    def line(self, key: str) -> bytes:
        """Read one back."""
        return self._journal.line(self.places[key])

    def close(self) -> None:
        """Sync and release the file."""
        self._journal.close()


def regenerate(
    collected: Path,
    folder: Path,
    options: Regenerate,
    *,
    target: str | None = None,
    encoder: ConversationEncoder | None = None,
    generate: Generate | None = None,
    template: Mapping[str, Any] | None = None,
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
        template: chat-template arguments for every conversation; a row's own go over them.
        progress: told (conversations, answer tokens) more after each one.

    Raises:
        UserError: no server answers, or too many conversations failed. What was answered stays.
    """
    if not options.servers and (generate is None or encoder is None):
        raise UserError(
            "regenerate: name servers in regeneration.servers, or a target to generate with in this process"
        )
    asking = _Asking(options, target, dict(template or {}))
    if warning := asking.warning():
        say(warning)
    out = folder / "regenerated.jsonl"
    answers = AnswerFile(folder / "regenerated.partial.jsonl")
    tally: Counter[str] = Counter()
    # whose answers the file of a former run holds, which an interrupted run leaves there
    answered = read_json(folder / "regenerated.json").get(COLLECTED)
    bad_path = folder / "regenerated.bad.jsonl"
    try:
        with bad_path.open("w") as bad:
            received = _Received(answers, tally, bad, encoder, bool(options.servers), progress)
            todo = _unanswered(collected, asking, answers, tally, progress)
            if options.servers:
                from dspark_train.prepare.servers import answer_over_http

                answer_over_http(todo, options, received.done, received.failed)
            else:
                from dspark_train.prepare.in_process import answer_in_process

                assert generate is not None
                assert encoder is not None
                answer_in_process(todo, options, encoder, generate, received.done, received.failed)
            received.keep_doubtful()
        total = _write_in_order(collected, asking, answers, out)
        answered = file_digest(collected)
    finally:
        answers.close()
        write_json(folder / "regenerated.json", {**tally, COLLECTED: answered, SAMPLING: asking.sampling()})
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


@dataclass(frozen=True)
class _Asking:
    """What the target is asked with."""

    options: Regenerate
    target: str | None
    template: dict[str, Any]

    def key(self, conversation: Conversation) -> str:
        """Of a conversation's answer."""
        return request_key(conversation, self.options, self.target, self.template)

    def asked(self, conversation: Conversation) -> Conversation:
        """With the chat-template arguments for all."""
        return replace(conversation, template={**self.template, **conversation.template})

    def sampling(self) -> dict[str, Any]:
        """How answers are drawn, for the record."""
        left = dict.fromkeys(self.options.unset(), "the target's generation config")
        return {**self.options.sampling(), **left}

    def warning(self) -> str | None:
        """What to say where a mode is switched, and its sampling is not."""
        mode = {**self.template, "enable_thinking": self.options.thinking}
        if self.options.thinking is None:
            mode = self.template
        unset = self.options.unset()
        if "enable_thinking" not in mode or not unset:
            return None
        switch = "on" if mode["enable_thinking"] else "off"
        return (
            f"warning: thinking is switched {switch}, and {', '.join(unset)} are left "
            "to the target's generation config, which may hold the values of the other mode: set "
            f"{', '.join(f'regeneration.{name}' for name in unset)} to what the model's card recommends for this one"
        )


class _Received:
    """What becomes of the answers: they are checked, kept and counted.

    Args:
        answers: where they are kept.
        tally: where they are counted.
        bad: list of the conversations that got none.
        encoder: of the target; None checks nothing.
        by_servers: servers answer, of which it is to be seen what they serve.
        progress: told (conversations, answer tokens) more after each one.
    """

    def __init__(
        self,
        answers: AnswerFile,
        tally: Counter[str],
        bad: IO[str],
        encoder: ConversationEncoder | None,
        by_servers: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._answers, self._tally, self._bad = answers, tally, bad
        self._encoder, self._by_servers, self._progress = encoder, by_servers, progress
        self._doubtful: list[tuple[Progressing, str, dict[str, Any]]] = []

    def done(self, item: Progressing, key: str) -> None:
        """Take a complete conversation. One whose prompt was read otherwise waits for others to compare with."""
        row = item.row(key)
        to_check = self._encoder if self._by_servers and "turns" in row else None
        if to_check is None or self._same_prompt(row["turns"][0]["prompt_ids"], item, to_check):
            self._keep(item, key, row)
            return
        self._doubtful.append((item, key, row))
        if len(self._doubtful) >= _PROMPTS_COMPARED:  # as many others, at least, were read as they should be
            self.keep_doubtful()

    def keep_doubtful(self) -> None:
        """Keep the conversations that wait: there was no reason to stop."""
        while self._doubtful:
            self._keep(*self._doubtful.pop(0))

    def failed(self, conversation: Conversation, error: BadConversation) -> None:
        """Count and list a conversation that got no answer."""
        self._tally["failed"] += 1
        self._tally[f"failed: {error.reason}"] += 1
        row = {"id": conversation.id, "reason": error.reason, "detail": error.detail}
        self._bad.write(json.dumps(row) + "\n")
        self._bad.flush()

    def _keep(self, item: Progressing, key: str, row: dict[str, Any]) -> None:
        self._answers.append(key, row)
        self._tally["answered"] += 1
        for stop in row["stop"]:
            self._tally[f"stop: {stop}"] += 1
        tokens = sum((usage or {}).get("completion_tokens", 0) for usage in row["usage"])
        self._tally["answer tokens"] += tokens
        if "turns" in row:
            self._tally["with exact tokens"] += 1
        elif self._encoder is not None:
            self._tally[_tokenized_again(item, tokens, self._encoder)] += 1
        if self._progress:
            self._progress(1, tokens)

    def _same_prompt(self, found: Sequence[int], item: Progressing, encoder: ConversationEncoder) -> bool:
        """Whether the tokens that a server read before its first answer are those that the target would read.

        Raises:
            UserError: most of the first prompts differ, so that another model answers, or another template.
        """
        first = next(index for index, message in enumerate(item.messages) if message["role"] == "assistant")
        asked = replace(item.so_far, messages=item.messages[:first])
        same = encoder.continue_ids(asked) == list(found)
        self._tally[_SAME_PROMPT if same else _OTHER_PROMPT] += 1
        alike, others = self._tally[_SAME_PROMPT], self._tally[_OTHER_PROMPT]
        if others >= _PROMPTS_COMPARED and others > alike:
            raise UserError(
                f"the server read other tokens than {encoder.tokenizer.name_or_path} makes of the same messages, "
                f"{others} times (the same ones {alike} times): it serves another model, or another chat template. "
                "None of these answers is kept; name the target that is served, or serve the target"
            )
        return same


def _tokenized_again(item: Progressing, counted: int, encoder: ConversationEncoder) -> str:
    """What the answers' text gives when it is tokenized, beside the number of tokens that the server counted."""
    try:
        examples = encoder.encode(item.so_far)
    except BadConversation as error:
        return f"not tokenized again: {error.reason}"
    again = sum(int(example.loss_mask.sum()) for example in examples)
    return "tokenized again: same" if again == counted else "tokenized again: different length"


def _unanswered(
    collected: Path,
    asking: _Asking,
    answers: AnswerFile,
    tally: Counter[str],
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[str, Conversation]]:
    asked: set[str] = set()
    for conversation in read_conversations(collected):
        key = asking.key(conversation)
        if key in answers.places or key in asked:
            tally["answered before"] += 1
            if progress:
                progress(1, 0)
        else:
            asked.add(key)
            yield key, asking.asked(conversation)


def _write_in_order(collected: Path, asking: _Asking, answers: AnswerFile, out: Path) -> int:
    written = 0
    with open(f"{out}.tmp", "wb") as file:
        for conversation in read_conversations(collected):
            key = asking.key(conversation)
            if key in answers.places:
                file.write(answers.line(key))
                written += 1
    os.replace(f"{out}.tmp", out)
    return written
