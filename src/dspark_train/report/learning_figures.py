"""Figures of training: learning curves of a run, and of several side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dspark_train.report.pictures import (
    GREY,
    PALETTE,
    Axis,
    Bar,
    Bars,
    Lines,
    Picture,
    Series,
)
from dspark_train.report.text import percent, plain_number, share
from dspark_train.run import Curve

MAX_POINTS = 240
"""Points of a curve that a page keeps; more are averaged in groups."""


def thin(curve: Curve, limit: int = MAX_POINTS) -> Curve:
    """Average neighbouring points so that at most ``limit`` are left."""
    if len(curve) <= limit:
        return curve
    groups = [curve[len(curve) * i // limit : len(curve) * (i + 1) // limit] for i in range(limit)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def smooth(curve: Curve) -> Curve:
    """Return a running mean over about a twentieth of the curve, centred, for the eye."""
    reach = len(curve) // 40
    if reach < 1:
        return curve
    smoothed = []
    for i, (x, _) in enumerate(curve):
        window = curve[max(0, i - reach) : i + reach + 1]
        smoothed.append((x, sum(y for _, y in window) / len(window)))
    return smoothed


def _trained(label: str, curve: Curve, colour: int) -> list[Series]:
    """A curve of training: where it is noisy, its points faint and their running mean on top."""
    if len(curve) < 2:
        return []
    points = thin(curve)
    reach = max(y for _, y in points) - min(y for _, y in points)
    bends = zip(points, points[1:], points[2:], strict=False)
    noise = sum(abs(2 * b[1] - a[1] - c[1]) for a, b, c in bends) / len(points)
    if noise < reach / 200:
        return [Series(label, points, colour)]
    return [Series("", points, colour, faint=True), Series(label, smooth(points), colour)]


def _judged(label: str, curve: Curve, colour: int) -> list[Series]:
    """A curve of validations, dashed."""
    if not curve:
        return []
    return [Series(label, thin(curve), colour, dashed=True, markers=len(curve) <= 40)]


def learning(curves: Mapping[str, Curve], decoded: str = "by decoding") -> list[Picture]:
    """Learning curves: accepted length, loss and its terms, acceptance, speed, and where the time goes.

    Args:
        curves: of ``metrics.csv``.
        decoded: what validation by decoding is over.
    """

    def get(name: str) -> Curve:
        return curves.get(name, [])

    def lines(title: str, series: Sequence[Series], unit: str, text: Callable = plain_number) -> Lines:
        return Lines(title, "Against optimiser steps", series, Axis("Optimiser step"), Axis(unit, text=text))

    terms = []
    for colour, (label, name) in enumerate(
        (("cross-entropy", "ce"), ("total variation", "tv"), ("confidence", "confidence"))
    ):
        validated = _judged(label, get(f"val/{name}"), colour)
        terms += validated or _trained(label, get(f"train/{name}"), colour)
    where = "validation conversations" if get("val/ce") else "training"
    rate = get("lr") or next((curve for name, curve in sorted(curves.items()) if name.startswith("lr")), [])
    return [
        lines(
            "Accepted length τ",
            [
                *_trained("expected, training", get("train/tau"), 0),
                *_judged("expected, validation", get("val/tau"), 1),
                *_judged(decoded, get("decode/tau"), 2),
            ],
            "tokens per round",
        ),
        lines(
            "Loss",
            [*_trained("training", get("train/loss"), 0), *_judged("validation", get("val/loss"), 1)],
            "loss",
        ),
        lines(f"Terms of the loss, {where}", terms, "value"),
        _expected_positions(curves),
        lines(f"Measured speedup, {decoded}", _judged("", get("decode/speedup"), 2), "times plain decoding"),
        lines("Learning rate", _trained("", rate, GREY), "learning rate"),
        lines("Gradient norm", _trained("", get("grad_norm"), GREY), "norm before clipping"),
        lines("Training speed", _trained("", get("tokens_per_second"), GREY), "tokens per second"),
        lines(
            f"Calibration error of raw confidences, {decoded}",
            _judged("", get("decode/ece"), 2),
            "ECE",
            percent,
        ),
        step_parts(curves),
    ]


def _expected_positions(curves: Mapping[str, Curve]) -> Lines:
    prefix = "val/accept_" if any(name.startswith("val/accept_") for name in curves) else "train/accept_"
    numbered = [(name.removeprefix(prefix), curve) for name, curve in curves.items()]
    found = sorted((int(number), curve) for number, curve in numbered if number.isdigit())
    steps = max(1, len(found) - 1)
    series = [
        Series(f"{position}", smooth(thin(curve)), shade=1 - index / steps)
        for index, (position, curve) in enumerate(found)
    ]
    where = "validation conversations" if prefix.startswith("val") else "training"
    title = f"Expected acceptance by draft position, {where}"
    return Lines(title, "One line a position", series, Axis("Optimiser step"), Axis("accepted", text=percent))


def step_parts(curves: Mapping[str, Curve]) -> Bars:
    """What share of a training step each part takes, averaged over the run."""
    bars = [
        Bar(name.removeprefix("time/"), sum(y for _, y in curve) / len(curve), GREY)
        for name, curve in curves.items()
        if name.startswith("time/") and curve
    ]
    return Bars("Where a training step's time goes", "Averaged over the run", bars, share)


def compared_curves(named: Mapping[str, Mapping[str, Curve]]) -> list[Lines]:
    """Learning curves of several runs, one line a run; only what two runs have at least."""
    pictures = []
    for column, title, unit in (
        ("val/tau", "Expected accepted length τ, teacher-forced, validation", "tokens per round"),
        ("decode/tau", "Accepted length τ by decoding", "tokens per round"),
        ("decode/speedup", "Measured speedup while training", "times plain decoding"),
        ("val/loss", "Loss, validation conversations", "loss"),
    ):
        lines = [
            Series(name, thin(curves[column]), colour, dashed=colour >= len(PALETTE), markers=True)
            for colour, (name, curves) in enumerate(named.items())
            if curves.get(column)
        ]
        if len(lines) > 1:
            pictures.append(Lines(title, "One line a run", lines, Axis("Optimiser step"), Axis(unit)))
    return pictures
