"""What the target is asked, and what it answered: the options, one answer, and a conversation on its way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dspark_train.data.conversations import BadConversation, Conversation, Turn
from dspark_train.errors import UserError
from dspark_train.lists import Names


@dataclass(frozen=True)
class Regenerate:
    """How the target answers."""

    servers: list[str] | Names = field(default_factory=list)
    """Addresses of OpenAI-compatible servers (http://host:port, without /v1), with commas between; none: in this
    process."""
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
    """Passed to the chat template as ``enable_thinking``; None leaves it to ``tokenization.template``. A model
    recommends other sampling for each mode, and its generation config holds that of one: set it too."""
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
                raise UserError(f"regeneration.{name} is {getattr(self, name)}: it must be at least 1")
        for server in self.servers:
            if not server.startswith(("http://", "https://")):
                raise UserError(f"regeneration.servers: {server!r} is no address; expected http://host:port")

    def delay(self, attempt: int) -> float:
        """Seconds to wait after the ``attempt``-th wrong answer in a row (from 1)."""
        return self.backoff * min(2 ** (attempt - 1), 30)

    def sampling(self) -> dict[str, Any]:
        """The sampling settings that are set."""
        names = ("temperature", "top_p", "top_k", "min_p")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def unset(self) -> list[str]:
        """Sampling settings that decide and are left to the generation config; none where decoding is greedy."""
        known = self.sampling()
        return (
            []
            if known.get("temperature") == 0
            else [n for n in ("temperature", "top_p", "top_k") if n not in known]
        )


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
    def so_far(self) -> Conversation:
        """The conversation with the answers that it has."""
        return replace(self.conversation, messages=self.messages, template=self.template)

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
            content = content.partition("<think>")[0]  # nothing is left of an answer cut while thinking
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
            self.so_far,
            finished=self._answers[-1].stop != "length",
            turns=turns if len(turns) == len(self._answers) else (),
        )
        extra = {"key": key, "stop": [answer.stop for answer in self._answers]}
        return finished.to_row() | extra | {"usage": [answer.usage for answer in self._answers]}


def request_key(
    conversation: Conversation,
    options: Regenerate,
    target: str | None,
    template: Mapping[str, Any] | None = None,
) -> str:
    """Name what is asked for: the content, who is asked, and the options that the answer depends on.

    ``template``, the chat-template arguments for all conversations, counts where it says more than ``thinking``.
    """
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
    mode = {} if options.thinking is None else {"enable_thinking": options.thinking}
    if template and template != mode:
        parts.append(dict(template))
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]


Done = Callable[[Progressing, str], None]
Failed = Callable[[Conversation, BadConversation], None]
