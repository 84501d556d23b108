"""Compares a written folder, through the independent reader, with the draft that it was made from."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark_train.calibration.bias import BIAS
from dspark_train.draft.families import root_scale
from dspark_train.errors import UserError
from dspark_train.interchange.readback import GreedyBlock, PlainDraft
from dspark_train.structures import Blocks

if TYPE_CHECKING:
    from dspark_train.draft.model import DSparkDraft

PROBES = 4
"""Blocks that are compared."""
CONTEXT = 24
"""Context positions of the longest probe."""
TOLERANCE = 1e-3
"""Largest float32 difference of logits and confidence logits, relative to the largest logit (at least 1)."""


@dataclass(frozen=True)
class ReadBack:
    """How far the folder and the draft are apart, over :data:`PROBES` greedy blocks."""

    logits: float
    """Largest absolute difference of draft logits."""
    confidence: float | None
    """Largest absolute difference of confidence logits; None where the folder has no confidence head."""
    drafts: int
    """Greedy draft tokens compared; all of them equal."""


def verify_folder(
    folder: Path,
    draft: DSparkDraft,
    embedding: Tensor,
    head: Tensor,
    dtype: torch.dtype,
    temperature: float = 1.0,
    bias: float = 0.0,
    seed: int = 0,
) -> ReadBack:
    """Read ``folder`` back and compare logits, confidences and greedy drafts on random features.

    Both sides compute in float32 on weights rounded to ``dtype``, so that only a wrong tensor, a wrong field
    or a wrong rewrite can set them apart.

    Args:
        folder: what was written.
        draft: what it was made from; left as it is.
        embedding: ``[V, d]`` of the target, without the embedding scale.
        head: ``[V, d]`` of the target.
        dtype: element type of the folder.
        temperature: that was folded into the confidence head.
        bias: that was added to it before.
        seed: of the features and anchors.

    Raises:
        UserError: they differ; the folder must not be used.
    """
    config, generator = draft.config, torch.Generator().manual_seed(seed)
    plain = PlainDraft(folder, stored_embedding(draft, embedding, dtype), head.to(dtype))
    features = torch.randn(CONTEXT, len(config.layer_ids) * config.hidden_size, generator=generator)
    anchors = torch.linspace(1, CONTEXT, PROBES).long()
    tokens = torch.randint(config.vocab_size, (PROBES,), generator=generator)
    proposals = [plain.propose(features[:n], int(t), int(n)) for n, t in zip(anchors, tokens, strict=True)]
    twin = rounded(draft, embedding, head, dtype, temperature, bias)
    logits, confidence = _teacher_forced(twin, features, anchors, tokens, proposals)
    return _compare(folder, draft, logits, confidence, proposals)


@torch.no_grad()
def rounded(
    draft: DSparkDraft,
    embedding: Tensor,
    head: Tensor,
    dtype: torch.dtype,
    temperature: float = 1.0,
    bias: float = 0.0,
) -> DSparkDraft:
    """Return a float32 CPU copy of ``draft``, weights rounded to ``dtype``, bias and temperature folded in."""
    from dspark_train.draft.model import BorrowedVocabulary

    borrowed = draft.borrowed
    draft.borrowed = None
    try:
        twin = copy.deepcopy(draft).cpu().eval()
    finally:
        draft.borrowed = borrowed
    scalars = [layer.layer_scalar for layer in twin.layers if layer.layer_scalar is not None]
    for tensor in (*twin.parameters(), *scalars):
        tensor.data = tensor.data.to(dtype).float()
    if twin.confidence_head is not None:
        added = twin.get_parameter(BIAS)
        added.data = (added.data.double() + bias).to(dtype).float()
        for parameter in twin.confidence_head.parameters():
            parameter.data = (parameter.data.double() / temperature).to(dtype).float()
    ids = draft.draft_token_ids
    rows = head if ids is None else head[ids.cpu()]
    stored = stored_embedding(draft, embedding, dtype).float()
    root_scaled = twin.config.family.root_scaled
    twin.config.embedding_scale = root_scale(twin.config.hidden_size, dtype) if root_scaled else 1.0
    twin.borrowed = BorrowedVocabulary(stored, rows.to(dtype).float())
    return twin


def stored_embedding(draft: DSparkDraft, embedding: Tensor, dtype: torch.dtype) -> Tensor:
    """``[V, d]`` as a folder holds it: scaled, unless engines scale it themselves."""
    scale = 1.0 if draft.config.family.root_scaled else draft.config.embedding_scale
    return (embedding.to(dtype).float() * scale).to(dtype)


@torch.no_grad()
def _teacher_forced(
    draft: DSparkDraft, features: Tensor, anchors: Tensor, tokens: Tensor, proposals: list[GreedyBlock]
) -> tuple[Tensor, Tensor | None]:
    """The draft's logits ``[N, γ, U]`` and confidence logits ``[N, γ]`` along the proposed tokens."""
    proposed = torch.stack([proposal.tokens for proposal in proposals])
    slots = torch.full_like(proposed, draft.config.mask_token_id)
    slots[:, 0] = tokens
    blocks = Blocks(
        sequence=torch.zeros_like(anchors),
        anchor=anchors,
        slot_ids=slots,
        labels=proposed,
        previous=torch.cat([tokens[:, None], proposed[:, :-1]], dim=1),
        supervised=torch.ones_like(proposed, dtype=torch.bool),
    )
    output = draft(features[None], blocks)
    return draft.logits(output.hidden, output.latent), output.confidence_logits


def _compare(
    folder: Path, draft: DSparkDraft, logits: Tensor, confidence: Tensor | None, proposals: list[GreedyBlock]
) -> ReadBack:
    read = torch.stack([proposal.logits for proposal in proposals])
    ids = draft.draft_token_ids
    inside = read if ids is None else read[..., ids.cpu()]
    if not bool(inside.isfinite().all() & logits.isfinite().all()):
        raise UserError(f"{folder}: reading it back gives logits that are not finite; a tensor is missing")
    tolerance = TOLERANCE * max(1.0, float(logits.abs().max()))
    gap = float((inside - logits).abs().max())
    tokens = torch.stack([proposal.tokens for proposal in proposals])
    best = logits.argmax(-1)
    own = best if ids is None else ids.cpu()[best]
    read_confidence = [proposal.confidence_logits for proposal in proposals]
    confidence_gap = None
    if confidence is not None and read_confidence[0] is not None:
        stacked = torch.stack([row for row in read_confidence if row is not None])
        confidence_gap = float((stacked - confidence).abs().max())
    if gap > tolerance or (confidence_gap or 0.0) > tolerance or not torch.equal(own, tokens):
        raise UserError(
            f"{folder}: reading it back gives another draft (logits differ by {gap:.3g}, confidences by "
            f"{confidence_gap if confidence_gap is not None else 0:.3g}, {int((own != tokens).sum())} of "
            f"{tokens.numel()} draft tokens); do not serve it, and report this"
        )
    return ReadBack(gap, confidence_gap, tokens.numel())
