"""What ``show`` and ``stats`` print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark_train.data.blocks import eligible_anchors
from dspark_train.data.conversations import BadConversation, conversation_of_line
from dspark_train.data.dataset import ExampleStore, PreparedSet
from dspark_train.data.tokenize import ConversationEncoder, Example, tokenizer_fingerprint
from dspark_train.files import read_json, read_lines

SUPERVISED, CONTEXT = ("black on green", "black on bright_green"), ("dim", "dim underline")


def examples_of(
    path: Path, tokenizer: Any, split: str, first: int, count: int, max_length: int
) -> Iterator[tuple[int, Example | BadConversation]]:
    """Yield some examples of a prepared set or of a file of conversations, with their index."""
    if path.is_dir():
        prepared = PreparedSet(path)
        prepared.check_tokenizer(tokenizer_fingerprint(tokenizer), str(tokenizer.name_or_path))
        store = prepared.split(split)
        yield from ((index, store[index]) for index in range(first, min(first + count, len(store))))
        return
    encoder = ConversationEncoder(tokenizer, max_length=max_length)
    for index, line in enumerate(islice(read_lines(path), first, first + count), first):
        try:
            for example in encoder.encode(conversation_of_line(line)):
                yield index, example
        except BadConversation as error:
            yield index, error


def print_example(console: Console, tokenizer: Any, index: int, example: Example | BadConversation) -> None:
    """Print one example; neighbouring tokens differ in shade, so that their boundaries show."""
    if isinstance(example, BadConversation):
        console.print(Text(f"{index}: left out: {example}", style="bold red"))
        return
    anchors = len(eligible_anchors(example.loss_mask))
    console.rule(
        f"{index} · {example.conversation} · {example.domain} · {len(example.input_ids)} tokens, "
        f"{int(example.loss_mask.sum())} supervised, {anchors} eligible anchors"
    )
    console.print(coloured(tokenizer, example), soft_wrap=True)
    console.print()


def coloured(tokenizer: Any, example: Example) -> Text:
    """The example's text: supervised tokens on green, context dim; tokens of one character are shown together."""
    text = Text()
    waiting: list[int] = []
    shade = 0
    for position, token in enumerate(example.input_ids.tolist()):
        waiting.append(token)
        piece = tokenizer.backend_tokenizer.decode(waiting, skip_special_tokens=False)
        last = position + 1 == len(example.input_ids)
        if piece.endswith("\ufffd") and not last and len(waiting) < 6:
            continue  # the first bytes of a character
        styles = SUPERVISED if example.loss_mask[position] else CONTEXT
        text.append(piece.replace("\n", "⏎\n"), style=styles[shade])
        shade, waiting = 1 - shade, []
    return text


def print_stats(console: Console, path: Path, block_size: int, num_anchors: int, plot: Path) -> None:
    """Print tables about a prepared set and draw a plot."""
    prepared = PreparedSet(path)
    manifest = prepared.manifest
    table = Table(
        title=f"{path} · {manifest.conversations} conversations · tokenizer {manifest.tokenizer_name}"
    )
    for column in ("split", "examples", "tokens", "supervised", "share", "anchors", "per example"):
        table.add_column(column, justify="left" if column == "split" else "right")
    cost = Table(title=f"cost of an epoch (γ {block_size}, at most {num_anchors} anchors per example)")
    for column in ("split", "tokens through the target", "blocks", "draft slots, at most"):
        cost.add_column(column, justify="left" if column == "split" else "right")
    costs: dict[str, tuple[int, int]] = {}
    stores: dict[str, ExampleStore] = {}
    for split, counts in prepared.splits.items():
        stores[split] = prepared.split(split)
        blocks = int(np.minimum(stores[split].column("anchors"), num_anchors).sum())
        table.add_row(
            split,
            f"{counts.examples:,}",
            f"{counts.tokens:,}",
            f"{counts.supervised:,}",
            f"{counts.supervised / counts.tokens:.1%}",
            f"{counts.anchors:,}",
            f"{counts.anchors / counts.examples:.1f}",
        )
        costs[split] = counts.tokens, blocks * block_size
        cost.add_row(split, f"{counts.tokens:,}", f"{blocks:,}", f"{blocks * block_size:,}")
    console.print(table)
    console.print(cost)
    for arguments, share in prepared.templates:
        console.print(f"chat-template arguments of {share:.1%} of the examples: {arguments or 'none'}")
    if manifest.answers:
        console.print(f"answers drawn with: {manifest.answers}")
    lengths = Table(title="quantiles over examples")
    for column in ("", "min", "10 %", "median", "90 %", "99 %", "max"):
        lengths.add_column(column, justify="right" if column else "left")
    joined = {name: np.concatenate([store.column(name) for store in stores.values()]) for name in _QUANTITIES}
    for name, label in _QUANTITIES.items():
        values = np.quantile(joined[name], (0, 0.1, 0.5, 0.9, 0.99, 1))
        lengths.add_row(label, *(f"{value:,.0f}" for value in values))
    console.print(lengths)
    domains = Counter[str]()
    tokens = Counter[str]()
    for store in stores.values():
        for domain, supervised in zip(store.column("domain"), store.column("supervised"), strict=True):
            domains[domain] += 1
            tokens[domain] += int(supervised)
    mix = Table("domain", "examples", "share", "supervised tokens", "share", title="domains")
    for domain, count in domains.most_common():
        shares = count / domains.total(), tokens[domain] / tokens.total()
        mix.add_row(domain, f"{count:,}", f"{shares[0]:.1%}", f"{tokens[domain]:,}", f"{shares[1]:.1%}")
    console.print(mix)
    rows = [
        (f"tokenize: {kind}", *item)
        for kind in ("errors", "dropped", "notes")
        for item in getattr(manifest, kind).items()
    ]
    rows = [*_left_out_before(path.resolve().parent), *rows]
    if rows:
        reasons = Table("kind", "reason", "conversations", title="left out and worked around")
        for kind, reason, count in rows:
            reasons.add_row(kind, reason, f"{count:,}")
        console.print(reasons)
    _plot(plot, joined, domains, costs)
    console.print(f"plot: {plot}")


_QUANTITIES = {"length": "tokens", "supervised": "supervised tokens", "anchors": "eligible anchors"}


def _left_out_before(folder: Path) -> list[tuple[str, str, int]]:
    """What the stages before left out, by ``(stage, reason, count)``, where their counts lie beside the set."""
    collected: Counter[str] = Counter()
    for tally in read_json(folder / "collected.json").get("sources", {}).values():
        collected.update(
            {name: count for name, count in tally.items() if name.startswith(("bad: ", "left out: "))}
        )
    answered = read_json(folder / "regenerated.json")
    return [
        *(("collect", reason, count) for reason, count in collected.items()),
        *(("regenerate", name, count) for name, count in answered.items() if name.startswith("failed: ")),
    ]


def _plot(
    path: Path, columns: dict[str, NDArray[Any]], domains: Counter[str], costs: dict[str, tuple[int, int]]
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6.5), layout="constrained")
    axes = figure.subplots(2, 3).flat
    for axis, (name, label) in zip(axes, _QUANTITIES.items(), strict=False):
        axis.hist(columns[name], bins=50, color="#4477aa")
        axis.set_xlabel(label)
        axis.set_ylabel("examples")
    names = [domain for domain, _ in domains.most_common(15)][::-1]
    axes[3].barh(names, [domains[name] for name in names], color="#228833")
    axes[3].set_xlabel("examples")
    axes[3].set_title("domains", fontsize=10)
    splits = [*costs][::-1]
    for axis, which, label in (
        (axes[4], 0, "tokens through the target"),
        (axes[5], 1, "draft slots, at most"),
    ):
        axis.barh(splits, [costs[split][which] for split in splits], color="#aa3377")
        axis.set_xlabel(f"{label}, an epoch")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.locator_params(axis="x", nbins=4)
    figure.savefig(path, dpi=120)
