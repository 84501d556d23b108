"""Eagle3 against the reference's numbers, and against a plain oracle."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark_train.draft.eagle3 import Eagle3Draft, unrolled_attention

FOLDER = Path(__file__).parents[1] / "fixtures/golden/eagle3"


@pytest.fixture(scope="module")
def draft():
    return Eagle3Draft.load(FOLDER / "checkpoint").eval()


@pytest.fixture(scope="module")
def golden():
    return load_file(FOLDER / "train_forward.safetensors")


@pytest.fixture(scope="module")
def expected():
    return json.loads((FOLDER / "expected.json").read_text())


def test_states_and_logits_are_the_references(draft, golden):
    hidden = draft.unroll(golden["target_features"], golden["input_ids"])
    valid = golden["query_valid"].bool()
    wanted = golden["hidden_states"]
    assert (hidden - wanted)[valid].abs().max() < 1e-5 * wanted.abs().max()
    logits = draft.base_logits(draft.hidden(hidden))
    torch.testing.assert_close(logits[valid], golden["draft_logits"][valid], atol=1e-4, rtol=0)


def test_loss_and_gradients_are_the_references(draft, golden, expected):
    """Its own mask and divisor, by a plain sum over the rows that it supervises."""
    logits = draft.base_logits(draft.hidden(draft.unroll(golden["target_features"], golden["input_ids"])))
    mask = golden["position_mask"].float()
    entropy = -(golden["target_probs"] * logits.log_softmax(-1)).sum(-1)
    steps = torch.where(mask > 0, entropy, 0).sum((1, 2)) / expected["normalizer"]
    torch.testing.assert_close(steps, torch.tensor(expected["step_losses"]), rtol=1e-5, atol=0)
    loss = (steps * torch.tensor(expected["step_weights"])).sum()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5)
    loss.backward()
    gradients = load_file(FOLDER / "gradients.safetensors")
    found = {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}
    assert set(found) == set(gradients)
    for name, wanted in gradients.items():
        assert (found[name] - wanted).norm() < 1e-4 * wanted.norm(), name
    draft.zero_grad()


@pytest.mark.parametrize(("rows", "steps"), [(3, 1), (130, 2), (300, 4)])
def test_attention_sees_the_context_and_its_own_steps(rows, steps):
    generator = torch.Generator().manual_seed(rows)

    def heads(count):
        return torch.randn(2, rows, count, 8, generator=generator, dtype=torch.float64, requires_grad=True)

    query, keys, values = heads(4), [heads(2) for _ in range(steps)], [heads(2) for _ in range(steps)]
    found = unrolled_attention(query, keys, values, 0.3)
    wide_keys = torch.cat([k.repeat_interleave(2, dim=2) for k in keys], dim=1)
    wide_values = torch.cat([v.repeat_interleave(2, dim=2) for v in values], dim=1)
    own = torch.eye(rows, dtype=torch.bool)
    seen = torch.cat([torch.ones(rows, rows).tril().bool(), *[own] * (steps - 1)], dim=1)
    scores = torch.einsum("bthd,bshd->bhts", query, wide_keys) * 0.3
    shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    wanted = torch.einsum("bhts,bshd->bthd", shares, wide_values)
    torch.testing.assert_close(found, wanted)
    parts = [query, *keys, *values]
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), parts),
        torch.autograd.grad(wanted.square().sum(), parts),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_a_draft_is_written_and_read_back(draft, tmp_path):
    draft.save(tmp_path / "draft")
    again = Eagle3Draft.load(tmp_path / "draft")
    for (name, one), (_, other) in zip(draft.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
