"""The LightningModule: states → draft → objective → log (shape legend: :mod:`dspark_train.structures`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from dspark_train.data.blocks import slot_weights
from dspark_train.data.dataset import ExampleStore
from dspark_train.draft.config import DSparkConfig
from dspark_train.draft.eagle3 import Eagle3Config
from dspark_train.draft.initialise import initialise
from dspark_train.draft.kinds import make_draft
from dspark_train.draft.linear_start import start_linearly
from dspark_train.draft.markov_start import start_from_bigrams
from dspark_train.draft.model import DSparkDraft
from dspark_train.draft.recipe import DraftRecipe, build_config, build_eagle3_config, choose_mask_token
from dspark_train.errors import UserError
from dspark_train.machine import DTYPES, decide, decided, remember
from dspark_train.structures import Blocks, TargetStates, TensorStruct, TokenBatch, TrainingBatch
from dspark_train.target.config import TargetConfig
from dspark_train.target.frozen import FrozenTarget
from dspark_train.training.objective import fused_objective
from dspark_train.training.optimizer import (
    OptimizerConfig,
    Schedule,
    build_optimizer,
    iterations_of,
    skip_where_not_finite,
)
from dspark_train.training.starting import gather_samples
from dspark_train.training.states import LiveStates, StateSource
from dspark_train.training.strategy import gather_objects, loss_scale
from dspark_train.training.terms import (
    ObjectiveConfig,
    ObjectiveMetrics,
    ObjectiveTerms,
    SupervisedRows,
    collect_terms,
    confidence_rows,
)
from dspark_train.training.zero_state import is_sharded


@dataclass(frozen=True)
class PreparedBatch(TensorStruct):
    """A batch and everything that follows from its integers, ready for the device."""

    batch: TrainingBatch
    rows: SupervisedRows
    host: TokenBatch
    """The batch's tokens, which stay on the CPU."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PreparedBatch:
        """Move what the device reads."""
        return PreparedBatch(
            self.batch.to(device, non_blocking), self.rows.to(device, non_blocking), self.host
        )


class DSparkModule(LightningModule):
    """Trains a draft beside a frozen target."""

    def __init__(
        self,
        target: TargetConfig,
        draft: DraftRecipe,
        objective: ObjectiveConfig,
        optimizer: OptimizerConfig,
        init_from: str | None = None,
    ) -> None:
        """Keep the recipe; nothing is loaded before a stage begins.

        Args:
            target: the frozen target model.
            draft: shape of the draft.
            objective: coefficients of the loss.
            optimizer: optimiser and schedule.
            init_from: folder or hub id of a draft in any format that ``import`` reads, whose weights to start from.
        """
        super().__init__()
        self.target_config, self.recipe = target, draft
        self.objective, self.optimizer_config, self.init_from = objective, optimizer, init_from
        self.draft: Any = None
        self.strict_loading = True
        self.source: StateSource | None = None
        """Where the target's states come from; the target itself unless a callback sets a cache."""
        self.schedule: Schedule | None = None
        """Of the learning rate; a budget of time changes its length."""
        self._target: FrozenTarget | None = None
        self.slot_weights: Tensor
        self.register_buffer(
            "slot_weights", slot_weights(draft.block_size, objective.decay), persistent=False
        )
        self._sums = {stage: self._new_metrics() for stage in ("train", "val")}
        self._logged_step = 0
        self.gradient_norm: Tensor | None = None
        """Of the last step, before clipping; None under ZeRO."""
        self.skipped_steps: Tensor | float = 0.0
        """Steps of this process that were left out, their gradients not being finite."""

    # -- what is loaded, and when ---------------------------------------------------------------------------------

    @property
    def target(self) -> FrozenTarget:
        """The frozen target, loaded at its first use. It is no ``nn.Module``, so no checkpoint or shard sees it."""
        if self._target is None:
            device = self._trainer.strategy.root_device if self._trainer is not None else None
            self._target = FrozenTarget.load(self.target_config, device)
        return self._target

    @target.setter
    def target(self, target: FrozenTarget) -> None:
        self._target = target

    def release(self) -> None:
        """Let go of target, draft and states, so that what follows training has their memory."""
        self._target = self.source = self.draft = None

    @property
    def draft_config(self) -> DSparkConfig | Eagle3Config:
        """Configuration of the draft, without the size of a reduced vocabulary that the data decides."""
        target = self.target
        about = (self.recipe, target.config, target.layer_ids)
        vocabulary: dict[str, Any] = {
            "vocab_size": target.vocab_size,
            "embedding_scale": target.embedding_scale,
        }
        if self.recipe.kind == "eagle3":
            return build_eagle3_config(*about, **vocabulary)
        mask = self.recipe.mask_token_id
        return build_config(
            *about,
            **vocabulary,
            num_anchors=getattr(getattr(self._trainer, "datamodule", None), "num_anchors", 512),
            mask_token_id=choose_mask_token(target.tokenizer, target.vocab_size) if mask is None else mask,
            num_layers=target.num_layers,
        )

    def setup(self, stage: str) -> None:
        """Load the target, and tell the data which token fills the slots after an anchor.

        Raises:
            UserError: ranks that were started one by one have chosen different precisions.
        """
        if self.trainer.world_size > 1:
            remember(self.trainer.strategy.broadcast(decided()))
            precision = self.trainer.strategy.broadcast(self.trainer.precision)
            if precision != self.trainer.precision:
                raise UserError(
                    f"trainer.precision: the first rank measured {precision}, rank {self.global_rank} "
                    f"{self.trainer.precision}; name one of them"
                )
        data = getattr(self.trainer, "datamodule", None)
        if data is not None:
            data.mask_token_id = self.draft_config.mask_token_id

    def configure_model(self) -> None:
        """Make the draft (inside the strategy's own context, so that ZeRO-3 can shard it as it is made)."""
        if self.draft is not None:
            return
        config, token_ids = self.draft_config, self._draft_vocabulary()
        if token_ids is not None:
            config.draft_vocab_size = token_ids.numel()
            config.check()
        self.draft = make_draft(config, self.target, token_ids)
        if self._trainer is not None and self._trainer.ckpt_path is not None:
            return  # every weight comes from the checkpoint
        initialise(self.draft, self.recipe, self.target)
        if self.recipe.head_start == "bigrams":
            pairs = answer_pairs(self._training_store("draft.head_start bigrams"), token_ids)
            start_from_bigrams(self.draft.markov_head, *pairs)
        if self.init_from:
            self.warm_start(self.draft, self.init_from)
        elif self.recipe.init == "linear":
            self.draft.to(self.target.device)
            batches = self._training_data("draft.init linear").first_batches()
            start_linearly(self.draft, gather_samples(batches, self._states))

    @staticmethod
    def warm_start(draft: DSparkDraft, source: str) -> None:
        """Copy the weights of a draft that this project wrote; the command line puts a reader of all formats here."""
        draft.load_state_dict(DSparkDraft.load(source).state_dict())

    def _draft_vocabulary(self) -> Tensor | None:
        if self.recipe.vocab_size is None and self.recipe.vocab_coverage is None:
            return None
        if self.recipe.vocab_size is not None and self.recipe.vocab_size > self.target.vocab_size:
            raise UserError(
                f"draft.vocab_size is {self.recipe.vocab_size}, and the target's vocabulary has "
                f"{self.target.vocab_size} tokens: give fewer, or leave it out to keep all"
            )
        store = self._training_store("draft.vocab_size and draft.vocab_coverage")
        counts = answer_token_counts(store, self.target.vocab_size)
        return choose_vocabulary(counts, self.recipe.vocab_size, self.recipe.vocab_coverage)

    def _training_data(self, asking: str) -> Any:
        data = getattr(self._trainer, "datamodule", None)
        if data is None:
            raise UserError(f"{asking}: the training data are needed, so run under a trainer")
        return data

    def _training_store(self, asking: str) -> ExampleStore:
        data = self._training_data(asking)
        return data.store(data.train_split)

    def configure_optimizers(self) -> Any:
        """AdamW or Muon, with a schedule per step."""
        batches = self.trainer.estimated_stepping_batches
        if batches == float("inf"):
            raise UserError("the schedule needs a last step: set trainer.max_steps or trainer.max_epochs")
        total = int(batches)
        self.schedule = Schedule(total, self.optimizer_config.warmup)
        first = iterations_of(self.optimizer_config, self.draft) if self.trainer.is_global_zero else None
        choice = self.trainer.strategy.broadcast(first)  # alike on all ranks, or they would drift apart
        iterations = torch.bfloat16 if choice is None else DTYPES[decide(choice).name]
        optimizer, scheduler = build_optimizer(self.optimizer_config, self.draft, self.schedule, iterations)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # -- the step -------------------------------------------------------------------------------------------------

    def on_before_batch_transfer(self, batch: TrainingBatch, dataloader_idx: int) -> PreparedBatch:
        """Index the supervised slots on the CPU, so that the step never waits for a size."""
        if batch.blocks.anchor.numel() == 0:
            batch = TrainingBatch(batch.tokens, _placeholder(batch), batch.global_weight)
        rows = SupervisedRows.of(batch.blocks, batch.tokens.input_ids.shape[1])
        prepared = PreparedBatch(batch, rows, batch.tokens)
        return prepared.pin_memory() if self.device.type == "cuda" else prepared

    def transfer_batch_to_device(
        self, batch: PreparedBatch, device: torch.device, dataloader_idx: int
    ) -> PreparedBatch:
        """Copy from pinned memory, while the device still works on the step before."""
        return batch.to(device, non_blocking=True)

    def _states(self, tokens: TokenBatch, host: TokenBatch | None = None) -> TargetStates:
        return self._source().states(tokens, self.target.device, host)

    def _source(self) -> StateSource:
        if self.source is None:
            self.source = LiveStates(self.target)
        return self.source

    def compute(self, prepared: PreparedBatch) -> tuple[Tensor, ObjectiveTerms]:
        """Loss of a batch over its global denominator (differentiable), and its detached sums."""
        batch, rows, config = prepared.batch, prepared.rows, self.objective
        states = self._states(batch.tokens, prepared.host)
        level = states.logsumexp
        output = self.draft(states.features, batch.blocks, batch.tokens.input_ids)
        slot_weights = self.slot_weights[rows.slot % output.hidden.shape[1]]
        weights = slot_weights / max(batch.global_weight, 1e-12)
        sums = fused_objective(
            output.hidden.flatten(0, 1)[rows.slot],
            None if output.latent is None else output.latent.flatten(0, 1)[rows.slot],
            None if self.draft.markov_head is None else self.draft.markov_head.markov_w2.weight,
            self.draft.head_weight,
            self.target.head_weight if level is None else self.draft.head_weight,
            states.last_hidden.flatten(0, 1)[rows.position],
            rows.target_row,
            batch.blocks.labels.flatten()[rows.slot],
            weights,
            ce_coef=config.ce,
            tv_coef=config.tv,
            softcap=self.target.logit_softcap,
            draft_token_ids=self.draft.draft_token_ids,
            target_logsumexp=None if level is None else level.flatten()[rows.position],
            memory_budget_bytes=config.memory_budget,
            others=config.others,
        )
        confidence = confidence_rows(output, rows, sums.accept)
        loss = sums.loss + config.confidence * (weights * confidence).sum()
        return loss, collect_terms(output, rows, sums, confidence, slot_weights)

    def training_step(self, prepared: PreparedBatch, batch_idx: int) -> Tensor:
        """One micro-batch. Strategies average over ranks and accumulation; the true gradient is the sum."""
        if prepared.rows.slot.numel() == 0 and self.trainer.world_size == 1:
            # nothing is supervised, and no other rank waits for this one's passes
            trained = [parameter for parameter in self.draft.parameters() if parameter.requires_grad]
            return 0.0 * min(trained, key=Tensor.numel).sum()
        loss, terms = self.compute(prepared)
        self.metrics("train").update(terms)
        return loss * loss_scale(self.trainer)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Look at the gradients: a step that is not finite is skipped and counted (ZeRO looks at its own)."""
        gradients = [parameter.grad for parameter in self.draft.parameters() if parameter.grad is not None]
        if gradients and not is_sharded(self.draft):
            self.gradient_norm, skipped = skip_where_not_finite(optimizer, gradients)
            self.skipped_steps = self.skipped_steps + skipped

    def validation_step(self, prepared: PreparedBatch, batch_idx: int) -> None:
        """The same terms on validation conversations, with fixed anchors."""
        _, terms = self.compute(prepared)
        self.metrics("val").update(terms)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Divide and log the sums of the steps since the last logging step."""
        step, every = self.trainer.global_step, self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step % every == 0 and step != self._logged_step:
            self._logged_step = step
            self._log("train")

    def on_validation_epoch_end(self) -> None:
        """Divide and log the sums of the whole validation."""
        self._log("val")

    def _log(self, stage: str) -> None:
        metrics = self.metrics(stage)
        values = {f"{stage}/{name}": value for name, value in metrics.compute().items()}
        metrics.reset()
        shown = {f"{stage}/loss", f"{stage}/tau"}
        for name, value in values.items():
            self.log(name, value, prog_bar=name in shown, rank_zero_only=False, sync_dist=False)

    # -- helpers --------------------------------------------------------------------------------------------------

    def _new_metrics(self) -> ObjectiveMetrics:
        metrics = ObjectiveMetrics(self.recipe.block_size, self.objective)
        metrics.has_confidence = self.recipe.confidence_head and self.recipe.kind == "dspark"
        return metrics

    def metrics(self, stage: str) -> ObjectiveMetrics:
        """Running sums of ``train`` or ``val``, on this module's device."""
        metrics = self._sums[stage]
        return metrics if metrics.device == self.device else metrics.to(self.device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Carry every rank's running sums, so that a resumed run logs what an uninterrupted one logs."""
        sums = {
            f"metrics/{stage}": {name: value.cpu() for name, value in metrics.state_dict().items()}
            for stage, metrics in self._sums.items()
        }
        checkpoint["running_sums"] = gather_objects(sums)
        checkpoint["logged_step"] = self._logged_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the running sums; with another number of ranks, the first takes them all."""
        rank, parts = self.global_rank, checkpoint.get("running_sums", [])
        if len(parts) == self.trainer.world_size:
            parts = [parts[rank]]
        for key in parts[0] if parts and (len(parts) == 1 or rank == 0) else ():
            total = {name: sum(part[key][name] for part in parts) for name in parts[0][key]}
            self.metrics(key.removeprefix("metrics/")).load_state_dict(
                total, strict=False
            )  # terms added since
        self._logged_step = checkpoint.get("logged_step", 0)


def answer_token_counts(store: Any, vocab_size: int) -> Tensor:
    """How often the training answers hold each token: ``[V]`` int64.

    Args:
        store: training examples.
        vocab_size: V.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for index in range(len(store)):
        example = store[index]
        ids = torch.from_numpy(example.input_ids[example.loss_mask].astype("int64"))
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


PAIRS_AT_ONCE = 2**22
"""Token pairs that are gathered before they are counted."""


def answer_pairs(store: Any, token_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct pairs of consecutive supervised tokens of the training answers, the second in the draft's vocabulary.

    Args:
        store: training examples.
        token_ids: ``[U]`` ascending target ids of the draft's vocabulary; None keeps every token.

    Returns:
        First tokens as target ids, second ones as draft ids, and how often each pair occurs: ``[pairs]`` int64 each.
    """
    keys, counts = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    waiting: list[Tensor] = []

    def merge() -> tuple[Tensor, Tensor]:
        fresh = torch.cat([keys, *waiting])
        weights = torch.cat([counts, torch.ones(fresh.numel() - keys.numel(), dtype=torch.int64)])
        waiting.clear()
        found, place = fresh.unique(return_inverse=True)
        return found, torch.zeros_like(found).index_add(0, place, weights)

    held = 0
    for index in range(len(store)):
        example = store[index]
        ids, both = example.input_ids.astype("int64"), example.loss_mask[1:] & example.loss_mask[:-1]
        waiting.append(torch.from_numpy((ids[:-1][both] << 32) | ids[1:][both]))
        held += waiting[-1].numel()
        if held >= PAIRS_AT_ONCE:
            (keys, counts), held = merge(), 0
    keys, counts = merge()
    previous, following = keys >> 32, keys & (2**32 - 1)
    if token_ids is None:
        return previous, following, counts
    place = torch.searchsorted(token_ids, following).clamp(max=token_ids.numel() - 1)
    known = token_ids[place] == following
    return previous[known], place[known], counts[known]


def choose_vocabulary(counts: Tensor, size: int | None, coverage: float | None) -> Tensor:
    """Most frequent tokens of the training answers, ascending.

    Args:
        counts: ``[V]`` occurrences of each token in the training answers.
        size: tokens to keep, or None.
        coverage: share of all occurrences to cover, where ``size`` is None.

    Returns:
        ``[U]`` int64 target ids; ties go to the smaller id.
    """
    ranked = torch.argsort(counts, descending=True, stable=True)
    if size is None:
        share = counts[ranked].double().cumsum(0) / counts.sum().clamp(min=1)
        wanted = torch.tensor(float(coverage or 1.0) - 1e-12, dtype=torch.float64)
        size = int(torch.searchsorted(share, wanted)) + 1
    return ranked[: min(size, counts.numel())].sort().values


def _placeholder(batch: TrainingBatch) -> Blocks:
    """One block without a supervised slot: a batch with no anchor still takes part in every collective."""
    size = batch.blocks.slot_ids.shape[1]
    one, wide = torch.zeros(1, dtype=torch.int64), torch.zeros(1, size, dtype=torch.int64)
    return Blocks(one, one, wide, wide, wide, torch.zeros(1, size, dtype=torch.bool))
