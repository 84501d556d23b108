"""What a recipe will need, from configs alone: parameters, memory by part, FLOPs, steps, time, cache, batch size.

Letters as in :mod:`dspark_train.structures`. Everything is arithmetic over shapes; no weight is loaded.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from dspark_train.cli.parsing import STRICT, explain
from dspark_train.errors import UserError
from dspark_train.training.costs import Load, Shape, flops_of, load_of, memory_of

GPUS = {
    "a100-40gb": (312.0, 40),
    "a100-80gb": (312.0, 80),
    "h100": (989.0, 80),
    "h200": (989.0, 141),
    "b200": (2250.0, 180),
    "l40s": (362.0, 48),
    "rtx-4090": (165.0, 24),
    "rtx-5090": (210.0, 32),
    "mi300x": (1307.0, 192),
}
"""Dense bf16 TFLOP/s and memory in GB, from the vendors' data sheets."""
_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "tie_word_embeddings",
)
_QWEN3 = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
KNOWN_TARGETS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": dict(zip(_FIELDS, (2560, 36, 32, 9728, True), strict=True)) | _QWEN3,
    "Qwen/Qwen3-8B": dict(zip(_FIELDS, (4096, 36, 32, 12288, False), strict=True)) | _QWEN3,
    "Qwen/Qwen3-14B": dict(zip(_FIELDS, (5120, 40, 40, 17408, False), strict=True)) | _QWEN3,
}
"""Shapes of the recipes' targets, so that planning them needs no network."""
ASSUMED_SAMPLES = 1_000_000
"""Training sequences of a recipe whose data are not prepared yet: about what the paper trains on."""
UTILISATION = 0.4
"""Share of the peak that the matrix products of such a step reach; an assumption, printed with the estimate."""


@dataclass
class Plan:
    """The answer; ``str`` is what the command prints."""

    shape: Shape
    load: Load
    ranks: int
    stage: int
    memory: dict[str, int]
    by_stage: dict[int, int]
    flops: dict[str, float]
    steps: int
    epochs: float
    accumulation: int
    seconds: float | None
    gpu: str | None
    gpu_bytes: int | None
    cache_bytes: int
    largest: int | None
    notes: list[str] = field(default_factory=list)

    @property
    def total_memory(self) -> int:
        """Bytes per GPU."""
        return sum(self.memory.values())

    def __str__(self) -> str:
        gib = 2**30
        shape, lines = self.shape, []
        lines += [
            f"trained parameters   {shape.trained / 1e6:,.1f} M  (backbone "
            f"{(shape.trained - shape.head_parameters) / 1e6:,.1f} M, heads {shape.head_parameters / 1e6:,.1f} M)",
            f"frozen parameters    {shape.frozen / 1e6:,.1f} M",
            f"micro-batch          {self.load.sequences} sequences, {self.load.tokens:,} tokens, "
            f"{self.load.blocks:,} blocks, {self.load.rows:,} supervised slots",
            f"accumulation         {self.accumulation} micro-batches × {self.ranks} ranks",
            "",
            f"memory per GPU       {self.total_memory / gib:,.2f} GiB under "
            + (f"ZeRO-{self.stage}" if self.stage else "no sharding"),
        ]
        lines += [f"  {name:<18} {size / gib:8.2f} GiB" for name, size in self.memory.items()]
        stages = "   ".join(
            f"{'none' if stage == 0 else f'ZeRO-{stage}'} {size / gib:.2f}"
            for stage, size in self.by_stage.items()
        )
        lines += [f"  by stage (GiB)     {stages}", ""]
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


def make_plan(
    config: dict[str, Any],
    target: dict[str, Any],
    gpu: str | None,
    samples: int | None,
    length: float,
    answer_share: float,
) -> Plan:
    """Put a plan together from resolved configurations.

    Args:
        config: of the run (sections target, draft, objective, data, trainer).
        target: the target's Hugging Face ``config.json``.
        gpu: one of :data:`GPUS`, or None.
        samples: training sequences, or None where unknown (steps then come from ``max_steps``, or from
            :data:`ASSUMED_SAMPLES`).
        length: mean tokens of a sequence.
        answer_share: share of them that is supervised.
    """
    data, trainer, objective = (config.get(name) or {} for name in ("data", "trainer", "objective"))
    shape = shape_of(config, target)
    stage, offload = stage_of(trainer)
    ranks = ranks_of(trainer)
    micro, batch = int(data.get("micro_batch_size", 1)), int(data.get("global_batch_size", 512))
    if batch % (micro * ranks):
        raise UserError(
            f"global_batch_size {batch} is not a multiple of micro_batch_size × ranks = {micro} × {ranks}: change one"
        )
    anchors = int(data.get("num_anchors", 512))
    budget = int(objective.get("memory_budget_mib", 192)) * 2**20
    mixed = str(trainer.get("precision") or "bf16-mixed").startswith("bf16")
    load = load_of(shape, micro, length, answer_share, anchors)
    memory = memory_of(shape, load, stage, ranks, budget, mixed=mixed, offload=offload)
    by_stage = {
        other: sum(memory_of(shape, load, other, ranks, budget, mixed=mixed).values()) for other in range(4)
    }
    accumulation = batch // (micro * ranks)
    flops = {name: value * accumulation * ranks for name, value in flops_of(shape, load).items()}
    steps, epochs, notes = count_steps(trainer, samples, batch)
    seconds = gpu_bytes = largest = None
    if gpu is not None:
        if gpu not in GPUS:
            raise UserError(f"gpu {gpu!r} is not known: choose one of {', '.join(GPUS)}")
        peak, gigabytes = GPUS[gpu]
        gpu_bytes = int(gigabytes * 1e9)
        seconds = steps * sum(flops.values()) / (ranks * peak * 1e12 * UTILISATION)

        def fits(size: int) -> bool:
            trial = load_of(shape, size, length, answer_share, anchors)
            taken = memory_of(shape, trial, stage, ranks, budget, mixed=mixed, offload=offload)
            return sum(taken.values()) * 1.1 < gpu_bytes

        largest = 0
        while largest < batch // ranks and fits(largest + 1):
            largest += 1
        if not largest:
            notes.append(f"not even one sequence fits on {gpu}: raise the ZeRO stage, or shard the target")
    item = 2 if mixed else 4
    cache = int((samples or 0) * length * ((shape.taps + 1) * shape.d * item + 4))
    return Plan(
        shape, load, ranks, stage, memory, by_stage, flops, steps, epochs, accumulation, seconds, gpu, gpu_bytes,
        cache, largest, notes,
    )  # fmt: skip


def shape_of(config: dict[str, Any], target: dict[str, Any]) -> Shape:
    """Shape of the draft that ``config`` asks for beside ``target``.

    Raises:
        UserError: the target's config lacks a field.
    """
    draft = config.get("draft") or {}
    text = target.get("text_config", target)
    try:
        d, heads, layers = (
            int(text[name]) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        vocabulary, intermediate = int(text["vocab_size"]), int(text["intermediate_size"])
    except KeyError as error:
        raise UserError(
            f"the target's config.json has no {error}: is it a causal language model's?"
        ) from error
    taps = (config.get("target") or {}).get("layer_ids")
    head = draft.get("head", "vanilla")
    rank = int(draft.get("markov_rank", 256)) if head != "none" else 0
    return Shape(
        d=d,
        target_layers=layers,
        target_intermediate=intermediate,
        target_heads=heads,
        target_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or d // heads),
        vocabulary=vocabulary,
        taps=len(taps) if taps else 5,
        layers=int(draft.get("num_layers", 5)),
        intermediate=int(draft.get("intermediate_size") or intermediate),
        block=int(draft.get("block_size", 7)),
        rank=rank,
        head=head,
        draft_vocabulary=int(draft.get("vocab_size") or vocabulary),
        confidence=bool(draft.get("confidence_head", True)),
        confidence_with_markov=bool(draft.get("confidence_with_markov", True)) and rank > 0,
        tied=bool(text.get("tie_word_embeddings", target.get("tie_word_embeddings", False))),
        cpu=(config.get("trainer") or {}).get("accelerator") == "cpu",
    )


def stage_of(trainer: dict[str, Any]) -> tuple[int, bool]:
    """ZeRO stage of a trainer's strategy (0 for none), and whether the optimiser is offloaded."""
    strategy = trainer.get("strategy")
    if isinstance(strategy, dict) and str(strategy.get("class_path", "")).endswith("ZeroStrategy"):
        options = strategy.get("init_args") or {}
        return int(options.get("stage", 2)), bool(options.get("offload_optimizer", False))
    return 0, False


def ranks_of(trainer: dict[str, Any]) -> int:
    """Processes of a trainer; ``auto`` and the like count as one node of eight GPUs (one process on a CPU)."""
    devices = trainer.get("devices", 1)
    if isinstance(devices, list):
        count = len(devices)
    elif str(devices).lstrip("-").isdigit() and int(devices) > 0:
        count = int(devices)
    else:
        count = 1 if trainer.get("accelerator") == "cpu" else 8
    return count * int(trainer.get("num_nodes", 1) or 1)


def count_steps(trainer: dict[str, Any], samples: int | None, batch: int) -> tuple[int, float, list[str]]:
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


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``base``, section by section."""
    result = dict(base)
    for key, value in over.items():
        key = key.removesuffix("+")
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def read_target_config(name: str) -> dict[str, Any]:
    """The target's ``config.json``: known here, of a folder or a file, of the embedded default, or of the hub.

    Raises:
        UserError: there is none.
    """
    from dspark_train.target.config import TargetConfig
    from dspark_train.target.frozen import resolve_path

    if name in KNOWN_TARGETS:
        return KNOWN_TARGETS[name]
    path = Path(name)
    if path.suffix == ".json" and path.is_file():
        return dict(json.loads(path.read_text()))
    folder = Path(resolve_path(TargetConfig(name_or_path=name))) if not path.is_dir() else path
    if (folder / "config.json").is_file():
        return dict(json.loads((folder / "config.json").read_text()))
    from transformers import AutoConfig

    try:
        return dict(AutoConfig.from_pretrained(name).to_dict())
    except (OSError, ValueError) as error:
        raise UserError(
            f"the config of target {name!r} cannot be found: give --target_config a config.json"
        ) from error


def data_facts(path: str) -> tuple[int, float, float] | None:
    """Training sequences, mean length and supervised share of a prepared set (None where it is no such folder)."""
    manifest = Path(path) / "manifest.json"
    if not manifest.is_file():
        return None
    train = json.loads(manifest.read_text())["splits"].get("train")
    if not train or not train["examples"]:
        return None
    return (
        train["examples"],
        train["tokens"] / train["examples"],
        train["supervised"] / max(1, train["tokens"]),
    )


def plan(
    config: list[Path],
    target_config: Path | None = None,
    gpu: str | None = None,
    samples: int | None = None,
    length: float | None = None,
    answer_share: float = 0.6,
) -> Plan:
    """Say what a recipe will need, from configs alone.

    Args:
        config: YAML files of the recipe; later ones win.
        target_config: the target's config.json, where it is not found by the target's name.
        gpu: estimate time and the largest micro-batch for this GPU.
        samples: training sequences; left out, those of the prepared set.
        length: mean tokens per sequence; left out, that of the prepared set, else a quarter of the maximum.
        answer_share: share of the tokens that the target generated; left out, that of the prepared set.
    """
    merged: dict[str, Any] = {}
    for path in config:
        if not path.is_file():
            raise UserError(f"there is no config {path}")
        merged = merge(merged, yaml.safe_load(path.read_text()) or {})
    name = str((merged.get("target") or {}).get("name_or_path", "smollm2-135m-instruct"))
    facts = data_facts(str((merged.get("data") or {}).get("path", "")))
    notes = []
    if facts is not None:
        samples, length, answer_share = samples or facts[0], length or facts[1], facts[2]
    if length is None:
        length = float((merged.get("data") or {}).get("max_length", 4096)) / 4
        notes.append(
            f"mean length assumed {length:.0f} tokens, {answer_share:.0%} of them answers: give --length"
        )
    found = json.loads(target_config.read_text()) if target_config else read_target_config(name)
    result = make_plan(merged, found, gpu, samples, length, answer_share)
    result.notes += notes
    print(result)
    return result


def main(arguments: Sequence[str]) -> None:
    """Run ``plan``.

    Args:
        arguments: command line, the command's name first.
    """
    parser = jsonargparse.ArgumentParser(
        prog="dspark-train plan", description="Say what a recipe will need, from configs alone.", **STRICT
    )
    parser.add_function_arguments(plan, as_group=False)
    try:
        parsed = parser.parse_args(join_configs(arguments[1:]))
    except argparse.ArgumentError as error:
        raise explain(error, parser) from error
    plan(**vars(parser.instantiate(parsed)))


def join_configs(arguments: Sequence[str]) -> list[str]:
    """Turn repeated ``--config FILE`` into one list, in their order."""
    found: list[str] = []
    rest: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--config":
            found += [value for value in [next(waiting, None)] if value is not None]
        elif argument.startswith("--config="):
            found.append(argument.removeprefix("--config="))
        else:
            rest.append(argument)
    return [*rest, f"--config={json.dumps(found)}"] if found else rest
