"""Sequences that share a batch share nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch

from dspark_train.data.sampler import MicroBatch
from dspark_train.structures import TargetStates


def prepared(samples: tuple[int, ...]) -> Any:
    data = tiny.TinyData(16)
    data.mask_token_id = tiny.VOCABULARY - 1
    batch = data.batches("train")[MicroBatch(samples, samples, 0, 0)]
    module = tiny.tiny_module()
    module.configure_model()
    assert module.draft is not None
    with torch.no_grad():
        for parameter in module.draft.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return module, module.on_before_batch_transfer(batch, 0)


def test_the_loss_of_one_sequence_does_not_move_when_another_changes() -> None:
    module, batch = prepared((2, 5))
    rows = batch.batch.blocks.sequence[batch.rows.slot // 4]
    states = module.target.states(batch.batch.tokens.input_ids)
    noise = torch.randn(states.features.shape, generator=torch.Generator().manual_seed(0))
    changed = states.features.clone()
    changed[0] += noise[0]
    other = TargetStates(changed, states.last_hidden)
    one, two = (module.draft(part.features, batch.batch.blocks) for part in (states, other))
    same = batch.batch.blocks.sequence == 1
    assert torch.equal(one.hidden[same], two.hidden[same])
    assert not torch.equal(one.hidden[~same], two.hidden[~same])
    assert set(rows.tolist()) == {0, 1}


def test_the_sums_of_a_batch_are_the_sums_of_its_sequences() -> None:
    module, both = prepared((2, 5))
    _, terms = module.compute(both)
    parts = []
    for sample in (2, 5):
        other, alone = prepared((sample,))
        other.draft = module.draft
        alone = replace(alone, batch=replace(alone.batch, global_weight=both.batch.global_weight))
        parts.append(other.compute(alone)[1])
    for name in ("weight", "ce", "tv", "confidence", "survival"):
        total = sum(float(getattr(part, name)) for part in parts)
        assert float(getattr(terms, name)) == pytest.approx(total, rel=1e-5), name
