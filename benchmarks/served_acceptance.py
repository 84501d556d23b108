"""Served acceptance: what vLLM accepts of an exported draft, beside what this project's decoder accepts.

usage: python benchmarks/served_acceptance.py --vllm VENV/bin/python [--run checkpoints/quickstart]
                                              [--only NAME ...] [--output benchmarks/served_acceptance.md]

Needs an environment with vLLM (the variable VLLM_PYTHON names its interpreter, or --vllm does). Every row is
one pair of target and draft in one layout, in float32, greedy, whole blocks: completions must be those of
plain serving, and accepted length and acceptance per position those of this project's decoder on the same
prompts.

Tiny pairs are made here, in about a minute each: a target trained on a random second-order law of 40
symbols, so that its greedy answers neither stop nor repeat soon, and a draft trained on text that the target
sampled. A run folder adds its own pair.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from dspark_train.data.blocks import build_blocks
from dspark_train.decoding.decoder import generate
from dspark_train.draft.config import DSparkConfig
from dspark_train.draft.model import DSparkDraft
from dspark_train.interchange.export import ExportFormat, TargetWeights, export_draft
from dspark_train.interchange.serve_check import Acceptance, own_rounds
from dspark_train.structures import TokenBatch
from dspark_train.target.config import TargetConfig
from dspark_train.target.frozen import FrozenTarget

WORKER = Path(__file__).with_name("vllm_worker.py")
VOCABULARY = 256
SYMBOLS = 40
"""Tokens that the law uses: every sixth id."""
CONTEXT = 512


@dataclass(frozen=True)
class TinyPair:
    """A pair that is made here."""

    name: str
    family: str
    layouts: tuple[ExportFormat, ...]
    head: str = "vanilla"
    reduced: int | None = None
    """Draft vocabulary: the most frequent tokens of the target's text."""
    target: tuple[tuple[str, Any], ...] = ()
    """Fields of the target's configuration."""


PAIRS = (
    TinyPair("tiny Llama", "Llama", ("native", "speculators")),
    TinyPair(
        "tiny Qwen3, tied embeddings",
        "Qwen3",
        ("native", "speculators"),
        target=(("tie_word_embeddings", True),),
    ),
    TinyPair("tiny Qwen3, 160 of 256 draft tokens", "Qwen3", ("native", "speculators"), reduced=160),
    TinyPair("tiny Llama, parallel draft", "Llama", ("native",), head="none"),
    TinyPair(
        "tiny Llama, llama3 rope",
        "Llama",
        ("native", "speculators"),
        target=(
            (
                "rope_parameters",
                {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            ),
        ),
    ),
)


@dataclass(frozen=True)
class Case:
    """One pair, ready to be served."""

    name: str
    target: FrozenTarget
    target_folder: Path
    draft: DSparkDraft
    layouts: tuple[ExportFormat, ...]
    prompts: list[list[int]]


def make_target(pair: TinyPair, folder: Path, steps: int) -> FrozenTarget:
    """A target in ``folder``, with a tokenizer, as a server needs it."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{pair.family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        **{"tie_word_embeddings": False, **dict(pair.target)},
    )
    model = getattr(transformers, f"{pair.family}ForCausalLM")(config).float()
    train_target(model, steps)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
    return FrozenTarget.load(TargetConfig(str(folder), layer_ids=[0, 1, 2], dtype="float32", device="cpu"))


def law_text(count: int, length: int, seed: int) -> torch.Tensor:
    """Texts ``[count, length]`` of the law: the next symbol follows from the last two, nine times out of
    ten."""
    table = torch.randint(SYMBOLS, (SYMBOLS, SYMBOLS), generator=torch.Generator().manual_seed(389))
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(SYMBOLS, (count, length), generator=generator)
    lawful = torch.rand(count, length, generator=generator) < 0.9
    for place in range(2, length):
        text[:, place] = torch.where(
            lawful[:, place], table[text[:, place - 2], text[:, place - 1]], text[:, place]
        )
    return text * 6


def train_target(model: torch.nn.Module, steps: int) -> None:
    """Train a target on the law."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        text = law_text(32, 48, seed=100 + step)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
        loss = model(input_ids=text, labels=text).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def sample_text(target: FrozenTarget, count: int, length: int) -> torch.Tensor:
    """Texts ``[count, length]`` that the target sampled at a low temperature."""
    prompts = law_text(count, 4, seed=2)
    options = {"max_new_tokens": length - 4, "temperature": 0.5, "batch_size": 64, "seed": 3}
    answers = generate(target, None, prompts.tolist(), **options).tokens
    return torch.cat([prompts, torch.tensor(answers)], dim=1)


def train_draft(pair: TinyPair, target: FrozenTarget, steps: int) -> DSparkDraft:
    """A draft trained on the target's text: cross-entropy of the drafts, nothing else."""
    text = sample_text(target, 192, 96)
    rank = 0 if pair.head == "none" else 16
    torch.manual_seed(4)
    config = DSparkConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters=dict(target.config.rope_parameters),
        block_size=5,
        num_target_layers=target.num_layers,
        target_layer_ids=list(target.layer_ids),
        mask_token_id=VOCABULARY - 1,
        markov_rank=rank,
        markov_head_type=pair.head,
        confidence_head_with_markov=rank > 0,
        draft_vocab_size=pair.reduced,
        bos_token_id=None,
        eos_token_id=None,
    )
    ids = None
    if pair.reduced is not None:
        ids = text.flatten().bincount(minlength=VOCABULARY).topk(pair.reduced).indices.sort().values
    place = torch.full((VOCABULARY,), -100)
    place[torch.arange(VOCABULARY) if ids is None else ids] = torch.arange(pair.reduced or VOCABULARY)
    draft = DSparkDraft(config, target=target, draft_token_ids=ids)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
        rows = torch.randint(len(text), (8,), generator=torch.Generator().manual_seed(step))
        mask = torch.ones(8, text.shape[1], dtype=torch.bool)
        tokens = TokenBatch(text[rows], torch.full((8,), text.shape[1]), mask, rows)
        blocks = build_blocks(
            tokens, num_anchors=24, block_size=5, mask_token_id=VOCABULARY - 1, seed=5, epoch=step
        )
        output = draft(target.states(tokens.input_ids).features, blocks)
        labels = place[blocks.labels].masked_fill(~blocks.supervised, -100)
        loss = torch.nn.functional.cross_entropy(
            draft.logits(output.hidden, output.latent).flatten(0, 1), labels.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.eval()


def tiny_cases(work: Path, names: list[str], target_steps: int, draft_steps: int) -> Iterator[Case]:
    """The pairs that are made here."""
    for pair in PAIRS:
        if names and not any(name.lower() in pair.name.lower() for name in names):
            continue
        folder = work / pair.name.replace(" ", "_").replace(",", "") / "target"
        target = make_target(pair, folder, target_steps)
        draft = train_draft(pair, target, draft_steps)
        prompts = [law_text(1, 5 + i, seed=6 + i)[0].tolist() for i in range(8)]
        yield Case(pair.name, target, folder, draft, pair.layouts, prompts)


def run_case(run: Path, limit: int) -> Case:
    """The pair of a run, on held-out prompts."""
    from dspark_train.target.frozen import resolve_path
    from dspark_train.training.run import load_run

    opened = load_run(run, dtype="float32")
    opened.data.setup()
    prompts = [list(prompt.ids) for prompt in opened.data.prompts("heldout") if len(prompt.ids) < 128][:limit]
    folder = Path(resolve_path(TargetConfig(**opened.config["target"])))
    return Case(run.name, opened.target, folder, opened.draft, ("native", "speculators"), prompts)


def ask_vllm(interpreter: str, work: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run the worker; its answer."""
    path = work / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    done = subprocess.run([interpreter, str(WORKER), str(path)], capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"vLLM failed on {job['draft']}:\n{done.stderr[-3000:]}")
    return json.loads(line.removeprefix("RESULT "))


def check(case: Case, interpreter: str, work: Path, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Serve a pair in each of its layouts."""
    tokens, trace = own_rounds(case.target, case.draft, case.prompts, max_tokens)
    own = Acceptance.of_trace(trace)
    longest = max(map(len, case.prompts)) + max_tokens + 16
    job = {
        "target": str(case.target_folder),
        "draft": None,
        "prompts": case.prompts,
        "max_tokens": max_tokens,
        "max_model_len": min(CONTEXT, -(-longest // 64) * 64),
    }
    plain = ask_vllm(interpreter, work, job)
    for layout in case.layouts:
        folder = work / case.name.replace(" ", "_").replace(",", "") / layout
        weights = TargetWeights.of(case.target)
        export_draft(case.draft, weights, folder, layout, torch.float32)
        begun = time.monotonic()
        served = ask_vllm(interpreter, work, {**job, "draft": str(folder)})
        counters = served["counters"]
        theirs = Acceptance.of_counts(
            counters["num_drafts"], counters["num_accepted_tokens"], counters["num_accepted_tokens_per_pos"]
        )
        yield {
            "pair": case.name,
            "layout": layout,
            "prompts": len(case.prompts),
            "identical_to_plain": sum(a == b for a, b in zip(served["tokens"], plain["tokens"], strict=True)),
            "identical_to_own": sum(a == b for a, b in zip(served["tokens"], tokens, strict=True)),
            "vllm": theirs,
            "own": own,
            "versions": served["versions"],
            "seconds": time.monotonic() - begun,
        }


def render(rows: list[dict[str, Any]], max_tokens: int) -> str:
    """The table as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items())
    lines = [
        "# Served acceptance",
        "",
        "What vLLM accepts of an exported draft, beside what this project's decoder accepts on the same "
        "prompts.",
        f"float32, greedy, whole blocks, {max_tokens} new tokens a prompt. Engine: {versions}; this project: "
        "torch "
        f"{torch.__version__}, transformers {transformers.__version__}, Python {sys.version.split()[0]}.",
        "Made by `python benchmarks/served_acceptance.py`.",
        "",
        "| pair | layout | prompts | same as plain serving | same as this decoder | rounds | accepted "
        "length, vLLM | "
        "accepted length, here | acceptance up to each position, vLLM | acceptance up to each position, here "
        "|",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        theirs, own = row["vllm"], row["own"]
        shares = [" ".join(f"{value:.4f}" for value in side.acceptance) for side in (theirs, own)]
        rounds = f"{theirs.rounds}" if theirs.rounds == own.rounds else f"{theirs.rounds} / {own.rounds}"
        lines.append(
            f"| {row['pair']} | {row['layout']} | {row['prompts']} | {row['identical_to_plain']} | "
            f"{row['identical_to_own']} | {rounds} | {theirs.accepted_length:.4f} | "
            f"{own.accepted_length:.4f} | "
            f"{shares[0]} | {shares[1]} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", default=os.environ.get("VLLM_PYTHON"), help="interpreter with vLLM")
    parser.add_argument("--run", type=Path, help="run folder whose pair is served too")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of tiny pairs; none: all")
    parser.add_argument("--no-tiny", action="store_true", help="the run's pair alone")
    parser.add_argument("--target-steps", type=int, default=400, help="training steps of a tiny target")
    parser.add_argument("--draft-steps", type=int, default=100, help="training steps of a tiny draft")
    parser.add_argument("--max-tokens", type=int, default=48, help="new tokens a prompt")
    parser.add_argument("--limit", type=int, default=8, help="prompts of the run")
    parser.add_argument("--work", type=Path, default=Path("build/served_acceptance"), help="scratch folder")
    parser.add_argument("--output", type=Path, help="Markdown file for the table")
    options = parser.parse_args()
    if not options.vllm:
        parser.error("name an interpreter with vLLM by --vllm or VLLM_PYTHON")
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    cases = (
        iter(())
        if options.no_tiny
        else tiny_cases(work, options.only, options.target_steps, options.draft_steps)
    )
    rows = []
    own_run = (run_case(options.run, options.limit) for _ in range(options.run is not None))
    for case in itertools.chain(cases, own_run):
        for row in check(case, options.vllm, work, options.max_tokens):
            rows.append(row)
            print(
                f"{row['pair']}, {row['layout']}: {row['seconds']:.0f} s", row["vllm"], row["own"], flush=True
            )
    text = render(rows, options.max_tokens)
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    different = [
        row for row in rows if row["identical_to_plain"] != row["prompts"] or row["vllm"] != row["own"]
    ]
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()
