"""The commands ``prepare``, ``prepare show`` and ``prepare stats``: the data stages, with bars, and a look
at the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dspark_train.data.conversations import SplitShares
from dspark_train.errors import UserError
from dspark_train.files import count_lines
from dspark_train.prepare.answers import Regenerate
from dspark_train.prepare.collect import CollectOptions, Deduplicate, Filters, collect
from dspark_train.prepare.regenerate import check_collected, regenerate
from dspark_train.prepare.sources import Source, count_rows

if TYPE_CHECKING:
    from dspark_train.data.tokenize import ConversationEncoder
    from dspark_train.prepare.in_process import Generate

Stage = Literal["collect", "regenerate", "tokenize"]
STAGES: tuple[Stage, ...] = ("collect", "regenerate", "tokenize")


@dataclass(frozen=True)
class Tokenize:
    """How conversations become examples."""

    max_length: int = 4096
    """Most tokens of an example; longer ones are cut."""
    template: dict[str, Any] = field(default_factory=dict)
    """Chat-template arguments, such as ``enable_thinking: false``."""
    workers: int = 1
    """Processes."""


def prepare(
    output: Path | None = None,
    sources: list[Source] = [],  # noqa: B006 - read only
    target: str | None = None,
    name: str = "",
    notes: str = "",
    stages: list[Stage] = ["collect", "tokenize"],  # noqa: B006 - read only; a tuple would not parse from YAML
    filters: Filters = Filters(),  # noqa: B008 - frozen
    deduplicate: Deduplicate = Deduplicate(),  # noqa: B008 - frozen
    shares: SplitShares = SplitShares(),  # noqa: B008 - frozen
    size: int | None = None,
    seed: int = 0,
    max_error_share: float = 0.05,
    regeneration: Regenerate = Regenerate(),  # noqa: B008 - frozen
    tokenization: Tokenize = Tokenize(),
) -> None:
    """Make a training set: collect conversations, let the target answer them, tokenize them with exact masks.

    Each stage leaves its result in the output folder (collected.jsonl, regenerated.jsonl, tokenized/) and is
    skipped or continued where a former run left off.

    Args:
        output: folder of the results.
        sources: where conversations come from.
        target: hub id or folder of the target; its tokenizer and chat template decide the masks.
        name: of the recipe.
        notes: on licenses and origins, for the record.
        stages: which to run, of collect, regenerate and tokenize. The last one takes the answers of the
            target where regenerated.jsonl exists or is to be made, else the collected ones.
        filters: conversations, and parts of them, that are left out.
        deduplicate: which conversations count as the same.
        shares: how conversations are divided into splits.
        size: conversations in all; as many as the weights allow by default.
        seed: of the mixture's choice and order.
        max_error_share: stop where more than this share of the rows or conversations is faulty.
        regeneration: how the target answers.
        tokenization: how conversations become examples.
    """
    if output is None:
        raise UserError("output is not set: name the folder of the results, in the recipe or with --output")
    wanted = [stage for stage in STAGES if stage in stages]
    if not wanted:
        raise UserError(f"stages is empty: name some of {', '.join(STAGES)}")
    options = CollectOptions(sources, filters, deduplicate, shares, size, seed, max_error_share)
    output.mkdir(parents=True, exist_ok=True)
    encoder = (
        _encoder(target, tokenization)
        if "tokenize" in wanted or _needs_encoder(wanted, regeneration, target)
        else None
    )
    result = output / "collected.jsonl"
    if "collect" in wanted:
        with _progress("collect", "rows", _total_rows(sources)) as bar:
            result = collect(options, output, lambda rows: bar(rows, None))
    if "regenerate" in wanted:
        _require(result, "collect")
        with _progress("regenerate", "conversations", count_lines(result)) as bar:
            result = regenerate(
                result,
                output,
                regeneration,
                target=target,
                encoder=encoder,
                generate=None if regeneration.servers else in_process(str(target), regeneration),
                progress=lambda conversations, _tokens: bar(conversations, None),
            )
    elif (output / "regenerated.jsonl").exists():
        check_collected(output / "regenerated.jsonl", output / "collected.jsonl")
        result = output / "regenerated.jsonl"
    if "tokenize" in wanted:
        from dspark_train.data.build import BuildOptions, build_set

        _require(result, "collect")
        recipe = {"name": name, "notes": notes, "sources": [asdict(source) for source in sources]}
        assert encoder is not None
        build = BuildOptions(tokenization.max_length, tokenization.template, shares, max_error_share)
        with _progress("tokenize", "conversations") as bar:
            build_set(
                result,
                output / "tokenized",
                encoder.tokenizer,
                build,
                workers=tokenization.workers,
                progress=bar,
                recipe=recipe,
            )
        stats(output / "tokenized")


def _needs_encoder(stages: Sequence[Stage], regeneration: Regenerate, target: str | None) -> bool:
    """Answering in this process takes the tokenizer; with servers it checks their counts, if it is known."""
    return "regenerate" in stages and (not regeneration.servers or target is not None)


def _require(path: Path, stage: str) -> None:
    if not path.exists():
        raise UserError(f"{path} does not exist: run the stage {stage!r} first")


def _total_rows(sources: Sequence[Source]) -> int | None:
    counts = [count_rows(source) for source in sources]
    return None if None in counts else sum(count or 0 for count in counts)


def load_tokenizer(target: str) -> Any:
    """Load the tokenizer of a target by hub id, folder, or the name of the embedded default."""
    from transformers import AutoTokenizer

    from dspark_train.target.embedded import NAME, embedded_target

    path = str(embedded_target()) if target == NAME else target
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"target {target!r}: no tokenizer can be loaded from it ({reason})") from error


def in_process(target: str, options: Regenerate) -> Generate:
    """Load a target and return a function that lets it answer batches of prompts.

    Sampling settings that are not set come from the target's generation config. Greedy answers are always
    the same; sampled ones also depend on which prompts share a batch, so that an interrupted run may end
    with others.
    """
    from dspark_train.decoding.decoder import Decoder
    from dspark_train.decoding.sampling import SamplingRule
    from dspark_train.target.frozen import FrozenTarget

    if options.min_p is not None:
        raise UserError("regeneration.min_p is not known in this process: leave it out, or name servers")
    frozen = FrozenTarget.load(target)
    own = getattr(frozen.model, "generation_config", None)

    def setting(name: str, otherwise: float) -> float:
        chosen = getattr(options, name)
        declared = getattr(own, name, None)
        return float(chosen if chosen is not None else declared if declared is not None else otherwise)

    rule = SamplingRule(setting("temperature", 1.0), int(setting("top_k", 0)), setting("top_p", 1.0))
    decoder = Decoder(frozen, rule=rule)

    def generate(
        prompts: Sequence[Sequence[int]], *, max_tokens: int, sampling: dict[str, Any], seeds: Sequence[int]
    ) -> list[tuple[list[int], bool]]:
        requests = decoder.requests(prompts, max_tokens, None)
        result = decoder.run(requests, batch_size=len(prompts), seed=seeds[0])
        finished = (reason == "stop" for reason in result.finished_by)
        return list(zip(result.tokens, finished, strict=True))

    return generate


def _encoder(target: str | None, tokenization: Tokenize) -> ConversationEncoder:
    from dspark_train.data.tokenize import ConversationEncoder

    if target is None:
        raise UserError("target is not set: tokenizing needs the target whose template and vocabulary decide")
    tokenizer = load_tokenizer(target)
    return ConversationEncoder(tokenizer, max_length=tokenization.max_length, arguments=tokenization.template)


@contextmanager
def _progress(title: str, unit: str, total: int | None = None) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar with throughput and time left."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task(title, total=total, rate="")

        def advance(count: int, whole: int | None) -> None:
            speed = progress.tasks[0].speed
            rate = f"{speed:,.0f} {unit}/s" if speed else ""
            progress.update(
                task, advance=count, rate=rate, total=progress.tasks[0].total if whole is None else whole
            )

        yield advance


def show(
    path: Path,
    target: str | None = None,
    split: Literal["train", "calibration", "heldout"] = "train",
    first: int = 0,
    count: int = 3,
    max_length: int = 4096,
) -> None:
    """Print conversations with their supervised tokens coloured and the tokens' boundaries marked.

    Args:
        path: a prepared set, or a JSONL file of conversations.
        target: hub id or folder whose tokenizer made the set.
        split: which split of a prepared set.
        first: index of the first one.
        count: how many.
        max_length: most tokens per example, for a JSONL file.
    """
    from rich.console import Console

    from dspark_train.prepare.looking import examples_of, print_example

    if target is None:
        raise UserError("target is not set: showing text needs the tokenizer that made the tokens")
    tokenizer = load_tokenizer(target)
    console = Console()
    for index, example in examples_of(path, tokenizer, split, first, count, max_length):
        print_example(console, tokenizer, index, example)


def stats(path: Path, block_size: int = 7, num_anchors: int = 512, plot: Path | None = None) -> None:
    """Tell what a prepared set holds: lengths, mask share, anchors, dropped rows, domains, cost of an epoch.

    Args:
        path: a prepared set.
        block_size: draft tokens per block (γ), for the cost of an epoch.
        num_anchors: most anchors per sequence, for the cost of an epoch.
        plot: where the plot goes; ``stats.png`` in the set by default.
    """
    from rich.console import Console

    from dspark_train.prepare.looking import print_stats

    print_stats(Console(), path, block_size, num_anchors, plot or path / "stats.png")
