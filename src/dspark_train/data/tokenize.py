"""Conversations to token ids and exact loss masks.

The rendered text is tokenized once. A generated range of characters becomes a range of tokens where both of its
ends are token boundaries. Where an end lies inside a token, the turn is tokenized as decoding would see it: the
prompt by itself, then the answer.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dspark_train.data.align import Aligner, TextTokens
from dspark_train.data.conversations import BadConversation, Conversation, DroppedConversation
from dspark_train.data.render import Renderer, SupervisedText
from dspark_train.errors import UserError

TokenSpans = tuple[Sequence[int] | NDArray[np.int32], list[tuple[int, int]]]
"""Token ids of a sequence, and its supervised ranges."""

TOKENIZE_VERSION = 2
"""Raised when the same conversation would give other tokens or another mask than before."""


@dataclass(frozen=True)
class Example:
    """One training sequence of T tokens."""

    input_ids: NDArray[np.int32]
    """``[T]``."""
    loss_mask: NDArray[np.bool_]
    """``[T]``: tokens that the target generated."""
    domain: str
    conversation: str
    """Id of the conversation that it comes from."""
    split: str | None = None

    @property
    def eligible_anchors(self) -> int:
        """Positions ``n`` such that ``n`` and ``n + 1`` are supervised."""
        return int(np.count_nonzero(self.loss_mask[:-1] & self.loss_mask[1:]))


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return 16 hexadecimal digits that differ where vocabulary, merges, added tokens or chat template do."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["truncation"] = state["padding"] = None
    content = json.dumps([state, tokenizer.chat_template], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


class ConversationEncoder:
    """Turns conversations into examples with one tokenizer and its chat template.

    Args:
        tokenizer: a fast Hugging Face tokenizer; it is not modified.
        max_length: the most tokens of an example.
        arguments: extra chat-template arguments for every conversation.
        clock: time that the template shows, where it shows one; now by default.

    Raises:
        UserError: no chat template (found when the first conversation needs one), or no fast tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int,
        arguments: Mapping[str, Any] | None = None,
        clock: datetime | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no character offsets: a fast tokenizer "
                "(tokenizer.json) is needed for exact masks"
            )
        if max_length < 2:
            raise UserError(f"max_length is {max_length}; it must be at least 2 tokens")
        self.max_length = max_length
        self.tokenizer, self._arguments, self._clock = tokenizer, arguments, clock
        self._renderer: Renderer | None = None
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._aligner = Aligner(self._backend)
        self._size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self._counts: Counter[str] = Counter()

    @property
    def renderer(self) -> Renderer:
        """The chat template; raises UserError where there is none."""
        if self._renderer is None:
            self._renderer = Renderer(self.tokenizer, self._arguments, self._clock)
        return self._renderer

    @property
    def counts(self) -> Counter[str]:
        """How often something had to be worked around or left out, by name."""
        return self._counts + (self._renderer.counts if self._renderer else Counter())

    def encode(self, conversation: Conversation) -> list[Example]:
        """Return the examples of one conversation; raise BadConversation where it gives none."""
        [result] = self.encode_many([conversation])
        if isinstance(result, BadConversation):
            result.add_note(f"conversation {conversation.id}")
            raise result
        return result

    def encode_many(self, conversations: Sequence[Conversation]) -> Iterator[list[Example] | BadConversation]:
        """Yield the examples of each conversation, or what is wrong with it; all texts are tokenized at once."""
        planned: list[list[SupervisedText] | BadConversation] = []
        for conversation in conversations:
            if conversation.exact:
                planned.append([])
                continue
            try:
                planned.append(self.renderer.supervised_texts(conversation))
            except BadConversation as error:
                planned.append(error)
        texts = [item.text for plan in planned if not isinstance(plan, BadConversation) for item in plan]
        tokens = self._aligner.tokenize(texts)
        for conversation, plan in zip(conversations, planned, strict=True):
            if isinstance(plan, BadConversation):
                yield plan
                continue
            pairs = [(item, next(tokens)) for item in plan]
            try:
                sequences = self._exact(conversation) if conversation.exact else self._align(pairs)
                yield self._examples(conversation, sequences)
            except BadConversation as error:
                yield error

    def continue_ids(self, conversation: Conversation) -> list[int]:
        """Return the tokens that the target reads after all messages: they end with the generation prompt."""
        text = self.renderer.render(conversation, conversation.messages, prompt=True)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens that the target reads before it answers new messages, rendered as in training.

        Raises:
            UserError: no chat template, or one that refuses them.
        """
        try:
            return self.continue_ids(Conversation("prompt", messages))
        except BadConversation as error:
            raise UserError(f"{self.tokenizer.name_or_path}: {error}") from error

    def decode_answer(self, ids: Sequence[int], finished: bool) -> str:
        """Return the text of generated tokens, without the end token where they are finished."""
        content = list(ids[:-1]) if finished else list(ids)
        text: str = self._backend.decode(content, skip_special_tokens=False)
        return text

    def _exact(self, conversation: Conversation) -> Iterator[TokenSpans]:
        """Yield ``(ids, supervised token ranges)`` of a row that brings its own tokens."""
        if conversation.input_ids is not None and conversation.loss_mask is not None:
            padded = np.concatenate(
                [[0], np.asarray(conversation.loss_mask, dtype=np.int8) != 0, [0]]
            ).astype(np.int8)
            edges = np.flatnonzero(np.diff(padded)).tolist()
            yield list(conversation.input_ids), list(zip(edges[::2], edges[1::2], strict=True))
            return
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for turn in conversation.turns:
            prompt, answer = list(turn.prompt_ids), list(turn.answer_ids)
            if ids and prompt[: len(ids)] != ids:
                self._counts["turns cut into examples of their own"] += 1
                yield ids, spans
                spans = []
            spans.append((len(prompt), len(prompt) + len(answer)))
            ids = prompt + answer
        yield ids, spans

    def _align(self, pairs: Sequence[tuple[SupervisedText, TextTokens]]) -> Iterator[TokenSpans]:
        """Yield ``(ids, supervised token ranges)`` of the rendered texts, in the order of their turns."""
        for item, tokenized in pairs:
            aligned: list[tuple[int, int]] = []
            apart: list[tuple[int, int]] = []
            for span in item.spans:
                if span[0] == span[1]:  # an answer that was cut before it said anything
                    continue
                tokens = tokenized.range(*span)
                if tokens is None:
                    apart.append(span)
                else:
                    aligned.append(tokens)
            for start, end in apart:
                ids = self._encode_apart(item.text[:start], item.text[start:end])
                if ids is None:
                    self._counts["turn unsupervised: its boundary falls inside a token"] += 1
                else:
                    self._counts["boundary inside a token: prompt and answer tokenized apart"] += 1
                    yield ids[0] + ids[1], [(len(ids[0]), len(ids[0]) + len(ids[1]))]
            if aligned:
                yield tokenized.ids, aligned
            elif not apart:
                raise DroppedConversation("no eligible anchor", "the answer is empty")

    def _encode_apart(self, prompt: str, answer: str) -> tuple[list[int], list[int]] | None:
        """Tokenize a prompt and the answer that continues it with a token boundary between them."""
        before = self._backend.encode(prompt, add_special_tokens=False).ids
        whole = self._backend.encode(prompt + answer, add_special_tokens=False).ids
        expected = self._backend.decode(whole, skip_special_tokens=False)
        for lead in ("", "\n", "a\n", "\n\n"):
            encoding = self._backend.encode(lead + answer, add_special_tokens=False)
            first = 0 if not lead else encoding.char_to_token(len(lead))
            if (
                first is None
                or (span := encoding.token_to_chars(first)) is None
                or (lead and span[0] < len(lead))
            ):
                continue
            after = encoding.ids[first:]
            if self._backend.decode(before + after, skip_special_tokens=False) == expected:
                return before, after
        return None

    def _examples(self, conversation: Conversation, sequences: Iterator[TokenSpans]) -> list[Example]:
        """Check, truncate and wrap; raise BadConversation where nothing can be trained on."""
        examples: list[Example] = []
        nothing = BadConversation("no supervised token")
        for ids, spans in sequences:
            if spans and spans[0] == (0, len(ids)):
                raise BadConversation("every token is supervised", "there is no prompt before the answer")
            tokens = np.asarray(ids, dtype=np.int64)
            if not tokens.size or tokens.min() < 0 or tokens.max() >= self._size:
                raise BadConversation("token id outside the vocabulary", f"must be in 0..{self._size - 1}")
            end = spans[-1][1] if spans else 0
            if end > self.max_length:
                self._counts["truncated to max_length"] += 1
                end = max(
                    (min(stop, self.max_length) for start, stop in spans if start < self.max_length),
                    default=0,
                )
                nothing = DroppedConversation(
                    "no anchor left after truncation", f"max_length {self.max_length}"
                )
            mask = np.zeros(end, dtype=np.bool_)
            for start, stop in spans:
                mask[start:stop] = True
            example = Example(
                tokens[:end].astype(np.int32),
                mask,
                conversation.domain,
                conversation.id,
                conversation.split,
            )
            if example.eligible_anchors:
                examples.append(example)
            elif mask.any() and not isinstance(nothing, DroppedConversation):
                nothing = DroppedConversation("no eligible anchor", "no two supervised tokens in a row")
        if not examples:
            raise nothing
        return examples
