"""What a chat template makes of a conversation, and which characters of it the target generated.

The template is a black box. It is rendered twice around a turn: up to the turn with the generation prompt
(what the target reads), and up to and including the turn. Where the second text continues the first, the
continuation is what the target generated, plus what the template puts around it; a rendering with a marker
as content tells these two apart. No separator, role name or pattern of any model is known here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

from dspark_train.data.conversations import BadConversation, Conversation
from dspark_train.errors import UserError

MARKER = "zq7 marker 7qz"
_THOUGHT = "zq7 thought 7qz"
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which messages carry what was thought before the answer."""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class SupervisedText:
    """A rendered conversation up to the end of its last supervised turn."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Character ranges that the target generated, ascending: content and end of turn."""


@dataclass(frozen=True)
class _Frame:
    """What the template puts around a turn's content."""

    before: str
    after: str
    end: str
    """The part of ``after`` that the target generates: up to and including the end token; may be empty."""
    header: bool = False
    """``before`` stands between reasoning and content too, so the target generates it (a channel's header)."""

    @property
    def inserted(self) -> int:
        """Characters of ``before`` that the target does not generate: none of white space or a header, else all."""
        return len(self.before) if self.before.strip() and not self.header else 0


def _is_plain(message: Mapping[str, Any]) -> bool:
    return _is_text(message) and message["content"] != ""


def _is_text(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content"), str) and len(message) == 2


def _after(text: str, opening: str) -> str:
    """What follows ``opening`` and its line breaks."""
    return text.lstrip().removeprefix(opening).lstrip("\n")


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with the arguments of its tool calls as JSON text, for templates that refuse objects."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        if isinstance(function.get("arguments"), Mapping):
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls} if calls else message


class Renderer:
    """Renders conversations with one chat template and finds the generated characters.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        arguments: extra template arguments for every conversation (``enable_thinking``, …).
        clock: time that ``strftime_now`` tells, the same in every rendering; now by default.

    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        arguments: Mapping[str, Any] | None = None,
        clock: datetime | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: use an "
                "instruction-tuned target, "
                "or put a chat_template.jinja beside the tokenizer"
            )
        self._template = {
            with_tools: tokenizer.get_chat_template(tools=[{}] if with_tools else None)
            for with_tools in (False, True)
        }
        self._arguments = dict(arguments or {})
        self._special = dict(tokenizer.special_tokens_map)
        self._clock = clock or datetime.now()
        tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(
            tokenizer.all_special_tokens
        )
        markers = sorted((re.escape(token) for token in tokens if token), key=len, reverse=True)
        self._end_pattern = re.compile(r"\s*(?:" + "|".join(markers) + ")") if markers else None
        self._last_pattern = re.compile(r"\s*(?:" + "|".join(markers) + r")\Z") if markers else None
        self._tagged = any(_GENERATION_TAG.search(text) for text in self._template.values())
        self._frames: dict[bool, _Frame] = {}
        self._opened = ""
        self.counts: Counter[str] = Counter()
        """How often something had to be worked around, by name."""

    def render(
        self, conversation: Conversation, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False
    ) -> str:
        """Render messages with the conversation's tools and template arguments.

        Args:
            conversation: gives the tools and the template arguments.
            messages: what to render.
            prompt: add the generation prompt.

        Raises:
            BadConversation: the template refuses the messages.
        """
        return self._render(conversation, messages, prompt, tags=False)[0]

    def _render(
        self, conversation: Conversation, messages: Sequence[Mapping[str, Any]], prompt: bool, tags: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

        tools = list(conversation.tools) if conversation.tools else None
        variables = {**self._special, **self._arguments, **conversation.template}
        template = self._template[tools is not None]
        compiled = _compile_jinja_template(template)  # one for each text, in a cache of the library
        compiled.globals["strftime_now"] = self._clock.strftime
        try:
            if tools is None and not tags and all(map(_is_text, messages)):
                # nothing that the library would convert, which takes it as long as the rendering itself
                text: str = compiled.render(
                    messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **variables
                )
                return text, []
            rendered: Any = render_jinja_template(
                [[dict(message) for message in messages]],
                tools=tools,  # type: ignore[arg-type]
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=tags,
                **variables,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            as_text = [_with_text(message) for message in messages]
            if as_text != list(messages):
                return self._render(conversation, as_text, prompt, tags)
            raise BadConversation("the chat template refuses it", str(error)) from error
        return rendered[0][0], rendered[1][0] if tags else []

    def supervised_texts(self, conversation: Conversation) -> list[SupervisedText]:
        """Render a conversation into as few texts as are exact for every assistant turn.

        In each text, every supervised turn is preceded by exactly the prompt that the target would have
        read. One text holds all turns where the template is prefix-stable; a turn whose rendering changes
        when later turns are added gets a text of its own, that ends with it. A turn that does not continue
        its own generation prompt is left unsupervised and counted.

        Raises:
            BadConversation: no assistant turn, or the template shows a turn differently from its content.
        """
        messages = conversation.messages
        pending = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not pending:
            raise BadConversation("no assistant turn")
        prompts = {turn: self.render(conversation, messages[:turn], prompt=True) for turn in pending}
        final = pending[-1]
        shown: dict[int, tuple[str, int, int] | None] = {}

        def generated(turn: int) -> tuple[str, int, int] | None:
            if turn not in shown:
                whole = self.render(conversation, messages[: turn + 1])
                finished = conversation.finished or turn != final
                span = self._generated(conversation, turn, prompts[turn], whole, finished)
                shown[turn] = (
                    self._prefilled(conversation, turn, prompts[turn], finished)
                    if span is None
                    else (whole[: span[1]], *span)
                )
            return shown[turn]

        texts = []
        while pending:
            last = pending.pop()
            found = generated(last)
            if found is None:
                self.counts["turn does not continue its generation prompt"] += 1
                continue
            text, start, end = found
            spans, unstable = [(start, end)], []
            for turn in reversed(pending):
                span = self._quick(conversation, text, prompts[turn], messages[turn])
                if span is None and (earlier := generated(turn)) is not None and text.startswith(earlier[0]):
                    span = earlier[1:]
                if span is None:
                    unstable.append(turn)
                else:
                    spans.append(span)
            pending = unstable[::-1]
            texts.append(SupervisedText(text, tuple(reversed(spans))))
        if len(texts) > 1:
            self.counts["turns cut into examples of their own"] += len(texts) - 1
        if not texts:
            raise BadConversation(
                "no assistant turn continues its generation prompt",
                f"it opens {self._opened!r}, and no answer does: let the target answer (`prepare --stages "
                "collect,regenerate,tokenize`), or switch thinking off in the template's arguments"
                if self._opened
                else "",
            )
        frame = self._frames.get(bool(conversation.tools))
        if frame is not None and not frame.end:
            self.counts["the template ends turns with no special token of the tokenizer"] += 1
        if self._tagged:
            self._compare_with_tags(conversation, texts[0])
        return texts[::-1]

    def _quick(
        self, conversation: Conversation, text: str, prompt: str, message: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        """Find a plain turn in a text by the frame of the turns before; None where that proves nothing."""
        frame = self._frames.get(bool(conversation.tools))
        if frame is None or not _is_plain(message) or not text.startswith(prompt):
            return None
        start, said = len(prompt), message["content"]
        for before in dict.fromkeys((frame.before, "")):  # "": what is inserted in a last turn only
            for shown in (said, said.strip()):
                expected = before + shown + frame.end
                if text.startswith(expected, start):
                    return start + (frame.inserted if before else 0), start + len(expected)
        return None

    def _generated(
        self, conversation: Conversation, turn: int, prompt: str, whole: str, finished: bool
    ) -> tuple[int, int] | None:
        """Return the generated range of ``whole``, which ends with the turn; None if it has another prompt."""
        if not whole.startswith(prompt):
            return None
        message, start = conversation.messages[turn], len(prompt)
        tail, said, plain = whole[start:], message["content"], _is_plain(message)
        frame = self._frames.get(bool(conversation.tools))
        if not (plain and frame and self._framed(tail, said, frame)):
            frame = self._frames[bool(conversation.tools)] = self._probe(conversation, turn, prompt)
        if not tail.endswith(frame.after) and message.get("tool_calls") and self._last_pattern:
            called = self._last_pattern.search(tail)  # a call may end with a token of its own
            if called:
                self._check_body(tail[: called.start()], message, turn)
                return start, len(whole) if finished else start + called.start()
        if not tail.endswith(frame.after):
            raise BadConversation(
                "the template ends this turn unlike others", f"message {turn}: {tail[-60:]!r}"
            )
        body = tail[: len(tail) - len(frame.after)]
        inserted = frame.inserted if body.startswith(frame.before) else 0
        if plain and body.strip() == said.strip():
            inserted = 0  # the content itself holds what the template would insert
        headed = frame.header and body.startswith(frame.before)
        self._check_body(body[len(frame.before) if headed else inserted :], message, turn)
        return start + inserted, start + len(body) + (len(frame.end) if finished else 0)

    @staticmethod
    def _framed(tail: str, said: Any, frame: _Frame) -> bool:
        return tail in (frame.before + shown + frame.after for shown in (said, said.strip()))

    def _check_body(self, body: str, message: Mapping[str, Any], turn: int) -> None:
        said = message["content"]
        if isinstance(said, list):
            said = "".join(str(part.get("text", "")) for part in said if isinstance(part, Mapping))
        said = (said or "").strip()
        if body.strip() == said:
            return
        if said and body.split() == said.split():
            self.counts["white space changed by the template"] += 1
            return
        others = [message.get(name) for name in ("tool_calls", *_REASONING)]
        if any(others) and said in body:
            return
        raise BadConversation(
            "the template shows an assistant turn differently from its content",
            f"message {turn}: {body[:80]!r} instead of {said[:80]!r}",
        )

    def _probe(self, conversation: Conversation, turn: int, prompt: str) -> _Frame:
        """Learn what the template puts around a turn's content from a turn that says the marker."""
        said = {"role": "assistant", "content": MARKER}
        text = self.render(conversation, [*conversation.messages[:turn], said])
        if not text.startswith(prompt) or text.count(MARKER, len(prompt)) != 1:
            raise BadConversation(
                "the template does not show assistant content", f"message {turn}: {text[-80:]!r}"
            )
        before, after = text[len(prompt) :].split(MARKER)
        match = self._end_pattern.match(after) if self._end_pattern else None
        header = bool(before.strip()) and self._is_header(conversation, turn, before)
        return _Frame(before, after, match.group() if match else "", header)

    def _is_header(self, conversation: Conversation, turn: int, before: str) -> bool:
        """Whether what stands before a turn's content stays whole, and apart from it, where there is reasoning."""
        said = {"role": "assistant", "content": MARKER, **dict.fromkeys(_REASONING, _THOUGHT)}
        text = self.render(conversation, [*conversation.messages[:turn], said])
        between = text.split(_THOUGHT)[-1].split(MARKER)[0] if _THOUGHT in text else ""
        return between.endswith(before) and between != before

    def _prefilled(
        self, conversation: Conversation, turn: int, prompt: str, finished: bool
    ) -> tuple[str, int, int] | None:
        """A turn whose content begins with what the generation prompt opens (``<think>``), told as it was generated.

        Such templates drop the thought, and what opens it, from turns of the history.
        """
        messages, said = conversation.messages, conversation.messages[turn]["content"]
        shown = self.render(conversation, [*messages[:turn], {"role": "assistant", "content": MARKER}])
        same = (a == b for a, b in zip(prompt, shown, strict=False))
        start = sum(takewhile(bool, same))
        opened, tail = prompt[start:], shown[start:]
        if not isinstance(said, str) or not opened.strip() or not tail.startswith(MARKER):
            return None
        if not said.lstrip().startswith(opened.strip()):
            self._opened = opened.strip()
            return None
        rest = said.removeprefix(opened) if said.startswith(opened) else _after(said, opened.strip())
        match = self._end_pattern.match(tail[len(MARKER) :]) if self._end_pattern else None
        text = prompt + rest + (match.group() if match and finished else "")
        return text, len(prompt), len(text)

    def _compare_with_tags(self, conversation: Conversation, found: SupervisedText) -> None:
        """Count conversations whose ``{% generation %}`` tags mark other characters than were found."""
        text, tagged = self._render(conversation, conversation.messages, prompt=False, tags=True)
        if not text.startswith(found.text):
            return
        marked = [text[start:end].strip() for start, end in tagged if start < len(found.text)]
        end = self._frames[bool(conversation.tools)].end.strip()
        ours = [found.text[start:stop].strip() for start, stop in found.spans]
        agrees = len(marked) == len(ours) and all(
            theirs in (mine, mine.removesuffix(end).strip())
            for theirs, mine in zip(marked, ours, strict=True)
        )
        if not agrees:
            self.counts["generation tags disagree"] += 1
