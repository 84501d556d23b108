"""Agreement with the reference implementation's numbers, for all four heads and both layouts of Gemma 4."""

from __future__ import annotations

import pytest
import torch
from golden import GEMMA4, HEADS, load_golden
from torch.nn.functional import binary_cross_entropy_with_logits

from dspark_train.data.blocks import slot_weights
from dspark_train.training.objective import fused_objective
from dspark_train.training.reference import row_losses
from dspark_train.training.terms import SupervisedRows

FORWARD, LOSS, GRADIENT = 1e-4, 1e-5, 1e-4  # absolute, relative, relative to each tensor's norm


@pytest.mark.parametrize("head", [*HEADS, *GEMMA4])
def test_blocks_and_forward(head: str) -> None:
    golden = load_golden(head)
    blocks, supervised = golden.blocks, golden.blocks.supervised
    assert torch.equal(supervised, golden.kept("supervised").bool())
    assert torch.equal(blocks.labels[supervised], golden.kept("labels")[supervised])
    output = golden.draft(golden.tensors["target_features"], blocks)
    logits = golden.draft.logits(output.hidden, output.latent)
    assert (logits - golden.kept("draft_logits"))[supervised].abs().max() < FORWARD
    assert (output.confidence_logits - golden.kept("confidence_logits"))[supervised].abs().max() < FORWARD


@pytest.mark.parametrize("form", ["plain", "fused"])
@pytest.mark.parametrize("head", [*HEADS, *GEMMA4])
def test_losses_and_gradients(head: str, form: str) -> None:
    golden = load_golden(head)
    draft, blocks, expected = golden.draft, golden.blocks, golden.expected
    output = draft(golden.tensors["target_features"], blocks)
    rows = SupervisedRows.of(blocks, golden.tensors["input_ids"].shape[1])
    block_size = draft.config.block_size
    weights = slot_weights(block_size, expected["decay_gamma"])[rows.slot % block_size]
    total = weights.sum()
    assert float(total) == pytest.approx(expected["weight_sum"], rel=LOSS)
    hidden, labels = output.hidden.flatten(0, 1)[rows.slot], blocks.labels.flatten()[rows.slot]
    latent = None if output.latent is None else output.latent.flatten(0, 1)[rows.slot]
    states = golden.tensors["target_last_hidden"].flatten(0, 1)[rows.position]
    alphas = expected["alphas"]
    if form == "plain":
        target_logits = draft.base_logits(states)[rows.target_row]
        ce, l1, accept = row_losses(draft.logits(hidden, latent), target_logits, labels)
        loss = (weights * (alphas["ce"] * ce + alphas["l1"] * l1)).sum() / total
    else:
        sums = fused_objective(
            hidden,
            latent,
            None if draft.markov_head is None else draft.markov_head.markov_w2.weight,
            draft.head_weight,
            draft.head_weight,
            states,
            rows.target_row,
            labels,
            weights / total,
            ce_coef=alphas["ce"],
            tv_coef=alphas["l1"],
            softcap=draft.config.final_logit_softcapping,
        )
        ce, l1, accept, loss = sums.ce, sums.l1, sums.accept, sums.loss
    golden_accept = golden.kept("accept_rate").flatten()[rows.slot]
    assert (accept - golden_accept).abs().max() < FORWARD
    confidence = binary_cross_entropy_with_logits(
        output.confidence_logits.flatten()[rows.slot], accept, reduction="none"
    )
    loss = loss + alphas["confidence"] * (weights * confidence).sum() / total
    for value, name in ((ce, "ce_loss"), (l1, "l1_loss"), (confidence, "confidence_loss")):
        assert float((weights * value).sum().detach() / total) == pytest.approx(expected[name], rel=LOSS)
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=LOSS)
    loss.backward()
    trained = {
        name: parameter.grad for name, parameter in draft.named_parameters() if parameter.requires_grad
    }
    assert set(trained) == set(golden.gradients)
    for name, gradient in trained.items():
        reference = golden.gradients[name]
        assert (gradient - reference).norm() <= GRADIENT * reference.norm(), name
