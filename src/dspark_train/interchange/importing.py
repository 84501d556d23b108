"""Takes drafts made elsewhere: checks them against their target, completes them, or starts training from them."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dspark_train.draft.config import canonical_rope
from dspark_train.errors import UserError
from dspark_train.hub import local_folder
from dspark_train.interchange.checkpoint import DraftCheckpoint, read_config, write_checkpoint
from dspark_train.interchange.detect import Layout, detect, read_draft
from dspark_train.interchange.export import replace_folder
from dspark_train.interchange.native import to_native
from dspark_train.interchange.verify import ReadBack, verify_folder
from dspark_train.target.config import layer_id_problems

if TYPE_CHECKING:
    from dspark_train.draft.config import DSparkConfig
    from dspark_train.draft.model import DSparkDraft
    from dspark_train.target.frozen import FrozenTarget

COPY_TOLERANCE = 1e-2
"""Largest difference, by rounding, between a folder's copy of a target matrix and the target's own."""


@dataclass(frozen=True)
class ImportResult:
    """A draft that was taken in."""

    layout: Layout
    """Of the source."""
    folder: Path
    notes: list[str] = field(default_factory=list)
    """What was filled in, dropped or found different, one sentence each."""
    read_back: ReadBack | None = None
    """Comparison of the source with what was written; None for a warm start only."""


@dataclass(frozen=True)
class WarmStart:
    """What :func:`warm_start` did."""

    layout: Layout
    """Of the source."""
    copied: list[str]
    """Parameters that came from the source."""
    fresh: list[str]
    """Parameters that keep their new initialisation."""
    notes: list[str]


def fit_to_target(checkpoint: DraftCheckpoint, target: FrozenTarget) -> list[str]:
    """Check a draft against the target it is for, and fill in what its layout leaves out.

    Returns:
        What was filled in or differs, one sentence each.

    Raises:
        UserError: another hidden size, vocabulary, depth or set of layers.
    """
    config, notes = checkpoint.config, list[str]()
    wrong = [
        f"{name} {config[name]} (the target has {value})"
        for name, value in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size))
        if config[name] != value
    ]
    if config["num_target_layers"] is None:
        config["num_target_layers"] = target.num_layers
        notes.append(f"filled in num_target_layers {target.num_layers} from the target")
    elif config["num_target_layers"] != target.num_layers:
        wrong.append(f"num_target_layers {config['num_target_layers']} (the target has {target.num_layers})")
    wrong += layer_id_problems("target_layer_ids", config["target_layer_ids"], target.num_layers)
    if wrong:
        raise UserError(f"the draft was not made for {target.name}: {'; '.join(wrong)}")
    own = canonical_rope(target.config.to_dict())
    if config["rope_parameters"] is None:
        config["rope_parameters"] = own
        notes.append(f"filled in the rope settings from the target: {own}")
    elif own is not None and config["rope_parameters"] != own:
        notes.append(f"keeps its own rope settings {config['rope_parameters']}; the target's are {own}")
    if config["rope_parameters"] is None:
        raise UserError(
            "neither the draft nor the target says its rope_theta; add it to the draft's config.json"
        )
    config["embedding_scale"] = target.embedding_scale
    config["final_logit_softcapping"] = target.logit_softcap
    return notes


def complete(checkpoint: DraftCheckpoint, target: FrozenTarget) -> list[str]:
    """Add the target's copies that the draft lacks, and compare the ones that it has.

    Raises:
        UserError: its copies are not the target's, so that it was made for another model.
    """
    notes, dtype = [], checkpoint.dtype
    ids = checkpoint.draft_token_ids
    head = target.head_weight if ids is None else target.head_weight[ids.to(target.head_weight.device)]
    for name, own in (("embed_tokens.weight", target.embedding_weight), ("lm_head.weight", head)):
        own = own.detach().cpu().to(dtype)
        given = checkpoint.tensors.get(name)
        if given is not None:
            scale = float(own.float().abs().max())
            gap = float((given.float() - own.float()).abs().max())
            if name == "embed_tokens.weight" and target.embedding_scale != 1.0:
                scaled = own.float() * target.embedding_scale
                if float((given.float() - scaled).abs().max()) <= COPY_TOLERANCE * float(scaled.abs().max()):
                    gap = 0.0
            if not gap <= COPY_TOLERANCE * max(scale, 1e-6):
                raise UserError(
                    f"{name} of the draft differs from the target's by up to {gap:.3g} (largest entry "
                    f"{scale:.3g}); it was made for another model than {target.name}, or trained with a matrix "
                    "of its own"
                )
            if gap:
                notes.append(
                    f"{name} differs from the target's by rounding ({gap:.2g}); the target's is used"
                )
        checkpoint.tensors[name] = own
    return notes


def import_folder(
    source: Path, folder: Path, target: FrozenTarget, layout: Layout | None = None
) -> ImportResult:
    """Write a draft in any known layout as a native folder that this project decodes, calibrates and exports.

    The result is compared with the source through the independent reader. A draft whose slots predict their
    own positions (DFlash, older speculators checkpoints) is kept as a start for training: nothing here
    decodes it. The folder is written aside and moved into place once the comparison has passed.

    Args:
        source: the checkpoint.
        folder: to write.
        target: that the draft is for.
        layout: skips detection.

    Raises:
        UserError: unknown layout, damaged files, or a draft for another target.
    """
    from dspark_train.draft.model import DSparkDraft

    layout = layout or detect(source)
    checkpoint = read_draft(source, layout)
    aside = folder.with_name(folder.name + ".partial")
    compared = source if checkpoint.config["rope_parameters"] else aside
    notes = [*checkpoint.notes, *fit_to_target(checkpoint, target), *complete(checkpoint, target)]
    raw = read_config(source / "config.json")
    if "auto_map" in raw:
        notes.append("the folder brings Python code along (auto_map): it was neither needed nor run")
    config, tensors = to_native(checkpoint)
    shutil.rmtree(aside, ignore_errors=True)
    write_checkpoint(aside, config, tensors)
    if not checkpoint.config["sample_from_anchor"]:
        notes.append(
            "its slots predict their own positions (sample_from_anchor false): decoding refuses it; train "
            f"from it with fit --model.init_from {folder}"
        )
        replace_folder(aside, folder)
        return ImportResult(layout, folder, notes)
    try:
        draft = DSparkDraft.load(aside, dtype=checkpoint.dtype)
        draft.borrow(target)
        matrices = (target.embedding_weight.cpu(), target.head_weight.cpu())
        read_back = verify_folder(compared, draft, *matrices, checkpoint.dtype)
        replace_folder(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return ImportResult(layout, folder, notes, read_back)


@torch.no_grad()
def warm_start(draft: DSparkDraft, given: str | Path) -> WarmStart:
    """Copy what ``source`` has into a new draft; heads that it lacks, or has in another form, stay new.

    Not resuming: optimiser, schedule and data order start afresh. What was taken and filled in is printed.
    The backbone must fit entirely; its parameters are set to NaN first, so that none can be left out
    unnoticed.

    Args:
        draft: new, made from its target.
        given: folder or hub id of a checkpoint in any known layout.

    Raises:
        UserError: the backbone has another shape or other taps.
    """
    source = local_folder(str(given))
    layout = detect(source)
    checkpoint = read_draft(source, layout)
    notes = [*checkpoint.notes, *_check_backbone(source, checkpoint.config, draft.config)]
    values = {**checkpoint.tensors, **_head_rows(checkpoint, draft)}
    own = dict(draft.named_parameters())
    heads = tuple(name for name in own if name.startswith(("markov_head.", "confidence_head.")))
    same_kind = checkpoint.config["markov_head_type"] == draft.config.markov_head_type
    fresh = [
        name
        for name in heads
        if name not in values
        or values[name].shape != own[name].shape
        or (name.startswith("markov_head.") and not same_kind)
    ]
    if any(name.startswith("markov_head.") for name in fresh):
        fresh = [name for name in heads if name in fresh or name.startswith("markov_head.")]
        if draft.config.confidence_head_with_markov:
            fresh = list(heads)
    copied = [
        name for name in own if name not in fresh and name not in ("embed_tokens.weight", "lm_head.weight")
    ]
    for name in copied:
        own[name].fill_(math.nan)
        if name in values:
            own[name].copy_(values[name])
    for name, buffer in draft.named_buffers():
        if name.endswith("layer_scalar"):  # stored, never trained
            buffer.copy_(values[name])
    missing = [name for name in copied if not bool(own[name].isfinite().all())]
    if missing:
        raise UserError(
            f"{source}: {', '.join(missing[:4])} missing or not finite; it cannot be started from"
        )
    if fresh:
        notes.append(f"new: {', '.join(sorted({name.split('.')[0] for name in fresh}))}")
    report = WarmStart(layout, copied, fresh, notes)
    _say(source, report)
    return report


def _say(source: Path, report: WarmStart) -> None:
    """Print, on one process, what training starts from and what was filled in."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    @rank_zero_only
    def say() -> None:
        print(
            f"starting from {source} ({report.layout}): {len(report.copied)} tensors, optimiser and schedule new"
        )
        for note in report.notes:
            print(f"note: {note}")

    say()


def _check_backbone(source: Path, config: dict[str, Any], own: DSparkConfig) -> list[str]:
    """Refuse a backbone of another shape; return what differs and does not matter to the shapes."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    wrong = [
        f"{name} {config[name]} (this run: {getattr(own, name)})"
        for name in (*names, "num_hidden_layers", "vocab_size")
        if config[name] != getattr(own, name)
    ]
    wrong += [
        f"{name} {config.get(name, default)} (this run: {getattr(own, name)})"
        for name, default in (("layer_family", "qwen3"), ("attention_k_eq_v", False))
        if config.get(name, default) != getattr(own, name)
    ]
    if config["target_layer_ids"] != list(own.layer_ids):
        wrong.append(f"target_layer_ids {config['target_layer_ids']} (this run: {list(own.layer_ids)})")
    if wrong:
        raise UserError(f"model.init_from {source}: {'; '.join(wrong)}; give the run the source's values")
    notes = [
        f"{name} was {config[name]}, is {getattr(own, name)}"
        for name in ("block_size", "mask_token_id")
        if config[name] != getattr(own, name)
    ]
    windows = ("layer_types", "sliding_window", "sliding_window_non_causal")
    notes += [
        f"{name} was {config[name]}, is {getattr(own, name)}"
        for name in windows
        if config[name] != getattr(own, name)
    ]
    if not config["sample_from_anchor"]:
        notes.append("its slots predicted their own positions, and learn to predict the next ones")
    theirs, ours = config["rope_parameters"], canonical_rope(own.to_dict())
    if theirs is not None and theirs != ours:
        notes.append(f"the rope settings were {theirs}, are {ours}")
    return notes


def _head_rows(checkpoint: DraftCheckpoint, draft: DSparkDraft) -> dict[str, Tensor]:
    """W2 of the source with the rows of the new draft's vocabulary, 0 where the source has none."""
    name = "markov_head.markov_w2.weight"
    theirs = checkpoint.tensors.get(name)
    if theirs is None or draft.markov_head is None:
        return {}
    vocabulary = checkpoint.config["vocab_size"]
    full = theirs.new_zeros(vocabulary, theirs.shape[1])
    full[torch.arange(vocabulary) if checkpoint.draft_token_ids is None else checkpoint.draft_token_ids] = (
        theirs
    )
    ids = draft.draft_token_ids
    return {name: full if ids is None else full[ids.cpu()]}
