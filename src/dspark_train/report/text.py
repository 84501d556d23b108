"""How the report writes numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def fixed(value: float, digits: int = 2) -> str:
    """Write a number with a fixed count of decimals and thousands separated."""
    return f"{value:,.{digits}f}"


def one_decimal(value: float) -> str:
    """Write a number with one decimal."""
    return fixed(value, 1)


def plain_number(value: float) -> str:
    """Write a number with as few characters as keep it honest: 1200 → 1,200, 0.5 → 0.5, 1e-5 → 1e-05."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.0e}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    """Write a share of one as a percentage."""
    return f"{100 * value:.4g} %"


def share(value: float, digits: int = 1) -> str:
    """Write a share of one as a percentage (narrow no-break space before the sign)."""
    return f"{100 * value:.{digits}f}\u202f%"


def factor(value: float) -> str:
    """Write a ratio: 1.62×."""
    return f"{value:.2f}×"


def duration(seconds: float) -> str:
    """Write a duration in the two units that matter: 18 min 20 s."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def size(count: float) -> str:
    """Write a number of bytes in decimal units."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} bytes"


def quantity(value: float) -> str:
    """Write a count as people say it: 14.2 million, 3,500."""
    for unit, scale in (("billion", 1e9), ("million", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:,.0f}"


def maybe(value: float | None, write_number: Callable[[float], str]) -> str:
    """Write a number, or a dash where there is none."""
    return "–" if value is None else write_number(value)


def share_or_dash(value: float | None) -> str:
    """Write a share as a percentage, or a dash where there is none."""
    return maybe(value, share)


def mode_name(temperature: float) -> str:
    """Name a sampling temperature: Greedy, Temperature 1."""
    return "Greedy" if temperature == 0 else f"Temperature {temperature:g}"


def split_name(split: str) -> str:
    """Name a split inside a sentence: validation, test, or held-out in runs of earlier versions."""
    return "held-out" if split == "heldout" else split


def drawn(answers: Mapping[str, Any]) -> str:
    """Say how a set's answers were drawn: temperature 0.7, top-p 0.8, top-k 20."""
    named = {name: name.replace("_", "-") for name in answers}
    known = [f"{named[name]} {value:g}" for name, value in answers.items() if isinstance(value, int | float)]
    left = [named[name] for name, value in answers.items() if not isinstance(value, int | float)]
    return ", ".join([*known, *([f"{' and '.join(left)} of the target's generation config"] if left else [])])


def signed(value: float, digits: int = 2) -> str:
    """Write a difference with its sign."""
    return f"{value:+.{digits}f}".replace("-", "−")


def interval(low: float, high: float, digits: int = 2) -> str:
    """Write an interval: 2.11–2.35."""
    return f"{low:.{digits}f}–{high:.{digits}f}"
