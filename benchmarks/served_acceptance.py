"""Served acceptance: what vLLM accepts of an exported draft, beside what this project's decoder accepts.

usage: python benchmarks/served_acceptance.py --vllm VENV/bin/python [--run checkpoints/quickstart]
                                              [--only NAME ...] [--output benchmarks/served_acceptance.md]

Needs an environment with vLLM (the variable VLLM_PYTHON names its interpreter, or --vllm does). Every row is
one pair of target and draft in one layout, in float32, greedy, whole blocks: completions must be those of
plain serving, and accepted length and acceptance per position those of this project's decoder on the same
prompts.

Tiny pairs are made here: random targets whose greedy answers wander, and random drafts whose sequential head leans
towards the pairs of tokens in those answers. Both the backbone and the head decide, so some drafts are accepted and
some are not, and an engine that reads either of them wrongly shows. A run folder adds its own, trained pair.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from dspark_train.decoding.decoder import generate
from dspark_train.draft.config import DSparkConfig
from dspark_train.draft.model import DSparkDraft
from dspark_train.interchange.export import ExportFormat, TargetWeights, export_draft
from dspark_train.interchange.serve_check import AcceptedRounds, own_rounds
from dspark_train.target.config import TargetConfig
from dspark_train.target.frozen import FrozenTarget

WORKER = Path(__file__).with_name("vllm_worker.py")
VOCABULARY = 256
CONTEXT = 512
LEAN = 1.5
"""How strongly a tiny draft leans towards pairs of tokens that its target says."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class TinyPair:
    """A pair that is made here."""

    name: str
    family: str
    layouts: tuple[ExportFormat, ...]
    target: tuple[tuple[str, Any], ...] = ()
    """Fields of the target's configuration."""
    reduced: int | None = None
    """Size of the draft's vocabulary."""


TIED = (("tie_word_embeddings", True),)
PAIRS = (
    TinyPair(
        "tiny Llama, llama3 rope", "Llama", ("native", "speculators"), (("rope_parameters", LLAMA3_ROPE),)
    ),
    TinyPair("tiny Qwen3, tied matrices", "Qwen3", ("native", "speculators"), TIED),
    TinyPair("tiny Qwen3, 128 draft tokens", "Qwen3", ("native", "speculators"), TIED, reduced=128),
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


def make_target(pair: TinyPair, folder: Path) -> FrozenTarget:
    """A random target in ``folder``, with a tokenizer, as a server needs it."""
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
        initializer_range=0.12,
        bos_token_id=None,
        eos_token_id=None,
        **{"tie_word_embeddings": False, **dict(pair.target)},
    )
    getattr(transformers, f"{pair.family}ForCausalLM")(config).float().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
    return FrozenTarget.load(TargetConfig(str(folder), layer_ids=[0, 1, 2], dtype="float32", device="cpu"))


def make_draft(pair: TinyPair, target: FrozenTarget, answers: list[list[int]]) -> DSparkDraft:
    """A random draft whose sequential head leans towards the pairs of tokens in ``answers``."""
    config = DSparkConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.12,
        rope_parameters=dict(target.config.rope_parameters),
        block_size=5,
        num_target_layers=target.num_layers,
        target_layer_ids=list(target.layer_ids),
        mask_token_id=VOCABULARY - 1,
        markov_rank=32,
        draft_vocab_size=pair.reduced,
        bos_token_id=None,
        eos_token_id=None,
    )
    said = torch.tensor([token for answer in answers for token in answer]).bincount(minlength=VOCABULARY)
    ids = None if pair.reduced is None else said.topk(pair.reduced).indices.sort().values
    place = dict(zip(range(VOCABULARY) if ids is None else ids.tolist(), itertools.count(), strict=False))
    torch.manual_seed(4)
    draft = DSparkDraft(config, target=target, draft_token_ids=ids).eval()
    for name, parameter in draft.named_parameters():
        if "norm" in name:  # of ones, nobody could tell which layer's norm was applied
            parameter.data.uniform_(0.5, 1.5)
    first, second = draft.markov_head.markov_w1.weight.data, draft.markov_head.markov_w2.weight.data
    first.normal_()
    for before, after in {pair for answer in answers for pair in itertools.pairwise(answer)}:
        if after in place:
            second[place[after]] += LEAN * first[before] / first[before].norm()
    return draft


def tiny_cases(work: Path, names: list[str], max_tokens: int) -> Iterator[Case]:
    """The pairs that are made here."""
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(VOCABULARY - 1, (5 + i,), generator=generator).tolist() for i in range(8)]
    for pair in PAIRS:
        if names and not any(name.lower() in pair.name.lower() for name in names):
            continue
        folder = work / slug(f"{pair.family}{len(pair.target)}") / "target"
        target = make_target(pair, folder)
        answers = generate(target, None, prompts, max_new_tokens=max_tokens, batch_size=8).tokens
        yield Case(pair.name, target, folder, make_draft(pair, target, answers), pair.layouts, prompts)


def run_case(run: Path, limit: int) -> Case:
    """The pair of a run, on its test prompts."""
    from dspark_train.run import Run
    from dspark_train.target.frozen import resolve_path

    opened = Run(run, dtype="float32")
    opened.data.setup()
    prompts = [list(prompt.ids) for prompt in opened.data.prompts("test") if len(prompt.ids) < 128][:limit]
    folder = Path(resolve_path(TargetConfig(**opened.config["target"])))
    return Case(run.name, opened.target, folder, opened.draft, ("native", "speculators"), prompts)


def ask_vllm(interpreter: str, work: Path, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the worker on all jobs in one process; its answers."""
    path = work / "jobs.json"
    path.write_text(json.dumps(jobs), encoding="utf-8")
    done = subprocess.run([interpreter, str(WORKER), str(path)], capture_output=True, text=True, check=False)
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if len(lines) < len(jobs):
        raise SystemExit(f"vLLM failed on {jobs[len(lines)]}:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in lines]


def jobs_of(case: Case, work: Path, max_tokens: int, mend: bool) -> list[dict[str, Any]]:
    """Export a pair in each of its layouts; jobs for plain serving and for each layout."""
    longest = max(map(len, case.prompts)) + max_tokens + 16
    job = {
        "target": str(case.target_folder),
        "draft": None,
        "prompts": case.prompts,
        "max_tokens": max_tokens,
        "max_model_len": -(-longest // 64) * 64,
        "mend": mend,
    }
    jobs = [job]
    for layout in case.layouts:
        folder = work / slug(case.name) / layout
        export_draft(case.draft, TargetWeights.of(case.target), folder, layout, torch.float32)
        jobs.append({**job, "draft": str(folder)})
    return jobs


def check(case: Case, answers: list[dict[str, Any]], max_tokens: int) -> Iterator[dict[str, Any]]:
    """Compare what vLLM answered with this project's decoder: a row for each layout."""
    tokens, trace = own_rounds(case.target, case.draft, case.prompts, max_tokens)
    plain, *served = answers
    for layout, answer in zip(case.layouts, served, strict=True):
        counters = answer["counters"]
        theirs = AcceptedRounds.of_counts(
            counters["num_drafts"], counters["num_accepted_tokens"], counters["num_accepted_tokens_per_pos"]
        )
        yield {
            "pair": case.name,
            "layout": layout,
            "prompts": len(case.prompts),
            "identical_to_plain": sum(a == b for a, b in zip(answer["tokens"], plain["tokens"], strict=True)),
            "identical_to_own": sum(a == b for a, b in zip(answer["tokens"], tokens, strict=True)),
            "vllm": theirs,
            "own": AcceptedRounds.of_trace(trace),
            "mended": answer["mended"],
            "versions": answer["versions"],
        }


def slug(name: str) -> str:
    """A name as a folder."""
    return name.replace(" ", "_").replace(",", "")


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
        "Made by `python benchmarks/served_acceptance.py`"
        + (
            ", with every draft layer's own key norm: the engine's CPU kernel applies the first layer's to all "
            "(`mend_grouped_norm` in `vllm_worker.py`; `--as-shipped` leaves it)."
            if rows[0]["mended"]
            else "."
        ),
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
    parser.add_argument("--max-tokens", type=int, default=48, help="new tokens a prompt")
    parser.add_argument("--limit", type=int, default=8, help="prompts of the run")
    parser.add_argument("--as-shipped", action="store_true", help="leave the engine's CPU norm as it is")
    parser.add_argument("--work", type=Path, default=Path("build/served_acceptance"), help="scratch folder")
    parser.add_argument("--output", type=Path, help="Markdown file for the table")
    options = parser.parse_args()
    if not options.vllm:
        parser.error("name an interpreter with vLLM by --vllm or VLLM_PYTHON")
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    cases = iter(()) if options.no_tiny else tiny_cases(work, options.only, options.max_tokens)
    own_run = (run_case(options.run, options.limit) for _ in range(options.run is not None))
    pairs = list(itertools.chain(cases, own_run))
    jobs = [jobs_of(case, work, options.max_tokens, not options.as_shipped) for case in pairs]
    answers = iter(ask_vllm(options.vllm, work, list(itertools.chain(*jobs))))
    rows: list[dict[str, Any]] = []
    for case, asked in zip(pairs, jobs, strict=True):
        rows += check(case, list(itertools.islice(answers, len(asked))), options.max_tokens)
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
