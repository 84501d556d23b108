"""Answers from a target in this process, in batches of similar prompt length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal, Protocol

from dspark_train.data.conversations import BadConversation, Conversation
from dspark_train.data.tokenize import ConversationEncoder
from dspark_train.prepare.answers import Answer, Done, Failed, Progressing, Regenerate


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


def answer_in_process(
    todo: Iterator[tuple[str, Conversation]],
    options: Regenerate,
    encoder: ConversationEncoder,
    generate: Generate,
    done: Done,
    failed: Failed,
) -> None:
    """Answer conversations; batches are formed within windows of the file.

    Args:
        todo: conversations, by key.
        options: of the stage.
        encoder: of the target.
        generate: the target's continuation of a batch of prompts.
        done: told of each complete conversation.
        failed: told of each that the template refuses.
    """
    window = 16 * options.concurrency
    while items := list(islice(todo, window)):
        active: list[tuple[str, Progressing, list[int]]] = []
        for key, conversation in items:
            item = Progressing(conversation, options)
            with _failing(conversation, failed):
                active.append((key, item, encoder.continue_ids(item.so_far)))
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
                    active.append((key, item, encoder.continue_ids(item.so_far)))


@contextmanager
def _failing(conversation: Conversation, failed: Failed) -> Iterator[None]:
    try:
        yield
    except BadConversation as error:
        failed(conversation, error)
