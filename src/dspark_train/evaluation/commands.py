"""Commands of this room: ``report``, ``evaluate``, ``ablate``. Heavy imports wait until a command runs."""

from __future__ import annotations

from pathlib import Path

from dspark_train.errors import UserError


def report(run: Path, others: list[Path] | None = None, output: Path | None = None) -> None:
    """Write a run's report, one self-contained HTML page; with further runs, a page that compares them.

    Args:
        run: the run's folder.
        others: further run folders to compare ``run`` with.
        output: where to write; left out, ``report.html`` (or ``comparison.html``) in the run's folder.
    """
    from dspark_train.evaluation.comparison import write_comparison
    from dspark_train.evaluation.report import write_report

    if output is not None and output.suffix not in (".html", ".htm"):
        raise UserError(f"output {output} must end in .html")
    written = (
        write_comparison([run, *others], output or run / "comparison.html")
        if others
        else write_report(run, output)
    )
    print(f"report: {written}")
