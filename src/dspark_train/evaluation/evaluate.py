"""Decodes benchmark suites with several methods, prompt by prompt, and keeps a record of each."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from dspark_train.calibration.sts import Scalings
from dspark_train.data.tokenize import ConversationEncoder
from dspark_train.decoding.decoder import Decoder, GenerationResult
from dspark_train.decoding.policies import Policy
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.draft.kinds import Draft
from dspark_train.errors import UserError
from dspark_train.evaluation.baselines import PromptLookup
from dspark_train.evaluation.options import EvaluateOptions
from dspark_train.evaluation.records import Record, RecordFile, count_trace
from dspark_train.evaluation.suites import Suite, SuitePrompt
from dspark_train.evaluation.summary import PLAIN
from dspark_train.structures import DecodingTrace
from dspark_train.target.frozen import FrozenTarget


class Method(Protocol):
    """A way of decoding."""

    @property
    def key(self) -> str:
        """Name in records and tables' columns: unique in an evaluation."""

    @property
    def label(self) -> str:
        """Name for the reader."""

    @property
    def kind(self) -> str:
        """``plain``, ``draft``, ``head_off`` or ``prompt_lookup``."""

    def calibration(self, temperature: float) -> Scalings | None:
        """``[γ]`` temperatures of the confidences at a sampling temperature; None leaves them raw."""

    def decoder(self, rule: SamplingRule) -> Decoder:
        """Make its decoder."""


@dataclass(frozen=True, eq=False)
class PlainMethod:
    """The target alone."""

    target: FrozenTarget
    key: str = PLAIN
    label: str = "plain"
    kind: str = "plain"

    def calibration(self, temperature: float) -> None:
        """Plain decoding has no confidences."""

    def decoder(self, rule: SamplingRule) -> Decoder:
        """Decode without a draft."""
        return Decoder(self.target, rule=rule)


@dataclass(frozen=True, eq=False)
class DraftMethod:
    """A draft, its head on or off."""

    target: FrozenTarget
    draft: Draft
    key: str
    label: str
    kind: str = "draft"
    calibrations: Mapping[float, Scalings] = field(default_factory=dict)
    """``[γ]`` temperatures of the confidences by sampling temperature."""
    policy: Policy | None = None

    def calibration(self, temperature: float) -> Scalings | None:
        """Return what was fitted on rounds of this sampling temperature, if anything was."""
        return self.calibrations.get(temperature)

    def decoder(self, rule: SamplingRule) -> Decoder:
        """Decode with the draft."""
        return Decoder(self.target, self.draft, self.policy, rule, self.calibration(rule.temperature))


@dataclass(frozen=True, eq=False)
class LookupMethod:
    """Draft tokens copied from earlier text."""

    target: FrozenTarget
    block_size: int
    key: str = "prompt_lookup"
    label: str = "prompt lookup"
    kind: str = "prompt_lookup"

    def calibration(self, temperature: float) -> None:
        """Copied drafts have no confidences."""

    def decoder(self, rule: SamplingRule) -> Decoder:
        """Decode with copied drafts."""
        return PromptLookup(self.target, self.block_size, rule)


@dataclass(frozen=True)
class Evaluation:
    """How prompts are decoded."""

    target: FrozenTarget
    """Gives the tokenizer."""
    methods: Sequence[Method]
    options: EvaluateOptions
    template: Mapping[str, Any] | None = None
    """Arguments of the chat template: those that the drafts were trained with, unless others are wanted."""

    @cached_property
    def encoder(self) -> ConversationEncoder:
        """Renders prompts as training did."""
        tokenizer = self.target.tokenizer
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"the tokenizer of {self.target.name} has no chat template: suites are conversations; use an "
                "instruction-tuned target"
            )
        return ConversationEncoder(tokenizer, max_length=2**31, arguments=self.template)

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens that the target reads before it answers."""
        return self.encoder.prompt_ids(messages)

    def fits(self, ids: Sequence[int]) -> bool:
        """Whether the target's context holds a prompt and a whole answer."""
        context = self.target.context_length
        return context is None or len(ids) + self.options.max_new_tokens <= context

    def measure(self, method: Method, suite: Suite, prompt: SuitePrompt, temperature: float) -> Record:
        """Decode the turns of a prompt, each after the method's own earlier answers, until the context is full."""
        decoder = method.decoder(SamplingRule(temperature, self.options.top_k, self.options.top_p))
        messages: list[dict[str, str]] = []
        results: list[GenerationResult] = []
        for number, turn in enumerate(prompt.turns):
            messages.append({"role": "user", "content": turn})
            ids = self.encode(messages)
            if number and not self.fits(ids):
                break
            seed = random.Random(f"{self.options.seed}/{suite.name}/{prompt.index}/{number}").getrandbits(31)
            requests = decoder.requests([ids], self.options.max_new_tokens, None)
            results.append(decoder.run(requests, seed=seed))
            answer = self.target.tokenizer.decode(results[-1].tokens[0], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
        return make_record(method, suite, prompt, temperature, results)


def fitting(evaluation: Evaluation, suites: Sequence[Suite]) -> tuple[list[Suite], dict[str, list[int]]]:
    """Leave out prompts that the target's context cannot hold together with an answer.

    Returns:
        The suites with what fits, and the index of every prompt left out, by suite.

    Raises:
        UserError: nothing of a suite fits.
    """
    kept, left_out = [], {}
    for suite in suites:
        fit = [
            prompt
            for prompt in suite.prompts
            if evaluation.fits(evaluation.encode([{"role": "user", "content": prompt.turns[0]}]))
        ]
        if not fit:
            raise UserError(
                f"suite {suite.name}: no prompt fits the target's context together with an answer of "
                f"{evaluation.options.max_new_tokens} tokens; lower max_new_tokens"
            )
        inside = {prompt.index for prompt in fit}
        if len(fit) < len(suite.prompts):
            left_out[suite.name] = [prompt.index for prompt in suite.prompts if prompt.index not in inside]
        kept.append(dataclasses.replace(suite, prompts=tuple(fit)))
    return kept, left_out


def make_record(
    method: Method, suite: Suite, prompt: SuitePrompt, temperature: float, results: Sequence[GenerationResult]
) -> Record:
    """Add up the turns of a prompt."""
    digest = hashlib.sha256(repr([result.tokens[0] for result in results]).encode()).hexdigest()[:16]
    counts: dict[str, Any] = {}
    if method.kind != "plain":
        trace = DecodingTrace.concatenate([result.trace for result in results])
        counts = count_trace(trace, method.calibration(temperature))
    return Record(
        method=method.key,
        temperature=temperature,
        suite=suite.name,
        index=prompt.index,
        domain=prompt.domain,
        tokens=sum(len(result.tokens[0]) for result in results),
        seconds=sum(result.timings.total for result in results),
        digest=digest,
        **counts,
    )


@dataclass(frozen=True)
class Task:
    """One prompt that one method decodes at one temperature."""

    method: Method
    suite: Suite
    prompt: SuitePrompt
    temperature: float

    @property
    def key(self) -> tuple[str, float, str, int]:
        """As the record that it makes."""
        return self.method.key, self.temperature, self.suite.name, self.prompt.index


def tasks(evaluation: Evaluation, suites: Sequence[Suite]) -> Iterator[Task]:
    """Yield all tasks; methods follow each other on a prompt, so that a machine's slow minutes hit all."""
    for suite in suites:
        for prompt in suite.prompts:
            for temperature in evaluation.options.temperatures:
                for method in evaluation.methods:
                    yield Task(method, suite, prompt, temperature)


def run_evaluation(
    evaluation: Evaluation,
    suites: Sequence[Suite],
    file: RecordFile,
    progress: Callable[[int, int, Record | None], None] | None = None,
) -> None:
    """Decode whatever the file does not hold yet, appending one record after the other.

    Args:
        evaluation: methods and settings.
        suites: what is decoded.
        file: of records.
        progress: called with (done, all, latest record) after each task.
    """
    everything = list(tasks(evaluation, suites))
    left = [task for task in everything if task.key not in file.records]
    done = len(everything) - len(left)
    if progress is not None:
        progress(done, len(everything), None)
    if left:
        _warm_up(evaluation, left[0])
    for number, task in enumerate(left, start=done + 1):
        record = evaluation.measure(task.method, task.suite, task.prompt, task.temperature)
        file.append(record)
        if progress is not None:
            progress(number, len(everything), record)


def _warm_up(evaluation: Evaluation, task: Task) -> None:
    """Let every method decode a little: its first call pays for allocations and caches."""
    prompt = SuitePrompt(task.prompt.index, task.prompt.turns[:1], task.prompt.domain)
    options = dataclasses.replace(evaluation.options, max_new_tokens=16)
    for method in evaluation.methods:
        brief = dataclasses.replace(evaluation, methods=[method], options=options)
        for temperature in evaluation.options.temperatures:
            brief.measure(method, task.suite, prompt, temperature)
