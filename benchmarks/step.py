"""The whole training step: tokens/s, the share of each part, and how both grow with anchors and with length.

``python benchmarks/step.py`` measures the quickstart's recipe beside its real target; ``--tiny`` beside a small random
one. The table goes into ``benchmarks/README.md``, together with the memory that ``plan`` expects.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch
from table import PeakMemory, machine, write_table

from dspark_train.data.blocks import build_blocks, slot_weights
from dspark_train.data.load import Load
from dspark_train.draft.model import DSparkDraft
from dspark_train.draft.recipe import DraftRecipe, build_config
from dspark_train.structures import TokenBatch
from dspark_train.target.config import TargetConfig
from dspark_train.target.cost import TargetCost
from dspark_train.target.frozen import FrozenTarget
from dspark_train.training.costs import StepCost
from dspark_train.training.objective import fused_objective, target_logsumexp
from dspark_train.training.terms import ObjectiveConfig, SupervisedRows, confidence_rows

PARTS = ("target", "draft", "objective", "backward", "optimiser")


def tiny_target() -> FrozenTarget:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return FrozenTarget(LlamaForCausalLM(config), [1, 3, 5], name="tiny")


def measure(
    target: FrozenTarget,
    recipe: DraftRecipe,
    sequences: int,
    length: int,
    anchors: int,
    cached: bool,
    steps: int,
    mixed: bool = True,
) -> dict[str, Any]:
    """Seconds of each part (the fastest step's), tokens/s, peak extra memory; ``mixed`` is bf16 autocast."""
    device, objective = target.device, ObjectiveConfig()
    torch.manual_seed(0)
    config = build_config(recipe, target.config, target.layer_ids, vocab_size=target.vocab_size)
    ids = None
    if recipe.vocab_size:
        config.draft_vocab_size = recipe.vocab_size
        ids = torch.randperm(target.vocab_size)[: recipe.vocab_size].sort().values
    draft = DSparkDraft(config, target=target, draft_token_ids=ids).to(device)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], fused=True)
    mask = torch.zeros(sequences, length, dtype=torch.bool)
    mask[:, length // 4 :] = True
    tokens = TokenBatch(
        torch.randint(0, target.vocab_size, (sequences, length)),
        torch.full((sequences,), length),
        mask,
        torch.arange(sequences),
    )
    blocks = build_blocks(
        tokens, num_anchors=anchors, block_size=recipe.block_size, mask_token_id=0, seed=0, epoch=0
    )
    rows = SupervisedRows.of(blocks, length).to(device)
    blocks, inputs = blocks.to(device), tokens.input_ids.to(device)
    weights = slot_weights(recipe.block_size, objective.decay).to(device)[rows.slot % recipe.block_size]
    weights = weights / weights.sum()
    stored = target.states(inputs)
    level = (
        target_logsumexp(stored.last_hidden.flatten(0, 1)[rows.position], target.head_weight)
        if cached
        else None
    )

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    best: dict[str, float] = {}
    with PeakMemory() as peak:
        for _ in range(steps):
            marks = [now()]
            states = stored if cached else target.states(inputs)
            marks.append(now())
            with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
                output = draft(states.features, blocks)
                marks.append(now())
                sums = fused_objective(
                    output.hidden.flatten(0, 1)[rows.slot],
                    None if output.latent is None else output.latent.flatten(0, 1)[rows.slot],
                    None if draft.markov_head is None else draft.markov_head.markov_w2.weight,
                    draft.head_weight,
                    draft.head_weight if cached else target.head_weight,
                    states.last_hidden.flatten(0, 1)[rows.position],
                    rows.target_row,
                    blocks.labels.flatten()[rows.slot],
                    weights,
                    ce_coef=objective.ce,
                    tv_coef=objective.tv,
                    draft_token_ids=draft.draft_token_ids,
                    target_logsumexp=level,
                )
                loss = sums.loss + (weights * confidence_rows(output, rows, sums.accept)).sum()
            marks.append(now())
            loss.backward()
            marks.append(now())
            optimizer.step()
            optimizer.zero_grad()
            marks.append(now())
            parts = {name: b - a for name, a, b in zip(PARTS, marks[:-1], marks[1:], strict=True)}
            if not best or sum(parts.values()) < sum(best.values()):
                best = parts
    total = sum(best.values())
    load = Load(sequences, sequences * length, len(blocks.anchor), len(rows.slot), len(rows.position))
    cost = StepCost(
        TargetCost.of(target.model),
        draft,
        objective.memory_budget,
        mixed=mixed,
        target_item=target.dtype.itemsize,
        cached=cached,
        device=device.type,
    )
    expected = cost.memory(load, stage=0, ranks=1)
    moving = sum(value for name, value in expected.items() if name not in ("target", "weights"))
    return {
        "seconds": total,
        "tokens": sequences * length / total,
        "parts": best,
        "bytes": peak.bytes,
        "plan": moving,
        "flops": sum(cost.flops(load).values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--case", type=int, default=None, help="measure one case only, and print it")
    arguments = parser.parse_args()
    sequences, length, anchors = base = (4, 128, 8) if arguments.tiny else (8, 256, 32)
    reduced = 600 if arguments.tiny else 7080
    cases: list[tuple[str, tuple[int, int, int], int | None, bool]] = [
        ("full vocabulary", base, None, False),
        (f"reduced vocabulary ({reduced:,})", base, reduced, False),
        ("full vocabulary, cached features", base, None, True),
        ("reduced, cached features", base, reduced, True),
        ("half the anchors", (sequences, length, anchors // 2), reduced, False),
        ("twice the anchors", (sequences, length, anchors * 2), reduced, False),
        ("half the length", (sequences, length // 2, anchors), reduced, False),
        ("twice the length", (sequences, length * 2, anchors), reduced, False),
    ]
    rank = 32 if arguments.tiny else 128
    if (
        arguments.case is not None
    ):  # in a process of its own, so that memory kept by the allocator does not hide any
        _, size, vocabulary, cached = cases[arguments.case]
        target = (
            tiny_target() if arguments.tiny else FrozenTarget.load(TargetConfig(layer_ids=[1, 8, 15, 22, 28]))
        )
        recipe = DraftRecipe(num_layers=2, markov_rank=rank, vocab_size=vocabulary)
        print(json.dumps(measure(target, recipe, *size, cached, arguments.steps) | {"target": target.name}))
        return
    heading = [
        "case",
        "sequences × tokens × anchors",
        "step",
        "tokens/s",
        *PARTS,
        "peak extra memory",
        "plan",
    ]
    lines = ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    for index, (name, size, _, _) in enumerate(cases):
        command = [sys.executable, __file__, *sys.argv[1:], "--case", str(index)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        shares = [f"{found['parts'][part] / found['seconds']:.0%}" for part in PARTS]
        cells = [
            name,
            " × ".join(map(str, size)),
            f"{found['seconds']:.3f} s",
            f"{found['tokens']:,.0f}",
            *shares,
        ]
        cells += [f"{found['bytes'] / 2**20:,.0f} MiB", f"{found['plan'] / 2**20:,.0f} MiB"]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    caption = (
        f"Target {found['target']}; 2 draft layers, γ 7, rank {rank}, bf16 autocast. Peak memory is above target and "
        f"weights; “plan” is what `plan` expects of it. Fastest of {arguments.steps} steps. {machine()}"
    )
    write_table("step", " ".join(["python benchmarks/step.py", *sys.argv[1:]]), caption, lines)


if __name__ == "__main__":
    main()
