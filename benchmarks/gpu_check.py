"""What only a GPU can tell, in ten minutes: correctness first, then speed. Random weights in Qwen3-4B's shape.

``make gpu-check`` prints a table and writes ``gpu_check.json``; with ``DEVICE=cpu`` the same code runs on tiny shapes.
Every part is a process of its own with a time limit, so that one which hangs or crashes costs no other. A part that
needs a library which is not installed (DeepSpeed) is left out and says so; ``datasets`` and ``jsonargparse`` are not
needed at all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the parent of the parts must not touch the GPU

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

import step as step_benchmark  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from dspark_train.data.blocks import build_blocks  # noqa: E402
from dspark_train.data.conversations import Prompt  # noqa: E402
from dspark_train.decoding.decoder import generate  # noqa: E402
from dspark_train.decoding.measure import Settings, compare, seconds_per_token  # noqa: E402
from dspark_train.decoding.sampling import SamplingRule  # noqa: E402
from dspark_train.draft.attention import AttentionLayout, block_attention  # noqa: E402
from dspark_train.draft.flex import FlexLayout, flex_block_attention  # noqa: E402
from dspark_train.draft.model import DSparkDraft  # noqa: E402
from dspark_train.draft.recipe import DraftRecipe, build_config  # noqa: E402
from dspark_train.structures import Blocks, TokenBatch, TrainingBatch  # noqa: E402
from dspark_train.target.config import TargetConfig  # noqa: E402
from dspark_train.target.frozen import FrozenTarget  # noqa: E402
from dspark_train.training.costs import peak_rate  # noqa: E402
from dspark_train.training.feature_cache import FeatureCache, identity_of  # noqa: E402
from dspark_train.training.module import DSparkModule  # noqa: E402
from dspark_train.training.objective import fused_objective  # noqa: E402
from dspark_train.training.optimizer import OptimizerConfig  # noqa: E402
from dspark_train.training.reference import row_losses  # noqa: E402
from dspark_train.training.terms import ObjectiveConfig  # noqa: E402


@dataclass(frozen=True)
class Shapes:
    """Sizes of everything that is run."""

    target: dict[str, Any]
    draft_layers: int
    rank: int
    sequences: int
    length: int
    anchors: int
    blocks: tuple[int, ...]
    """Per sequence, of the attention's checks."""
    groupings: tuple[tuple[int, int], ...]
    """Query and key-value heads of the attention's checks."""
    rows: int
    batches: tuple[int, ...]
    new_tokens: int
    dtype: torch.dtype


QWEN3_4B = Shapes(
    {
        "vocab_size": 151_936, "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "tie_word_embeddings": True,
    },
    5, 256, 8, 1024, 512, (1, 4, 5, 8, 18, 19, 300), ((32, 8), (16, 2), (8, 8), (9, 3)), 512, (1, 8, 32), 64,
    torch.bfloat16,
)  # fmt: skip
TINY = Shapes(
    {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "tie_word_embeddings": True,
    },
    1, 8, 2, 40, 6, (1, 5, 19), ((4, 1), (4, 2)), 64, (1, 2), 6, torch.float32,
)  # fmt: skip
GAMMA = 7
BLOCK_CHECK_LENGTH = 96


def make_target(shapes: Shapes, device: torch.device) -> FrozenTarget:
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(Qwen3Config(**shapes.target, dtype=shapes.dtype)).to(shapes.dtype)
    layers = shapes.target["num_hidden_layers"]
    return FrozenTarget(model, [0, layers // 2, layers - 2], name="random")


def recipe_of(shapes: Shapes, head: str = "vanilla") -> DraftRecipe:
    rank = 0 if head == "none" else shapes.rank
    return DraftRecipe(
        shapes.draft_layers, GAMMA, head=head, markov_rank=rank, confidence_with_markov=rank > 0, mask_token_id=0
    )  # fmt: skip


def make_draft(shapes: Shapes, target: FrozenTarget, head: str = "vanilla") -> DSparkDraft:
    config = build_config(
        recipe_of(shapes, head),
        target.config,
        target.layer_ids,
        vocab_size=target.vocab_size,
        mask_token_id=0,
    )
    return DSparkDraft(config, target=target).to(target.device)


def random_batch(shapes: Shapes) -> TrainingBatch:
    count, length = shapes.sequences, shapes.length
    mask = torch.zeros(count, length, dtype=torch.bool)
    mask[:, length // 4 :] = True
    ids = torch.randint(0, shapes.target["vocab_size"], (count, length))
    tokens = TokenBatch(ids, torch.full((count,), length), mask, torch.arange(count))
    blocks = build_blocks(
        tokens, num_anchors=shapes.anchors, block_size=GAMMA, mask_token_id=0, seed=0, epoch=0
    )
    return TrainingBatch(tokens, blocks, float(blocks.supervised.sum()))


def wait(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(run: Callable[[], object], device: torch.device, times: int = 3) -> float:
    """Median seconds, after a run that may compile."""
    run()
    found = []
    for _ in range(times):
        begun = wait(device)
        run()
        found.append(wait(device) - begun)
    return statistics.median(found)


def far(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, of the largest value."""
    gap = (ours.double() - theirs.double()).abs().max()
    return float(gap / theirs.double().abs().max().clamp(min=1e-12))


# -- the parts ----------------------------------------------------------------------------------------------


def correctness(shapes: Shapes, device: torch.device) -> dict[str, Any]:
    """FlexAttention and the objective, forward and backward, against their twins."""
    found: dict[str, Any] = {"attention": {}, "objective": {}}
    for per_sequence in shapes.blocks:
        for heads, keys in shapes.groupings:
            found["attention"][f"{per_sequence} blocks, {heads}/{keys} heads"] = attention_gap(
                per_sequence, heads, keys, shapes.target["head_dim"], device
            )
    found["objective"] = objective_gap(shapes, device)
    worst = max([*found["attention"].values(), *found["objective"].values()])
    assert worst < 0.03, f"the largest relative difference is {worst:.3g}: {found}"
    return found


def attention_gap(per_sequence: int, heads: int, keys: int, size: int, device: torch.device) -> float:
    sequences, length, count = 2, BLOCK_CHECK_LENGTH, 2 * per_sequence
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(per_sequence)

    def random(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator).to(device, kind)
        return drawn.requires_grad_(device.type == "cuda")  # FlexAttention has no backward pass on CPUs

    anchors = torch.randint(1, length - GAMMA, (sequences, per_sequence), generator=generator).sort(1).values
    wide = torch.zeros(count, GAMMA, dtype=torch.int64)
    blocks = Blocks(
        torch.arange(sequences).repeat_interleave(per_sequence), anchors.flatten(), wide, wide, wide, wide.bool()
    ).to(device)  # fmt: skip
    operands = [
        random(count, GAMMA, heads, size), random(sequences, length, keys, size), random(sequences, length, keys, size),
        random(count, GAMMA, keys, size), random(count, GAMMA, keys, size),
    ]  # fmt: skip
    weight = torch.randn(count, GAMMA, heads, size, generator=generator).to(device)

    def both(function: Any, layout: Any) -> list[Tensor]:
        mixed = function(*operands, layout.of(blocks, sequences, length), size**-0.5)
        if not mixed.requires_grad:
            return [mixed]
        return [mixed.detach(), *torch.autograd.grad((mixed.float() * weight).sum(), operands)]

    ours, theirs = both(flex_block_attention, FlexLayout), both(block_attention, AttentionLayout)
    return max(far(a, b) for a, b in zip(ours, theirs, strict=True))


def objective_gap(shapes: Shapes, device: torch.device) -> dict[str, float]:
    vocabulary, size, rank, rows = shapes.target["vocab_size"], 256, shapes.rank, shapes.rows
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(rows, size, generator=generator), torch.randn(rows, rank, generator=generator) * 0.1,
        torch.randn(vocabulary, rank, generator=generator) * 0.1,
    ]  # fmt: skip
    head = (torch.randn(vocabulary, size, generator=generator) * size**-0.5).to(device)
    states = torch.randn(rows // 4, size, generator=generator).to(device)
    place, labels = torch.arange(rows) // 4, torch.randint(0, vocabulary, (rows,), generator=generator)
    weights = torch.full((rows,), 1 / rows, device=device)
    ours = [tensor.to(device).requires_grad_() for tensor in drawn]
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        sums = fused_objective(
            *ours, head, head, states, place, labels.to(device), weights, ce_coef=0.1, tv_coef=0.9,
            memory_budget_bytes=rows * vocabulary,  # several chunks
        )  # fmt: skip
    got = torch.autograd.grad(sums.loss, ours)
    twin = [tensor.to(device).double().requires_grad_() for tensor in drawn]
    wide = head.double()
    logits = twin[0] @ wide.T + twin[1] @ twin[2].T
    ce, l1, _ = row_losses(logits, (states.double() @ wide.T)[place.to(device)], labels.to(device))
    loss = (weights * (0.1 * ce + 0.9 * l1)).sum()
    expected = torch.autograd.grad(loss, twin)
    found = {"loss": far(sums.loss.detach(), loss.detach())}
    return found | {
        name: far(a, b) for name, a, b in zip(("hidden", "latent", "W2"), got, expected, strict=True)
    }


def waits(shapes: Shapes, device: torch.device) -> dict[str, Any]:
    """A step of the LightningModule, forward and backward, in which a wait for the GPU is an error."""
    target = make_target(shapes, device)
    module = DSparkModule(TargetConfig(), recipe_of(shapes), ObjectiveConfig(), OptimizerConfig())
    module.target, module.draft = target, make_draft(shapes, target)
    module.to(device)
    batch = random_batch(shapes)
    losses = []
    for strict in (False, False, True):  # kernels are compiled, and memory is allocated, before
        if strict and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        prepared: Any = module.transfer_batch_to_device(module.on_before_batch_transfer(batch, 0), device, 0)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, terms = module.compute(prepared)
        loss.backward()
        module.metrics("train").update(terms)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        losses.append(float(loss.detach()))
    return {"loss": losses[-1]}


def training(shapes: Shapes, device: torch.device) -> dict[str, Any]:
    """Milliseconds by part, share of the GPU's peak, memory against the plan, and the longest kernels."""
    target, mixed = make_target(shapes, device), device.type == "cuda"
    sizes = (shapes.sequences, shapes.length, shapes.anchors)
    measured = step_benchmark.measure(target, recipe_of(shapes), *sizes, False, steps=3, mixed=mixed)
    found: dict[str, Any] = {
        "ms": {part: 1e3 * seconds for part, seconds in measured["parts"].items()},
        "tokens/s": measured["tokens"],
        "peak MiB": measured["bytes"] / 2**20,
        "planned MiB": measured["plan"] / 2**20,
    }
    if device.type == "cuda":
        peak = peak_rate(torch.cuda.get_device_name(device))
        if peak is not None:
            found["MFU"] = measured["flops"] / measured["seconds"] / peak
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            step_benchmark.measure(target, recipe_of(shapes), *sizes, False, steps=1, mixed=mixed)
        kernels = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)[:20]
        found["kernels, ms"] = {event.key[:80]: event.device_time_total / 1e3 for event in kernels}
    blocks = random_batch(shapes).blocks.to(device)
    layout = FlexLayout if device.type == "cuda" else AttentionLayout
    found["ms"]["mask"] = 1e3 * timed(lambda: layout.of(blocks, shapes.sequences, shapes.length), device)
    return found


def resuming(shapes: Shapes, device: torch.device) -> dict[str, Any]:
    """On one rank, under every strategy: a run resumed after three of six steps ends with the same bits."""
    import deepspeed  # noqa: F401 - its absence leaves this part out
    import tiny
    from lightning.pytorch.strategies import DDPStrategy

    from dspark_train.training.checkpointing import TrainingCheckpoint
    from dspark_train.training.strategy import ZeroStrategy

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "NODE_RANK": "0",
    }
    small = {**TINY.target, "vocab_size": tiny.VOCABULARY, "hidden_size": 256, "head_dim": 64}
    backend = "nccl" if device.type == "cuda" else "gloo"
    strategies: dict[str, Callable[[], Any]] = {
        "ddp": lambda: DDPStrategy(process_group_backend=backend),
        **{f"zero{stage}": (lambda stage=stage: ZeroStrategy(stage=stage)) for stage in (1, 2, 3)},
        "offload": lambda: ZeroStrategy(
            stage=3, offload_optimizer=True, offload_parameters=device.type == "cuda"
        ),
    }

    def train(strategy: Any, folder: Path, resume: Path | None = None) -> dict[str, Tensor]:
        trainer = tiny.tiny_trainer(
            folder, accelerator="gpu" if device.type == "cuda" else "cpu", strategy=strategy, max_steps=6,
            precision="bf16-mixed", enable_checkpointing=True, callbacks=[TrainingCheckpoint(every_n_steps=3, keep=9)],
        )  # fmt: skip
        module = tiny.tiny_module()
        with device:
            model = Qwen3ForCausalLM(Qwen3Config(**small))
        module.target = FrozenTarget(model, [0, 1, 3], name="random")
        tiny.fit(module, tiny.TinyData(), trainer, ckpt_path=resume, weights_only=False if resume else None)
        from dspark_train.training.zero_state import master_state

        return master_state(module.draft)

    found = {}
    with tempfile.TemporaryDirectory() as place:
        for port, (name, strategy) in enumerate(strategies.items(), 29_650):
            os.environ["MASTER_PORT"] = str(port)
            folder = Path(place) / name
            whole = train(strategy(), folder)
            again = train(strategy(), folder / "again", folder / "trainer" / "step=00000003.ckpt")
            found[name] = all(torch.equal(whole[key], again[key]) for key in whole)
    assert all(found.values()), f"a resumed run ends elsewhere: {found}"
    return found


def decoding(shapes: Shapes, device: torch.device) -> dict[str, Any]:
    """Graphs against eager for every head; then milliseconds per token, plain and with the draft."""
    prompts = [Prompt(str(n), "", tuple(range(5 + n, 21 + n))) for n in range(max(shapes.batches))]
    found: dict[str, Any] = {"same tokens with graphs": {}, "ms per token": {}}
    shallow = {**shapes.target, "num_hidden_layers": 5}  # in float32, so that no near tie falls otherwise
    small = make_target(replace(shapes, target=shallow, dtype=torch.float32), device)
    for head in ("vanilla", "gated", "rnn", "none"):
        draft = make_draft(shapes, small, head).float().eval()
        eager, captured = (
            generate(small, draft, [prompt.ids for prompt in prompts[:2]], max_new_tokens=8, graphs=graphs)
            for graphs in (False, True)
        )
        found["same tokens with graphs"][head] = eager.tokens == captured.tokens
    target = make_target(shapes, device)
    draft = make_draft(shapes, target).to(shapes.dtype).eval()
    modes = {"eager": {}, "graphs": {"graphs": True}}
    if device.type == "cuda":  # on a CPU, compiling would take most of a minute
        modes["graphs, compiled"] = {"graphs": True, "compile": True}
    weights = sum(parameter.numel() * parameter.element_size() for parameter in target.model.parameters())
    for mode, options in modes.items():
        for batch in shapes.batches:
            settings = Settings(max_new_tokens=shapes.new_tokens, batch_size=batch, **options)
            result = compare(target, draft, prompts[:batch], SamplingRule(0.0), settings)
            plain, drafted = (seconds_per_token(side) * batch for side in (result.plain, result.speculative))
            found["ms per token"][f"{mode}, batch {batch}"] = {
                "plain": 1e3 * plain, "drafted": 1e3 * drafted, "tau": result.trace.accepted_length,
                "plain GB/s of weights": weights / plain / 1e9,
            }  # fmt: skip
    assert all(found["same tokens with graphs"].values()), found["same tokens with graphs"]
    return found


def cache(shapes: Shapes, device: torch.device) -> dict[str, Any]:
    """GB/s of computing and writing target states, and of reading them onto the device."""
    target, tokens = make_target(shapes, device), random_batch(shapes).tokens
    with tempfile.TemporaryDirectory() as place:
        store = FeatureCache(Path(place), identity_of(target), target)
        begun = wait(device)
        states = store.states(tokens, device)
        filled = wait(device) - begun
        read = timed(lambda: store.states(tokens, device), device)
    size = sum(part.nbytes for part in (states.features, states.last_hidden))
    return {"GB": size / 1e9, "filling GB/s": size / filled / 1e9, "reading GB/s": size / read / 1e9}


PARTS: dict[str, tuple[Callable[[Shapes, torch.device], dict[str, Any]], int]] = {
    "correctness": (correctness, 150),
    "waits": (waits, 90),
    "training": (training, 120),
    "resuming": (resuming, 100),
    "decoding": (decoding, 100),
    "cache": (cache, 30),
}
"""Critical ones first, each with its time limit in seconds: ten minutes together."""


def run_part(name: str, kind: str, path: Path) -> None:
    """Run one part in this process, and write what came of it."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    shapes, begun = QWEN3_4B if kind == "cuda" else TINY, time.perf_counter()
    try:
        outcome = {"status": "ok", "found": PARTS[name][0](shapes, device)}
    except ImportError as error:
        outcome = {"status": f"left out: {error}"}
    except Exception as error:
        outcome = {"status": f"failed: {type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    path.write_text(json.dumps(outcome | {"seconds": time.perf_counter() - begun}))


def lines_of(found: Any, path: str = "") -> list[str]:
    if isinstance(found, dict):
        return [line for key, value in found.items() for line in lines_of(value, f"{path}{key} · ")]
    value = f"{found:.4g}" if isinstance(found, float) else str(found)
    return [f"| {path.removesuffix(' · ')} | {value} |"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    results: dict[str, Any] = {"device": options.device, "torch": torch.__version__, "parts": {}}
    processes = multiprocessing.get_context("fork")  # nothing has touched the GPU or made threads yet
    with tempfile.TemporaryDirectory() as place:
        for name in options.parts:
            path, limit = Path(place) / f"{name}.json", PARTS[name][1]
            process = processes.Process(target=run_part, args=(name, options.device, path))
            process.start()
            process.join(limit)
            if process.is_alive():
                process.kill()
                process.join()
                outcome: dict[str, Any] = {"status": f"failed: not done in {limit} s"}
            elif path.is_file():
                outcome = json.loads(path.read_text())
            else:
                outcome = {"status": f"failed: exit status {process.exitcode}"}
            results["parts"][name] = outcome
            print(f"\n## {name}: {outcome['status']} ({outcome.get('seconds', limit):.0f} s)\n", flush=True)
            table = ["| | |", "|---|--:|", *lines_of(outcome.get("found", {}))]
            print(outcome.get("traceback") or "\n".join(table), flush=True)
            options.output.write_text(json.dumps(results, indent=1))
    return any(outcome["status"].startswith("failed") for outcome in results["parts"].values())


if __name__ == "__main__":
    sys.exit(main())
