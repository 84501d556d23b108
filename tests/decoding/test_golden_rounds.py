"""Draft rounds of the reference implementation, through the decoder's own draft pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden import GEMMA4, HEADS, load_golden
from tiny_models import tiny_draft, tiny_target

from dspark_train.decoding.decoder import generate
from dspark_train.decoding.draft_pass import DraftPass
from dspark_train.decoding.layout import RowLayout
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.structures import Blocks

CPU = torch.device("cpu")


@pytest.mark.parametrize("head", [*HEADS, *GEMMA4])
@pytest.mark.parametrize("slot", [0, 2])
@torch.inference_mode()
def test_greedy_rounds_agree_with_the_reference(head: str, slot: int) -> None:
    golden = load_golden(head)
    features = golden.tensors["target_features"][0]
    drafted = DraftPass(golden.draft, slots=slot + 1, length=64)
    for index, expected in enumerate(golden.expected["decode_rounds"]):
        start, end = expected["context_rows"]
        drafted.append(features[start:end], RowLayout([end - start], [start], CPU, first_slot=slot))
        # idle slots before the one under test hold nothing and draft from position 0
        anchors = torch.tensor([7] * slot + [expected["anchor_token"]])
        positions = [0] * slot + [expected["anchor_position"]]
        hidden = drafted.hidden(anchors, positions)
        proposal = drafted.walk(hidden, anchors, SamplingRule())
        assert proposal.tokens[slot].tolist() == expected["greedy_draft"]
        torch.testing.assert_close(hidden[slot:], golden.decode[f"hidden_{index}"], atol=1e-4, rtol=0)
        if proposal.confidence_logits is not None:
            expected_logits = golden.decode[f"confidence_logits_{index}"]
            torch.testing.assert_close(proposal.confidence_logits[slot:], expected_logits, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_rejected_context_and_block_slots_leave_no_trace() -> None:
    """Rows appended beyond the next anchor, and slots of earlier blocks, change nothing."""
    golden = load_golden("vanilla")
    features = golden.tensors["target_features"][0]
    anchors, rule = torch.tensor([33]), SamplingRule()
    clean, used = (DraftPass(golden.draft, slots=1, length=64) for _ in range(2))
    clean.append(features[:8], RowLayout([8], [0], CPU))
    used.append(features[:5], RowLayout([5], [0], CPU))
    used.propose(torch.tensor([90]), [5], rule)
    used.append(features[5:12].flip(0), RowLayout([7], [5], CPU))  # seven verified, all wrong
    used.append(features[5:8], RowLayout([3], [5], CPU))
    first, second = clean.hidden(anchors, [8]), used.hidden(anchors, [8])
    torch.testing.assert_close(first, second)


WINDOWS = [{}, {"sliding_window": 7}, {"sliding_window": 6, "full_attention_layers": [1]},
           {"sliding_window": 7, "sliding_window_non_causal": True}]  # fmt: skip


@pytest.mark.parametrize("head", ["vanilla", "rnn", "none"])
@pytest.mark.parametrize("windows", WINDOWS, ids=["whole", "window", "some", "both ways"])
@pytest.mark.parametrize("prompts", [[[5, 9, 11, 40]], [[5, 9, 11, 40, 3, 8, 2, 61, 17], [7, 30]]])
@torch.inference_mode()
def test_decoding_drafts_what_the_training_pass_predicts(
    head: str, windows: dict[str, Any], prompts: list[list[int]]
) -> None:
    """Every block that was drafted while decoding, again as one packed training pass over the finished text."""
    target = tiny_target()
    draft = tiny_draft(target, head=head, **windows)
    graphs = len(prompts) > 1  # fixed shapes too
    result = generate(
        target, draft, prompts, max_new_tokens=24, stop_token_ids=[], batch_size=2, graphs=graphs
    )
    for index, prompt in enumerate(prompts):
        trace, text = result.trace, torch.tensor([[*prompt, *result.tokens[index]]])
        own = trace.request == index
        anchor, proposed = trace.anchor[own], trace.proposed[own]
        anchors = text[0, anchor]
        slot_ids = torch.full(proposed.shape, draft.config.mask_token_id)
        slot_ids[:, 0] = anchors
        nothing = torch.zeros_like(slot_ids)
        blocks = Blocks(torch.zeros_like(anchor), anchor, slot_ids, nothing, nothing, nothing.bool())
        hidden = draft(target.states(text).features, blocks).hidden
        proposal = DraftPass(draft, slots=1, length=1).walk(hidden, anchors, SamplingRule())
        assert torch.equal(proposal.tokens, proposed)
        assert proposal.confidence_logits is not None
        torch.testing.assert_close(
            proposal.confidence_logits, trace.confidence_logits[own], atol=1e-3, rtol=1e-3
        )
