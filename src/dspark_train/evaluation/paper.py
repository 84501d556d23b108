"""The paper's Table 1 as data, and what it was measured under."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dspark_train.evaluation.options import PROTOCOLS

SUITES = (
    "gsm8k",
    "math500",
    "aime25",
    "mbpp",
    "humaneval",
    "livecodebench",
    "mt-bench",
    "alpaca",
    "arena-hard-v2",
)
ACCEPTED_LENGTH: Mapping[str, Mapping[str, Sequence[float]]] = {
    "Qwen3-4B": {
        "DSpark": (6.11, 5.70, 4.89, 5.13, 5.38, 4.86, 3.64, 3.54, 3.29),
        "DFlash": (5.40, 4.85, 4.15, 4.40, 4.74, 4.18, 3.07, 2.96, 2.83),
        "Eagle3": (5.14, 4.62, 3.92, 3.69, 4.16, 3.77, 2.39, 2.26, 2.55),
    },
    "Qwen3-8B": {
        "DSpark": (6.17, 5.78, 5.01, 5.16, 5.52, 5.17, 3.72, 3.58, 3.21),
        "DFlash": (5.33, 4.91, 4.07, 4.36, 4.64, 4.39, 3.11, 2.98, 2.81),
        "Eagle3": (5.30, 4.77, 3.91, 3.96, 4.33, 4.17, 2.66, 2.54, 2.54),
    },
    "Qwen3-14B": {
        "DSpark": (6.21, 5.74, 4.94, 5.26, 5.43, 5.02, 3.70, 3.58, 3.13),
        "DFlash": (5.41, 4.84, 3.98, 4.44, 4.59, 4.33, 3.10, 2.94, 2.72),
        "Eagle3": (5.24, 4.60, 3.71, 3.81, 4.14, 4.01, 2.62, 2.47, 2.48),
    },
    "Gemma4-12B": {
        "DSpark": (6.05, 5.78, 5.12, 5.11, 5.64, 4.51, 3.49, 3.35, 2.92),
        "DFlash": (5.45, 5.04, 4.22, 4.39, 4.95, 3.70, 2.98, 2.84, 2.59),
        "Eagle3": (5.87, 5.46, 4.83, 4.72, 5.37, 4.16, 3.19, 3.06, 2.72),
    },
}
"""Table 1 of the paper: accepted length τ, the target's own token included, by target, drafter and suite."""
TEMPERATURE = 1.0
BLOCK_SIZE = 7


def row_of(target: str) -> str | None:
    """The paper's target that a name or path means; None for another one."""
    plain = re.sub(r"[^a-z0-9]", "", target.rsplit("/", 1)[-1].lower())
    return next((name for name in ACCEPTED_LENGTH if plain.startswith(name.replace("-", "").lower())), None)


def accepted_length(target: str, drafter: str, suite: str) -> float:
    """The paper's τ of one of its suites."""
    return ACCEPTED_LENGTH[target][drafter][SUITES.index(suite)]


def deviations(settings: Mapping[str, Any]) -> list[str]:
    """What differs from the conditions of Table 1, in words; empty where an evaluation does not say how it was made.

    Args:
        settings: of the evaluation, as its result holds them.
    """
    if "protocol" not in settings:
        return []
    found = []
    target, sampled = settings["target"], settings["temperatures"]
    template, trained = settings["template"], settings["trained_with"]
    row = row_of(target)
    if row is None:
        found.append(f"target {target}, which the paper has not")
    elif row.startswith("Qwen3") and json.loads(template).get("enable_thinking") is not False:
        found.append("thinking is not switched off")
    if template != trained:
        found.append(f"prompts rendered with {template}, training's with {trained or 'what is not recorded'}")
    elif settings["template_share"] < 1:
        found.append(f"prompts rendered with {template}, as {settings['template_share']:.0%} of training's")
    for name, of in settings["sizes"].items():
        if name not in SUITES:
            found.append(f"{name} is no suite of the paper")
        elif of["prompts"] < of["whole"]:
            left_out = len(settings["too_long"].get(name, ()))
            why = f" ({left_out} longer than the target's context)" if left_out else ""
            found.append(f"{of['prompts']} of {name}'s {of['whole']:,} prompts{why}")
    if settings["max_new_tokens"] != PROTOCOLS["paper"].max_new_tokens:
        found.append(
            f"{settings['max_new_tokens']:,} new tokens at most, not {PROTOCOLS['paper'].max_new_tokens:,}"
        )
    if TEMPERATURE not in sampled:
        found.append("nothing is sampled at temperature 1")
    if settings["top_k"] or settings["top_p"] < 1:
        found.append(f"top-k {settings['top_k']} and top-p {settings['top_p']:g}, not the whole distribution")
    if settings["policy"] != "fixed":
        found.append(f"policy {settings['policy']}, not whole blocks")
    if settings["turns"] != 1:
        found.append(f"up to {settings['turns']} turns of a prompt, not the first alone")
    for label, block_size in settings["block_sizes"].items():
        if block_size != BLOCK_SIZE:
            found.append(f"{label} drafts {block_size} tokens, not {BLOCK_SIZE}")
    return found
