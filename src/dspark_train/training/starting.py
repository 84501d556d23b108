"""Samples of the training answers, from which a linear start is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from dspark_train.draft.linear_start import SLOT_WEIGHTS, StartSamples
from dspark_train.errors import UserError
from dspark_train.progress import stage
from dspark_train.structures import TargetStates, TokenBatch

SAMPLES = 30_000
"""Positions of training answers behind a linear start."""


def gather_samples(
    batches: Iterable[TokenBatch], states: Callable[[TokenBatch], TargetStates], limit: int = SAMPLES
) -> StartSamples:
    """Positions of training answers, with what the target says there.

    Args:
        batches: of training, in the order in which the steps will ask for them.
        states: of a batch, from the target or from a feature cache.
        limit: positions after which no further batch is read.

    Raises:
        UserError: no answer is long enough.
    """
    features, tokens, hidden, first, found = [], [], [], None, 0
    with stage("first states", limit, "positions") as shown:
        for batch in batches:
            answer = states(batch)
            first = answer.features[0, 0] if first is None else first
            before = found
            for row, length in enumerate(batch.lengths.tolist()):
                mask = batch.loss_mask[row, :length].numpy()
                place = _anchors(mask).to(answer.features.device)
                ids = batch.input_ids[row].to(place.device)
                offsets = place[:, None] + torch.arange(len(SLOT_WEIGHTS), device=place.device)
                features.append(answer.features[row, place - 1])
                tokens.append(ids[offsets])
                hidden.append(answer.last_hidden[row, offsets])
                found += len(place)
            shown.advance(found - before)
            if found >= limit:
                break
    if first is None or not found:
        raise UserError(
            f"draft.init linear: no training answer has {len(SLOT_WEIGHTS) + 1} tokens; use init: random"
        )
    return StartSamples(torch.cat(features), torch.cat(tokens), torch.cat(hidden), first)


def _anchors(mask: np.typing.NDArray[np.bool_]) -> Tensor:
    """Positions after the first whose following ones are all supervised, as far as a start looks ahead."""
    ahead = len(SLOT_WEIGHTS)
    if len(mask) <= ahead + 1:
        return torch.empty(0, dtype=torch.int64)
    windows = np.lib.stride_tricks.sliding_window_view(mask[1:], ahead).all(1)
    places = torch.from_numpy(np.flatnonzero(windows))
    return places[(places > 0) & (places + ahead < len(mask))]
