"""The ``evaluate`` command: benchmark suites, beside baselines."""

from __future__ import annotations

from typing import Any

from dspark_train.evaluation.options import EvaluateOptions


def evaluate(options: EvaluateOptions) -> None:
    """Measure a draft's accepted length, speedup and calibration on benchmark suites, beside baselines.

    Prompts are decoded one at a time, every method on each before the next. What was measured is kept prompt
    by prompt, so the same command goes on after a stop. Writes evaluation/NAME.json and NAME.md into the run.
    """
    from dspark_train.evaluation.session import evaluate_run
    from dspark_train.progress import stage
    from dspark_train.report.tables import evaluation_markdown

    with stage("evaluating", unit="answers") as shown:

        def show(done: int, total: int, record: Any) -> None:
            shown.update(done, "" if record is None else f"{record.suite}, {record.method}", total)

        table = evaluate_run(options, show)
    text = evaluation_markdown(table)
    written = options.run / "evaluation" / f"{options.name}.md"
    written.write_text(text, encoding="utf-8")
    print(text)
    print(f"evaluation: {written.with_suffix('.json')}")
