"""Peak memory and time of the objective: fused, materialised, and chunked with recomputation in backward.

``python benchmarks/objective.py`` measures at the size of Qwen3-4B where the machine has the memory for the
materialised form, else smaller, and says so; the table goes into ``benchmarks/README.md``. Every form runs in a
process of its own, so that peaks do not mix.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from table import PeakMemory, machine, write_table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dspark_train.training.objective import fused_objective
from dspark_train.training.reference import row_losses

CE, TV = 0.1, 0.9
FORMS = ("materialised", "recomputed", "fused")


@dataclass(frozen=True)
class Size:
    rows: int = 3584
    d: int = 2560
    vocabulary: int = 151_936
    rank: int = 256
    answer_tokens: int = 1000
    block: int = 7
    draft_vocabulary: int = 0

    @property
    def anchors(self) -> int:
        return self.rows // self.block

    def __str__(self) -> str:
        reduced = f", U {self.draft_vocabulary:,}" if self.draft_vocabulary else ""
        return f"rows {self.rows:,}, d {self.d:,}, V {self.vocabulary:,}{reduced}, r {self.rank}"


def inputs_of(size: Size, device: str) -> dict[str, Any]:
    """bf16 head, fp32 masters, and blocks that overlap as anchors drawn from one answer do."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).mul_(scale).to(device, dtype)

    anchors = torch.randperm(size.answer_tokens, generator=generator)[: size.anchors].sort().values
    place = (anchors[:, None] + torch.arange(size.block)).flatten().sort().values
    _, row = torch.unique_consecutive(place, return_inverse=True)
    rows = len(row)
    head = normal(size.vocabulary, size.d, scale=0.05, dtype=torch.bfloat16)
    ids = None
    if size.draft_vocabulary:
        ids = (
            torch.randperm(size.vocabulary, generator=generator)[: size.draft_vocabulary]
            .sort()
            .values.to(device)
        )
    return {
        "hidden": normal(rows, size.d).requires_grad_(),
        "latent": normal(rows, size.rank).requires_grad_(),
        "w2": normal(size.draft_vocabulary or size.vocabulary, size.rank, scale=0.05).requires_grad_(),
        "draft_head": head if ids is None else head[ids],
        "target_head": head,
        "target_hidden": normal(int(row.max()) + 1, size.d, dtype=torch.bfloat16),
        "target_row": row,
        "labels": torch.randint(0, size.vocabulary, (rows,), generator=generator).to(device),
        "weights": torch.full((rows,), 1.0 / rows, device=device),
        "draft_token_ids": ids,
    }


def materialised(data: dict[str, Any]) -> Tensor:
    """Everything at once, differentiated by autograd."""
    row = data["target_row"].to(data["hidden"].device)
    draft = data["hidden"] @ data["draft_head"].T + data["latent"] @ data["w2"].T
    target = data["target_hidden"][row] @ data["target_head"].T
    ce, l1, _ = row_losses(draft.float(), target.float(), data["labels"], data["draft_token_ids"])
    return (data["weights"] * (CE * ce + TV * l1)).sum()


def recomputed(data: dict[str, Any], chunk: int = 256) -> Tensor:
    """Chunks of rows, each forgotten and computed again in backward."""

    def part(
        hidden: Tensor, latent: Tensor, w2: Tensor, row: Tensor, labels: Tensor, weights: Tensor
    ) -> Tensor:
        return materialised(
            data
            | {
                "hidden": hidden,
                "latent": latent,
                "w2": w2,
                "target_row": row,
                "labels": labels,
                "weights": weights,
            }
        )

    total = data["weights"].new_zeros(())
    names = ("target_row", "labels", "weights")
    for start in range(0, len(data["labels"]), chunk):
        here = slice(start, start + chunk)
        arguments = (
            data["hidden"][here],
            data["latent"][here],
            data["w2"],
            *(data[name][here] for name in names),
        )
        total = total + checkpoint(part, *arguments, use_reentrant=False)
    return total


def fused(data: dict[str, Any]) -> Tensor:
    return fused_objective(**data, ce_coef=CE, tv_coef=TV).loss


def measure(form: str, size: Size, device: str, repeats: int) -> dict[str, Any]:
    """Loss, best time, and peak memory above what the inputs take (gradients of the inputs included)."""
    data = inputs_of(size, device)
    leaves = [data[name] for name in ("hidden", "latent", "w2")]

    def step() -> float:
        for leaf in leaves:
            leaf.grad = None
        with torch.autocast(device, torch.bfloat16):
            loss = {"materialised": materialised, "recomputed": recomputed, "fused": fused}[form](data)
        loss.backward()
        return loss.item()

    times, loss = [], 0.0
    with PeakMemory() as peak:
        for _ in range(repeats):
            started = time.perf_counter()
            loss = step()
            times.append(time.perf_counter() - started)
    return {"form": form, "loss": loss, "seconds": min(times), "bytes": peak.bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--d", type=int, default=None)
    parser.add_argument("--vocabulary", type=int, default=None)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--draft-vocabulary", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--form", choices=FORMS, default=None, help="measure one form only, and print it")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    full = Size()
    rows = arguments.rows or (full.rows if device == "cuda" else full.rows // 2)
    size = Size(
        rows=rows,
        d=arguments.d or full.d,
        vocabulary=arguments.vocabulary or full.vocabulary,
        rank=arguments.rank,
        answer_tokens=full.answer_tokens * rows // full.rows,
        draft_vocabulary=arguments.draft_vocabulary,
    )
    if arguments.form:
        print(json.dumps(measure(arguments.form, size, device, arguments.repeats)))
        return
    results = {}
    for form in FORMS:
        command = [sys.executable, __file__, "--form", form, "--repeats", str(arguments.repeats)]
        for name, value in asdict(size).items():
            if name in ("rows", "d", "vocabulary", "rank", "draft_vocabulary"):
                command += [f"--{name.replace('_', '-')}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(
                f"{form}: failed ({(done.stderr.strip().splitlines() or ['killed: not enough memory?'])[-1]})"
            )
            continue
        results[form] = json.loads(done.stdout)
        print(results[form], flush=True)
    lines = [
        "| form | peak extra memory | time | memory, of materialised | speed, of materialised | loss |",
        "|---|---|---|---|---|---|",
    ]
    base = results.get("materialised")
    for form, result in results.items():
        memory = f"1/{base['bytes'] / result['bytes']:.1f}" if base else "–"
        speed = f"{base['seconds'] / result['seconds']:.2f}×" if base else "–"
        lines.append(
            f"| {form} | {result['bytes'] / 2**20:,.0f} MiB | {result['seconds']:.2f} s | {memory} | {speed} "
            f"| {result['loss']:.5f} |"
        )
    smaller = "" if rows == full.rows else f" (rows halved from {full.rows:,} for this machine)"
    caption = f"{size}, bf16 autocast{smaller}; best of {arguments.repeats}. {machine()}"
    name = "objective" if not size.draft_vocabulary else "objective-reduced"
    write_table(name, " ".join(["python benchmarks/objective.py", *sys.argv[1:]]), caption, lines)


if __name__ == "__main__":
    main()
