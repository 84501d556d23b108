"""The ``report`` command: one HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dspark_train.errors import UserError
from dspark_train.lists import Names


@dataclass(frozen=True)
class ReportOptions:
    """Options of ``report``."""

    run: Path
    """The run's folder."""
    compare: Names = Names()
    """Further run folders, with commas between, to compare the run with."""
    output: Path | None = None
    """Where to write; left out, report.html (or comparison.html) in the run's folder."""

    def __post_init__(self) -> None:
        if self.output is not None and self.output.suffix not in (".html", ".htm"):
            raise UserError(f"output {self.output} must end in .html")


def report(options: ReportOptions) -> None:
    """Write a run's report, one self-contained HTML page; with further runs, a page that compares them."""
    from dspark_train.report.comparison_page import write_comparison
    from dspark_train.report.run_page import write_report

    others = [Path(other) for other in options.compare]
    if others:
        written = write_comparison([options.run, *others], options.output or options.run / "comparison.html")
    else:
        written = write_report(options.run, options.output)
    print(f"report: {written}")
