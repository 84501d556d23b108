"""A recipe's needs put together: parameters, memory by part, FLOPs, steps, time, cache, batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dspark_train.data.load import Load, expected_load
from dspark_train.data.module import DSparkDataModule
from dspark_train.data.sampler import accumulation
from dspark_train.draft.config import DSparkConfig
from dspark_train.draft.cost import head_parameters, trained_parameters
from dspark_train.draft.eagle3 import Eagle3Config
from dspark_train.draft.kinds import Draft
from dspark_train.errors import UserError
from dspark_train.machine import DTYPES
from dspark_train.target.config import TargetConfig, text_config
from dspark_train.target.cost import TargetCost
from dspark_train.target.frozen import choose_form
from dspark_train.training.costs import GPUS, StepCost
from dspark_train.training.feature_cache import bytes_per_token

ASSUMED_SAMPLES = 1_000_000
"""Training sequences of a recipe whose data are not prepared yet: about what the paper trains on."""
LENGTHS = (1024, 4096, 16_384, 32_768)
"""Tokens of a sequence for which a plan says what one costs."""
UTILISATION = 0.4
"""Share of the peak that the matrix products of such a step reach; an assumption, printed with the estimate."""


@dataclass(frozen=True)
class DataFacts:
    """What a plan needs to know of the data."""

    samples: int | None
    """Training sequences; None where unknown (steps then come from ``max_steps``, or from
    :data:`ASSUMED_SAMPLES`)."""
    length: float
    """Mean tokens of a sequence."""
    longest: int
    """Tokens of the longest one; batches are of similar lengths, so one of them is of such sequences alone."""
    answer_share: float
    """Share of them that is supervised."""


@dataclass
class Plan:
    """The answer; ``str`` is what the command prints."""

    cost: StepCost
    load: Load
    """Of one micro-batch, on average: what time follows from."""
    peak: Load
    """Of the longest micro-batch: what memory follows from."""
    ranks: int
    stage: int
    """Of ZeRO; 0 for none."""
    memory: dict[str, int]
    """Bytes per GPU by part."""
    by_stage: dict[int, int]
    """Bytes per GPU under each stage."""
    flops: dict[str, float]
    """Of one optimiser step over all ranks, by part."""
    steps: int
    epochs: float
    accumulation: int
    seconds: float | None
    gpu: str | None
    gpu_bytes: int | None
    cache_bytes: int
    largest: int | None
    """Sequences of the largest micro-batch that fits on the GPU."""
    by_length: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Bytes per GPU and FLOPs of one sequence, by its tokens."""
    notes: list[str] = field(default_factory=list)

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return trained_parameters(self.cost.draft)

    @property
    def frozen(self) -> int:
        """Parameters of the target."""
        return self.cost.target.parameters

    @property
    def total_memory(self) -> int:
        """Bytes per GPU."""
        return sum(self.memory.values())

    def __str__(self) -> str:
        gib = 2**30
        heads = head_parameters(self.cost.draft)
        lines = [
            f"trained parameters   {self.trained / 1e6:,.1f} M  (backbone "
            f"{(self.trained - heads) / 1e6:,.1f} M, heads {heads / 1e6:,.1f} M)",
            *describe(self.cost.draft.config),
            f"frozen parameters    {self.frozen / 1e6:,.1f} M"
            + (f", {self.cost.target.active / 1e6:,.1f} M per token" if self.cost.target.experts else ""),
            f"micro-batch          {self.load.sequences} sequences, {self.load.tokens:,} tokens, "
            f"{self.load.blocks:,} blocks, {self.load.rows:,} supervised slots",
            f"accumulation         {self.accumulation} micro-batches × {self.ranks} ranks",
            "",
            f"memory per GPU       {self.total_memory / gib:,.2f} GiB under "
            + (f"ZeRO-{self.stage}" if self.stage else "no sharding")
            + f", in the longest micro-batch ({self.peak.tokens:,} tokens)",
        ]
        lines += [f"  {name:<18} {size / gib:8.2f} GiB" for name, size in self.memory.items()]
        stages = "   ".join(
            f"{'none' if stage == 0 else f'ZeRO-{stage}'} {size / gib:.2f}"
            for stage, size in self.by_stage.items()
        )
        lines.append(f"  by stage (GiB)     {stages}")
        lengths = "   ".join(
            f"{tokens // 1024}k {size / gib:.2f}, {flops / 1e12:.1f} T"
            for tokens, (size, flops) in self.by_length.items()
        )
        lines += [f"  one sequence of    {lengths}  (GiB, FLOPs)", ""]
        total = sum(self.flops.values())
        lines += [f"FLOPs per step       {total / 1e12:,.2f} T over all ranks"]
        lines += [f"  {name:<18} {100 * value / total:5.1f} %" for name, value in self.flops.items()]
        lines += ["", f"optimiser steps      {self.steps:,}  ({self.epochs:g} epochs)"]
        if self.seconds is not None:
            lines.append(
                f"time on {self.ranks} × {self.gpu:<10} {self.seconds / 3600:,.1f} h  "
                f"(at {UTILISATION:.0%} of its peak: an assumption)"
            )
        if self.cache_bytes:
            lines.append(f"feature cache        {self.cache_bytes / gib:,.1f} GiB, if chosen")
        if self.largest is not None:
            lines.append(
                f"largest micro-batch  {self.largest} sequences fit in {(self.gpu_bytes or 0) / gib:.0f} GiB"
            )
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def describe(config: DSparkConfig | Eagle3Config) -> list[str]:
    """Lines that say the draft's shape: it need not be its target's."""
    rope = config.rope_parameters or {}
    scaling = {name: value for name, value in rope.items() if name not in ("rope_type", "rope_theta")}
    kind = ", ".join([str(rope["rope_type"]), *(f"{name} {value}" for name, value in scaling.items())])
    windowed = [index for index, sight in enumerate(config.sights) if sight.window is not None]
    lines = [
        f"draft layers         {config.num_hidden_layers}, hidden size {config.hidden_size:,}, feed-forward "
        f"{config.intermediate_size:,} ({config.hidden_act})",
        f"draft attention      {config.num_attention_heads} heads of {config.head_dim}, "
        f"{config.num_key_value_heads} of keys and values, rope theta {rope['rope_theta']:,.0f} ({kind})",
    ]
    if isinstance(config, DSparkConfig) and windowed:
        lines.append(
            f"draft windows        {config.sliding_window:,} positions in layers {', '.join(map(str, windowed))}, "
            f"{'both ways' if config.sliding_window_non_causal else 'causal'} within a block"
        )
    return lines


def make_plan(
    trainer: Mapping[str, Any],
    target: TargetConfig,
    model: Any,
    draft: Draft,
    data: DSparkDataModule,
    facts: DataFacts,
    budget: int | None,
    gpu: str | None,
) -> Plan:
    """Put a plan together.

    Args:
        trainer: section of the parsed recipe.
        target: section of the parsed recipe.
        model: the target, on any device, ``meta`` among them.
        draft: likewise.
        data: batch sizes and anchors.
        facts: about the training sequences.
        budget: most bytes for one chunk of logits; None takes the device's default.
        gpu: one of :data:`GPUS`, or None.

    Raises:
        UserError: an unknown GPU, or a global batch that the ranks cannot divide.
    """
    if gpu is not None and gpu not in GPUS:
        raise UserError(f"gpu {gpu!r} is not known: choose one of {', '.join(GPUS)}")
    (stage, offload), ranks = stage_of(trainer), ranks_of(trainer)
    micro, batch = data.micro_batch_size, data.global_batch_size
    accumulated = accumulation(batch, micro, ranks)
    cost = StepCost(
        target=TargetCost.of(model),
        draft=draft,
        budget=budget,
        mixed=str(trainer["precision"]).startswith("bf16"),
        target_item=target_item(target, model.config, trainer),
        offload=offload,
        target_sharded=target.sharding == "zero3",
        cached=caches_features(trainer),
        device="cpu" if on_cpu(target, trainer) else "cuda",
    )

    def load(sequences: int, length: float) -> Load:
        return expected_load(sequences, length, facts.answer_share, data.num_anchors, draft.config.block_size)

    average, peak = load(micro, facts.length), load(micro, facts.longest)

    flops = {name: value * accumulated * ranks for name, value in cost.flops(average).items()}
    steps, epochs, notes = count_steps(trainer, facts.samples, batch)
    tokens = int((facts.samples or 0) * facts.length)
    seconds = gpu_bytes = largest = None
    if gpu is not None:
        rate, gigabytes = GPUS[gpu]
        gpu_bytes = int(gigabytes * 1e9)
        once = cost.target.pass_flops(tokens, facts.length) if cost.cached else 0.0
        seconds = (once + steps * sum(flops.values())) / (ranks * rate * 1e12 * UTILISATION)
        largest = 0
        while largest < batch // ranks and fits(
            cost, load(largest + 1, facts.longest), stage, ranks, gpu_bytes
        ):
            largest += 1
        if not largest:
            notes.append(f"not even one sequence fits on {gpu}: raise the ZeRO stage, or shard the target")
    if cost.cached:
        notes.append("the target runs once over each sequence, before training (CacheFeatures)")
    config = draft.config
    return Plan(
        cost=cost,
        load=average,
        peak=peak,
        ranks=ranks,
        stage=stage,
        memory=cost.memory(peak, stage, ranks),
        by_stage={
            other: sum(replace(cost, offload=False).memory(peak, other, ranks).values()) for other in range(4)
        },
        flops=flops,
        steps=steps,
        epochs=epochs,
        accumulation=accumulated,
        seconds=seconds,
        gpu=gpu,
        gpu_bytes=gpu_bytes,
        cache_bytes=tokens * bytes_per_token(len(config.layer_ids), config.hidden_size, cost.target_item),
        largest=largest,
        by_length={
            tokens: (sum(cost.memory(one, stage, ranks).values()), sum(cost.flops(one).values()))
            for tokens in LENGTHS
            for one in [
                expected_load(1, tokens, facts.answer_share, data.num_anchors, draft.config.block_size)
            ]
        },
        notes=notes,
    )


def fits(cost: StepCost, load: Load, stage: int, ranks: int, gpu_bytes: int) -> bool:
    """Whether a micro-batch fits, a tenth to spare."""
    return sum(cost.memory(load, stage, ranks).values()) * 1.1 < gpu_bytes


def target_item(target: TargetConfig, config: Any, trainer: Mapping[str, Any]) -> int:
    """Bytes of an element of the target; ``auto`` on a GPU is bfloat16, whatever this machine has."""
    if target.dtype != "auto":
        return {"bfloat16": 2, "float32": 4}[target.dtype]
    if not on_cpu(target, trainer):
        return 2
    return DTYPES[choose_form(text_config(config), torch.device("cpu")).name.split(",")[0]].itemsize


def on_cpu(target: TargetConfig, trainer: Mapping[str, Any]) -> bool:
    """Whether a recipe asks for the CPU; ``auto`` is planned as GPUs."""
    return "cpu" in (trainer["accelerator"], target.device)


def caches_features(trainer: Mapping[str, Any]) -> bool:
    """Whether a callback of the trainer stores the target's states."""
    callbacks = trainer["callbacks"] or []
    listed = callbacks if isinstance(callbacks, list) else [callbacks]
    return any(str(callback.get("class_path")).endswith(".CacheFeatures") for callback in listed)


def stage_of(trainer: Mapping[str, Any]) -> tuple[int, bool]:
    """ZeRO stage of a trainer's strategy (0 for none), and whether the optimiser is offloaded."""
    strategy = trainer.get("strategy")
    if isinstance(strategy, dict) and str(strategy.get("class_path", "")).endswith("ZeroStrategy"):
        options = strategy.get("init_args") or {}
        return int(options.get("stage", 2)), bool(options.get("offload_optimizer", False))
    return 0, False


def ranks_of(trainer: Mapping[str, Any]) -> int:
    """Processes of a trainer; ``auto`` and the like count as one node of eight GPUs (one process on a CPU)."""
    devices = trainer.get("devices", 1)
    if isinstance(devices, list):
        count = len(devices)
    elif str(devices).lstrip("-").isdigit() and int(devices) > 0:
        count = int(devices)
    else:
        count = 1 if trainer.get("accelerator") == "cpu" else 8
    return count * int(trainer.get("num_nodes", 1) or 1)


def count_steps(trainer: Mapping[str, Any], samples: int | None, batch: int) -> tuple[int, float, list[str]]:
    """Optimiser steps, epochs, and notes about what was assumed."""
    most, epochs = int(trainer.get("max_steps", -1) or -1), trainer.get("max_epochs")
    notes = []
    if samples is None:
        if most > 0:
            note = "the number of training sequences is unknown: give --samples for epochs and cache"
            return most, 0.0, [note]
        samples = ASSUMED_SAMPLES
        notes.append(f"the data are not prepared yet: {samples:,} training sequences assumed: give --samples")
    per_epoch = math.ceil(samples / batch)
    steps = per_epoch * int(epochs) if epochs else (most if most > 0 else per_epoch * 1000)
    if most > 0:
        steps = min(steps, most)
    return steps, round(steps / per_epoch, 2), notes
