"""Decodes answers for ``chat`` and ``generate``, and shows them as they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dspark_train.cli.chat import WriterOptions
from dspark_train.errors import UserError

if TYPE_CHECKING:
    from dspark_train.calibration.sts import Scalings
    from dspark_train.decoding.decoder import Decoder
    from dspark_train.decoding.stream import Pace
    from dspark_train.interchange.opening import Pair

COMPARED = 32
"""Tokens of the first answer that are decoded plainly as well, for a speed to compare with."""


class Writer:
    """Decodes answers and shows them."""

    def __init__(self, options: WriterOptions, quiet: bool = False) -> None:
        """Open the draft and its target; ``quiet`` shows no text, for answers that go to a file."""
        from dspark_train.data.render import Renderer
        from dspark_train.decoding.decoder import Decoder
        from dspark_train.decoding.sampling import SamplingRule
        from dspark_train.decoding.stream import Pace
        from dspark_train.interchange.opening import open_pair
        from dspark_train.progress import stage
        from dspark_train.studies.profile import measured_policy

        self.options, self.screen, self.quiet = options, Screen(), quiet
        with stage(f"opening {options.draft}"):
            self.pair = open_pair(options.draft, options.target)
        target, draft = self.pair.target, self.pair.draft
        rule = SamplingRule(options.temperature, options.top_k, options.top_p)
        with stage("measuring what a round costs"):
            policy, named = measured_policy(target, draft, options.policy, None, 1)
        self.name = f"{target.name} with {options.draft}, {rule.label}, {named} verification"
        self.renderer = Renderer(target.tokenizer, _template(self.pair))
        self.drafted = Decoder(target, draft, policy, rule, _sts(self.pair, rule.label))
        self.plain = Decoder(target, rule=rule)
        self.plainly = False
        self.pace: dict[bool, Pace] = {True: Pace(), False: Pace()}
        """Of plain decoding (True) and of decoding with the draft."""

    def opening(self) -> list[dict[str, str]]:
        """Messages that every conversation begins with."""
        return [{"role": "system", "content": self.options.system}] if self.options.system else []

    def answer(self, messages: Sequence[dict[str, Any]]) -> str:
        """Decode the answer to a conversation and show it; returns its text."""
        ids = self.prompt_ids(messages)
        decoder = self.plain if self.plainly else self.drafted
        texts = []
        with self.screen.answering(self.summary) if not self.quiet else self.screen.nothing() as show:
            for text, by_draft in self.texts(decoder, ids, self.options.max_new_tokens, self.plainly):
                texts.append(text)
                show(text, by_draft)
        if not self.plainly and not self.pace[True].rounds:
            for _ in self.texts(self.plain, ids, COMPARED, True):
                pass
        if not self.quiet:
            self.screen.note(self.summary())
        return "".join(texts)

    def prompt_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins."""
        from dspark_train.data.conversations import BadConversation, Conversation

        try:
            text = self.renderer.render(Conversation("chat", messages), messages, prompt=True)
        except BadConversation as error:
            raise UserError(f"the target's chat template refuses the conversation: {error}") from error
        return list(self.pair.target.tokenizer(text, add_special_tokens=False)["input_ids"])

    def texts(self, decoder: Decoder, ids: list[int], limit: int, plain: bool) -> Iterator[tuple[str, bool]]:
        """Pieces of an answer, each with whether the draft wrote it; counted as plain decoding or not."""
        from dspark_train.decoding.stream import Detokenizer, stream

        writer = Detokenizer(self.pair.target.tokenizer)
        for chunk in stream(decoder, ids, limit, self.options.seed, self.pace[plain]):
            for index, token in enumerate(chunk.tokens):
                if text := writer.add(token):
                    yield text, index < chunk.drafted

    def summary(self) -> str:
        """Speed, accepted length and acceptance by position, of all answers so far."""
        drafted, plain = self.pace[False], self.pace[True]
        parts = []
        if drafted.rounds:
            parts.append(f"{drafted.tokens_per_second:.1f} tokens/s with the draft")
        if plain.rounds:
            parts.append(f"{plain.tokens_per_second:.1f} plainly")
        if drafted.rounds and plain.rounds:
            parts.append(f"{drafted.tokens_per_second / plain.tokens_per_second:.2f} times as fast")
        if drafted.rounds:
            shares = " ".join(f"{share:.0%}" for share in drafted.acceptance)
            parts.append(f"τ {drafted.accepted_length:.2f}")
            parts.append(f"accepted by position {shares}")
        return " · ".join(parts)


class Screen:
    """A terminal, or a plain stream of text where there is none."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(highlight=False)

    def note(self, text: str) -> None:
        """Words that are not the target's."""
        self.console.print(text, style="dim", markup=False)

    def nothing(self) -> _Silent:
        """Shows nothing."""
        return _Silent()

    def answering(self, summary: Callable[[], str]) -> _Answer | _PlainAnswer:
        """Context that gives a function of (text, written by the draft) to show an answer with."""
        return _Answer(self.console, summary) if self.console.is_terminal else _PlainAnswer()


class _Silent:
    def __enter__(self) -> Callable[[str, bool], None]:
        return lambda text, by_draft: None

    def __exit__(self, *error: object) -> None:
        pass


class _PlainAnswer:
    def __enter__(self) -> Callable[[str, bool], None]:
        return lambda text, by_draft: print(text, end="", flush=True)

    def __exit__(self, *error: object) -> None:
        print()


class _Answer:
    """Finished lines scroll away; the line being written and the figures stay below them."""

    def __init__(self, console: Any, summary: Callable[[], str]) -> None:
        from rich.live import Live
        from rich.text import Text

        self.line, self.summary = Text(), summary
        self.live = Live(console=console, refresh_per_second=12, transient=True, get_renderable=self._below)

    def _below(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(self.line, Text(self.summary(), style="dim"))

    def __enter__(self) -> Callable[[str, bool], None]:
        self.live.start()
        return self._show

    def _show(self, text: str, by_draft: bool) -> None:
        from rich.text import Text

        *ended, rest = text.split("\n")
        style = "green" if by_draft else ""
        for part in ended:
            self.line.append(part, style)
            self.live.console.print(self.line)
            self.line = Text()
        self.line.append(rest, style)

    def __exit__(self, *error: object) -> None:
        self.live.stop()
        self.live.console.print(self.line)


def _template(pair: Pair) -> dict[str, Any]:
    """Template arguments that the draft was trained with."""
    return {} if pair.run is None else dict(pair.run.template)


def _sts(pair: Pair, label: str) -> Scalings | None:
    """Scalings that were fitted for this way of sampling."""
    from dspark_train.calibration.io import read_sts

    if pair.draft.confidence_head is None:
        return None
    if pair.run is not None:
        return read_sts(pair.run, label, pair.draft.config.block_size)
    fitted = pair.calibration
    right = fitted is not None and (fitted.sampling is None or fitted.sampling.label == label)
    return fitted.scalings if fitted is not None and right else None
