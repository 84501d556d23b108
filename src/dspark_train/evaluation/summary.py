"""From records to the result of an evaluation, ``evaluation/<name>.json``."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark_train.decoding.statistics import Array, Estimate, Sampled, bootstrap_weights, ratio
from dspark_train.evaluation.context import ContextResult, by_context
from dspark_train.evaluation.records import Record, pooled_bins

PLAIN = "plain"
"""Key of plain decoding, the denominator of every speedup."""


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are made."""

    confidence: float = 0.95
    resamples: int = 2000
    seed: int = 0


@dataclass(frozen=True)
class MethodResult:
    """One method on one group of prompts, or averaged over suites."""

    tau: Estimate
    speedup: Estimate | None = None
    """Over plain decoding; None where that was not measured."""
    conditional: list[float | None] = field(default_factory=list)
    """``[γ]`` acceptance given that all earlier tokens were accepted."""
    tokens_per_second: float | None = None
    ece: float | None = None
    """Calibration error of the confidences; None without any."""
    identical: int | None = None
    """Prompts whose output equals plain decoding's; None when sampling."""
    tokens: int | None = None
    rounds: int | None = None


@dataclass(frozen=True)
class GroupResult:
    """All methods on a suite or on a domain."""

    prompts: int
    methods: dict[str, MethodResult]
    """By key."""
    domain: str = ""
    """Of a suite: that of its prompts, or ``mixed``."""


@dataclass(frozen=True)
class MethodDifference:
    """τ of the first method minus that of the second, paired prompt by prompt."""

    first: str
    second: str
    macro: Estimate
    """Averaged over suites."""
    relative: float
    """To the second method's average."""
    suites: dict[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingResult:
    """All suites at one sampling temperature."""

    temperature: float
    suites: dict[str, GroupResult]
    macro: dict[str, MethodResult]
    """Average over suites, which count alike, by method."""
    domains: dict[str, GroupResult] = field(default_factory=dict)
    """Average over a domain's suites."""
    differences: list[MethodDifference] = field(default_factory=list)
    contexts: list[ContextResult] = field(default_factory=list)
    """By position of the anchor, where asked for."""


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation."""

    settings: dict[str, Any]
    """How it was made."""
    methods: list[dict[str, Any]]
    """Each with ``key`` and ``label``, and what else describes it."""
    results: list[SamplingResult]

    @property
    def labels(self) -> dict[str, str]:
        """Names of the methods by their keys."""
        return {method["key"]: method["label"] for method in self.methods}


@dataclass(frozen=True)
class Measured:
    """One method on one group of prompts."""

    tau: Sampled
    rate: Sampled
    """Tokens per second."""
    conditional: list[float | None]
    ece: float | None
    records: Sequence[Record]

    @classmethod
    def of(cls, records: Sequence[Record], weights: Array) -> Measured:
        """Pool the records of a group, in the order of the weights' columns."""
        reached = [sum(column) for column in zip(*(r.reached for r in records), strict=True)]
        kept = [sum(column) for column in zip(*(r.kept for r in records), strict=True)]
        return cls(
            tau=ratio([r.committed for r in records], [r.rounds for r in records], weights),
            rate=ratio([r.tokens for r in records], [r.seconds for r in records], weights),
            conditional=[k / r if r else None for k, r in zip(kept, reached, strict=True)],
            ece=calibration_error(records),
            records=records,
        )


def calibration_error(records: Iterable[Record]) -> float | None:
    """Return the ECE of the survival probability, averaged over positions; None without confidences."""
    bins = pooled_bins(records)
    return None if bins is None else float(bins.calibration_error.nanmean())


def summarise(
    records: Iterable[Record],
    methods: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    bootstrap: Bootstrap,
    edges: Sequence[int] = (),
) -> EvaluationResult:
    """Sum up an evaluation.

    Args:
        records: of all methods, suites and temperatures. A prompt that not every method has decoded is left
            out, so that methods are compared on the same prompts.
        methods: with ``key`` and ``label``, in the order of the table.
        settings: to be written into it.
        bootstrap: how intervals are made.
        edges: positions of anchors between which τ is reported too.
    """
    table: dict[float, dict[str, dict[int, dict[str, Record]]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        table[record.temperature][record.suite].setdefault(record.index, {})[record.method] = record
    keys = [str(method["key"]) for method in methods]
    results = [
        _result(temperature, suites, keys, bootstrap, edges) for temperature, suites in sorted(table.items())
    ]
    return EvaluationResult(
        settings={**settings, "confidence": bootstrap.confidence, "resamples": bootstrap.resamples},
        methods=[dict(method) for method in methods],
        results=[result for result in results if result.suites],
    )


def _result(
    temperature: float,
    suites: Mapping[str, Mapping[int, Mapping[str, Record]]],
    keys: Sequence[str],
    boot: Bootstrap,
    edges: Sequence[int],
) -> SamplingResult:
    measured: dict[str, dict[str, Measured]] = {}
    common: list[Mapping[str, Record]] = []
    entries: dict[str, GroupResult] = {}
    by_domain: dict[str, dict[str, list[Mapping[str, Record]]]] = defaultdict(lambda: defaultdict(list))
    for name, prompts in suites.items():
        whole = [methods for _, methods in sorted(prompts.items()) if all(key in methods for key in keys)]
        if not whole:
            continue
        common += whole
        weights = bootstrap_weights(len(whole), boot.resamples, boot.seed)
        measured[name] = {key: Measured.of([methods[key] for methods in whole], weights) for key in keys}
        domains = sorted({methods[keys[0]].domain for methods in whole})
        entries[name] = GroupResult(
            domain=domains[0] if len(domains) == 1 else "mixed",
            prompts=len(whole),
            methods={key: _method(measured[name], key, boot) for key in keys},
        )
        for methods in whole:
            by_domain[methods[keys[0]].domain][name].append(methods)
    drafting, chances = [key for key in keys if key != PLAIN], (boot.confidence, boot.resamples, boot.seed)
    return SamplingResult(
        temperature=temperature,
        suites=entries,
        domains={name: _domain(found, keys, boot) for name, found in sorted(by_domain.items())},
        macro={key: _macro(measured, key, boot) for key in keys} if measured else {},
        differences=_differences(measured, drafting, boot),
        contexts=by_context(common, drafting, edges, *chances) if edges else [],
    )


def _method(group: Mapping[str, Measured], key: str, boot: Bootstrap) -> MethodResult:
    one = group[key]
    plain = group.get(PLAIN)
    return MethodResult(
        tau=one.tau.estimate(boot.confidence) if key != PLAIN else Estimate(1.0, 1.0, 1.0),
        speedup=(one.rate / plain.rate).estimate(boot.confidence) if plain is not None else None,
        conditional=one.conditional,
        tokens_per_second=one.rate.value,
        ece=one.ece,
        identical=identical(one.records, plain.records) if plain is not None else None,
        tokens=sum(record.tokens for record in one.records),
        rounds=sum(record.rounds for record in one.records),
    )


def identical(one: Sequence[Record], other: Sequence[Record]) -> int | None:
    """Count the prompts with the same output in both; None when sampling: outputs may differ then."""
    if any(record.temperature > 0 for record in one):
        return None
    return sum(a.digest == b.digest for a, b in zip(one, other, strict=True))


def _domain(
    suites: Mapping[str, Sequence[Mapping[str, Record]]], keys: Sequence[str], boot: Bootstrap
) -> GroupResult:
    """The mean of a domain's suites, which count alike."""
    measured = {}
    for name, prompts in suites.items():
        weights = bootstrap_weights(len(prompts), boot.resamples, boot.seed)
        measured[name] = {key: Measured.of([methods[key] for methods in prompts], weights) for key in keys}
    return GroupResult(sum(map(len, suites.values())), {key: _macro(measured, key, boot) for key in keys})


def _macro(measured: Mapping[str, Mapping[str, Measured]], key: str, boot: Bootstrap) -> MethodResult:
    groups = list(measured.values())
    speedup = None
    if all(PLAIN in group for group in groups):
        rates = [group[key].rate / group[PLAIN].rate for group in groups]
        speedup = Sampled.mean(rates).estimate(boot.confidence)
    columns = itertools.zip_longest(*(group[key].conditional for group in groups))
    tau = Sampled.mean([group[key].tau for group in groups]).estimate(boot.confidence)
    return MethodResult(
        tau=tau if key != PLAIN else Estimate(1.0, 1.0, 1.0),
        speedup=speedup,
        conditional=[_mean(column) for column in columns],
        tokens_per_second=_mean([group[key].rate.value for group in groups]),
        ece=_mean([group[key].ece for group in groups]),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _differences(
    measured: Mapping[str, Mapping[str, Measured]], keys: Sequence[str], boot: Bootstrap
) -> list[MethodDifference]:
    """Return paired differences of τ between the first method and every other."""
    found: list[MethodDifference] = []
    for key in keys[1:] if measured else []:
        pairs = {name: group[keys[0]].tau - group[key].tau for name, group in measured.items()}
        base = Sampled.mean([group[key].tau for group in measured.values()])
        macro = Sampled.mean(list(pairs.values()))
        found.append(
            MethodDifference(
                first=keys[0],
                second=key,
                macro=macro.estimate(boot.confidence),
                relative=macro.value / base.value,
                suites={name: difference.estimate(boot.confidence) for name, difference in pairs.items()},
            )
        )
    return found
