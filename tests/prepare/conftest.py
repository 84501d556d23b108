"""Fixtures of this folder."""

from tiny_tokenizers import build_tokenizer, chatml, conversations_file  # noqa: F401
