"""Makes the pictures of the documentation from a finished run: ``python docs/pictures.py checkpoints/quickstart``."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dspark_train.cli.chat import WriterOptions
from dspark_train.cli.writer import Writer
from dspark_train.report import figures, learning_figures, results
from dspark_train.report.drawing import save_png
from dspark_train.run import Run

FOLDER = Path(__file__).parent / "pictures"
QUESTION = "A box holds 12 red and 8 blue pens. I take out a quarter of them. How many pens are left?"


def chat(run: Path) -> None:
    """An answer as ``chat`` shows it, and the figures below it."""
    writer = Writer(WriterOptions(draft=str(run), policy="fixed", max_new_tokens=120), quiet=True)
    pieces: list[tuple[str, bool]] = []
    messages = [{"role": "user", "content": QUESTION}]
    writer.answer([{"role": "user", "content": "Hello!"}])  # the first answer of a session warms up
    writer.pace = {plain: type(pace)() for plain, pace in writer.pace.items()}
    ids = writer.prompt_ids(messages)
    for piece in writer.texts(writer.drafted, ids, 120, plain=False):
        pieces.append(piece)
    for _ in writer.texts(writer.plain, ids, 120, plain=True):
        pass
    console = Console(record=True, width=88, highlight=False, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold]$ python -m dspark_train chat {run}[/bold]\n")
    console.print(f"› {QUESTION}")
    text = Text()
    for piece, by_draft in pieces:
        text.append(piece, "green" if by_draft else "")
    console.print(text)
    console.print(writer.summary(), style="dim")
    picture = console.export_svg(title="dspark-train chat", font_aspect_ratio=0.61)
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # nothing is fetched from elsewhere
    (FOLDER / "chat.svg").write_text(picture, encoding="utf-8")


def plots(run: Path) -> None:
    """Learning, and acceptance by position."""
    opened = Run(run)
    decoded = results.decoded(opened)
    save_png(FOLDER / "acceptance.png", figures.decoded_acceptance(decoded.modes, decoded.split), columns=2)
    save_png(FOLDER / "learning.png", learning_figures.learning(opened.metrics)[:4], columns=2)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints/quickstart")
    chat(folder)
    plots(folder)
