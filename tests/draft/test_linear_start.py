"""A draft that starts linearly predicts what the fitted linear map predicts, at the anchor and behind it."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_draft, tiny_target
from torch import Tensor

from dspark_train.decoding.draft_pass import DraftPass
from dspark_train.decoding.layout import RowLayout
from dspark_train.draft.linear_start import StartSamples, start_linearly
from dspark_train.draft.model import DSparkDraft
from dspark_train.errors import UserError
from dspark_train.target.frozen import FrozenTarget

CPU = torch.device("cpu")


def wide_target() -> FrozenTarget:
    """Heads with enough rotary frequencies to tell near from far."""
    return tiny_target(hidden_size=128, intermediate_size=64, tie_word_embeddings=False)


class World:
    """Features and tokens from which hidden states follow linearly, by maps of a rank that the heads can hold."""

    def __init__(self, target: FrozenTarget, count: int = 3000) -> None:
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        width, size = 3 * target.hidden_size, target.hidden_size
        # as in real models, all embeddings have something in common, the mask's the least
        with torch.no_grad():
            target.embedding_weight[:96] += 0.5 * normal(size)
        self.offset, self.scale = 5 * normal(width), 0.5 + 3 * torch.rand(width, generator=generator)
        self.first = 40 * normal(width)
        self.maps = [normal(width, 6) @ normal(6, size) / width**0.5 for _ in range(2)]
        self.table = 0.3 * normal(target.vocab_size, size)
        self.normal, self.width = normal, width
        features = self.features(count)
        tokens = torch.randint(3, 90, (count, 4), generator=generator)
        hidden = torch.stack([self.hidden(features, tokens[:, k], k) for k in range(4)], dim=1)
        self.samples = StartSamples(features, tokens, hidden, self.first)

    def features(self, count: int) -> Tensor:
        return self.offset + self.scale * self.normal(count, self.width)

    def backbone(self, features: Tensor, slot: int) -> Tensor:
        return (features - self.offset) / self.scale @ self.maps[min(slot, 1)]

    def hidden(self, features: Tensor, token: Tensor, slot: int) -> Tensor:
        return self.backbone(features, slot) + self.table[token]


def started(target: FrozenTarget, world: World, **recipe: object) -> DSparkDraft:
    draft = tiny_draft(target, markov_rank=32, **recipe)
    start_linearly(draft, world.samples)
    return draft


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_it_predicts_what_the_linear_map_predicts(kv_heads: int) -> None:
    target = wide_target()
    world = World(target)
    draft = started(target, world, num_key_value_heads=kv_heads)
    similar: list[list[float]] = [[], [], []]
    for length in range(6, 40, 3):
        features = world.features(length)
        features[0] = world.first
        draft_pass = DraftPass(draft, 1, 64)
        draft_pass.append(features, RowLayout([length], [0], CPU))
        with torch.no_grad():
            hidden = draft_pass.hidden(torch.tensor([17]), [length])[0]
        for slot in range(3):
            expected = world.backbone(features[-1], slot)
            similar[slot].append(float(torch.cosine_similarity(hidden[slot], expected, dim=0)))
    anchor, masked, later = (sum(values) / len(values) for values in similar)
    assert anchor > 0.8
    assert masked > 0.8
    assert later > 0.5


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_the_head_adds_what_the_token_before_says(head: str) -> None:
    target = wide_target()
    world = World(target)
    draft = started(target, world, head=head)
    token = torch.arange(3, 90)
    states = torch.randn(29, 3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    latent = draft.markov_head(states, draft.markov_head.markov_w1(token.view(29, 3)))
    bias = draft.bias(latent.flatten(0, 1)).detach()
    expected = (world.table[token] @ draft.head_weight.T).detach()
    bias, expected = (values - values.mean(1, keepdim=True) for values in (bias, expected))
    assert float(torch.cosine_similarity(bias, expected, dim=1).mean()) > 0.8


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
def test_a_reduced_vocabulary_starts_too(head: str) -> None:
    target = wide_target()
    draft = tiny_draft(target, token_ids=torch.arange(0, 90, 2), head=head)
    start_linearly(draft, World(target).samples)
    assert all(torch.isfinite(value).all() for value in draft.state_dict().values())


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_what_a_started_head_does_not_read_yet_can_be_learnt(head: str) -> None:
    """No weight that begins at zero has a gradient of zero."""
    target = wide_target()
    draft = started(target, World(target), head=head)
    states = torch.randn(20, 3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    latent = draft.markov_head(states, draft.markov_head.markov_w1(torch.arange(3, 63).view(20, 3)))
    draft.bias(latent).square().sum().backward()
    part = draft.markov_head.gate_proj if head == "gated" else draft.markov_head.joint_proj
    zero = part.weight == 0
    assert zero.any()
    assert (part.weight.grad[zero] != 0).float().mean() > 0.95


def test_one_key_value_head_is_refused() -> None:
    target = wide_target()
    with pytest.raises(UserError, match="at least two key-value heads"):
        started(target, World(target), num_key_value_heads=1)
