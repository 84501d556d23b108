"""One number added to the confidence head's bias, so that its confidences are right on average.

A draft is accepted more on the conversations that it was trained on than on others, and its confidence head, trained
on the same ones, believes it. A temperature pulls confidences towards or away from one half and cannot mend that:
a head that says 0.54 where 0.50 is accepted needs a shift. How much is accepted depends on how is sampled, so the bias
stands with the temperatures of one way of sampling; the draft's weights stay as trained.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark_train.structures import DecodingTrace

if TYPE_CHECKING:
    from dspark_train.run import Run

BIAS = "confidence_head.proj.bias"
"""Name of the confidence head's bias in a draft's weights."""
PRIOR = 1.0
"""Observations' worth of belief that the confidences are right as they are, so that few rounds move little."""


def fit_shift(confidence_logits: Tensor, prefix_accepted: Tensor, reached: Tensor) -> float:
    """The ``s`` of ``σ((logit + s) / T)`` that makes what was accepted most probable, with whatever ``T`` does so.

    One ``s`` and one ``T`` for all positions; temperatures proper are fitted afterwards, position by position, and a
    head that is merely too sure of itself gets no shift.

    Args:
        confidence_logits: ``[R, γ]`` raw logits.
        prefix_accepted: ``[R, γ]`` bool: the prefix up to and including slot ``k`` was accepted.
        reached: ``[R, γ]`` bool: which slots count, those that were verified after an accepted prefix; that is what
            a confidence is conditioned on.

    Returns:
        From the minimum of a convex function of ``1/T`` and ``s/T``, by Newton's method; 0 where nothing was reached,
        or where confidences say nothing about what is accepted (``T`` above 16).
    """
    logits, accepted = confidence_logits[reached].double(), prefix_accepted[reached].double()
    inputs = torch.stack([logits, torch.ones_like(logits)], 1)
    honest = torch.tensor([1.0, 0.0], dtype=torch.float64)
    prior = PRIOR * torch.eye(2, dtype=torch.float64)
    found = honest.clone()
    for _ in range(100):
        probability = (inputs @ found).sigmoid()
        slope = inputs.T @ (probability - accepted) + prior @ (found - honest)
        curvature = (inputs * (probability * (1 - probability))[:, None]).T @ inputs + prior
        step = torch.linalg.solve(curvature, slope)
        step = step / max(1.0, float(step.norm()))  # far from the minimum the curvature is all but gone
        found = found - step
        if float(step.norm()) < 1e-10:
            break
    scale, offset = found.tolist()
    return offset / scale if scale > 1 / 16 else 0.0


def shifted(trace: DecodingTrace, shift: float) -> DecodingTrace:
    """The rounds of a draft whose confidence head has ``shift`` added to its bias."""
    return dataclasses.replace(trace, confidence_logits=trace.confidence_logits + shift)


def restore_weights(run: Run) -> float:
    """Take a bias that an earlier version wrote into a run's draft, and into its rounds, back out of them.

    Calibrations of the run hold for the moved weights, and go.

    Returns:
        The bias that was taken out; 0 where the weights are as trained.
    """
    from safetensors.torch import load_file, save_file

    moved = run.confidence_shift
    if not moved:
        return 0.0
    if run.draft_weights_path.is_file():
        tensors = load_file(run.draft_weights_path)
        tensors[BIAS] = (tensors[BIAS].double() - moved).to(tensors[BIAS].dtype)
        aside = run.draft_weights_path.with_suffix(".tmp")
        save_file(tensors, str(aside), metadata={"format": "pt"})
        aside.replace(run.draft_weights_path)
    for path in run.trace_paths:
        shifted(DecodingTrace.load(path), -moved).save(path)
    for path in run.sts_paths:
        path.unlink()
    run.update(confidence_shift=0.0)
    return moved
