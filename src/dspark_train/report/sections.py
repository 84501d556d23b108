"""Chapters of a run's report. Each function returns a section, or None where the run has no data for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark_train.decoding.measure import DecodeResult, ExampleResult, ModeResult
from dspark_train.report import figures, learning_figures
from dspark_train.report.page import Example, Figure, Section, Table, Token
from dspark_train.report.text import (
    drawn,
    factor,
    fixed,
    maybe,
    mode_name,
    one_decimal,
    share_or_dash,
    split_name,
)
from dspark_train.run import Curve
from dspark_train.studies.rounds import AcceptanceStudy


def named(modes: Mapping[str, ModeResult]) -> dict[str, ModeResult]:
    """Modes by their names on the page: Greedy, Temperature 1."""
    return {mode_name(mode.temperature): mode for mode in modes.values()}


def decoded_validation(config: Mapping[str, Any]) -> str:
    """Say what validation by decoding is over: decoding 4 validation prompts, greedy."""
    trainer = config.get("trainer")
    callbacks = trainer.get("callbacks") if isinstance(trainer, dict) else None
    for callback in callbacks if isinstance(callbacks, list) else []:
        if isinstance(callback, dict) and str(callback.get("class_path", "")).endswith("DecodeValidation"):
            settings = callback.get("init_args") or {}
            split = split_name(str(settings.get("split", "validation")))
            sampling = figures.sampled(float(settings.get("temperature", 0.0)))
            return f"decoding {settings.get('prompts', 'some')} {split} prompts, {sampling}"
    return "by decoding"


def learning(
    curves: dict[str, Curve], decoded: str = "by decoding", answers: Mapping[str, Any] | None = None
) -> Section | None:
    """Learning curves: loss terms, accepted length, acceptance per position, speed.

    Args:
        curves: of the run.
        decoded: what validation by decoding is over.
        answers: how the answers of the data were drawn, where that is known.
    """
    shown = [Figure(picture) for picture in learning_figures.learning(curves, decoded) if picture.drawable]
    if not shown:
        return None
    how = f", drawn at {drawn(answers)}" if answers else ""
    lead = (
        "Dashed lines are measured on validation conversations. τ counts the target's own token. Expected τ is "
        f"teacher-forced: what the two distributions would accept at temperature 1 along the set's own answers{how}. "
        "What decoding accepts stands under Acceptance."
    )
    return Section("learning", "Learning curves", lead, "Learning", shown, source="metrics.csv")


def acceptance(decode: DecodeResult, study: AcceptanceStudy | None = None) -> Section | None:
    """Acceptance per draft position, conditional and cumulative, by domain, and τ by domain."""
    modes = named(decode.modes)
    drawn = {name: mode for name, mode in modes.items() if mode.acceptance.conditional}
    if not drawn and study is None:
        return None
    shown, tables = _mode_figures(drawn, decode.split) if drawn else [], []
    if study is not None:
        shown += _domain_figures(study)
    domains = sorted({domain for mode in modes.values() for domain in mode.domains})
    if domains:
        rows = [
            [d, *(fixed(m.domains[d].tau) if d in m.domains else "–" for m in modes.values())]
            for d in domains
        ]
        tables.append(Table("Accepted length τ by domain", ["Domain", *modes], rows))
    lead = (
        "How often the target keeps a draft token, by its place in the block, "
        f"decoding {split_name(decode.split or 'heldout')} prompts."
    )
    if study is not None and (about := figures.over(study)):
        lead += f" By domain: over {about}."
    files = [name for name, used in (("decode.json", drawn), ("studies/acceptance.json", study)) if used]
    return Section(
        "acceptance",
        "Acceptance by position",
        lead,
        "Acceptance",
        shown,
        tables,
        source=" and ".join(files),
    )


def _domain_figures(study: AcceptanceStudy) -> list[Figure]:
    captions = ("In brackets: rounds. Whiskers are 95 % intervals.", "In brackets: rounds.")
    shown = []
    for measure, picture, caption in zip(
        ("conditional", "cumulative"), figures.acceptance(study), captions, strict=True
    ):
        shares = {name: getattr(group, measure) for name, group in study.groups.items()}
        rows = [
            [name, f"{study.groups[name].rounds:,}", *map(share_or_dash, values)]
            for name, values in shares.items()
        ]
        size = max(map(len, shares.values()))
        table = Table(picture.title, ["", "Rounds", *map(str, range(1, size + 1))], rows, folded=True)
        shown.append(Figure(picture, caption, table))
    return shown


def _mode_figures(modes: Mapping[str, ModeResult], split: str) -> list[Figure]:
    captions = {
        "conditional": "A flat line: later tokens are as good as early ones.",
        "cumulative": "The share of rounds that get at least this far.",
    }
    shown = []
    for (measure, caption), picture in zip(
        captions.items(), figures.decoded_acceptance(modes, split), strict=True
    ):
        shares = {name: getattr(mode.acceptance, measure) for name, mode in modes.items()}
        if not all(shares.values()):
            continue
        rows = [[name, *map(share_or_dash, values)] for name, values in shares.items()]
        header = ["", *map(str, range(1, max(map(len, shares.values())) + 1))]
        table = Table(f"Acceptance, {picture.title.lower()}", header, rows, folded=True)
        shown.append(Figure(picture, caption, table))
    return shown


def speed(decode: DecodeResult) -> Section | None:
    """Plain against speculative decoding: tokens per second, and where the time of a round goes."""
    modes = {
        name: (mode, mode.plain, mode.speculative)
        for name, mode in named(decode.modes).items()
        if mode.plain is not None and mode.speculative is not None
    }
    if not modes:
        return None
    caption = "Grey: a step of plain decoding, which gives one token."
    shown = [Figure(figures.round_parts(mode), caption) for mode, _, _ in modes.values()]
    cells = {
        name: {
            "Plain tokens/s": fixed(plain.tokens_per_second, 1),
            "Speculative tokens/s": fixed(speculative.tokens_per_second, 1),
            "Speedup": "–" if mode.speedup is None else factor(mode.speedup.value),
            "τ": fixed(mode.tau),
            "Rows per round, anchor included": maybe(mode.verified_rows_per_round, one_decimal),
            "Plain ms/step": maybe(plain.round_milliseconds, one_decimal),
            "Speculative ms/round": maybe(speculative.round_milliseconds, one_decimal),
        }
        for name, (mode, plain, speculative) in modes.items()
    }
    header = [
        title for title in next(iter(cells.values())) if any(row[title] != "–" for row in cells.values())
    ]
    rows = [[name, *(row[title] for title in header)] for name, row in cells.items()]
    table = Table("Plain against speculative decoding", ["", *header], rows)
    lead = "The same prompts, decoded in turns by the same decoder with and without the draft"
    if decode.batch_size:
        lead += ", one at a time" if decode.batch_size == 1 else f", {decode.batch_size} at once"
    lead += f"; verification policy: {decode.policy}." if decode.policy else "."
    return Section("speed", "Speed", lead, "", shown, [table], source="decode.json")


def examples(found: Sequence[ExampleResult], limit: int = 6) -> Section | None:
    """Generations with every token coloured by who wrote it; one domain after the other."""
    by_domain: dict[str, list[ExampleResult]] = {}
    for item in found:
        if item.tokens and len(item.tokens) == len(item.origin):
            by_domain.setdefault(item.domain, []).append(item)
    shown: list[ExampleResult] = []
    while len(shown) < limit and any(by_domain.values()):
        for items in by_domain.values():
            if items and len(shown) < limit:
                shown.append(items.pop(0))
    if not shown:
        return None
    made = []
    for item in shown:
        tokens = [Token(text, origin) for text, origin in zip(item.tokens, item.origin, strict=True)]
        drafted = sum(token.origin == "draft" for token in tokens)
        note = f"{drafted} of {len(tokens)} tokens from the draft"
        made.append(Example(item.prompt, item.domain, tokens, note))
    lead = "The target checked every token; those on blue the draft had guessed right, several at a time."
    return Section("examples", "Example generations", lead, "Examples", examples=made, source="decode.json")


def recipe(
    settings: Sequence[tuple[str, str]], config_text: str, source: str = "config.yaml and run.json"
) -> Section | None:
    """The recipe: its main settings, and the whole configuration to unfold."""
    if not settings and not config_text:
        return None
    return Section(
        "recipe",
        "Recipe",
        settings=settings,
        listing=config_text,
        listing_title="The whole configuration",
        source=source,
    )
