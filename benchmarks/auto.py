"""Does ``auto`` take the faster dtype? Features, training steps and decoding in both, beside its choice.

``python benchmarks/auto.py RUN`` takes the pair of a finished quickstart and asks under several sets of instructions
(``ONEDNN_MAX_CPU_ISA``), each in a process of its own: as the processor is, and as processors without its newest units
would do. ``AVX2`` bounds oneDNN alone: BLAS and FBGEMM keep what the processor has. The table goes into
``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from dtypes import DTYPES
from dtypes import measure as rounds
from step import measure as training
from table import machine, write_table

from dspark_train import machine as processor
from dspark_train.draft.recipe import DraftRecipe
from dspark_train.run import Run
from dspark_train.target.config import TargetConfig
from dspark_train.target.frozen import PASS_ROWS, FrozenTarget, choose_form, read_target_config

SETS = ("", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
TURNS = 5


def measure(run: Path) -> dict[str, dict[str, Any]]:
    """Milliseconds of each job in both dtypes and as chosen, and what was chosen."""
    config = Run(run).required_config()
    named = TargetConfig(**config["target"])
    hub, cpu = read_target_config(named), torch.device("cpu")
    shape = processor.LayerShape.of(hub)
    states, drafting = choose_form(hub, cpu), choose_form(hub, cpu, config["draft"]["block_size"] + 1)
    steps = processor.choose_dtype("training", shape, PASS_ROWS, backward=True)
    found: dict[str, dict[str, Any]] = {}

    targets = {}
    for name in (*DTYPES, "auto"):
        named.dtype = name
        targets[name] = FrozenTarget.load(named)
    ids = torch.randint(0, 49_000, (10, 192), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {name: [] for name in targets}
    for turn in range(TURNS + 1):
        for name, target in targets.items():
            began = time.perf_counter()
            target.states(ids)
            if turn:
                times[name].append(1000 * (time.perf_counter() - began))
    found["features"] = {name: statistics.median(values) for name, values in times.items()} | {
        "chosen": states.name
    }

    recipe = DraftRecipe(num_layers=1, block_size=5, markov_rank=128, vocab_size=5900, num_key_value_heads=9)
    mixed = {
        name: 1000
        * training(targets["float32"], recipe, 16, 170, 32, True, TURNS, name == "bfloat16")["seconds"]
        for name in DTYPES
    }
    found["training step"] = mixed | {"auto": mixed[steps.name], "chosen": steps.name}

    passes = rounds(run, 40)
    round_of = {name: statistics.median(passes[name, "round"]) for name in DTYPES}
    chosen = drafting.name.split(",")[0]
    found["decoding round"] = round_of | {"auto": round_of[chosen], "chosen": drafting.name}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a finished quickstart")
    parser.add_argument("--child", action="store_true", help="measure in this process, and print it")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.run)))
        return
    lines = [
        "| instructions | job | float32 | bfloat16 | chosen | as chosen | of the better one |",
        "|---|---|--:|--:|---|--:|--:|",
    ]
    for name in SETS:
        environment = {key: value for key, value in os.environ.items() if key != "ONEDNN_MAX_CPU_ISA"}
        command = [sys.executable, __file__, str(options.run), "--child"]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=environment | ({"ONEDNN_MAX_CPU_ISA": name} if name else {}),
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        for job, found in json.loads(done.stdout.strip().splitlines()[-1]).items():
            ratio = found["auto"] / min(found[dtype] for dtype in DTYPES)
            cells = [*(f"{found[dtype]:,.1f} ms" for dtype in DTYPES), found["chosen"]]
            lines.append(
                f"| {name or 'all'} | {job} | {' | '.join(cells)} | {found['auto']:,.1f} ms | {ratio:.2f} |"
            )
            print(lines[-1], flush=True)
    caption = (
        "Features: ten sequences of 192 tokens, median of turns. Training: 16 sequences of 170 tokens from cached "
        "features, fastest step. Decoding: one request, a whole round, median. Without tiles (AMX) bfloat16 is no "
        f"choice for decoding, because a verified row would not get the bits of a plain one. {machine()}"
    )
    write_table("auto", "python benchmarks/auto.py RUN", caption, lines)


if __name__ == "__main__":
    main()
