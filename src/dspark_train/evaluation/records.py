"""What was measured on each prompt, appended to a file as it happens: a stopped evaluation can go on.

γ  block size      K  bins of the reliability sums
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dspark_train.calibration.metrics import DEFAULT_BINS, ReliabilityBins, reliability_bins
from dspark_train.calibration.selection import reached_slots, verified_slots
from dspark_train.calibration.sts import Sts, survival
from dspark_train.errors import UserError
from dspark_train.files import BadLine, Journal
from dspark_train.structures import DecodingTrace


@dataclass(frozen=True)
class Record:
    """One prompt, all its turns, decoded by one method at one temperature."""

    method: str
    temperature: float
    suite: str
    index: int
    """Of the prompt in its suite."""
    domain: str
    tokens: int
    """Generated, over all turns."""
    seconds: float
    """Wall time of decoding, prompts' passes included."""
    rounds: int = 0
    committed: int = 0
    """Tokens that the rounds brought: τ is committed / rounds. A turn's first token comes with its prompt."""
    reached: list[int] = field(default_factory=list)
    """``[γ]``: rounds that verified slot k with all earlier slots accepted."""
    kept: list[int] = field(default_factory=list)
    """``[γ]``: of these, rounds that accepted it."""
    bins: list[list[float]] = field(default_factory=list)
    """Reliability bins: position, bin, count, Σ predicted, Σ accepted. Empty without confidences."""
    anchors: list[int] = field(default_factory=list)
    """Position of each round's anchor in its text."""
    gained: list[int] = field(default_factory=list)
    """Tokens that each round brought."""
    digest: str = ""
    """Of the generated token ids, to compare methods with."""

    @property
    def key(self) -> tuple[str, float, str, int]:
        """What identifies the record."""
        return self.method, self.temperature, self.suite, self.index


def count_trace(trace: DecodingTrace, sts: Sts | None = None, bins: int = DEFAULT_BINS) -> dict[str, Any]:
    """Return the fields of a record that a trace gives.

    Args:
        trace: rounds of one prompt.
        sts: ``[γ]`` scalings of the confidences; None leaves them raw.
        bins: K.
    """
    verified, reached = verified_slots(trace), reached_slots(trace)
    sparse: list[list[float]] = []
    if trace.confidence_logits.numel() and not bool(trace.confidence_logits.isnan().any()):
        predicted = survival(trace.confidence_logits.double(), sts)
        sums = reliability_bins(predicted, trace.prefix_accepted, verified, bins=bins)
        for position, index in sums.count.nonzero().tolist():
            values = (sums.count, sums.predicted, sums.accepted)
            sparse.append([position, index, *(float(value[position, index]) for value in values)])
    return {
        "rounds": int(trace.accepted.numel()),
        "committed": int(trace.committed.sum()),
        "reached": reached.sum(0).tolist(),
        "kept": (reached & trace.prefix_accepted).sum(0).tolist(),
        "bins": sparse,
        "anchors": trace.anchor.tolist(),
        "gained": trace.committed.tolist(),
    }


def pooled_bins(records: Iterable[Record]) -> ReliabilityBins | None:
    """Add up the reliability bins of records; None where none has confidences."""
    entries = torch.tensor([entry for record in records for entry in record.bins], dtype=torch.float64)
    if not len(entries):
        return None
    position, index = entries[:, :2].long().T
    size = int(position.max()) + 1, int(index.max()) + 1
    count, predicted, accepted = (
        torch.zeros(size, dtype=torch.float64).index_put_((position, index), values, accumulate=True)
        for values in entries[:, 2:].T
    )
    return ReliabilityBins(count, predicted, accepted)


def conflicts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name the settings that differ; of mappings only common entries are compared."""
    found: list[str] = []
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += [f"{name}.{key}" for key in old.keys() & new.keys() if old[key] != new[key]]
        elif old != new:
            found.append(name)
    return sorted(found)


def merge(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of both, which do not conflict."""
    return {k: {**before.get(k, {}), **v} if isinstance(v, dict) else v for k, v in now.items()}


class RecordFile:
    """A journal of records: the settings first, then one record per line.

    Records made with other settings are refused. Settings that are mappings (drafts, suites) may gain entries:
    only common ones must agree. Where they do, the settings are written again, and the last ones count.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Open the file, or begin it.

        Args:
            path: of the file.
            settings: everything that the records depend on.

        Raises:
            UserError: the file's records were made with other settings, or the file is no such file.
        """
        self.path = path
        self.records: dict[tuple[str, float, str, int], Record] = {}
        settings = json.loads(json.dumps(settings))
        with Journal(path) as journal:
            before = self._read(journal)
            names = [] if before is None else conflicts(before, settings)
            if names:
                raise UserError(
                    f"{path} holds records made with other settings (differs: {', '.join(names)}): "
                    "choose another --name, or pass --restart true to measure again"
                )
            if before is None or (settings := merge(before, settings)) != before:
                journal.append({"settings": settings})

    def _read(self, journal: Journal) -> dict[str, Any] | None:
        """Take the records of a journal, and return the settings that they were made with; None where it is empty."""
        settings: dict[str, Any] | None = None
        try:
            for line in journal.lines():
                row = line.value()
                if settings is None or "settings" in row:
                    settings = row["settings"]
                else:
                    record = Record(**row)
                    self.records[record.key] = record
        except (BadLine, KeyError, TypeError) as error:
            raise UserError(f"{self.path} holds no evaluation records ({error}); move it away") from error
        return settings

    def append(self, record: Record) -> None:
        """Write a record to the end of the file."""
        with Journal(self.path) as journal:
            journal.append(asdict(record))
        self.records[record.key] = record
