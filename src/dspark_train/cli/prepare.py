"""The commands ``prepare``, ``prepare show`` and ``prepare stats``: the data stages, with bars, and a look
at the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dspark_train.data.conversations import Split, SplitShares
from dspark_train.data.tokenize import ConversationEncoder
from dspark_train.errors import UserError
from dspark_train.files import count_lines
from dspark_train.lists import Names
from dspark_train.prepare.answers import Regenerate
from dspark_train.prepare.collect import CollectOptions, Deduplicate, Filters, collect
from dspark_train.prepare.in_process import Generate
from dspark_train.prepare.regenerate import check_collected, regenerate
from dspark_train.prepare.sources import Source, count_rows
from dspark_train.progress import stage

Stage = Literal["collect", "regenerate", "tokenize"]
STAGES: tuple[Stage, ...] = ("collect", "regenerate", "tokenize")


@dataclass(frozen=True)
class Tokenize:
    """How conversations become examples."""

    max_length: int = 4096
    """Most tokens of an example; longer ones are cut."""
    template: dict[str, Any] = field(default_factory=dict)
    """Chat-template arguments of every conversation, such as ``enable_thinking: false``, also while the target
    answers. The set keeps them: ``evaluate`` and ``decode`` render other prompts with them."""
    workers: int = 1
    """Processes."""


@dataclass(frozen=True)
class PrepareOptions:
    """Options of ``prepare``."""

    output: Path | None = None
    """Folder of the results."""
    sources: list[Source] = field(default_factory=list)
    """Where conversations come from."""
    target: str | None = None
    """Hub id or folder of the target; its tokenizer and chat template decide the masks."""
    name: str = ""
    """Of the recipe."""
    notes: str = ""
    """On licenses and origins, for the record."""
    stages: list[Stage] | Names = Names(("collect", "tokenize"))
    """Which to run, of collect, regenerate and tokenize, with commas between. The last one takes the answers of
    the target where regenerated.jsonl exists or is to be made, else the collected ones."""
    filters: Filters = field(default_factory=Filters)
    """Conversations, and parts of them, that are left out."""
    deduplicate: Deduplicate = field(default_factory=Deduplicate)
    """Which conversations count as the same."""
    shares: SplitShares = field(default_factory=SplitShares)
    """How conversations are divided into splits."""
    size: int | None = None
    """Conversations in all; as many as the weights allow by default."""
    seed: int = 0
    """Of the mixture's choice and order."""
    max_error_share: float = 0.05
    """Stop where more than this share of the rows or conversations is faulty."""
    regeneration: Regenerate = field(default_factory=Regenerate)
    """How the target answers."""
    tokenization: Tokenize = field(default_factory=Tokenize)
    """How conversations become examples."""

    def __post_init__(self) -> None:
        if self.output is None:
            raise UserError(
                "output is not set: name the folder of the results, in the recipe or with --output"
            )
        for name in self.stages:
            if name not in STAGES:
                raise UserError(f"stages: {name!r} is none of {', '.join(STAGES)}")
        if not self.stages:
            raise UserError(f"stages is empty: name some of {', '.join(STAGES)}")
        thinking, template = self.regeneration.thinking, self.tokenization.template
        if thinking is not None and template.get("enable_thinking", thinking) != thinking:
            raise UserError(
                f"regeneration.thinking is {thinking}, and tokenization.template says enable_thinking: "
                f"{template['enable_thinking']}: answers are tokenized as they were asked for, so set one of them"
            )


def prepare(options: PrepareOptions) -> None:
    """Make a training set: collect conversations, let the target answer them, tokenize them with exact masks.

    Each stage leaves its result in the output folder (collected.jsonl, regenerated.jsonl, tokenized/) and is
    skipped or continued where a former run left off.
    """
    output = options.output
    assert output is not None
    wanted = [stage for stage in STAGES if stage in options.stages]
    collecting = CollectOptions(
        options.sources,
        options.filters,
        options.deduplicate,
        options.shares,
        options.size,
        options.seed,
        options.max_error_share,
    )
    output.mkdir(parents=True, exist_ok=True)
    encoder = _encoder(options) if _needs_encoder(wanted, options) else None
    result = output / "collected.jsonl"
    if "collect" in wanted:
        with _progress("collect", "rows", _total_rows(options.sources)) as bar:
            result = collect(collecting, output, lambda rows: bar(rows, None))
    if "regenerate" in wanted:
        _require(result, "collect")
        how = options.regeneration
        with _progress("regenerate", "conversations", count_lines(result)) as bar:
            result = regenerate(
                result,
                output,
                how,
                target=options.target,
                encoder=encoder,
                generate=None if how.servers else in_process(str(options.target), how),
                template=options.tokenization.template,
                progress=lambda conversations, _tokens: bar(conversations, None),
            )
    elif (output / "regenerated.jsonl").exists():
        check_collected(output / "regenerated.jsonl", output / "collected.jsonl")
        result = output / "regenerated.jsonl"
    if "tokenize" in wanted:
        _require(result, "collect")
        assert encoder is not None
        tokenize(options, result, encoder)


def tokenize(options: PrepareOptions, conversations: Path, encoder: ConversationEncoder) -> None:
    """Make the prepared set of the output folder from a file of conversations, and tell what it holds."""
    from dspark_train.data.build import BuildOptions, build_set

    assert options.output is not None
    folder, how = options.output / "tokenized", options.tokenization
    build = BuildOptions(how.max_length, how.template, options.shares, options.max_error_share)
    recipe = {
        "name": options.name,
        "notes": options.notes,
        "sources": [asdict(source) for source in options.sources],
    }
    with _progress("tokenize", "conversations") as bar:
        build_set(
            conversations,
            folder,
            encoder.tokenizer,
            build,
            workers=how.workers,
            progress=bar,
            recipe=recipe,
        )
    stats(StatsOptions(folder))


def _needs_encoder(stages: Sequence[Stage], options: PrepareOptions) -> bool:
    """Tokenizing takes it, and answering in this process; with servers it checks their counts, if it is known."""
    answers = "regenerate" in stages and (not options.regeneration.servers or options.target is not None)
    return "tokenize" in stages or answers


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


def _encoder(options: PrepareOptions) -> ConversationEncoder:
    if options.target is None:
        raise UserError("target is not set: tokenizing needs the target whose template and vocabulary decide")
    tokenizer, how = load_tokenizer(options.target), options.tokenization
    return ConversationEncoder(tokenizer, max_length=how.max_length, arguments=how.template)


@contextmanager
def _progress(title: str, unit: str, total: int | None = None) -> Iterator[Callable[[int, int | None], None]]:
    """Show a stage; what is given is called with the count since the last call, and the total where it changed."""
    with stage(title, total, unit) as shown:
        yield lambda count, whole: shown.update(shown.done + count, total=whole)


@dataclass(frozen=True)
class ShowOptions:
    """Options of ``prepare show``."""

    path: Path
    """A prepared set, or a JSONL file of conversations."""
    target: str | None = None
    """Hub id or folder whose tokenizer made the set."""
    split: Split = "train"
    """Which split of a prepared set."""
    first: int = 0
    """Index of the first one."""
    count: int = 3
    """How many."""
    max_length: int = 4096
    """Most tokens per example, for a JSONL file."""


def show(options: ShowOptions) -> None:
    """Print conversations with their supervised tokens coloured and the tokens' boundaries marked."""
    from rich.console import Console

    from dspark_train.prepare.looking import examples_of, print_example

    if options.target is None:
        raise UserError("target is not set: showing text needs the tokenizer that made the tokens")
    tokenizer = load_tokenizer(options.target)
    console = Console()
    chosen = examples_of(
        options.path, tokenizer, options.split, options.first, options.count, options.max_length
    )
    for index, example in chosen:
        print_example(console, tokenizer, index, example)


@dataclass(frozen=True)
class StatsOptions:
    """Options of ``prepare stats``."""

    path: Path
    """A prepared set."""
    block_size: int = 7
    """Draft tokens per block (γ), for the cost of an epoch."""
    num_anchors: int = 512
    """Most anchors per sequence, for the cost of an epoch."""
    plot: Path | None = None
    """Where the plot goes; left out, stats.png in the set."""


def stats(options: StatsOptions) -> None:
    """Tell what a prepared set holds: lengths, mask share, anchors, dropped rows, domains, cost of an epoch."""
    from rich.console import Console

    from dspark_train.prepare.looking import print_stats

    plot = options.plot or options.path / "stats.png"
    print_stats(Console(), options.path, options.block_size, options.num_anchors, plot)
