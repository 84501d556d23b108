"""Accepted length by position: whether a draft holds beyond the lengths that it was trained on."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dspark_train.decoding.statistics import Estimate, bootstrap_weights, ratio
from dspark_train.errors import UserError
from dspark_train.evaluation.records import Record


@dataclass(frozen=True)
class ContextResult:
    """Rounds of all suites whose anchor lies in one range of positions, by method."""

    first: int
    """Position."""
    last: int | None
    """Position, inclusive; None for no end."""
    tau: dict[str, Estimate]
    """None where a method has no round there."""
    rounds: dict[str, int]


def context_edges(words: Iterable[str]) -> list[int]:
    """Positions at which a range ends and the next begins; ``4k`` is 4,096.

    Raises:
        UserError: something else than ascending positions.
    """
    words = list(words)
    found = [re.fullmatch(r"(\d+)(k?)", word.lower()) for word in words]
    edges = [int(match[1]) * (1024 if match[2] else 1) for match in found if match]
    if len(edges) < len(words) or edges != sorted(set(edges)) or 0 in edges:
        raise UserError(f"by_context {','.join(words)} must be ascending positions, such as 1k,4k,16k")
    return edges


def by_context(
    prompts: Sequence[Mapping[str, Record]],
    keys: Sequence[str],
    edges: Sequence[int],
    confidence: float,
    resamples: int,
    seed: int,
) -> list[ContextResult]:
    """τ by the position of the anchor; ranges without a round are left out.

    Args:
        prompts: records of all methods, prompt by prompt.
        keys: of the methods that draft.
        edges: of :func:`context_edges`.
        confidence: of the intervals, which are bootstrapped over prompts.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        UserError: records of an earlier version, which hold no positions.
    """
    if not prompts:
        return []
    if any(prompt[key].rounds > len(prompt[key].anchors) for prompt in prompts for key in keys):
        raise UserError(
            "by_context: records of this evaluation come from an earlier version and hold no positions: choose "
            "another --name, or pass --restart true to measure again"
        )
    weights = bootstrap_weights(len(prompts), resamples, seed)
    found = []
    for first, end in itertools.pairwise([0, *edges, None]):
        assert first is not None
        tau, rounds = {}, {}
        for key in keys:
            inside = [
                [
                    gained
                    for anchor, gained in zip(prompt[key].anchors, prompt[key].gained, strict=True)
                    if first <= anchor and (end is None or anchor < end)
                ]
                for prompt in prompts
            ]
            counts = [len(part) for part in inside]
            tau[key] = ratio([sum(part) for part in inside], counts, weights).estimate(confidence)
            rounds[key] = sum(counts)
        if any(rounds.values()):
            found.append(ContextResult(first, None if end is None else end - 1, tau, rounds))
    return found
