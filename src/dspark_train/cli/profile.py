"""The ``profile`` command: what a target pass costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dspark_train.lists import Integers


@dataclass(frozen=True)
class ProfileOptions:
    """Options of ``profile``."""

    run: Path
    """Folder of a run, whose target and draft are measured."""
    out: Path | None = None
    """Where to write the table; left out, RUN/studies/cost_table.json."""
    max_rows: int = 128
    """Rows (tokens) of the largest verification pass."""
    requests: Integers = Integers((1, 2, 4, 8, 16))
    """Concurrent requests at which draft and overheads are measured, with commas between."""
    context: int = 256
    """Tokens of context of every request. In a batch, attention reads as far as the longest one."""
    repetitions: int = 20
    """Rounds timed at each point."""
    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Of target and draft. Left out: the run's."""


def profile(options: ProfileOptions) -> None:
    """Measure what a target pass costs against its rows, and a round's other parts against concurrent requests.

    Writes a cost table (JSON) for the schedulers and simulate, and a plot beside it.
    """
    from dspark_train.cli.tables import print_costs
    from dspark_train.progress import stage
    from dspark_train.report import figures
    from dspark_train.report.drawing import save_png
    from dspark_train.run import Run
    from dspark_train.studies.profile import measure_costs

    run = Run(options.run, options.dtype)
    target, draft = run.target, run.draft
    with stage("timing passes and the parts of a round"):
        table = measure_costs(
            target,
            draft,
            max_rows=options.max_rows,
            requests=options.requests,
            context=options.context,
            repetitions=options.repetitions,
        )
    path = options.out or run.cost_table_path
    table.save(path)
    save_png(path.with_suffix(".png"), figures.costs(table))
    print_costs(table)
    print(f"wrote {path} and {path.with_suffix('.png')}")
