"""Golden numbers of the reference implementation, as this project's structures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark_train.data.blocks import pack_blocks, supervised_slots
from dspark_train.draft.model import DSparkDraft
from dspark_train.structures import Blocks

FOLDER = Path(__file__).parent / "fixtures" / "golden"
HEADS = ("vanilla", "gated", "rnn", "parallel")
GEMMA4 = ("gemma4", "gemma4_kv_shared")
"""Drafts with Gemma 4's layers: values of their own, and keys shared as values."""


@dataclass(frozen=True)
class Golden:
    draft: DSparkDraft
    tensors: dict[str, Tensor]
    gradients: dict[str, Tensor]
    decode: dict[str, Tensor]
    expected: dict[str, Any]
    blocks: Blocks
    keep: tuple[Tensor, Tensor]

    def kept(self, name: str) -> Tensor:
        """Rows ``[N, γ, ..]`` of a golden output that belong to real blocks."""
        return self.tensors[name][self.keep]


def load_golden(head: str) -> Golden:
    folder = FOLDER / head
    draft = DSparkDraft.load(folder / "checkpoint")
    tensors = load_file(folder / "train_forward.safetensors")
    sequence, place = tensors["block_keep"].nonzero(as_tuple=True)
    anchor = tensors["anchor_positions"][sequence, place]
    masks = tensors["loss_mask"].bool().numpy()
    counts = torch.cat(
        [
            torch.from_numpy(
                supervised_slots(masks[row], anchor[sequence == row].numpy(), draft.config.block_size)
            )
            for row in range(len(masks))
        ]
    )
    blocks = pack_blocks(
        tensors["input_ids"],
        sequence,
        anchor,
        counts,
        block_size=draft.config.block_size,
        mask_token_id=draft.config.mask_token_id,
    )
    return Golden(
        draft=draft,
        tensors=tensors,
        gradients=load_file(folder / "gradients.safetensors"),
        decode=load_file(folder / "decode.safetensors"),
        expected=json.loads((folder / "expected.json").read_text()),
        blocks=blocks,
        keep=(sequence, place),
    )


def fake_target(draft: DSparkDraft) -> SimpleNamespace:
    """What a golden draft borrows from its target: nothing but the vocabulary matrices."""
    return SimpleNamespace(embedding=draft.embedding_weight, head=draft.head_weight)
