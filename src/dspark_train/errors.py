"""The one exception that means "the user can fix this"."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: the command line prints its message as one line and exits with status 2, without a traceback.

    The message says what was wrong (with the value received), where, and what to do about it.
    """
