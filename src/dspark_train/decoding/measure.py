"""Plain against speculative decoding of the same prompts, in one process and by one decoder."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

from dspark_train.calibration.sts import Scalings, Sts
from dspark_train.data.conversations import Prompt
from dspark_train.decoding.acceptance import acceptance_by_position
from dspark_train.decoding.decoder import Decoder, GenerationResult
from dspark_train.decoding.policies import Policy
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.decoding.statistics import Array, Sampled, bootstrap_weights, ratio
from dspark_train.decoding.timing import PARTS
from dspark_train.draft.kinds import Draft
from dspark_train.errors import UserError
from dspark_train.files import renamed
from dspark_train.progress import stage
from dspark_train.structures import DecodingTrace
from dspark_train.target.frozen import FrozenTarget, tolerance

RESAMPLES = 2000
"""Bootstrap resamples behind an interval."""


@dataclass(frozen=True)
class Settings:
    """How prompts are decoded.

    Args:
        max_new_tokens: longest answer, in tokens.
        batch_size: requests decoded at once.
        policy: of verification; None verifies whole blocks.
        sts: ``[γ]`` scalings of the confidences; None leaves them raw.
        seed: of sampling and bootstrap.
        graphs: rounds in fixed shapes, captured as CUDA graphs on a GPU; both sides.
        compile: compiled norms and MLPs; both sides.
    """

    max_new_tokens: int = 128
    batch_size: int = 1
    policy: Policy | None = None
    sts: Sts | None = None
    seed: int = 0
    graphs: bool = False
    compile: bool = False


@dataclass(frozen=True)
class Divergence:
    """First place where speculative greedy output left the plain one."""

    prompt: int
    position: int
    """Index among the generated tokens."""
    plain: int
    speculative: int
    gap: float
    """Target's logit of the plain token minus that of the speculative one, after their common prefix."""
    rounding: float
    """Largest gap that rounding of the target's dtype explains."""


@dataclass
class Comparison:
    """Plain and speculative results of the same groups of prompts at one sampling temperature."""

    temperature: float
    prompts: list[Prompt]
    groups: list[int] = field(default_factory=list)
    """Prompts of each group (decoded at once)."""
    plain: list[GenerationResult] = field(default_factory=list)
    speculative: list[GenerationResult] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    exact: bool = True
    """Whether greedy output has to be identical whatever the logit gap (float32)."""

    @property
    def trace(self) -> DecodingTrace:
        """All speculative rounds; requests are numbered as the prompts."""
        return DecodingTrace.concatenate([result.trace for result in self.speculative])

    @property
    def speedup(self) -> float:
        """Seconds per token of plain decoding over those of speculative decoding, prompts' passes included."""
        return seconds_per_token(self.plain) / seconds_per_token(self.speculative)

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """95 % bootstrap interval of the speedup, over groups of prompts."""
        weights = bootstrap_weights(len(self.plain), RESAMPLES, seed)
        speedup = _sampled_seconds(self.plain, weights) / _sampled_seconds(self.speculative, weights)
        bounds = speedup.interval(0.95)
        assert bounds is not None  # every request generates a token, so every resample has a speed
        return bounds


def interleave(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Order prompts so that every beginning holds each domain in its share of them all."""
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    placed = [
        ((rank + 0.5) / len(found), name, prompt)
        for name, found in domains.items()
        for rank, prompt in enumerate(found)
    ]
    return [prompt for _, _, prompt in sorted(placed, key=lambda entry: entry[:2])]


def compare(
    target: FrozenTarget,
    draft: Draft,
    prompts: Sequence[Prompt],
    rule: SamplingRule,
    settings: Settings,
    seconds: float = float("inf"),
) -> Comparison:
    """Decode prompts plainly and speculatively.

    The two take turns, the order swapped from group to group, so that a machine that grows faster or slower
    favours neither. Both decode a few tokens beforehand, untimed.

    Args:
        target: frozen target.
        draft: its draft.
        prompts: at least one.
        rule: sampling of both.
        settings: how prompts are decoded.
        seconds: no new group of prompts is begun after this time; one is decoded always.
    """
    graphs, compile = settings.graphs, settings.compile
    plain = Decoder(target, rule=rule, graphs=graphs, compile=compile)
    policy = copy.deepcopy(settings.policy)  # one that has learnt nothing yet
    drafted = Decoder(target, draft, policy, rule, settings.sts, graphs, compile)
    found = Comparison(rule.temperature, [], exact=target.dtype == torch.float32)
    with stage(f"decoding plainly and with the draft ({rule.label})", len(prompts), "prompts") as shown:
        for decoder in (plain, drafted):
            _decode(decoder, prompts[: settings.batch_size], settings, 0, limit=4)
        begun = time.monotonic()
        for start in range(0, len(prompts), settings.batch_size):
            if start and time.monotonic() - begun > seconds:
                break
            group = list(prompts[start : start + settings.batch_size])
            order = (plain, drafted) if len(found.groups) % 2 == 0 else (drafted, plain)
            results = {id(decoder): _decode(decoder, group, settings, start) for decoder in order}
            found.prompts += group
            found.groups.append(len(group))
            found.plain.append(results[id(plain)])
            found.speculative.append(results[id(drafted)])
            if seconds < float("inf"):  # the bound of time may come before the last prompt
                spent = time.monotonic() - begun
                rest = spent / len(found.prompts) * (len(prompts) - len(found.prompts))
                shown.remaining = max(0.0, min(seconds - spent, rest))
            shown.advance(len(group))
    if rule.greedy:
        check_plain(target, found)
        found.divergences = divergences(target, found)
    return found


def _decode(
    decoder: Decoder, group: Sequence[Prompt], settings: Settings, start: int, limit: int | None = None
) -> GenerationResult:
    requests = decoder.requests([prompt.ids for prompt in group], limit or settings.max_new_tokens, None)
    return decoder.run(
        requests,
        batch_size=settings.batch_size,
        seed=settings.seed + start,
        domains=[prompt.domain for prompt in group],
    )


def divergences(target: FrozenTarget, found: Comparison) -> list[Divergence]:
    """Places where greedy outputs differ, each with the target's logit gap there."""
    plain = [tokens for result in found.plain for tokens in result.tokens]
    drafted = [tokens for result in found.speculative for tokens in result.tokens]
    differing = []
    for index, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        if one == other:
            continue
        pairs = list(zip(one, other, strict=False))
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        if place == len(
            pairs
        ):  # one is a beginning of the other: they stopped differently, which is no rounding
            differing.append(Divergence(index, place, -1, -1, float("inf"), 0.0))
            continue
        prefix = torch.tensor([*found.prompts[index].ids, *one[:place]], device=target.device)
        logits = target.lm_head(target.states(prefix[None]).last_hidden[0, -1]).float()
        gap = float(logits[one[place]] - logits[other[place]])
        rounding = 8 * torch.finfo(target.dtype).eps * float(logits.abs().max())
        differing.append(Divergence(index, place, one[place], other[place], gap, rounding))
    return differing


CHECKED = 8
"""Tokens of plain decoding that are held against the target without any cache."""


@torch.inference_mode()
def check_plain(target: FrozenTarget, found: Comparison) -> None:
    """Hold the first tokens of plain decoding against the target's own pass over the whole text.

    Plain and speculative decoding share their passes; this one is independent of both.

    Raises:
        UserError: a token is not the target's best one, by more than rounding.
    """
    prompt, tokens = found.prompts[0].ids, found.plain[0].tokens[0][:CHECKED]
    ids = torch.tensor([*prompt, *tokens], device=target.device)
    states = target.states(ids[None]).last_hidden[0, len(prompt) - 1 : -1]
    logits = target.lm_head(states).float()
    gaps = logits.max(-1).values - logits.gather(1, ids[len(prompt) :, None])[:, 0]
    bound = 8 * tolerance(target.dtype) * logits.std(-1)
    if bool((gaps > bound).any()):
        place = int((gaps > bound).nonzero()[0])
        raise UserError(
            f"{target.name} without a cache puts token {int(logits[place].argmax())} at place {place} of the first "
            f"answer, decoding puts {tokens[place]} (logit gap {float(gaps[place]):.3g}): this target is not decoded "
            "rightly here"
        )


def failures(found: Comparison) -> list[Divergence]:
    """Divergences that count: in float32 all; else those whose gap exceeds rounding."""
    return [d for d in found.divergences if found.exact or abs(d.gap) > d.rounding]


# -- results, as decode.json holds them ---------------------------------------------------------------------


@dataclass(frozen=True)
class SideResult:
    """Speed of plain or of speculative decoding. What a file does not say is 0 or empty."""

    tokens_per_second: float
    tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    rounds: int = 0
    rows: int = 0
    """Token rows that the target went through."""
    round_milliseconds: float | None = None
    """Wall time of a round, prompts' passes left out."""
    milliseconds: dict[str, float] = field(default_factory=dict)
    """Of a round, by part."""


@dataclass(frozen=True)
class SpeedupResult:
    """Seconds per token of plain decoding over those of speculative decoding."""

    value: float
    low: float | None = None
    high: float | None = None
    spread: str = ""
    """What the two bounds are, in words."""


@dataclass(frozen=True)
class ShareResult:
    """Acceptance by position (lists of γ; None where no round tells)."""

    conditional: list[float | None] = field(default_factory=list)
    """Share of slot k's tokens accepted, of those whose earlier ones all were."""
    cumulative: list[float | None] = field(default_factory=list)
    """Share of rounds whose prefix up to slot k was accepted."""


@dataclass(frozen=True)
class IdentityResult:
    """How far greedy output equals plain decoding's."""

    prompts: int
    """Whose output is the same, token for token."""
    of: int = 0
    """Prompts decoded."""
    exact: bool = True
    """Whether rounding excuses no difference (float32)."""
    failures: int | None = None
    """Differences that rounding does not explain."""
    divergences: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class DomainResult:
    """Accepted length of one domain."""

    tau: float
    rounds: int = 0


@dataclass(frozen=True, kw_only=True)
class ModeResult:
    """Plain against speculative decoding at one sampling temperature."""

    temperature: float
    prompts: int | None = None
    tau: float
    acceptance: ShareResult = field(default_factory=ShareResult)
    verified_rows_per_round: float | None = None
    """Rows that the target verifies per round up to an end token, the anchor's included: the verification budget
    (paper, Figure 8)."""
    acceptance_rate_with_bonus: Annotated[
        float | None, renamed("acceptance_rate_with_bonus", "tokens_per_row")
    ] = None
    """Tokens that reach the output over these rows, the target's own included (paper, Figure 5)."""
    plain: SideResult | None = None
    speculative: SideResult | None = None
    speedup: SpeedupResult | None = None
    domains: dict[str, DomainResult] = field(default_factory=dict)
    identical: IdentityResult | None = None
    """Of greedy decoding."""
    sts: list[float] | None = None
    """``[γ]`` temperatures of the confidences; None where they are raw."""
    bias: float = 0.0
    """Added to the confidence logits."""


@dataclass(frozen=True)
class ExampleResult:
    """An answer, token by token."""

    prompt: str
    domain: str
    tokens: list[str]
    """Their texts."""
    origin: list[str]
    """Who wrote each: ``draft`` or ``target``."""


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """What ``decode`` measured: ``decode.json``."""

    policy: str = ""
    """How much of a block is verified."""
    batch_size: int | None = None
    max_new_tokens: int | None = None
    split: str = ""
    dtype: str = ""
    seed: int = 0
    graphs: bool = False
    compile: bool = False
    modes: dict[str, ModeResult] = field(default_factory=dict)
    """By the label of the sampling temperature."""
    identical: bool | None = None
    """Whether all greedy output equals plain decoding's."""
    examples: list[ExampleResult] = field(default_factory=list)


def mode_result(found: Comparison, seed: int = 0, sts: Sts | None = None) -> ModeResult:
    """Sum up a comparison.

    Args:
        found: of one sampling temperature.
        seed: of the bootstrap.
        sts: ``[γ]`` scalings of the confidences that it was decoded with.
    """
    whole, *domains = acceptance_by_position(found.trace)
    low, high = found.interval(seed)
    groups = f"groups of {max(found.groups)}" if max(found.groups) > 1 else "prompts"
    identical = None
    if found.temperature == 0:
        identical = IdentityResult(
            prompts=len(found.prompts) - len(found.divergences),
            of=len(found.prompts),
            exact=found.exact,
            failures=len(failures(found)),
            divergences=[vars(divergence) for divergence in found.divergences],
        )
    return ModeResult(
        temperature=found.temperature,
        prompts=len(found.prompts),
        tau=found.trace.accepted_length,
        acceptance=ShareResult(whole.conditional, whole.cumulative),
        verified_rows_per_round=float(found.trace.verify_length.double().mean()) + 1,
        acceptance_rate_with_bonus=_acceptance_rate(found.trace),
        plain=_side(found.plain),
        speculative=_side(found.speculative),
        speedup=SpeedupResult(found.speedup, low, high, f"(95 % over {len(found.groups)} {groups})"),
        domains={part.group: DomainResult(part.tau, part.rounds) for part in domains},
        identical=identical,
        sts=None if sts is None else list(Scalings.of(sts).temperatures),
        bias=0.0 if sts is None else Scalings.of(sts).bias,
    )


def _side(results: Sequence[GenerationResult]) -> SideResult:
    """Speed of plain or speculative decoding, and the milliseconds of a round by part."""
    seconds, tokens = sum(r.timings.total for r in results), sum(r.timings.tokens for r in results)
    rounds = max(1, sum(r.timings.rounds for r in results))
    parts = {
        part: 1000 * sum(r.timings.parts.get(part, 0.0) for r in results) / rounds
        for part in PARTS
        if part != "prefill"
    }
    parts["bookkeeping"] = 1000 * sum(r.timings.bookkeeping for r in results) / rounds
    return SideResult(
        tokens_per_second=tokens / seconds,
        tokens=tokens,
        seconds=seconds,
        prefill_seconds=sum(r.timings.parts.get("prefill", 0.0) for r in results),
        rounds=sum(r.timings.rounds for r in results),
        rows=sum(r.timings.rows for r in results),
        round_milliseconds=sum(parts.values()),
        milliseconds=parts,
    )


def examples(found: Comparison, tokenizer: Any, count: int) -> list[ExampleResult]:
    """A few answers, token by token, each marked with who proposed it."""
    answers = [tokens for result in found.speculative for tokens in result.tokens]
    trace, made = found.trace, []
    for index in range(min(count, len(answers))):
        rounds = trace.request == index
        pairs = zip(trace.accepted[rounds].tolist(), trace.committed[rounds].tolist(), strict=True)
        origin = ["target"]
        for accepted, committed in pairs:
            kept = min(accepted, committed)
            origin += ["draft"] * kept + ["target"] * (committed - kept)
        made.append(
            ExampleResult(
                prompt=tokenizer.decode(found.prompts[index].ids, skip_special_tokens=True),
                domain=found.prompts[index].domain,
                tokens=pieces(tokenizer, answers[index]),
                origin=origin,
            )
        )
    return made


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Text of each token, such that joined they are the whole text (a token that ends inside a character is '')."""
    texts, done = [], ""
    for end in range(1, len(tokens) + 1):
        whole = tokenizer.decode(tokens[:end])
        if whole.endswith("\N{REPLACEMENT CHARACTER}") and end < len(tokens):
            texts.append("")
            continue
        texts.append(whole[len(done) :])
        done = whole
    return texts


def seconds_per_token(results: Sequence[GenerationResult]) -> float:
    """Wall time of decoding over generated tokens, prompts' passes included."""
    return sum(r.timings.total for r in results) / sum(r.timings.tokens for r in results)


def _sampled_seconds(results: Sequence[GenerationResult], weights: Array) -> Sampled:
    """:func:`seconds_per_token` on every resample of the groups."""
    return ratio([r.timings.total for r in results], [float(r.timings.tokens) for r in results], weights)


def _acceptance_rate(trace: DecodingTrace) -> float:
    rows = trace.verify_length + 1
    return float(trace.committed.sum()) / max(1, int(rows.sum()))
