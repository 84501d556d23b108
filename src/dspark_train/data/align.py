"""From ranges of characters to ranges of tokens, exactly or not at all.

The tokens of a byte-level tokenizer, one after the other, are the bytes of the text. There, token boundaries are
sums of byte lengths. That is fast, and right for the spaces that such tokenizers leave out of their offsets. For
all other tokenizers, and where the sums do not give the text's length, the offsets are used.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer


class TextTokens:
    """The tokens of one text.

    Args:
        text: what was tokenized.
        ids: ``[T]`` int32.
        encoding: the tokenizer's answer with offsets; None where ``ends`` is given.
        ends: ``[T]`` number of bytes of the text up to the end of each token.
    """

    def __init__(
        self, text: str, ids: NDArray[np.int32], encoding: Encoding | None, ends: NDArray[np.int64] | None
    ) -> None:
        self.text, self.ids = text, ids
        self._encoding, self._ends = encoding, ends

    def range(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the tokens that cover exactly ``text[start:end]``; None where a token crosses one of its ends."""
        if end <= start:
            return None
        if self._ends is None:
            assert self._encoding is not None
            return _range_by_offsets(self._encoding, self.text, start, end)
        if self.text.isascii():
            places = (start, end)
        else:
            before = len(self.text[:start].encode())
            places = (before, before + len(self.text[start:end].encode()))
        first = 0 if places[0] == 0 else int(np.searchsorted(self._ends, places[0])) + 1
        last = int(np.searchsorted(self._ends, places[1]))
        if (first and self._ends[first - 1] != places[0]) or self._ends[last] != places[1]:
            return None
        return first, last + 1


class Aligner:
    """Tokenizes texts such that ranges of characters can be found in them.

    Args:
        backend: the tokenizer; a copy of the caller's, without truncation and padding.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        state = json.loads(backend.to_str())
        self._composes = _is_composer(state["normalizer"])
        self._lengths = _byte_lengths(state, backend) if _is_byte_level(state) else None

    def tokenize(self, texts: Sequence[str]) -> Iterator[TextTokens]:
        """Yield the tokens of each text; special tokens are not added."""
        if self._lengths is None:
            for text, encoding in zip(
                texts, self._backend.encode_batch(texts, add_special_tokens=False), strict=True
            ):
                yield TextTokens(text, np.asarray(encoding.ids, dtype=np.int32), encoding, None)
            return
        for text, encoding in zip(
            texts, self._backend.encode_batch_fast(texts, add_special_tokens=False), strict=True
        ):
            ids = np.asarray(encoding.ids, dtype=np.int32)
            ends = np.cumsum(self._lengths[ids])
            ascii_only = text.isascii()
            size = len(text) if ascii_only else len(text.encode())
            kept = ascii_only or not self._composes or unicodedata.is_normalized("NFC", text)
            if kept and len(ends) and ends[-1] == size:
                yield TextTokens(text, ids, None, ends)
            else:
                yield TextTokens(text, ids, self._backend.encode(text, add_special_tokens=False), None)


def _parts(stage: Any) -> list[dict[str, Any]]:
    """The steps of a tokenizer stage, sequences unpacked."""
    if stage is None:
        return []
    for name in ("pretokenizers", "normalizers", "decoders"):
        if name in stage:
            return [part for inner in stage[name] for part in _parts(inner)]
    return [stage]


def _is_composer(normalizer: Any) -> bool:
    return [part["type"] for part in _parts(normalizer)] == ["NFC"]


def _is_byte_level(state: dict[str, Any]) -> bool:
    """Whether the tokens' bytes are the text's, as far as the kind of tokenizer tells."""
    if (
        state["normalizer"] is not None
        and _parts(state["normalizer"])
        and not _is_composer(state["normalizer"])
    ):
        return False
    return any(part["type"] == "ByteLevel" for part in _parts(state["pre_tokenizer"]))


def _byte_lengths(state: dict[str, Any], backend: Tokenizer) -> NDArray[np.int64]:
    """Bytes of text that each token stands for: one per character, but UTF-8 in added tokens."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    for token, index in vocabulary.items():
        lengths[index] = len(token)
    for added in state["added_tokens"]:
        lengths[added["id"]] = len(added["content"].encode())
    return lengths


def _range_by_offsets(encoding: Encoding, text: str, start: int, end: int) -> tuple[int, int] | None:
    first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
    if first is None or last is None:
        return _range_by_all_offsets(encoding, text, start, end)
    count = len(encoding.ids)
    while last + 1 < count and (following := encoding.token_to_chars(last + 1)) and following[0] < end:
        last += 1
    head, tail = encoding.token_to_chars(first), encoding.token_to_chars(last)
    if head is None or tail is None or head[0] < start or tail[1] > end:
        return None
    return None if _hides_space(encoding, text, start, first) else (first, last + 1)


def _range_by_all_offsets(encoding: Encoding, text: str, start: int, end: int) -> tuple[int, int] | None:
    """Find the tokens of a range where some characters are in no token's offsets (trimmed, or normalised away)."""
    offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    begins, ends = offsets[:, 0], offsets[:, 1]
    inside = np.flatnonzero((begins >= start) & (ends <= end) & (ends > begins))
    crossing = (begins < end) & (ends > end) | (begins < start) & (ends > start)
    if not inside.size or crossing.any():
        return None
    first, last = int(inside[0]), int(inside[-1])
    if inside.size != last + 1 - first or _hides_space(encoding, text, start, first):
        return None
    return first, last + 1


def _hides_space(encoding: Encoding, text: str, start: int, token: int) -> bool:
    """Whether a token holds the space before ``start``, left out of its offsets."""
    if not start or text[start - 1] != " " or text[start] == " ":
        return False
    return encoding.tokens[token].startswith(("Ġ", "▁", " "))
