"""Writes a benchmark's table into ``benchmarks/README.md``, between its markers; and measures peak memory."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from dspark_train.run import Run, environment

README = Path(__file__).parent / "README.md"


def machine() -> str:
    """Machine, versions and commit, for a caption."""
    found = environment()
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("torch", "transformers"))
    return f"{found['machine']}; {versions}; commit {found['commit']}."


def write_table(name: str, command: str, caption: str, lines: list[str]) -> None:
    """Replace the section ``name`` (or append it)."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    body = "\n".join([start, f"`{command}`", "", caption, "", *lines, end])
    text = README.read_text() if README.is_file() else "# Benchmarks\n"
    if start in text and end in text:
        text = text[: text.index(start)] + body + text[text.index(end) + len(end) :]
    else:
        text = f"{text.rstrip()}\n\n{body}\n"
    README.write_text(text)
    print(body)


def run_argument(description: str | None) -> Run:
    """The finished run that the only argument of the command line names, opened for validation."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a finished run")
    run = Run(parser.parse_args().run).load()
    run.data.setup("validate")
    return run


class PeakMemory:
    """Bytes above the level at the start: of the GPU where there is one, else of the process's resident memory."""

    def __enter__(self) -> PeakMemory:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self.before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        self.bytes = 0
        return self

    def __exit__(self, *_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        else:
            status = Path("/proc/self/status").read_text()
            peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
        self.bytes = max(0, peak - self.before)
