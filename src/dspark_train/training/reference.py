"""The objective in plain PyTorch: the readable twin and test oracle of :mod:`dspark_train.training.objective`.

It materialises ``[rows, V]`` several times; nothing but tests and benchmarks calls it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def row_losses(
    draft_logits: Tensor, target_logits: Tensor, labels: Tensor, draft_token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy, L1 distance and acceptance probability of every row (paper's training losses).

    Args:
        draft_logits: ``[rows, U]``, sequential bias and soft-cap included.
        target_logits: ``[rows, V]``.
        labels: ``[rows]`` data tokens, as target ids.
        draft_token_ids: ``[U]`` ascending target ids; None where U = V.

    Returns:
        ``[rows]`` each: cross entropy (0 where the data token is outside the draft vocabulary), the full L1 distance
        ‖p_draft − p_target‖₁ over the target's vocabulary, and ``c* = 1 − ½ L1``, which carries no gradient.
    """
    draft, target = draft_logits.softmax(-1), target_logits.softmax(-1)
    if draft_token_ids is None:
        ce = cross_entropy(draft_logits, labels, reduction="none")
        l1 = (draft - target).abs().sum(-1)
    else:
        place = torch.searchsorted(draft_token_ids, labels).clamp(max=draft_token_ids.numel() - 1)
        known = draft_token_ids[place] == labels
        ce = cross_entropy(draft_logits, place, reduction="none").where(known, 0.0)
        inside = target[:, draft_token_ids]
        l1 = (draft - inside).abs().sum(-1) + (1 - inside.sum(-1))
    return ce, l1, (1 - l1 / 2).detach()
