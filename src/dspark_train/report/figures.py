"""One function per figure: from a result to the pictures that show it, in a page or in a PNG file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_train.decoding.acceptance import ALL
from dspark_train.report.drawing import save_png
from dspark_train.report.pictures import (
    GREY,
    PALETTE,
    Axis,
    Bar,
    Bars,
    Lines,
    Point,
    Series,
)
from dspark_train.report.text import fixed, mode_name, percent, share_or_dash, split_name

if TYPE_CHECKING:
    from dspark_train.decoding.cost import CostTable
    from dspark_train.decoding.measure import ModeResult
    from dspark_train.evaluation.ablate import StudyLine
    from dspark_train.studies.online_threshold import ThresholdDriftStudy
    from dspark_train.studies.reliability import ReliabilityBin, ReliabilityStudy
    from dspark_train.studies.rounds import AcceptanceStudy, DriftStudy, OfRounds, ThresholdStudy
    from dspark_train.studies.simulate import LoadStudy

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def over(study: OfRounds) -> str:
    """Say what rounds a study is of: 773 held-out rounds, greedy. Empty where its file does not say."""
    if not study.rounds:
        return ""
    split = f"{split_name(study.split)} " if study.split else ""
    sampling = "" if study.sampling_temperature is None else f", {sampled(study.sampling_temperature)}"
    return f"{study.rounds:,} {split}rounds{sampling}"


def sampled(temperature: float) -> str:
    """Name a sampling temperature inside a sentence: greedy, temperature 1."""
    return mode_name(temperature).lower()


# -- positions ----------------------------------------------------------------------------------------------


def _by_position(values: Sequence[float | None], offset: float = 0.0) -> list[Point]:
    """(1, value), (2, value), …, moved sideways; what is unknown becomes a gap."""
    return [(i + offset, math.nan if value is None else value) for i, value in enumerate(values, start=1)]


def positions(title: str, description: str, series: Sequence[Series]) -> Lines:
    """Shares by draft position, one line per series."""
    size = max((len(line.points) for line in series), default=1)
    place = Axis("Draft position", 0.5, size + 0.5, ticks=range(1, size + 1), text=lambda x: f"{x:.0f}")
    return Lines(title, description, series, place, Axis("accepted", 0.0, 1.0, ticks=SHARES, text=percent))


def acceptance(study: AcceptanceStudy) -> list[Lines]:
    """Conditional acceptance with 95 % intervals, and cumulative acceptance; one line a group of rounds."""
    middle = (len(study.groups) - 1) / 2
    given, together = [], []
    for colour, (name, group) in enumerate(study.groups.items()):
        shift = 0.08 * (colour - middle)
        bounds = zip(group.low, group.high, strict=True)
        errors = [(math.nan if a is None else a, math.nan if b is None else b) for a, b in bounds]
        points = _by_position(group.conditional, shift)
        label = f"{name} ({group.rounds:,}), τ {fixed(group.tau)}"
        given.append(Series(label, points, colour, markers=True, errors=errors, dashed=name == ALL))
        points = _by_position(group.cumulative, shift)
        together.append(Series(label, points, colour, markers=True, dashed=name == ALL))
    about = over(study)
    return [
        positions("Given that all earlier ones were accepted, by domain", about, given),
        positions("Together with all earlier ones, by domain", about, together),
    ]


def decoded_acceptance(modes: Mapping[str, ModeResult], split: str) -> list[Lines]:
    """Conditional and cumulative acceptance of ``decode``; one line a name."""
    about = f"decoding {split_name(split)} prompts".replace("  ", " ")
    pictures = []
    for measure, title in (
        ("conditional", "Given that all earlier ones were accepted"),
        ("cumulative", "Together with all earlier ones"),
    ):
        lines = []
        for colour, (name, mode) in enumerate(modes.items()):
            if values := getattr(mode.acceptance, measure):
                label = name + (f", {mode.prompts} prompts" if mode.prompts else "")
                lines.append(Series(label, _by_position(values), colour, markers=True))
        pictures.append(positions(title, about, lines))
    return pictures


def suite_positions(title: str, methods: Mapping[str, Sequence[float | None]]) -> Lines:
    """Conditional acceptance of benchmark suites; one line a method."""
    lines = [
        Series(label, _by_position(values), colour, markers=True)
        for colour, (label, values) in enumerate(methods.items())
    ]
    return positions(title, "Averaged over suites", lines)


# -- studies ------------------------------------------------------------------------------------------------


def thresholds(study: ThresholdStudy) -> list[Lines]:
    """What a static confidence threshold verifies and accepts; one line a group of rounds."""
    pictures = []
    for measure, title, axis in (
        (
            "acceptance_rate_with_bonus",
            "Acceptance rate, the target's own token included",
            Axis("tokens per row", 0.0, 1.0, text=percent),
        ),
        ("tokens_per_round", "Tokens per round", Axis("tokens")),
        ("verified_per_round", "Draft tokens verified per round", Axis("draft tokens", low=0.0)),
        ("rejected_per_round", "Draft tokens rejected per round", Axis("draft tokens", low=0.0)),
    ):
        lines = [
            Series(name, [(p.threshold, getattr(p, measure)) for p in points], colour, markers=True)
            for colour, (name, points) in enumerate(study.groups.items())
        ]
        pictures.append(Lines(title, over(study), lines, Axis("Confidence threshold", 0.0, 1.0), axis))
    return pictures


def reliability(study: ReliabilityStudy) -> list[Lines]:
    """Predicted against observed survival of the prefix, a square a position: grey as trained, blue calibrated.

    A dot's area is its share of the rounds.
    """
    pictures = []
    for index, (before, after) in enumerate(zip(study.bins_before, study.bins_after, strict=True)):
        error = f"{share_or_dash(study.ece_before[index])} → {share_or_dash(study.ece_after[index])}"
        lines = [
            *_dots("as trained", before, GREY, faint=True),
            *_dots("calibrated", after, 0, faint=False),
        ]
        unit = Axis("", 0.0, 1.0, ticks=(0.0, 0.5, 1.0), text=lambda x: f"{x:g}")
        about = f"Calibration error as trained and as calibrated: {error}"
        pictures.append(Lines(f"Position {index + 1}", about, lines, unit, unit, square=True))
    return pictures


def save_reliability(path: Path, study: ReliabilityStudy) -> None:
    """Write the reliability diagrams of all positions into one PNG file."""
    pictures = []
    for index, picture in enumerate(reliability(study)):
        scaled = f", T = {study.temperatures[index]:.2f}" if study.temperatures else ""
        error = f"ECE {share_or_dash(study.ece_before[index])} → {share_or_dash(study.ece_after[index])}"
        x, y = replace(picture.x, label=error), replace(picture.y, label="share accepted")
        pictures.append(replace(picture, title=f"{picture.title}{scaled}", x=x, y=y))
    title = "Predicted against observed survival of the prefix; grey as trained, blue calibrated"
    save_png(path, pictures, f"{title}\n{over(study)}")


def _dots(label: str, bins: Sequence[ReliabilityBin], colour: int, *, faint: bool) -> list[Series]:
    """A line through the bins that hold at least 0.5 % of the rounds, the others as dots beside it."""
    total = sum(entry.count for entry in bins) or 1.0
    series = []
    for solid in (True, False):
        kept = [entry for entry in bins if entry.count > 0 and (entry.count >= 0.005 * total) == solid]
        notes = [
            f"{label}: predicted {percent(entry.confidence)}, accepted {percent(entry.accepted)}, "
            f"{entry.count:g} rounds"
            for entry in kept
        ]
        radii = [1.6 + 5.0 * math.sqrt(entry.count / total) for entry in kept]
        points = [(entry.confidence, entry.accepted) for entry in kept]
        series.append(
            Series(
                label if solid else "",
                points,
                colour,
                faint=faint,
                line=solid,
                markers=True,
                radii=radii,
                notes=notes,
            )
        )
    return series


def drift(study: DriftStudy) -> Lines:
    """Mean calibration error along a load that changes from one domain to another."""
    kinds = (("frozen temperatures", "frozen", 1), ("following online", "online", 0))
    series = [
        Series(label, [(p.rounds, getattr(p, name)) for p in study.points], colour, markers=True)
        for label, name, colour in kinds
    ]
    honest = [(float(point.rounds), point.noise) for point in study.points]
    series.append(Series("honest probabilities", honest, GREY, dashed=True))
    return Lines(
        f"Mean calibration error while {study.first} gives way to {study.second}",
        over(study),
        series,
        Axis("Rounds replayed", low=0.0),
        Axis("ECE", low=0.0, text=percent),
        turn=_turn(study),
    )


def threshold_drift(study: ThresholdDriftStudy) -> Lines:
    """Accepted share of what a frozen and an online threshold verify, along a load that changes."""
    kinds = ((f"threshold {study.start:g}", "frozen", 1), ("following online", "online", 0))
    series = [
        Series(label, _known([(p.rounds, p) for p in study.points], name), colour, markers=True)
        for label, name, colour in kinds
    ]
    wanted = [(float(point.rounds), study.wanted) for point in study.points]
    series.append(Series("wanted", wanted, GREY, dashed=True))
    return Lines(
        f"Accepted share of verified draft tokens while {study.first} gives way to {study.second}",
        over(study),
        series,
        Axis("Rounds replayed", low=0.0),
        Axis("accepted", text=percent),
        turn=_turn(study),
    )


def _turn(study: DriftStudy | ThresholdDriftStudy) -> tuple[float, str, str]:
    """Where the first domain's rounds end."""
    change = max((float(point.rounds) for point in study.points if point.phase == study.first), default=0.0)
    return change, study.first, study.second


def load(study: LoadStudy) -> list[Lines]:
    """Throughput against per-user speed, and the verification budget against concurrency; a line a policy.

    Rings are extrapolated: some pass had more rows than were measured.
    """
    from dspark_train.studies.simulate import budget_points

    def speeds(colour: int, name: str) -> Series:
        points = study.policies[name]
        return Series(
            name,
            [(point.per_user, point.throughput) for point in points],
            colour,
            dashed=colour >= len(PALETTE),
            markers=True,
            hollow=[point.extrapolated for point in points],
            notes=[
                f"{name}, {fixed(point.requests, 1)} requests: {fixed(point.throughput, 0)} tokens/s together, "
                f"{fixed(point.per_user, 1)} each, {fixed(point.budget, 1)} rows a round"
                for point in points
            ],
        )

    return [
        Lines(
            "Throughput against speed per user",
            over(study),
            [speeds(colour, name) for colour, name in enumerate(study.policies)],
            Axis("Tokens per second, one user", log=10),
            Axis("tokens per second, all", log=10),
        ),
        Lines(
            "Rows verified per request",
            over(study),
            [
                Series(
                    name,
                    [(point.requests, point.budget) for point in points],
                    colour,
                    dashed=colour >= len(PALETTE),
                    markers=True,
                )
                for colour, (name, points) in enumerate(budget_points(study).items())
            ],
            Axis("Requests at work", log=2),
            Axis("rows per round, anchor included", low=0.0),
        ),
    ]


def costs(table: CostTable) -> list[Lines]:
    """Time of a target pass against its rows (median, p10 to p90), and of a round's parts against requests."""
    from dspark_train.decoding.cost import CURVES

    def curve(
        label: str, axis: Sequence[int], seconds: Sequence[float], colour: int, errors: Sequence[Point] = ()
    ) -> Series:
        points = [(float(x), 1000 * y) for x, y in zip(axis, seconds, strict=True)]
        return Series(label, points, colour, dashed=colour >= len(PALETTE), markers=True, errors=errors)

    spread = [(1000 * a, 1000 * b) for a, b in zip(table.seconds_p10, table.seconds_p90, strict=True)]
    whole = curve("", table.rows, table.seconds_median, 0, spread)
    parts = [
        curve(name.removesuffix("_seconds_median").replace("_", " "), table.requests, seconds, colour)
        for colour, name in enumerate(CURVES)
        if (seconds := getattr(table, name))
    ]
    context = f"{table.context} tokens of context"
    return [
        Lines(
            f"Target pass, {context}",
            "Median, p10 to p90",
            [whole],
            Axis("Rows of one target pass (tokens)", log=2),
            Axis("milliseconds, p10–p90", low=0.0),
        ),
        Lines(
            "Parts of a round",
            f"Medians, {context}",
            parts,
            Axis("Concurrent requests", log=2),
            Axis("milliseconds, median", low=0.0),
        ),
    ]


# -- decoding, suites, ablations ----------------------------------------------------------------------------

ROUND_PARTS = {
    "draft": "draft, parallel pass",
    "head": "sequential head",
    "schedule": "schedule",
    "verify": "target, verification",
    "target_head": "target, LM head",
    "sampling": "sampling",
    "bookkeeping": "everything else",
}
"""Parts of a round's time, in the order of the bars."""


def round_parts(mode: ModeResult) -> Bars:
    """Milliseconds of a round by part, and of a whole step of plain decoding."""
    parts = mode.speculative.milliseconds if mode.speculative else {}
    bars = [Bar(label, parts[part]) for part, label in ROUND_PARTS.items() if parts.get(part)]
    step = mode.plain.round_milliseconds if mode.plain else None
    if bars and step is not None:
        bars.append(Bar("plain step, whole", step, GREY))
    title = f"Milliseconds of a round by part, {sampled(mode.temperature)}"
    return Bars(title, "One bar a part", bars, fixed)


def lengths(title: str, bars: Sequence[Bar]) -> Bars:
    """Accepted lengths τ side by side."""
    return Bars(title, "One bar each", bars, fixed)


ABLATION_MEASURES = (
    ("expected", "Expected τ, temperature 1, teacher-forced, validation", "tokens per round"),
    ("tau", "Accepted length τ, greedy", "tokens per round"),
    ("tau_sampled", "Accepted length τ, temperature 1", "tokens per round"),
    ("speedup", "Speedup, greedy", "times plain decoding"),
    ("round_milliseconds", "Time of a greedy round", "milliseconds"),
)
"""What is drawn of every study of an ablation: attribute of a result, title, unit."""


def ablation(axis: str, places: Mapping[str, float], lines: Sequence[StudyLine]) -> list[Lines]:
    """Results of one study of an ablation, after the method's Figures 3 (layers) and 4 (block size).

    Args:
        axis: name of the varied axis.
        places: place on the x axis of each choice, by its name.
        lines: results along x.
    """
    names = {place: choice for choice, place in places.items()}
    margin = 0.06 * (max(names) - min(names) or 1.0)
    x = Axis(
        axis,
        min(names) - margin,
        max(names) + margin,
        ticks=sorted(names),
        text=lambda place: names.get(place, ""),
    )
    pictures = []
    for attribute, title, unit in ABLATION_MEASURES:
        series = [
            Series(line.label, points, colour, markers=True)
            for colour, line in enumerate(lines)
            if (points := _known(line.points, attribute))
        ]
        pictures.append(Lines(title, f"Against {axis}", series, x, Axis(unit)))
    return pictures


def _known(points: Sequence[tuple[float, Any]], attribute: str) -> list[Point]:
    return [(x, value) for x, result in points if (value := getattr(result, attribute)) is not None]
