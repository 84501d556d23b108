"""What a chat template makes of a conversation, and which characters of it the target generated.

The template is a black box. It is rendered twice around a turn: up to the turn with the generation prompt
(what the target reads), and up to and including the turn. Where the second text continues the first, the
continuation is what the target generated, plus what the template puts around it; a rendering with a marker
as content tells these two apart. No separator, role name or pattern of any model is known here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from dspark_train.data.conversations import BadConversation, Conversation
from dspark_train.errors import UserError

MARKER = "zq7 marker 7qz"
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

    @property
    def inserted(self) -> int:
        """Characters of ``before`` that the target does not generate: none if it is white space, else all."""
        return len(self.before) if self.before.strip() else 0


def _is_plain(message: Mapping[str, Any]) -> bool:
    return _is_text(message) and message["content"] != ""


def _is_text(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content"), str) and len(message) == 2


class Renderer:
    """Renders conversations with one chat template and finds the generated characters.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        arguments: extra template arguments for every conversation (``enable_thinking``, …).

    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
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
        tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(
            tokenizer.all_special_tokens
        )
        markers = sorted((re.escape(token) for token in tokens if token), key=len, reverse=True)
        self._end_pattern = re.compile(r"\s*(?:" + "|".join(markers) + ")") if markers else None
        self._tagged = any(_GENERATION_TAG.search(text) for text in self._template.values())
        self._frames: dict[bool, _Frame] = {}
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
        try:
            if tools is None and not tags and all(map(_is_text, messages)):
                # nothing that the library would convert, which takes it as long as the rendering itself
                text: str = _compile_jinja_template(self._template[False]).render(
                    messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **variables
                )
                return text, []
            rendered: Any = render_jinja_template(
                [[dict(message) for message in messages]],
                tools=tools,  # type: ignore[arg-type]
                chat_template=self._template[tools is not None],
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=tags,
                **variables,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
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
                shown[turn] = None if span is None else (whole[: span[1]], *span)
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
            raise BadConversation("no assistant turn continues its generation prompt")
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
        if not tail.endswith(frame.after):
            raise BadConversation(
                "the template ends this turn unlike others", f"message {turn}: {tail[-60:]!r}"
            )
        body = tail[: len(tail) - len(frame.after)]
        inserted = frame.inserted if body.startswith(frame.before) else 0
        if plain and body.strip() == said.strip():
            inserted = 0  # the content itself holds what the template would insert
        self._check_body(body[inserted:], message, turn)
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
        others = (message.get("tool_calls"), message.get("reasoning_content"), message.get("reasoning"))
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
        return _Frame(before, after, match.group() if match else "")

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
