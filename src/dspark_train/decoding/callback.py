"""Validation by actual decoding, while training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from dspark_train.calibration.metrics import expected_calibration_error
from dspark_train.calibration.selection import verified_slots
from dspark_train.calibration.sts import survival
from dspark_train.data.conversations import HELD_OUT, Prompt, Split
from dspark_train.decoding.acceptance import acceptance_by_position
from dspark_train.decoding.measure import Settings, compare, failures, interleave, seconds_per_token
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.draft.kinds import Draft, make_draft
from dspark_train.errors import UserError
from dspark_train.structures import DecodingTrace
from dspark_train.target.frozen import FrozenTarget
from dspark_train.target.sharding import is_shared
from dspark_train.training.strategy import gather_objects


class DecodeValidation(Callback):
    """Decode a few validation prompts at every validation, plainly and speculatively.

    Logs ``decode/tau``, ``decode/accept_1`` … (conditional acceptance by position), ``decode/speedup``,
    ``decode/ece`` (mean calibration error of the raw confidences) and ``decode/divergences`` (greedy only), on which
    checkpoints and early stopping can depend: ``monitor: decode/tau``.

    The draft is decoded in the target's dtype, as it will be served. Ranks share the prompts; with a sharded target
    they decode the same ones together, all of them.

    Args:
        prompts: prompts at most, of all domains in turn.
        max_new_tokens: longest answer, in tokens.
        batch_size: requests decoded at once.
        temperature: of sampling; 0 is greedy.
        seconds: no new prompt is begun after this time.
        every: validations between two decodings.
        split: whose prompts; ``heldout``, in configurations of earlier versions, is read as validation.
    """

    def __init__(
        self,
        prompts: int = 4,
        max_new_tokens: int = 64,
        batch_size: int = 1,
        temperature: float = 0.0,
        seconds: float = 20.0,
        every: int = 1,
        split: Split | Literal["heldout"] = "validation",
    ) -> None:
        super().__init__()
        if min(prompts, batch_size, every) < 1 or max_new_tokens < 2 or seconds <= 0:
            raise UserError(
                f"DecodeValidation: prompts ({prompts}), batch_size ({batch_size}) and every ({every}) must be at "
                f"least 1, max_new_tokens ({max_new_tokens}) at least 2, seconds ({seconds}) above 0"
            )
        self.prompts, self.seconds, self.every = prompts, seconds, every
        self.split: Split = "validation" if split == HELD_OUT else split
        self.rule = SamplingRule(temperature)
        self.settings = Settings(max_new_tokens=max_new_tokens, batch_size=batch_size)
        self._validations = 0
        self._copy: Draft | None = None
        self._chosen: list[Prompt] | None = None

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decode and log (before checkpoints look at the metrics)."""
        if trainer.sanity_checking:
            return
        self._validations += 1
        if (self._validations - 1) % self.every:
            return
        module: Any = pl_module
        if self._chosen is None:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            self._chosen = interleave(data.prompts(self.split))[: self.prompts]
            if not self._chosen:
                raise UserError(
                    f"DecodeValidation: the data have no {self.split} prompts; give that split a share, or name another"
                )
        self._copy = snapshot(module.draft, module.target, self._copy)
        if not is_shared(module.target.model):
            own, seconds = self._chosen[trainer.global_rank :: trainer.world_size], self.seconds
        else:  # every rank takes part in every pass: all decode the same prompts, and none stops early
            own, seconds = self._chosen, float("inf")
        found = compare(module.target, self._copy, own, self.rule, self.settings, seconds) if own else None
        parts = [part for part in gather_objects(found) if part is not None]
        if own is self._chosen:
            parts = parts[:1]
        trace = DecodingTrace.concatenate([part.trace for part in parts])
        for name, value in metrics(trace).items():
            self._log(pl_module, name, value)
        plain = seconds_per_token([result for part in parts for result in part.plain])
        drafted = seconds_per_token([result for part in parts for result in part.speculative])
        self._log(pl_module, "speedup", plain / drafted)
        if self.rule.greedy:
            self._log(pl_module, "divergences", float(sum(len(failures(part)) for part in parts)))

    def _log(self, module: LightningModule, name: str, value: float) -> None:
        shown = name in ("tau", "speedup")
        # every rank has gathered the same sums: nothing is left to reduce
        module.log(f"decode/{name}", value, prog_bar=shown, rank_zero_only=False, sync_dist=False)


def metrics(trace: DecodingTrace) -> dict[str, float]:
    """What rounds say: τ, conditional acceptance of every position that was reached, calibration error."""
    found = {"tau": trace.accepted_length}
    for position, rate in enumerate(acceptance_by_position(trace)[0].conditional):
        if rate is not None:
            found[f"accept_{position + 1}"] = rate
    if not trace.confidence_logits.isnan().any():
        error = expected_calibration_error(
            survival(trace.confidence_logits.double()), trace.prefix_accepted, verified_slots(trace)
        )
        found["ece"] = float(error.nanmean())
    return found


@torch.no_grad()
def snapshot(draft: Draft, target: FrozenTarget, copy: Draft | None = None) -> Draft:
    """Copy a draft in training into one that decodes: in the target's dtype, whole, without hooks.

    Args:
        draft: in training; under ZeRO 3 its parameters are gathered (all ranks must call).
        target: whose embedding and head the copy borrows.
        copy: an earlier copy, to be overwritten.
    """
    if copy is None:
        ids = draft.draft_token_ids
        with torch.device(target.device):
            copy = make_draft(draft.config, target, None if ids is None else ids.clone())
        torch.nn.Module.to(copy, target.device).eval().requires_grad_(False)
        for parameter in copy.parameters():
            parameter.data = parameter.data.to(target.dtype)
    source = dict(draft.named_parameters())
    with _gathered(list(source.values())):
        for name, parameter in copy.named_parameters():
            parameter.copy_(source[name])
    return copy


@contextmanager
def _gathered(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned):
        yield
