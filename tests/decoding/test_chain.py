"""Chains of an Eagle3 draft: the reference's rounds, and no loss."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_target

from dspark_train.decoding.chain_pass import ChainPass
from dspark_train.decoding.decoder import generate
from dspark_train.decoding.layout import RowLayout
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.draft.eagle3 import Eagle3Config, Eagle3Draft

FOLDER = Path(__file__).parents[1] / "fixtures/golden/eagle3"


def tiny_eagle3(target, seed=0, steps=4):
    config = Eagle3Config(
        **{
            key: getattr(target.config, key)
            for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        },
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        target_layer_ids=list(target.layer_ids),
        num_target_layers=target.num_layers,
        ttt_length=steps,
    )
    torch.manual_seed(seed)
    draft = Eagle3Draft(config, target=target).float().eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.15)
    return draft


@torch.inference_mode()
@pytest.mark.parametrize("slot", [0, 2])
def test_rounds_are_the_references(slot):
    draft = Eagle3Draft.load(FOLDER / "checkpoint").eval()
    features = load_file(FOLDER / "train_forward.safetensors")["target_features"][0]
    chain = ChainPass(draft, slots=slot + 1, length=64)
    for place, expected in enumerate(json.loads((FOLDER / "expected.json").read_text())["decode_rounds"]):
        start, end = expected["context_rows"]
        tokens = torch.tensor(expected["context_tokens"])
        layout = RowLayout([end - start], [start], chain.device, first_slot=slot)
        chain.begin(features[start:end], layout, tokens)
        if slot:
            chain.move(slot, 0, end)
        proposal = chain.propose(torch.tensor([expected["anchor_token"]]), [end], SamplingRule())
        assert proposal.tokens[0].tolist() == expected["greedy_draft"], place


@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_output_is_the_targets(batch_size):
    target = tiny_target()
    draft = tiny_eagle3(target)
    prompts = [[1, 5, 9], [3, 4], [8, 8, 8, 8, 8], [11]]
    plain = generate(target, None, prompts, max_new_tokens=20, batch_size=batch_size)
    drafted = generate(target, draft, prompts, max_new_tokens=20, batch_size=batch_size)
    assert drafted.tokens == plain.tokens
    assert drafted.trace.proposed.shape[1] == 4


def test_a_perfect_chain_is_accepted_whole():
    """A draft that repeats one token, for a target that does: every round commits K + 1."""
    target = tiny_target()
    target.model.lm_head.weight.data.zero_()
    target.model.lm_head.weight.data[7] = 0.0
    draft = tiny_eagle3(target)
    result = generate(target, draft, [[1, 5, 9]], max_new_tokens=21, stop_token_ids=[])
    assert result.trace.accepted.tolist() == [4, 4, 4, 4]


def test_what_a_round_drafts_does_not_depend_on_how_it_got_there():
    """States of verified rows are true ones: a draft continued round by round proposes as after one prefill."""
    target = tiny_target()
    draft = tiny_eagle3(target)
    whole = generate(target, draft, [[1, 5, 9, 12]], max_new_tokens=24, stop_token_ids=[])
    tokens = [1, 5, 9, 12, *whole.tokens[0]]
    for anchor, proposed in zip(whole.trace.anchor.tolist(), whole.trace.proposed.tolist(), strict=True):
        begun = generate(target, draft, [tokens[:anchor]], max_new_tokens=3, stop_token_ids=[])
        assert begun.trace.proposed[0].tolist()[:2] == proposed[:2]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampling_is_lossless(temperature):
    """Frequencies of the second token equal the target's."""
    target = tiny_target()
    draft = tiny_eagle3(target)
    count = 3000
    drafted = generate(
        target, draft, [[1, 5, 9]] * count, max_new_tokens=2, temperature=temperature, batch_size=500, seed=3
    )
    states = target.states(torch.tensor([[1, 5, 9]]))
    first = (target.lm_head(states.last_hidden[0, -1]).float() / temperature).softmax(-1)
    starts = torch.bincount(torch.tensor([t[0] for t in drafted.tokens]), minlength=97) / count
    assert (starts - first).abs().sum() / 2 < 0.12
    common = int(first.argmax())
    follow = target.states(torch.tensor([[1, 5, 9, common]]))
    wanted = (target.lm_head(follow.last_hidden[0, -1]).float() / temperature).softmax(-1)
    seconds = torch.tensor([t[1] for t in drafted.tokens if t[0] == common and len(t) > 1])
    found = torch.bincount(seconds, minlength=97) / len(seconds)
    noise = (wanted * (1 - wanted) / len(seconds)).sqrt()
    assert ((found - wanted).abs() <= 5 * noise + 1e-3).all()
