"""The one decoder: batched, ragged, greedy or sampled, speculative or plain, lossless.

    R  active requests      γ  block size      S  rows of a verification pass, Σ (verify length + 1)

A round, for all active requests at once: the draft proposes γ tokens after each request's anchor; the policy
picks how many of them are verified; the target runs the anchor and the picked tokens of all requests as one
flat row list; verification accepts a prefix of each and adds a token of the target's own, the next anchor.
Plain decoding is the same loop with no draft. Requests join as soon as one leaves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dspark_train.calibration.online import OnlineSts
from dspark_train.calibration.sts import Scalings, Sts, conditional
from dspark_train.decoding.chain_pass import ChainPass
from dspark_train.decoding.draft_pass import DraftPass, Proposal
from dspark_train.decoding.layout import RowLayout
from dspark_train.decoding.pass_choice import open_pass
from dspark_train.decoding.policies import FixedLength, Policy
from dspark_train.decoding.programs import Programs
from dspark_train.decoding.requests import Request, RoundLog, stop_sets, take
from dspark_train.decoding.sampling import SamplingRule, best_token, draw, verify_greedy, verify_sampled
from dspark_train.decoding.timing import Stopwatch, Timings
from dspark_train.draft.eagle3 import Eagle3Draft
from dspark_train.draft.kinds import Draft
from dspark_train.errors import UserError
from dspark_train.structures import DecodingTrace
from dspark_train.target.frozen import FrozenTarget


@dataclass(frozen=True)
class GenerationResult:
    """What :func:`generate` made."""

    tokens: list[list[int]]
    """Generated tokens of each prompt, a stop token included."""
    finished_by: list[str]
    """Of each prompt: ``stop`` (a stop token) or ``length`` (its limit, or the end of the target's context)."""
    trace: DecodingTrace
    """Every speculative round. Plain decoding has blocks of size 0."""
    timings: Timings
    """Seconds by part, and counts."""


def generate(
    target: FrozenTarget,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    policy: Policy | None = None,
    stop_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    batch_size: int = 1,
    seed: int = 0,
    sts: Sts | OnlineSts | None = None,
    domains: Sequence[str] = (),
    graphs: bool = False,
    compile: bool = False,
) -> GenerationResult:
    """Generate answers whose distribution is exactly the target's.

    Args:
        target: frozen target.
        draft: proposes; None decodes plainly.
        prompts: token ids of each prompt, at least one each.
        max_new_tokens: limit of all prompts, or of each.
        temperature: of target and draft; 0 is greedy.
        top_k: tokens kept by sampling; 0 keeps all.
        top_p: nucleus kept by sampling; 1 keeps all.
        policy: how many draft tokens are verified; None verifies the whole block.
        stop_token_ids: of all prompts, or of each; None takes the target's end tokens.
        batch_size: requests decoded at once.
        seed: of the sampling.
        sts: ``[γ]`` scalings of the confidences, or their temperatures alone; online ones follow what is accepted
            while decoding; None leaves the confidences raw.
        domains: of each prompt, for the trace.
        graphs: run rounds in a few fixed shapes, captured as CUDA graphs; on a CPU the same shapes, uncaptured.
        compile: ``torch.compile`` the norms and MLPs of target and draft.

    Raises:
        UserError: a prompt that is empty, too long or has unknown ids, a draft made for another target, or a
            policy that needs the confidence head that the draft lacks.
    """
    decoder = Decoder(target, draft, policy, SamplingRule(temperature, top_k, top_p), sts, graphs, compile)
    requests = decoder.requests(prompts, max_new_tokens, stop_token_ids)
    return decoder.run(requests, batch_size=batch_size, seed=seed, domains=domains)


class Decoder:
    """A target, a draft, and the rules by which they decode."""

    def __init__(
        self,
        target: FrozenTarget,
        draft: Draft | None = None,
        policy: Policy | None = None,
        rule: SamplingRule | None = None,
        sts: Sts | OnlineSts | None = None,
        graphs: bool = False,
        compile: bool = False,
    ) -> None:
        """Check that the parts fit; arguments as in :func:`generate`."""
        self.target, self.draft = target, draft
        self.graphs, self.compile = graphs, compile
        self.policy = FixedLength() if policy is None else policy
        self.rule = SamplingRule() if rule is None else rule
        self.block_size = 0 if draft is None else draft.config.block_size
        self.depth = self.policy.depth(self.block_size)
        if draft is not None:
            _check_pair(target, draft)
            if self.policy.needs_confidence and draft.confidence_head is None:
                raise UserError(
                    f"policy {type(self.policy).__name__} reads confidences, but this draft was trained without a "
                    "confidence head: use a fixed length"
                )
        if self.policy.follows_sts and not isinstance(sts, OnlineSts):
            sts = OnlineSts([1.0] * self.block_size if sts is None else sts)
        self.online = sts if isinstance(sts, OnlineSts) else None
        if self.online is not None and self.depth < self.block_size:
            raise UserError("online scalings need policies that may verify whole blocks")
        fixed = sts.sts if isinstance(sts, OnlineSts) else sts
        if fixed is not None and len(fixed) != self.block_size:
            raise UserError(f"{len(fixed)} scalings (sts) were given for a block size of {self.block_size}")
        self.bias = 0.0 if fixed is None else Scalings.of(fixed).bias
        """Added to the confidence logits."""
        self._sts = None if fixed is None else self._tensor(fixed)

    def _tensor(self, sts: Sts) -> Tensor:
        values = Scalings.of(sts).temperatures[: self.depth]
        return torch.tensor(values, dtype=torch.float32, device=self.target.device)

    @property
    def sts(self) -> Tensor | None:
        """``[depth]`` float32 temperatures of the confidences; None where they are raw."""
        return self._sts if self.online is None else self._tensor(self.online.sts)

    def requests(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        stop_token_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    ) -> list[Request]:
        """Check prompts and limits, and bound each by the target's context."""
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        stops = stop_sets(self.target, stop_token_ids, len(prompts))
        if len(limits) != len(prompts) or len(stops) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts, {len(limits)} limits and {len(stops)} stop lists do not match"
            )
        context = self.target.context_length
        made = []
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            ids = list(prompt)
            if not ids:
                raise UserError(f"prompt {index} is empty: it needs at least one token")
            if min(ids) < 0 or max(ids) >= self.target.vocab_size:
                raise UserError(f"prompt {index} has token ids outside 0..{self.target.vocab_size - 1}")
            if media := self.target.media_tokens.intersection(ids):
                raise UserError(
                    f"prompt {index} has token {min(media)}, which stands for an image, a video or sound: only text is "
                    "decoded here"
                )
            if limit < 1:
                raise UserError(f"max_new_tokens {limit} of prompt {index} must be at least 1")
            if context is not None and len(ids) >= context:
                raise UserError(
                    f"prompt {index} has {len(ids)} tokens; the target's context of {context} is full"
                )
            room = limit if context is None else min(limit, context - len(ids))
            made.append(Request(index, ids, room, stops[index]))
        return made

    def start(self, slots: int, length: int, seed: int) -> ActiveRun:
        """Begin a run; a decoder that proposes in another way than by a draft starts another kind of run.

        Args:
            slots: requests decoded at once.
            length: positions of the longest request.
            seed: of the sampling.
        """
        return ActiveRun(self, slots, length, seed)

    @torch.inference_mode()
    def run(
        self,
        requests: Sequence[Request],
        *,
        batch_size: int = 1,
        seed: int = 0,
        domains: Sequence[str] = (),
        watch: Callable[[deque[Request]], object] | None = None,
    ) -> GenerationResult:
        """Decode requests, ``batch_size`` at once, in their order.

        ``watch`` is called after every round with the requests that have not begun; it may drop some.
        """
        if batch_size < 1:
            raise UserError(f"batch_size {batch_size} must be at least 1")
        length = max((len(r.prompt) + r.limit for r in requests), default=1)
        slots = max(1, min(batch_size, len(requests)))
        run = self.start(slots, length, seed)
        started = time.perf_counter()
        with run:
            waiting = deque(requests)
            while run.step(waiting):
                if watch is not None:
                    watch(waiting)
        timings = run.timings
        timings.parts = run.watch.read()
        timings.total = time.perf_counter() - started
        timings.tokens = sum(len(request.tokens) for request in requests)
        return GenerationResult(
            tokens=[request.tokens for request in requests],
            finished_by=[request.finished_by for request in requests],
            trace=run.rounds.trace(self.rule.temperature, domains),
            timings=timings,
        )


class ActiveRun:
    """One run of a decoder: caches, active requests, rounds. A context manager; it runs only while entered."""

    def __init__(self, decoder: Decoder, slots: int, length: int, seed: int) -> None:
        self.decoder, self.rule, self.slots = decoder, decoder.rule, slots
        self.device = decoder.target.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.programs = Programs(slots, self.device, self.generator) if decoder.graphs else None
        how = (self.programs, decoder.compile)
        self.target = open_pass(decoder.target, slots, length, decoder.draft is not None, *how)
        self.draft = None
        if decoder.draft is not None and decoder.depth > 0:
            self.draft = draft_pass(decoder.draft, slots, length + decoder.block_size, *how)
        self.choose = decoder.policy.start()
        self.active: list[Request] = []
        """Request of each slot; the slots in use are the first ones, always."""
        self.rounds = RoundLog(decoder.block_size)
        self.watch = Stopwatch(self.device)
        self.timings = Timings()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.target)
        if self.draft is not None:
            self._stack.enter_context(self.draft)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def join(self, requests: Sequence[Request], known: int = 0) -> None:
        """Give requests the next free slots: run their prompts in one pass and draw their first tokens.

        Args:
            requests: not yet begun.
            known: tokens of each prompt whose keys and values the slot already holds.
        """
        with self.watch.part("prefill"):
            rows = [request.prompt[known:] for request in requests]
            counts = [len(tokens) for tokens in rows]
            layout = RowLayout(counts, [known] * len(rows), self.device, first_slot=len(self.active))
            ids = torch.tensor([token for tokens in rows for token in tokens], device=self.device)
            hidden, features = self.target(ids, layout)
            last = torch.tensor(counts, device=self.device).cumsum(0) - 1
            logits = self.decoder.target.lm_head(hidden[last])
            first = self._best(logits) if self.rule.greedy else self._draw(self.rule.probabilities(logits))
            if self.draft is not None and features is not None:
                following = ids.roll(-1)
                following[last] = first
                self.draft.begin(features, layout, following)
            for request, token in zip(requests, first.tolist(), strict=True):
                request.commit([token])
        self.active += requests

    def leave(self) -> None:
        """Free the slots of finished requests, keeping the slots in use together at the front."""
        for slot in reversed(range(len(self.active))):
            if not self.active[slot].finished_by:
                continue
            last = len(self.active) - 1
            if slot != last:
                moved = self.active[last]
                self.target.cache.move(last, slot, moved.position)
                if self.draft is not None:
                    self.draft.move(last, slot, moved.position)
                self.active[slot] = moved
            self.active.pop()

    def step(self, waiting: deque[Request]) -> bool:
        """Let waiting requests join where there is room, run a round, and let the finished leave.

        Returns:
            Whether there is more to do.
        """
        while waiting and len(self.active) < self.slots:
            self.join(take(waiting, self.slots - len(self.active)))
            self.leave()
        if self.active:
            self.round()
            self.leave()
        return bool(waiting or self.active)

    def round(self) -> None:
        """Advance every active request by one round."""
        active = self.active
        positions = [request.position for request in active]
        anchors = torch.tensor([request.tokens[-1] for request in active], device=self.device)
        proposal, counts = self._propose(anchors, positions)
        layout = RowLayout(counts, positions, self.device)
        width = max(counts)
        block = anchors[:, None]
        if proposal is not None:
            block = torch.cat([block, proposal.tokens[:, : width - 1]], dim=1)
        with self.watch.part("verify"):
            ids = block[0] if layout.single else block[layout.slot, layout.offset]
            hidden, features = self.target.verify(ids, layout, self.decoder.depth + 1)
        accepted, following = self._verify(hidden, layout, block[:, 1:], proposal)
        if self.draft is not None and features is not None:
            with self.watch.part("draft"):
                self.draft.follow(features, layout, self.decoder.depth + 1, block, accepted, following)
        self._commit(positions, counts, accepted.tolist(), following.tolist(), proposal)

    def _propose(self, anchors: Tensor, positions: list[int]) -> tuple[Proposal | None, list[int]]:
        """Draft tokens, and rows of each request to verify: the anchor and the prefix that the policy picked."""
        proposal = self._draft(anchors, positions)
        return proposal, [1] * len(positions) if proposal is None else self._schedule(proposal)

    def _draft(self, anchors: Tensor, positions: list[int]) -> Proposal | None:
        """Draft tokens after the anchors ``[R]``; None decodes plainly."""
        if self.draft is None:
            return None
        if isinstance(self.draft, ChainPass):
            with self.watch.part("draft"):
                return self.draft.propose(anchors, positions, self.rule, self.decoder.depth, self.generator)
        with self.watch.part("draft"):
            hidden = self.draft.hidden(anchors, positions)
        with self.watch.part("head"):
            return self.draft.walk(hidden[:, : self.decoder.depth], anchors, self.rule, self.generator)

    def _schedule(self, proposal: Proposal) -> list[int]:
        """Rows of each request to verify, the anchor's included."""
        with self.watch.part("schedule"):
            logits = proposal.confidence_logits
            confidence = (
                torch.full(proposal.tokens.shape, float("nan"), device=self.device)
                if logits is None
                else conditional(logits + self.decoder.bias, self.decoder.sts)
            )
            lengths = self.choose(confidence).tolist()
        # a request's last token is the target's own: no draft token beyond that is verified
        pairs = zip(lengths, self.active, strict=True)
        return [1 + min(length, request.remaining - 1) for length, request in pairs]

    def _verify(
        self, hidden: Tensor, layout: RowLayout, proposed: Tensor, proposal: Proposal | None
    ) -> tuple[Tensor, Tensor]:
        """Accepted draft tokens ``[R]`` and the target's token after them ``[R]``."""
        with self.watch.part("target_head"):
            logits = self.decoder.target.lm_head(hidden)
        with self.watch.part("sampling"):
            lengths = torch.tensor(layout.counts, device=self.device) - 1
            if self.rule.greedy:
                return verify_greedy(self._best(logits)[layout.grid], proposed, lengths)
            distributions = self.rule.probabilities(logits)
            if proposal is None or proposal.probabilities is None or proposed.shape[1] == 0:
                return torch.zeros_like(lengths), self._draw(distributions[layout.grid[:, 0]])
            slots = proposed.shape[1]
            return verify_sampled(
                distributions,
                layout.grid,
                proposed,
                proposal.probabilities[:, :slots],
                proposal.indices[:, :slots],
                self.decoder.draft.draft_token_ids if self.decoder.draft is not None else None,
                lengths,
                self.generator,
            )

    def _commit(
        self,
        positions: list[int],
        counts: list[int],
        accepted: list[int],
        following: list[int],
        proposal: Proposal | None,
    ) -> None:
        rounds, active = self.rounds, self.active
        proposed = [[] for _ in active] if proposal is None else proposal.tokens.tolist()
        self.timings.rounds += 1
        self.timings.rows += sum(counts)
        lengths, kept_tokens = [], []
        for slot, request in enumerate(active):
            taken = request.commit([*proposed[slot][: accepted[slot]], following[slot]])
            rounds.committed.append(taken)
            lengths.append(request.counted(proposed[slot][: counts[slot] - 1]))
            kept_tokens.append(min(accepted[slot], lengths[-1]))
        rounds.requests += [request.index for request in active]
        rounds.anchors += positions
        rounds.proposed += proposed
        rounds.lengths += lengths
        rounds.accepted += kept_tokens
        rounds.raw_lengths += [count - 1 for count in counts]
        rounds.raw_accepted += accepted
        verified, kept = torch.tensor(lengths), torch.tensor(kept_tokens)
        if proposal is not None and proposal.confidence_logits is not None:
            rounds.confidence.append(proposal.confidence_logits)
            if self.decoder.online is not None:
                self.decoder.online.update(proposal.confidence_logits, verified, kept)
        self.decoder.policy.update(verified, kept)

    def _best(self, logits: Tensor) -> Tensor:
        return best_token(logits)

    def _draw(self, probabilities: Tensor) -> Tensor:
        return draw(probabilities, self.generator)


def draft_pass(
    draft: Draft, slots: int, length: int, programs: Programs | None = None, compile: bool = False
) -> DraftPass | ChainPass:
    """How a draft of its kind proposes; arguments as of :class:`DraftPass`."""
    if isinstance(draft, Eagle3Draft):
        return ChainPass(draft, slots, length)
    return DraftPass(draft, slots, length, programs, compile)


def _check_pair(target: FrozenTarget, draft: Draft) -> None:
    config = draft.config
    facts = (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("target layers", config.num_target_layers, target.num_layers),
        ("tapped layers", list(config.layer_ids), list(target.layer_ids)),
    )
    wrong = [f"{name} {mine} (target: {its})" for name, mine, its in facts if mine != its]
    if wrong:
        raise UserError(f"this draft was made for another target than {target.name}: {', '.join(wrong)}")
