"""What changes where a policy cut the block before: fitted from rounds that were cut.

    R  rounds      γ  block size

A recorded round that verified its whole block is followed by one that starts behind everything accepted. Where a policy
cuts the block at slot k and all of its prefix is accepted, the next block starts behind the target's own token
at k: earlier in the text, at a place that was hard enough to be cut, and with that token resolved. Its confidences are
other ones than those of the round that followed in the record, by an amount that goes with the confidence at which the
block was cut; and a token of the same confidence is accepted more or less often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_train.calibration.selection import reached_slots, select_rounds
from dspark_train.decoding.policies import Threshold
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.run import Run
from dspark_train.structures import DecodingTrace
from dspark_train.studies.record import Recording, recorded_rounds

LEAST_CUTS = 50
"""Rounds after a cut that a fit needs."""
NEWTON = 20
"""Steps of Newton's method; it converges in a few."""
CUT_BELOW = 0.5
"""Confidence below which blocks are cut for the fit."""


@dataclass(frozen=True)
class CutEffect:
    """Shift of the confidence logits after a cut, linear in the logit of the slot that was cut off first."""

    rounds: int
    """Rounds after a cut behind it."""
    offset: list[float]
    """``[γ]`` shift at a logit of 0."""
    slope: list[float]
    """``[γ]`` change of the shift per unit of that logit."""
    low: float
    """Smallest logit seen at a cut; below it the shift stays."""
    high: float
    """Largest one."""
    level: list[float]
    """``[γ]`` log-odds of acceptance at a logit of 0 in the record, given that all before was accepted."""
    scale: list[float]
    """``[γ]`` change of these log-odds per unit of the logit."""
    gain: float
    """What a cut adds to the log-odds of acceptance, at the same logit."""

    def shift(self, cut: Tensor) -> Tensor:
        """Shift ``[R, γ]`` after cuts at logits ``[R]``; 0 where the logit is NaN: no cut."""
        at = cut.clamp(self.low, self.high)[:, None]
        moved = torch.tensor(self.offset).to(at) + torch.tensor(self.slope).to(at) * at
        return moved.masked_fill(at.isnan(), 0.0)

    def acceptance(self, logits: Tensor, cut: bool) -> Tensor:
        """Probability ``[R, γ]`` that each slot is accepted, given that all before it were; after a cut or not."""
        level, scale = (torch.tensor(values).to(logits) for values in (self.level, self.scale))
        return (level + scale * logits + (self.gain if cut else 0.0)).sigmoid()


def fit_cuts(record: DecodingTrace, cuts: DecodingTrace) -> CutEffect | None:
    """Fit the shift: confidences after real cuts, less those that follow in the record; and the gain in acceptance.

    Both confidences are regressed on the logit at the cut. In the record, each slot up to the first rejected one could
    have been the first one cut off, with all before it accepted.

    Args:
        record: rounds that verified whole blocks.
        cuts: rounds of the same draft and sampling under a policy that cuts blocks; all slots' confidences are known.

    Returns:
        None where fewer than :data:`LEAST_CUTS` rounds, with all slots drawn, follow a cut.
    """
    block_size = record.block_size
    before, after_cuts = _pairs(cuts)
    cut = before.verify_length
    open_end = (cut < block_size) & (before.accepted == cut)
    found = _logits_at(before, cut.clamp_max(block_size - 1))[open_end]
    following = after_cuts.confidence_logits[open_end].to(torch.float64)
    drawn = following.isfinite().all(1) & found.isfinite()
    found, following = found[drawn], following[drawn]
    if len(found) < LEAST_CUTS:
        return None
    before, after = _pairs(record)
    slots = torch.arange(block_size)
    could = (slots <= before.accepted[:, None]) & (slots < before.verify_length[:, None])
    round_of, slot = could.nonzero(as_tuple=True)
    usual = before.confidence_logits[round_of, slot].to(torch.float64)
    expected = after.confidence_logits[round_of].to(torch.float64)
    offset, slope = _line(found, following) - _line(usual, expected)
    level, scale = _acceptance(record)
    cut_rounds = select_rounds(after_cuts, open_end.nonzero().flatten()[drawn])
    at, accepted, slot = _reached(cut_rounds)
    gain = _offset(level[slot] + scale[slot] * at, accepted)
    return CutEffect(
        rounds=len(found),
        offset=offset.tolist(),
        slope=slope.tolist(),
        low=float(found.min()),
        high=float(found.max()),
        level=level.tolist(),
        scale=scale.tolist(),
        gain=gain,
    )


def recorded_effect(
    run: Run, rule: SamplingRule, recording: Recording, say: Callable[[str], None] = print
) -> CutEffect | None:
    """What a cut changes, by a run's calibration prompts: their whole blocks, and blocks cut by a threshold.

    Args:
        run: whose rounds; missing ones are decoded.
        rule: sampling of target and draft.
        recording: how missing rounds are made.
        say: told what is being done.

    Returns:
        None where the run holds no rounds of cut blocks and no draft to decode some, or too few.
    """
    equal = f"{run.name}: acceptance after a cut is taken as in the record"
    decodable = (run.draft_path / "config.json").is_file()
    if not decodable and run.trace("calibration_cut", rule.label) is None:
        say(f"{equal}: it holds neither rounds of cut blocks nor a draft to decode some")
        return None
    whole = recorded_rounds(run, "calibration", rule, recording, say)
    cut = recorded_rounds(run, "calibration", rule, recording, say, cutting=Threshold(CUT_BELOW))
    effect = fit_cuts(whole, cut)
    if effect is None:
        say(f"{equal}: fewer than {LEAST_CUTS} recorded rounds follow a cut")
    return effect


def _pairs(trace: DecodingTrace) -> tuple[DecodingTrace, DecodingTrace]:
    """Rounds that another of the same request follows, and those."""
    order = trace.request.argsort(stable=True)
    request = trace.request[order]
    followed = (request[1:] == request[:-1]).nonzero().flatten()
    return select_rounds(trace, order[followed]), select_rounds(trace, order[followed + 1])


def _logits_at(trace: DecodingTrace, slot: Tensor) -> Tensor:
    return trace.confidence_logits.to(torch.float64).gather(1, slot[:, None]).squeeze(1)


def _line(at: Tensor, values: Tensor) -> Tensor:
    """Least squares ``[2, γ]``: offset and slope of ``values [N, γ]`` over ``at [N]``."""
    design = torch.stack([torch.ones_like(at), at], 1)
    return torch.linalg.lstsq(design, values).solution


def _reached(trace: DecodingTrace) -> tuple[Tensor, Tensor, Tensor]:
    """Verified slots whose prefix was accepted: logits, acceptance (0 or 1) and slot of each; ``[N]``."""
    place, slot = reached_slots(trace).nonzero(as_tuple=True)
    accepted = (trace.accepted[place] > slot).to(torch.float64)
    return trace.confidence_logits[place, slot].to(torch.float64), accepted, slot


def _acceptance(record: DecodingTrace) -> tuple[Tensor, Tensor]:
    """Logistic regression of acceptance on the logit, slot by slot: level and scale, ``[γ]`` each.

    A weak prior holds the level near 0 and the scale near 1, where the logit is taken at its word.
    """
    at, accepted, slot = _reached(record)
    fitted = []
    for position in range(record.block_size):
        here = slot == position
        design = torch.stack([torch.ones_like(at[here]), at[here]], 1)
        prior = torch.tensor([0.0, 1.0], dtype=torch.float64)
        weights = prior.clone()
        for _ in range(NEWTON):
            chance = (design @ weights).sigmoid()
            slope = design.T @ (accepted[here] - chance) - (weights - prior)
            bend = (design * (chance * (1 - chance))[:, None]).T @ design + torch.eye(2, dtype=torch.float64)
            weights = weights + torch.linalg.solve(bend, slope)
        fitted.append(weights)
    level, scale = torch.stack(fitted).unbind(1)
    return level, scale


def _offset(log_odds: Tensor, accepted: Tensor) -> float:
    """What to add to log-odds ``[N]`` so that as many are accepted as were; a weak prior holds it near 0."""
    moved = torch.zeros((), dtype=torch.float64)
    for _ in range(NEWTON):
        chance = (log_odds + moved).sigmoid()
        moved = moved + ((accepted - chance).sum() - moved) / ((chance * (1 - chance)).sum() + 1)
    return float(moved)
