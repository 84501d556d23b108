"""Eagle3 drafts in the reference's layout (``Qwen3Eagle3Model``): written, read back, compared."""

from __future__ import annotations

from pathlib import Path

import torch

from dspark_train.draft.eagle3 import Eagle3Draft
from dspark_train.errors import UserError

ROWS = 24
"""Rows that are compared."""


@torch.no_grad()
def export_eagle3(draft: Eagle3Draft, folder: Path, dtype: torch.dtype) -> float:
    """Write a draft, read it back, and compare the logits of an unrolled pass over random features.

    Args:
        draft: trained.
        folder: to write; an earlier draft in it is replaced, whole or not at all.
        dtype: of the stored weights.

    Returns:
        Largest difference of a logit, weights rounded to ``dtype`` on one side.

    Raises:
        UserError: a weight is not finite, or what is read back is another draft.
    """
    broken = [name for name, tensor in draft.state_dict().items() if not bool(tensor.isfinite().all())]
    if broken:
        raise UserError(f"the draft cannot be exported: {', '.join(broken)} not finite; train it again")
    aside = folder.with_name(f".{folder.name}.checked")
    draft.save(aside, dtype=dtype)
    read = Eagle3Draft.load(aside, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    size = len(draft.config.layer_ids) * draft.config.hidden_size
    features = torch.randn(1, ROWS, size, generator=generator)
    ids = torch.randint(draft.config.vocab_size, (1, ROWS), generator=generator)
    kind = draft.fc.weight.dtype
    own = draft.base_logits(draft.hidden(draft.unroll(features.to(draft.device, kind), ids.to(draft.device))))
    found = read.base_logits(read.hidden(read.unroll(features, ids)))
    gap = float((found - own.float().cpu()).abs().max())
    rounding = 64 * torch.finfo(dtype if dtype.itemsize < kind.itemsize else kind).eps
    if gap > rounding * max(1.0, float(found.abs().max())):
        raise UserError(
            f"{aside}: reading it back gives another draft (logits differ by {gap:.3g}); report this"
        )
    if folder.exists():
        for path in folder.glob("model*.safetensors*"):
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    for path in aside.iterdir():
        path.replace(folder / path.name)
    aside.rmdir()
    return gap
