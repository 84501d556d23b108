"""Keeps tokens, keys and passwords out of whatever is shown: reports, comparisons, model cards."""

from __future__ import annotations

import re
from typing import Any

SECRET_NAMES = re.compile(
    r"(^|_)(token|tokens?_file|api_?key|key|secret|password|passwd|credentials?|authorization)$",
    re.IGNORECASE,
)
"""Names of settings whose value is never written."""
SECRET_VALUES = re.compile(
    r"(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[0-9A-Z]{16})|(?<=://)[^/\s@]+@"
)
"""Keys of well-known services, and credentials inside addresses."""
LEFT_OUT = "(left out)"
"""Stands where a secret stood."""


def redact(value: Any, name: str = "") -> Any:
    """Return a setting without secrets: by its name, or by what it looks like."""
    if isinstance(value, dict):
        return {key: redact(entry, str(key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [redact(entry, name) for entry in value]
    if value is not None and SECRET_NAMES.search(name):
        return LEFT_OUT
    return SECRET_VALUES.sub(LEFT_OUT, value) if isinstance(value, str) else value
