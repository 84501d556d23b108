"""Writes a trained draft in the layout of a serving engine, reads it back, and says what it cannot do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dspark_train.calibration.io import Calibration
from dspark_train.draft.config import canonical_rope
from dspark_train.draft.families import LAYER_FAMILIES
from dspark_train.errors import UserError
from dspark_train.interchange.checkpoint import MAX_SHARD_BYTES, DraftCheckpoint, write_checkpoint
from dspark_train.interchange.dflash import to_dflash
from dspark_train.interchange.engines import (
    DFLASH_WARNING,
    ENGINES,
    Engine,
    ExportFormat,
    problems,
    serving_commands,
)
from dspark_train.interchange.folding import (
    add_empty_head,
    fold_bias,
    fold_embedding_scale,
    fold_temperature,
    fold_vocabulary,
)
from dspark_train.interchange.native import (
    DSPARK_DEFAULTS,
    LAYER_FIELDS,
    REQUIRED_FIELDS,
    expected_shapes,
    to_native,
)
from dspark_train.interchange.speculators import to_speculators
from dspark_train.interchange.verify import ReadBack, verify_folder
from dspark_train.run import STS_FILE

if TYPE_CHECKING:
    from dspark_train.draft.model import DSparkDraft
    from dspark_train.target.frozen import FrozenTarget


@dataclass(frozen=True)
class TargetWeights:
    """What an export takes from the target."""

    name: str
    """Name or path, as a server will be given it."""
    architectures: list[str]
    embedding: Tensor
    """``[V, d]``, without the embedding scale."""
    head: Tensor
    """``[V, d]``."""
    quantisation: str = ""
    """Scheme of a quantised target; empty for a plain one."""

    @classmethod
    def of(cls, target: FrozenTarget) -> TargetWeights:
        """Of a loaded target."""
        names = list(target.model.config.architectures or [type(target.model).__name__])
        scheme = "" if target.quantisation is None else target.quantisation.scheme
        return cls(target.name, names, target.embedding_weight.detach(), target.head_weight.detach(), scheme)


@dataclass
class ExportResult:
    """A written folder."""

    folder: Path
    format: ExportFormat
    config: dict[str, Any]
    """As written."""
    read_back: ReadBack
    warnings: list[str] = field(default_factory=list)
    """Engines that cannot serve it, and why."""
    notes: list[str] = field(default_factory=list)
    """What was rewritten for the engines."""
    temperature: float | None = None
    """Folded into the confidence head; None where none was."""
    target: str = ""
    """Name or path of the target, as a server will be given it."""
    engines: dict[Engine, list[str]] = field(default_factory=dict)
    """Problems of each engine that the format is for."""

    @property
    def commands(self) -> list[str]:
        """How to serve it, in each engine that can."""
        return serving_commands(
            self.engines,
            self.target,
            str(self.folder),
            self.config["block_size"],
            calibrated=(self.folder / STS_FILE).is_file(),
            folded=self.temperature is not None,
        )


def checkpoint_of(draft: DSparkDraft, target: TargetWeights, dtype: torch.dtype) -> DraftCheckpoint:
    """Return the draft in memory as a checkpoint of one element type, copies of the target's weights
    included.

    Raises:
        UserError: a weight is missing or not finite (training diverged).
    """
    source = draft.config.to_dict()
    config = {name: source[name] for name in (*REQUIRED_FIELDS, "head_dim", *LAYER_FIELDS)}
    config |= {name: source.get(name, default) for name, default in DSPARK_DEFAULTS.items()}
    for name in ("block_size", "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type"):
        config[name] = source[name]
    config["num_target_layers"] = source["num_target_layers"]
    config["draft_vocab_size"] = source.get("draft_vocab_size")
    for name in ("layer_types", "sliding_window", "sliding_window_non_causal"):
        config[name] = source[name]
    config["rope_parameters"] = canonical_rope(source)
    state = {name: tensor.detach().cpu() for name, tensor in draft.state_dict().items() if name != "d2t"}
    token_ids = draft.draft_token_ids
    token_ids = None if token_ids is None else token_ids.cpu()
    head = target.head if token_ids is None else target.head[token_ids.to(target.head.device)]
    state |= {"embed_tokens.weight": target.embedding.cpu(), "lm_head.weight": head.cpu()}
    tensors = {name: state[name].to(dtype) for name in expected_shapes(config) if name in state}
    missing = sorted(set(expected_shapes(config)) - set(tensors))
    broken = sorted(name for name, tensor in tensors.items() if not bool(tensor.isfinite().all()))
    if missing or broken:
        raise UserError(
            f"the draft cannot be exported: {', '.join(missing) or 'no tensor'} missing, "
            f"{', '.join(broken) or 'none'} not finite; train it again or use an earlier checkpoint"
        )
    return DraftCheckpoint(config, tensors, token_ids)


def rewrite(
    checkpoint: DraftCheckpoint,
    target: TargetWeights,
    layout: ExportFormat,
    temperature: float | None,
    calibration: Calibration | None = None,
) -> tuple[DraftCheckpoint, dict[Engine, list[str]]]:
    """Rewrite a draft for a layout's engines, and find what they cannot do.

    Returns:
        The draft to write, and the problems of each engine that the layout is for.

    Raises:
        UserError: no engine of a layout that is made for one engine can serve the draft.
    """
    scale = checkpoint.config["embedding_scale"]
    if calibration is not None and calibration.folded_bias and calibration.sampling is not None:
        checkpoint = fold_bias(checkpoint, calibration.folded_bias, calibration.sampling.label)
    if temperature is not None:
        checkpoint = fold_temperature(checkpoint, temperature)
    family = LAYER_FAMILIES[checkpoint.config["layer_family"]]
    if layout in ("speculators", "dflash") and checkpoint.config["layer_family"] != "qwen3":
        raise UserError(f"format {layout} holds Qwen3 layers only, and this draft has Gemma 4's: use native")
    if family.root_scaled:
        checkpoint = add_empty_head(checkpoint)
    elif layout != "dflash":  # which holds no embedding to fold the scale into
        checkpoint = add_empty_head(fold_embedding_scale(checkpoint))
    if layout in ("native", "sglang"):
        checkpoint = fold_vocabulary(checkpoint, target.head.cpu())
    judged = {**checkpoint.config, "embedding_scale": scale}
    found: dict[Engine, list[str]] = {engine: problems(judged, engine) for engine in ENGINES[layout]}
    if len(found) == 1 and layout in ("speculators", "sglang"):
        (reasons,) = found.values()
        if reasons:
            raise UserError(
                f"format {layout}: {'; '.join(reasons)}. Nothing was written; format native is read back by "
                "this project whatever the engines say"
            )
    return checkpoint, found


def export_draft(
    draft: DSparkDraft,
    target: TargetWeights,
    folder: Path,
    layout: ExportFormat = "native",
    dtype: torch.dtype | None = None,
    temperature: float | None = None,
    calibration: Calibration | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    warn: Callable[[str], None] | None = None,
) -> ExportResult:
    """Write ``draft`` to ``folder``, read it back independently, and compare.

    The folder is written aside and moved into place once the comparison has passed.

    Args:
        draft: trained.
        target: that it was trained for.
        folder: to write; an earlier export in it is replaced.
        layout: of the folder.
        dtype: element type of the weights; None keeps the target's.
        temperature: folded into the confidence head; None folds none.
        calibration: whose ``folded_bias`` is added to the confidence head; None adds none.
        max_shard_bytes: largest weight file.
        warn: called with every warning, before anything is written.

    Raises:
        UserError: the layout cannot hold the draft, its engine cannot serve it, or reading back fails.
    """
    dtype = dtype or target.head.dtype
    checkpoint, found = rewrite(checkpoint_of(draft, target, dtype), target, layout, temperature, calibration)
    if layout == "dflash":
        config, tensors = to_dflash(checkpoint)
    elif layout == "speculators":
        config, tensors = to_speculators(checkpoint, target.name, target.architectures)
    else:
        config, tensors = to_native(checkpoint)
    warnings = [reason for reasons in found.values() for reason in reasons]
    if layout == "dflash":
        warnings.append(DFLASH_WARNING)
    if warn is not None:
        for line in warnings:
            warn(line)
    if target.quantisation:
        checkpoint.notes.append(
            f"the target is quantised ({target.quantisation}), and the draft is trained on the states that it has so: "
            "serve it with this checkpoint of the target, not with another quantisation"
        )
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    write_checkpoint(aside, config, tensors, max_shard_bytes)
    bias = 0.0 if calibration is None or calibration.sampling is None else calibration.folded_bias
    read_back = verify_folder(
        aside, draft, target.embedding.cpu(), target.head.cpu(), dtype, temperature or 1.0, bias
    )
    replace_folder(aside, folder)
    return ExportResult(
        folder, layout, config, read_back, warnings, checkpoint.notes, temperature, target.name, found
    )


def replace_folder(source: Path, folder: Path) -> None:
    """Move the files of ``source`` into ``folder``; weights and temperatures of an earlier export are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    singles = [folder / "model.safetensors.index.json", folder / STS_FILE]
    for stale in [*folder.glob("model*.safetensors"), *singles]:
        stale.unlink(missing_ok=True)
    for path in source.iterdir():
        path.replace(folder / path.name)
    source.rmdir()
