"""What changes where a policy cut the block before: fitted from rounds that were cut.

    R  rounds      γ  block size

A recorded round that verified its whole block is followed by one that starts behind everything accepted. Where a policy
cuts the block at slot k and all of its prefix is accepted, the next block starts behind the target's own token
at k: earlier in the text, at a place that was hard enough to be cut, and with that token resolved. Its confidences are
other ones than those of the round that followed in the record, by an amount that goes with the confidence at which the
block was cut; what confidences mean stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_train.calibration.selection import select_rounds
from dspark_train.decoding.policies import Threshold
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.run import Run
from dspark_train.structures import DecodingTrace
from dspark_train.studies.record import Recording, recorded_rounds

LEAST_CUTS = 50
"""Rounds after a cut that a fit needs."""
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

    def shift(self, cut: Tensor) -> Tensor:
        """Shift ``[R, γ]`` after cuts at logits ``[R]``; 0 where the logit is NaN: no cut."""
        at = cut.clamp(self.low, self.high)[:, None]
        moved = torch.tensor(self.offset).to(at) + torch.tensor(self.slope).to(at) * at
        return moved.masked_fill(at.isnan(), 0.0)


def fit_cuts(record: DecodingTrace, cuts: DecodingTrace) -> CutEffect | None:
    """Fit the shift: confidences after real cuts, less those that follow in the record.

    Both are regressed on the logit at the cut. In the record, each slot up to the first rejected one could have been
    the first one cut off, with all before it accepted.

    Args:
        record: rounds that verified whole blocks.
        cuts: rounds of the same draft and sampling under a policy that cuts blocks; all slots' confidences are known.

    Returns:
        None where fewer than :data:`LEAST_CUTS` rounds, with all slots drawn, follow a cut.
    """
    block_size = record.block_size
    before, after = _pairs(cuts)
    cut = before.verify_length
    open_end = (cut < block_size) & (before.accepted == cut)
    found = _logits_at(before, cut.clamp_max(block_size - 1))[open_end]
    following = after.confidence_logits[open_end].to(torch.float64)
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
    return CutEffect(len(found), offset.tolist(), slope.tolist(), float(found.min()), float(found.max()))


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
