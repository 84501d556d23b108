"""What one step costs on one machine: seconds against rows of a target pass and against requests.

``profile`` measures a :class:`CostTable`, the schedulers and ``simulate`` read it. Everything in it is wall
time in seconds; nothing in it depends on the draft's quality.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark_train.errors import UserError

CURVES = (
    "single_row_seconds_median",
    "two_row_seconds_median",
    "uneven_seconds_median",
    "draft_seconds_median",
    "short_draft_seconds_median",
    "round_overhead_seconds_median",
    "step_overhead_seconds_median",
)
"""Optional curves over ``requests``."""
SLOPES = ("single_row_seconds_per_context", "block_seconds_per_context", "draft_seconds_per_context")
"""Optional curves over ``requests`` too: what one more token of context costs."""


@dataclass(frozen=True)
class CostTable:
    """Measured seconds of the parts of a decoding step.

    The target pass is measured against its ``rows`` (tokens of all requests together). Two layouts of the
    same number of rows cost differently where attention matters (one request with 8 rows reads one cache, 8
    requests with one row read 8), so the first curve is measured in blocks of ``rows_per_request`` rows, and
    ``single_row_seconds_median`` may add the curve of plain decoding. The curves over ``requests`` are
    optional; an absent one counts as free (the draft, the overheads) or as the first curve (the single-row
    one).
    """

    context: int
    """Tokens of context per request at which everything was measured."""
    rows: tuple[int, ...]
    """Rows of a target pass, strictly increasing, from 1."""
    seconds_median: tuple[float, ...]
    """Seconds of a target pass of so many rows, LM head and sampling included: median over repetitions."""
    seconds_p10: tuple[float, ...]
    """Its 10 % quantile."""
    seconds_p90: tuple[float, ...]
    """Its 90 % quantile."""
    rows_per_request: int = 1
    """Rows that one request had in the measurement (fewer where ``rows`` is smaller): γ + 1, or 1."""
    requests: tuple[int, ...] = ()
    """Concurrent requests of the optional curves, strictly increasing, from 1."""
    single_row_seconds_median: tuple[float, ...] = ()
    """Seconds of a target pass with one row per request."""
    two_row_seconds_median: tuple[float, ...] = ()
    """Seconds of a target pass with two rows per request."""
    uneven_seconds_median: tuple[float, ...] = ()
    """Seconds of a target pass where the first request has ``rows_per_request`` rows and every other one."""
    draft_seconds_median: tuple[float, ...] = ()
    """Seconds of the draft's part of a round: parallel pass, sequential head, sampling, confidences."""
    short_draft_seconds_median: tuple[float, ...] = ()
    """The same where the sequential head stops after the first token, as for a policy that verifies one."""
    round_overhead_seconds_median: tuple[float, ...] = ()
    """Seconds of the rest of a speculative round: schedule, cache upkeep, bookkeeping."""
    step_overhead_seconds_median: tuple[float, ...] = ()
    """Seconds of the rest of a plain-decoding step: bookkeeping."""
    single_row_seconds_per_context: tuple[float, ...] = ()
    """Seconds that each further token of context, of every request, adds to a target pass with one row per request."""
    block_seconds_per_context: tuple[float, ...] = ()
    """The same with ``rows_per_request`` rows per request."""
    draft_seconds_per_context: tuple[float, ...] = ()
    """The same of the draft's part."""
    prompt_tokens: tuple[int, ...] = ()
    """Tokens of the prompts of ``prompt_seconds_median``, strictly increasing."""
    prompt_seconds_median: tuple[float, ...] = ()
    """Seconds of the pass over a prompt: target, first token, and the draft's context."""
    machine: str = ""
    """Device and threads of the measurement, for the reader."""

    def __post_init__(self) -> None:
        _check_axis("rows", self.rows)
        for name in ("seconds_median", "seconds_p10", "seconds_p90"):
            _check_curve(name, getattr(self, name), "rows", self.rows)
        if self.requests:
            _check_axis("requests", self.requests)
        for name in (*CURVES, *SLOPES):
            if getattr(self, name):
                _check_curve(name, getattr(self, name), "requests", self.requests)
        if self.prompt_tokens:
            _check_axis("prompt_tokens", self.prompt_tokens, first=None)
            _check_curve(
                "prompt_seconds_median", self.prompt_seconds_median, "prompt_tokens", self.prompt_tokens
            )
        for low, middle, high, rows in zip(
            self.seconds_p10, self.seconds_median, self.seconds_p90, self.rows, strict=True
        ):
            if not low <= middle <= high:
                raise UserError(
                    f"cost table: at rows={rows} the quantiles are not in order "
                    f"(p10 {low}, median {middle}, p90 {high}); measure again with `dspark-train profile`"
                )
        if self.context < 0 or self.rows_per_request < 1:
            raise UserError(
                f"cost table: context must be ≥ 0 and rows_per_request ≥ 1, got {self.context} and "
                f"{self.rows_per_request}"
            )

    def seconds(self, rows: Tensor) -> Tensor:
        """Seconds of a target pass of ``rows`` rows, in the measured layout.

        Args:
            rows: Any shape, ≥ 0; 0 rows cost nothing. Between measured points linear; past the last one the last
                segment goes on (see :attr:`max_rows`).

        Returns:
            Same shape, float64.
        """
        rows = rows.to(torch.float64)
        return torch.where(rows > 0, _interpolate(rows, self.rows, self.seconds_median), 0.0)

    def verify_seconds(self, rows: Tensor, requests: Tensor, width: Tensor | None = None) -> Tensor:
        """Seconds of a target pass of ``rows`` rows that belong to ``requests`` requests.

        The cost of a pass is taken as (cost of its rows) + (cost of each request's attention), where all requests
        are padded to the rows of the widest one. Both come from the differences between the measured layouts;
        without the single-row curve the second is 0, without the other two it does not depend on the width.

        Args:
            rows: Any shape, ≥ ``requests``.
            requests: Broadcastable to ``rows``.
            width: Rows of the widest request, broadcastable too; None: as wide as can be.

        Returns:
            Same shape, float64.
        """
        base = self.seconds(rows)
        if not self.single_row_seconds_median or self.rows_per_request == 1:
            return base
        rows, requests = rows.to(torch.float64), requests.to(torch.float64)
        most = self.rows_per_request
        if width is None:
            width = (rows - requests + 1).clamp_max(most)
        added = self._attention(requests)
        own, own_width = self._measured(rows)
        attention = requests * _between(added, width.to(torch.float64), most)
        seconds = base + attention - own * _between(added, own_width, most)
        # more rows of as many requests cost no less; differences of noisy curves might say so
        return torch.where(requests > 1, seconds.maximum(self.single_row_seconds(requests)), base)

    def _measured(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Requests behind :attr:`seconds_median` at ``rows``, and the rows of each."""
        return (rows / self.rows_per_request).clamp_min(1), rows.clamp_max(self.rows_per_request)

    def _attention(self, requests: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Seconds that one of ``requests`` requests adds beyond its rows, with one row, with two, and with all."""
        most, alone = self.rows_per_request, requests <= 1  # one request's passes were measured as they are

        def missing(curve: tuple[float, ...], rows: Tensor) -> Tensor:
            return self._optional(requests, curve) - self.seconds(rows)

        def per_request(seconds: Tensor, count: Tensor) -> Tensor:
            return (seconds / count.clamp_min(1e-9)).clamp_min(0).masked_fill(alone, 0)

        own, own_width = self._measured(requests)
        single = missing(self.single_row_seconds_median, requests)
        if not (self.two_row_seconds_median and self.uneven_seconds_median):
            one = per_request(single, requests - own)
            return one, one, one
        rows = requests + most - 1
        whole = per_request(missing(self.uneven_seconds_median, rows), requests - self._measured(rows)[0])
        two = whole
        if most > 2:
            pairs, pair_width = self._measured(2 * requests)
            share = (pair_width - 2) / (most - 2)
            two = missing(self.two_row_seconds_median, 2 * requests) + pairs * share * whole
            two = per_request(two, requests - pairs * (1 - share))
        # what lies behind the pass of so many rows in whole blocks is at least two rows wide
        one = per_request(single + own * _between((two, two, whole), own_width, most), requests)
        return one, two, whole

    def single_row_seconds(self, requests: Tensor) -> Tensor:
        """Seconds of a target pass with one row for each of ``requests`` requests (any shape), float64."""
        if not self.single_row_seconds_median:
            return self.seconds(requests)
        return _interpolate(requests, self.requests, self.single_row_seconds_median)

    def draft_seconds(self, requests: Tensor, depth: int | None = None) -> Tensor:
        """Seconds of the draft's part of a round (any shape), float64; 0 if unmeasured.

        Args:
            requests: Any shape.
            depth: Tokens that the sequential head draws, 0 to γ; None is γ. For 0 the draft does not run.
        """
        if depth == 0:
            return torch.zeros(requests.shape, dtype=torch.float64)
        whole = self._optional(requests, self.draft_seconds_median)
        block_size = self.rows_per_request - 1
        if depth is None or depth >= block_size or not self.short_draft_seconds_median:
            return whole
        short = self._optional(requests, self.short_draft_seconds_median)
        return short + (whole - short) * (depth - 1) / (block_size - 1)

    def round_overhead_seconds(self, requests: Tensor) -> Tensor:
        """Seconds of the rest of a speculative round (any shape), float64; 0 if unmeasured."""
        return self._optional(requests, self.round_overhead_seconds_median)

    def step_overhead_seconds(self, requests: Tensor) -> Tensor:
        """Seconds of the rest of a plain-decoding step (any shape), float64; 0 if unmeasured."""
        return self._optional(requests, self.step_overhead_seconds_median)

    def prompt_seconds(self, tokens: Tensor) -> Tensor:
        """Seconds of the pass over prompts of so many tokens together (any shape), float64.

        Unmeasured, it is a target pass of as many rows.
        """
        if not self.prompt_tokens:
            return self.seconds(tokens)
        return _interpolate(tokens, self.prompt_tokens, self.prompt_seconds_median)

    def context_seconds(self, requests: Tensor, width: Tensor, plain: bool) -> Tensor:
        """Seconds that each further token of context, of every request, adds to a round; 0 if unmeasured.

        Args:
            requests: any shape.
            width: rows of the widest request, broadcastable to it.
            plain: no draft runs.

        Returns:
            As ``requests`` and ``width`` broadcast, float64.
        """
        single, whole, draft = (self._optional(requests, getattr(self, name)) for name in SLOPES)
        share = (width.to(torch.float64) - 1) / max(1, self.rows_per_request - 1)
        return single + share * (whole - single) + (0.0 if plain else draft)

    def _optional(self, requests: Tensor, curve: tuple[float, ...]) -> Tensor:
        if not curve:
            return torch.zeros(requests.shape, dtype=torch.float64)
        return _interpolate(requests, self.requests, curve)

    @property
    def max_rows(self) -> int:
        """Rows of the largest measured pass; what is read beyond is an extrapolation."""
        return self.rows[-1]

    def steps_per_second(self, max_rows: int) -> Tensor:
        """The schedulers' SPS curve of the bare target pass.

        Returns:
            ``[max_rows + 1]`` float64: entry ``B`` is SPS(B); entry 0 is infinite and never asked for.
        """
        return 1 / self.seconds(torch.arange(max_rows + 1))

    def rounds_per_second(self, requests: int, max_rows: int) -> Tensor:
        """SPS of whole rounds of ``requests`` requests: draft, overhead and verification.

        Throughput is tokens per round times this, so a scheduler that is to raise throughput reads it:
        draft and overhead are paid whatever is verified, and flatten the curve.

        Returns:
            ``[max_rows + 1]`` float64; entries below ``requests`` are never asked for.
        """
        rows = torch.arange(max_rows + 1)
        count = torch.tensor(requests)
        fixed = self.draft_seconds(count) + self.round_overhead_seconds(count)
        return 1 / (fixed + self.verify_seconds(rows, count))

    def monotone(self) -> CostTable:
        """Return the table with its curves made non-decreasing by isotonic regression (noise removed)."""
        from scipy.optimize import isotonic_regression

        curves = {name: getattr(self, name) for name in ("seconds_median", *CURVES)}
        smooth = {
            name: tuple(isotonic_regression(curve).x.tolist()) if curve else ()
            for name, curve in curves.items()
        }
        # the quantiles move with the median so that they stay in order
        ratio = [new / old for new, old in zip(smooth["seconds_median"], self.seconds_median, strict=True)]
        for name, bound in (("seconds_p10", min), ("seconds_p90", max)):
            moved = (value * factor for value, factor in zip(getattr(self, name), ratio, strict=True))
            smooth[name] = tuple(map(bound, moved, smooth["seconds_median"]))
        return dataclasses.replace(self, **smooth)  # type: ignore[arg-type]

    def save(self, path: str | Path) -> None:
        """Write the table as JSON; curves that were not measured are left out."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        content = {name: value for name, value in dataclasses.asdict(self).items() if value != ()}
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read what :meth:`save` wrote.

        Raises:
            UserError: the file is missing, is not JSON, lacks or has unknown keys, or holds impossible values.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(f"no cost table at {path}; write one with `dspark-train profile`")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path} is not valid JSON ({error}); write it again with `dspark-train profile`"
            ) from None
        fields = dataclasses.fields(cls)
        required = {field.name for field in fields if field.default is dataclasses.MISSING}
        if not isinstance(content, dict) or not required <= content.keys():
            raise UserError(f"{path}: a cost table needs the keys {sorted(required)}")
        if unknown := content.keys() - {field.name for field in fields}:
            raise UserError(
                f"{path}: unknown keys {sorted(unknown)}; known: {[field.name for field in fields]}"
            )
        lists: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
        }
        try:
            return cls(**lists)
        except TypeError:
            raise UserError(f"{path}: a value has the wrong type; lists of numbers are expected") from None


def _check_axis(name: str, values: tuple[int, ...], first: int | None = 1) -> None:
    if not values or not all(isinstance(value, int) for value in values):
        raise UserError(f"cost table: {name} must be a list of whole numbers, got {values!r}")
    begun = values[0] >= 1 if first is None else values[0] == first
    if not begun or any(later <= earlier for earlier, later in itertools.pairwise(values)):
        raise UserError(
            f"cost table: {name} must start at {first or 'least at 1'} and strictly increase, got {list(values)}"
        )


def _check_curve(name: str, curve: tuple[float, ...], axis_name: str, axis: tuple[int, ...]) -> None:
    if len(curve) != len(axis):
        raise UserError(f"cost table: {name} has {len(curve)} values for {len(axis)} {axis_name}")
    for position, value in zip(axis, curve, strict=True):
        positive = value >= 0 if name in SLOPES or "overhead" in name else value > 0
        if not (math.isfinite(value) and positive):
            raise UserError(
                f"cost table: {name} at {axis_name}={position} is {value}; seconds must be positive"
            )


def _interpolate(at: Tensor, axis: tuple[int, ...], curve: tuple[float, ...]) -> Tensor:
    """Piecewise linear; the last segment goes on (never downwards); constant before the first."""
    at = at.to(torch.float64)
    x, y = torch.tensor(axis, dtype=torch.float64), torch.tensor(curve, dtype=torch.float64)
    if len(axis) == 1:
        return y[0] * at.clamp_min(1) / x[0]  # one point: proportional, the pessimistic guess
    right = torch.searchsorted(x, at.contiguous()).clamp(1, len(axis) - 1)
    slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
    inside = y[right - 1] + slope * (at.clamp_min(x[0]) - x[right - 1])
    return torch.where(at > x[-1], y[-1] + slope.clamp_min(0) * (at - x[-1]), inside)


def _between(added: tuple[Tensor, Tensor, Tensor], width: Tensor, most: int) -> Tensor:
    """Seconds of a request padded to ``width`` rows, from those of 1, 2 and ``most``: piecewise linear."""
    one, two, whole = added
    return torch.where(width <= 2, one.lerp(two, width - 1), two.lerp(whole, (width - 2) / max(1, most - 2)))
