"""Which way a target is run while decoding: found by trying, once for each model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dspark_train.decoding.general_pass import GeneralPass
from dspark_train.decoding.layout import RowLayout
from dspark_train.decoding.programs import Programs
from dspark_train.decoding.target_pass import TargetPass
from dspark_train.errors import UserError
from dspark_train.progress import say
from dspark_train.target.frozen import FrozenTarget, distances, tolerance

SHORT = 24
"""Tokens of the probe, where the target has no window."""
CHUNK = 512
"""Most prompt rows of one ragged pass of the probe: bounds the memory of its masks."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "index_topk", "local_attention", "window_size")
"""Fields of Hugging Face configs that bound how far a layer looks."""


class Pass(AbstractContextManager[Any], Protocol):
    """A target that keeps what it has seen of some requests."""

    cache: Any

    def __call__(self, ids: Tensor, layout: Any) -> tuple[Tensor, Tensor | None]:
        """New rows ``[S]``: last hidden states ``[S, d]`` and features ``[S, m·d]``."""

    def verify(self, ids: Tensor, layout: RowLayout, width: int) -> tuple[Tensor, Tensor | None]:
        """Rows of a round, no request more than ``width``."""


@dataclass(frozen=True)
class PassChoice:
    """How a target is run while decoding."""

    name: str
    """``ragged``: all requests in one pass, softmax attention of this project. ``general``: each request over the
    model's own cache. ``general, by token``: the same, a token at a time."""
    reason: str = ""
    """Why no faster one."""


_ways: dict[str, Callable[[FrozenTarget, int, int, bool], Pass]] = {
    "ragged": TargetPass,
    "general": GeneralPass,
    "general, by token": partial(GeneralPass, by_token=True),
}
_chosen: WeakKeyDictionary[Any, PassChoice] = WeakKeyDictionary()


def open_pass(
    target: FrozenTarget,
    slots: int,
    length: int,
    features: bool,
    programs: Programs | None = None,
    compile: bool = False,
) -> Pass:
    """The pass that this target gets, to be entered.

    Args:
        target: frozen target.
        slots: requests that fit at once.
        length: positions that fit in each.
        features: whether tapped layers are collected.
        programs: runs verification in fixed shapes; of the ragged pass only.
        compile: compile what lies between the products; of the ragged pass only.

    Raises:
        UserError: no pass gives this target's own logits, or fixed shapes are asked for where there are none.
    """
    choice = choose_pass(target)
    if choice.name == "ragged":
        return TargetPass(target, slots, length, features, programs, compile)
    if programs is not None or compile:
        raise UserError(
            f"{target.name} is decoded over its own cache ({choice.reason}): decode without graphs and compile"
        )
    return _ways[choice.name](target, slots, length, features)


@torch.inference_mode()
def choose_pass(target: FrozenTarget) -> PassChoice:
    """The fastest way that gives the target's own logits, found at the first call for a model.

    Raises:
        UserError: none does; it says how each failed.
    """
    if target.model not in _chosen:
        probe = Probe(target)
        failures: list[str] = []
        for name, make in _ways.items():
            failure = probe.failure(make)
            if failure is None:
                _chosen[target.model] = PassChoice(name, "; ".join(failures))
                if failures:
                    say(f"{target.name} is decoded over its own cache, each request alone: {failures[0]}")
                break
            if not any(known.endswith(f": {failure}") for known in failures):
                failures.append(f"{name}: {failure}")
        else:
            raise UserError(f"{target.name} cannot be decoded here ({'; '.join(failures)})")
    return _chosen[target.model]


class Probe:
    """Two short requests, decoded together: prompts, uneven rounds, a rejection, a request that moves.

    All against the target's own states without a cache. The longer request is twice as long as the widest window.
    """

    def __init__(self, target: FrozenTarget) -> None:
        self.target = target
        longest = (target.context_length or 2**31) - 1
        self.lengths = (max(SHORT, min(2 * window(target.config) + 16, longest)), SHORT)
        generator = torch.Generator().manual_seed(1)
        self.ids = [
            torch.randint(target.vocab_size, (n,), generator=generator).to(target.device)
            for n in self.lengths
        ]
        self.expected: list[Tensor] = []
        for ids in self.ids:
            states = target.states(ids[None])
            rows = slice(-SHORT, None)  # logits of a whole long prompt would be the largest tensor of all
            self.expected.append(target.lm_head(states.last_hidden[0, rows]).float())
        # what rounding does to this model: its own logits of prefixes, whose products are summed in other orders
        ids, whole = self.ids[1], self.expected[1]
        prefixes = [target.lm_head(target.states(ids[None, :rows]).last_hidden[0]) for rows in (5, 11)]
        noise = torch.cat([distances(logits, whole[: len(logits)]) for logits in prefixes])
        exact = target.dtype == torch.float32
        low, high = tolerance(target.dtype), 2e-3 if exact else 0.5
        self.bound = min(max(low, 2 * float(noise.max())), high)
        """Largest distance of a row's logits that is called rounding."""
        self.mean_bound = min(max(low, 2.5 * float(noise.mean())), high)
        """Of all rows together."""
        self.share = 1.0 if exact else 0.75  # a tie of experts may fall otherwise in half precision
        self.seen: list[Tensor] = []

    def failure(self, make: Callable[[FrozenTarget, int, int, bool], Pass]) -> str | None:
        """What is wrong with the states of a pass; None where they are the target's own."""
        try:
            with make(self.target, 2, max(self.lengths) + 8, True) as run:
                return self._run(run)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the model's own code raises when it is run this way
            reason = (str(error).strip().splitlines() or [""])[0]
            return f"{type(error).__name__}: {reason[:200]}"

    def _run(self, run: Pass) -> str | None:
        self.seen = []
        first, second = (n - 14 for n in self.lengths)

        def rows(
            what: str, starts: list[int], counts: list[int], wrong: int = 0, slot: int = 0
        ) -> str | None:
            """Rows of the requests from ``slot`` on, the last ``wrong`` of each not the true ones."""
            given = [
                self.ids[slot + i][start : start + count].clone()
                for i, (start, count) in enumerate(zip(starts, counts, strict=True))
            ]
            if wrong:
                for ids in given:
                    ids[-wrong:] = (ids[-wrong:] + 1) % self.target.vocab_size
            return self._compare(run, what, starts, counts, given, wrong, slot, slot)

        step = CHUNK if isinstance(run, TargetPass) else first
        for start in range(0, first - 3, step):
            count = min(step, first - 3 - start)
            if failure := rows("a prompt", [start], [count]):
                return failure
        script = (
            lambda: rows("a second prompt", [0], [second], slot=1),
            lambda: rows("uneven rows", [first - 3, second], [3, 1]),
            lambda: rows("rejected rows", [first, second + 1], [5, 4], wrong=2),
            lambda: rows("after a rejection", [first + 3, second + 3], [2, 3]),
            lambda: rows("one row", [first + 5, second + 6], [1, 1]),
            lambda: rows("all rejected", [first + 6, second + 7], [4, 4], wrong=3),
            lambda: rows("after a second rejection", [first + 7, second + 8], [4, 2]),
        )
        for part in script:
            if failure := part():
                return failure
        run.cache.move(1, 0, second + 10)
        given = [self.ids[1][second + 10 : second + 14]]
        if failure := self._compare(run, "a request that moved", [second + 10], [4], given, 0, 0, 1):
            return failure
        mean = float(torch.cat(self.seen).mean())
        return (
            None
            if mean <= self.mean_bound
            else f"logits differ from the model's own by {mean:.2g} on average"
        )

    def _compare(
        self,
        run: Pass,
        what: str,
        starts: list[int],
        counts: list[int],
        given: list[Tensor],
        wrong: int,
        slot: int,
        request: int,
    ) -> str | None:
        layout = RowLayout(counts, starts, self.target.device, first_slot=slot)
        hidden, features = run(torch.cat(given), layout)
        if features is None or features.shape[0] != sum(counts):
            return f"{what}: no features"
        far: list[Tensor] = []
        for i, (start, own) in enumerate(zip(starts, hidden.split(counts), strict=True)):
            expected, total = self.expected[request + i], self.lengths[request + i]
            begin = max(start, total - expected.shape[0])  # logits are known of the last rows
            right = own[begin - start : len(own) - wrong]
            if len(right):
                at = begin - (total - expected.shape[0])
                far.append(distances(self.target.lm_head(right), expected[at : at + len(right)]))
        self.seen += far
        if far and not torch.cat(far).quantile(self.share) <= self.bound:
            return f"{what}: logits differ from the model's own by {float(torch.cat(far).max()):.2g}"
        return None


def window(config: Any) -> int:
    """Positions of the widest window that a Hugging Face (text) config names; 0 where it names none."""
    values = [vars(config).get(name) for name in _WINDOWS]
    return max((value for value in values if isinstance(value, int)), default=0)
