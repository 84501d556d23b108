"""Lists as options: one grammar on the command line and in YAML. Importing this costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

T = TypeVar("T")


class Listed(tuple[T, ...]):
    """Values of one type, given with commas between (``0,1``) or as a YAML list (``[0, 1]``)."""

    kind: ClassVar[Callable[[str], Any]]
    """Reads one value; a ValueError says that it is none."""
    plural: ClassVar[str]
    """What the values are, for messages."""

    @classmethod
    def parse(cls, given: Any) -> Self:
        """Read what a command line or a YAML file holds. A value alone is a list of one.

        Raises:
            ValueError: it is no list of such values.
        """
        parts = given.split(",") if isinstance(given, str) else given
        parts = parts if isinstance(parts, list | tuple) else [parts]
        try:
            if any(isinstance(part, bool) or not isinstance(part, str | int | float) for part in parts):
                raise ValueError(given)
            return cls(cls.kind(word) for part in parts if (word := str(part).strip()))
        except ValueError:
            raise ValueError(
                f"{given!r} must be {cls.plural} with commas between, or a list in brackets"
            ) from None

    def __str__(self) -> str:
        return ",".join(str(value).removesuffix(".0") for value in self)


class Numbers(Listed[float]):
    """Numbers."""

    kind = float
    plural = "numbers"


class Integers(Listed[int]):
    """Whole numbers."""

    kind = int
    plural = "whole numbers"


class Names(Listed[str]):
    """Words that are names."""

    kind = str
    plural = "names"
