"""From records to the table of an evaluation, ``evaluation/<name>.json``::

    {"settings": {…}, "methods": [{"key", "label", "kind", …}],
     "results": [{"temperature": 0.0,
                  "suites": {name: {"domain", "prompts", "methods": {key: cell}}},
                  "domains": {name: {"prompts", "methods": {key: cell}}},
                  "macro": {key: cell},
                  "differences": [{"first", "second", "macro": estimate, "relative",
                                   "suites": {name: estimate}}]}]}

A cell is ``{"tau": estimate, "speedup": estimate or null, "conditional": [γ], "tokens_per_second", "ece",
"identical": prompts whose output equals plain decoding's or null, "tokens", "rounds"}``; an estimate is
``{"value", "low", "high"}``. The macro average weighs suites alike.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark_train.decoding.statistics import Array, Sampled, bootstrap_weights, ratio
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
) -> dict[str, Any]:
    """Make the table of an evaluation.

    Args:
        records: of all methods, suites and temperatures. A prompt that not every method has decoded is left
            out, so that methods are compared on the same prompts.
        methods: with ``key`` and ``label``, in the order of the table.
        settings: to be written into it.
        bootstrap: how intervals are made.
    """
    table: dict[float, dict[str, dict[int, dict[str, Record]]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        table[record.temperature][record.suite].setdefault(record.index, {})[record.method] = record
    keys = [str(method["key"]) for method in methods]
    results = [_result(temperature, suites, keys, bootstrap) for temperature, suites in sorted(table.items())]
    return {
        "settings": {**settings, "confidence": bootstrap.confidence, "resamples": bootstrap.resamples},
        "methods": [dict(method) for method in methods],
        "results": [result for result in results if result["suites"]],
    }


def _result(
    temperature: float,
    suites: Mapping[str, Mapping[int, Mapping[str, Record]]],
    keys: Sequence[str],
    boot: Bootstrap,
) -> dict[str, Any]:
    measured: dict[str, dict[str, Measured]] = {}
    entries: dict[str, Any] = {}
    by_domain: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for name, prompts in suites.items():
        whole = [methods for _, methods in sorted(prompts.items()) if all(key in methods for key in keys)]
        if not whole:
            continue
        weights = bootstrap_weights(len(whole), boot.resamples, boot.seed)
        measured[name] = {key: Measured.of([methods[key] for methods in whole], weights) for key in keys}
        domains = sorted({methods[key].domain for methods in whole for key in keys})
        entries[name] = {
            "domain": domains[0] if len(domains) == 1 else "mixed",
            "prompts": len(whole),
            "methods": {key: _cell(measured[name], key, boot) for key in keys},
        }
        for methods in whole:
            for key in keys:
                by_domain[methods[key].domain][key].append(methods[key])
    return {
        "temperature": temperature,
        "suites": entries,
        "domains": {name: _domain(found, keys, boot) for name, found in sorted(by_domain.items())},
        "macro": {key: _macro(measured, key, boot) for key in keys} if measured else {},
        "differences": _differences(measured, [key for key in keys if key != PLAIN], boot),
    }


def _cell(group: Mapping[str, Measured], key: str, boot: Bootstrap) -> dict[str, Any]:
    one = group[key]
    plain = group.get(PLAIN)
    return {
        "tau": one.tau.to_json(boot.confidence) if key != PLAIN else {"value": 1.0, "low": 1.0, "high": 1.0},
        "speedup": (one.rate / plain.rate).to_json(boot.confidence) if plain is not None else None,
        "conditional": one.conditional,
        "tokens_per_second": one.rate.value,
        "ece": one.ece,
        "identical": identical(one.records, plain.records) if plain is not None else None,
        "tokens": sum(record.tokens for record in one.records),
        "rounds": sum(record.rounds for record in one.records),
    }


def identical(one: Sequence[Record], other: Sequence[Record]) -> int | None:
    """Count the prompts with the same output in both; None when sampling: outputs may differ then."""
    if any(record.temperature > 0 for record in one):
        return None
    return sum(a.digest == b.digest for a, b in zip(one, other, strict=True))


def _domain(found: Mapping[str, list[Record]], keys: Sequence[str], boot: Bootstrap) -> dict[str, Any]:
    count = len(found[keys[0]])
    weights = bootstrap_weights(count, boot.resamples, boot.seed)
    group = {key: Measured.of(found[key], weights) for key in keys}
    return {"prompts": count, "methods": {key: _cell(group, key, boot) for key in keys}}


def _macro(measured: Mapping[str, Mapping[str, Measured]], key: str, boot: Bootstrap) -> dict[str, Any]:
    groups = list(measured.values())
    speedup = None
    if all(PLAIN in group for group in groups):
        speedup = Sampled.mean([group[key].rate / group[PLAIN].rate for group in groups]).to_json(
            boot.confidence
        )
    columns = itertools.zip_longest(*(group[key].conditional for group in groups))
    errors = [group[key].ece for group in groups if group[key].ece is not None]
    tau = Sampled.mean([group[key].tau for group in groups]).to_json(boot.confidence)
    return {
        "tau": tau if key != PLAIN else {"value": 1.0, "low": 1.0, "high": 1.0},
        "speedup": speedup,
        "conditional": [_mean(column) for column in columns],
        "tokens_per_second": _mean([group[key].rate.value for group in groups]),
        "ece": _mean(errors),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _differences(
    measured: Mapping[str, Mapping[str, Measured]], keys: Sequence[str], boot: Bootstrap
) -> list[dict[str, Any]]:
    """Return paired differences of τ between the first method and every other."""
    found: list[dict[str, Any]] = []
    for key in keys[1:] if measured else []:
        pairs = {name: group[keys[0]].tau - group[key].tau for name, group in measured.items()}
        base = Sampled.mean([group[key].tau for group in measured.values()])
        macro = Sampled.mean(list(pairs.values()))
        found.append(
            {
                "first": keys[0],
                "second": key,
                "macro": macro.to_json(boot.confidence),
                "relative": macro.value / base.value,
                "suites": {name: difference.to_json(boot.confidence) for name, difference in pairs.items()},
            }
        )
    return found
