"""Commands of this room: ``report``, ``evaluate``, ``ablate``. Heavy imports wait until a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dspark_train.errors import UserError


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def report(run: Path, compare: str = "", output: Path | None = None) -> None:
    """Write a run's report, one self-contained HTML page; with further runs, a page that compares them.

    Args:
        run: the run's folder.
        compare: further run folders, with commas between, to compare ``run`` with.
        output: where to write; left out, ``report.html`` (or ``comparison.html``) in the run's folder.
    """
    from dspark_train.report.comparison_page import write_comparison
    from dspark_train.report.run_page import write_report

    if output is not None and output.suffix not in (".html", ".htm"):
        raise UserError(f"output {output} must end in .html")
    others = [Path(other) for other in _split(compare)]
    if others:
        written = write_comparison([run, *others], output or run / "comparison.html")
    else:
        written = write_report(run, output)
    print(f"report: {written}")


def evaluate(
    run: Path,
    suites: str,
    suites_dir: Path | None = None,
    prompts: int | None = 20,
    temperatures: str = "0,1",
    drafts: str = "",
    baselines: str = "plain,head_off,prompt_lookup",
    max_new_tokens: int = 256,
    top_k: int = 0,
    top_p: float = 1.0,
    policy: str = "fixed",
    costs: Path | None = None,
    dtype: Literal["auto", "bfloat16", "float32"] | None = None,
    seed: int = 0,
    name: str = "suites",
    restart: bool = False,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> None:
    """Measure a draft's accepted length, speedup and calibration on benchmark suites, beside baselines.

    Prompts are decoded one at a time, every method on each before the next. What was measured is kept prompt
    by prompt, so the same command goes on after a stop. Writes evaluation/NAME.json and NAME.md into the run.

    Args:
        run: the run's folder.
        suites: with commas between: gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mt-bench, alpaca
            or arena-hard-v2 (from the hub), or name=file.jsonl with a list ``turns`` per line.
        suites_dir: folder where name.jsonl is looked for before the hub is asked.
        prompts: prompts per suite, drawn by the seed; null takes all.
        temperatures: sampling temperatures, with commas between; 0 is greedy.
        drafts: further drafts for the same target, as name=folder (a run's or a draft's), with commas
            between; a separately trained parallel draft is one of them.
        baselines: of plain, head_off (the run's draft without its sequential head) and prompt_lookup.
        max_new_tokens: limit of every answer.
        top_k: tokens kept by sampling; 0 keeps all.
        top_p: nucleus kept by sampling; 1 keeps all.
        policy: how much of a block is verified: fixed, fixed:K, threshold:P, scheduled or asynchronous.
        costs: cost table for the schedulers, as ``profile`` writes it.
        dtype: of target and drafts; left out, the run's own.
        seed: of the choice of prompts and of the sampling.
        name: of the evaluation, for its files.
        restart: forget what this evaluation measured before.
        confidence: of the bootstrap intervals.
        resamples: of the bootstrap.
    """
    from rich.progress import Progress

    from dspark_train.evaluation.records import Record
    from dspark_train.evaluation.session import EvaluateOptions, evaluate_run
    from dspark_train.evaluation.summary import Bootstrap
    from dspark_train.report.tables import evaluation_markdown

    try:
        sampled = [float(value) for value in _split(temperatures)]
    except ValueError:
        raise UserError(f"temperatures {temperatures!r} must be numbers with commas between") from None
    options = EvaluateOptions(
        run=run,
        suites=_split(suites),
        suites_dir=suites_dir,
        prompts=prompts,
        temperatures=sampled,
        drafts=_split(drafts),
        baselines=_split(baselines),
        max_new_tokens=max_new_tokens,
        top_k=top_k,
        top_p=top_p,
        policy=policy,
        costs=costs,
        dtype=dtype,
        seed=seed,
        name=name,
        restart=restart,
        bootstrap=Bootstrap(confidence, resamples, seed),
    )
    with Progress(transient=True) as bar:
        task = bar.add_task("opening", total=None)

        def show(done: int, total: int, record: Record | None) -> None:
            where = f"{record.suite}, {record.method}" if record is not None else "decoding"
            bar.update(task, completed=done, total=total, description=where)

        table = evaluate_run(options, show)
    text = evaluation_markdown(table)
    (run / "evaluation" / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"evaluation: {run / 'evaluation' / name}.json")


def ablate(grid: Path, dry_run: bool = False) -> None:
    """Train a small grid of recipes, run by run, and compare them in a table, plots and a page.

    Runs that are finished are kept, an interrupted one goes on, a failed one is named and stops no other: the
    same command continues an ablation.

    Args:
        grid: YAML file with the recipe, the axes and the studies.
        dry_run: only print the runs and their commands.
    """
    from dspark_train.evaluation.ablate import train_cells
    from dspark_train.evaluation.ablation import Cell, fit_arguments, read_ablation
    from dspark_train.report.ablation_page import write_results

    ablation = read_ablation(grid)
    if dry_run:
        for cell in ablation.cells():
            print(f"{cell.name}: {' '.join(fit_arguments(ablation, cell))}")
        return

    def show(number: int, total: int, cell: Cell, state: str) -> None:
        print(f"[{number}/{total}] {cell.name}: {state}", flush=True)

    failures = train_cells(ablation, show)
    print(write_results(ablation, failures))
    print(f"ablation: {ablation.folder}")
    if failures:
        text = "; ".join(f"{name}: {line}" for name, line in failures.items())
        raise UserError(f"{len(failures)} runs failed ({text}); their logs are in {ablation.folder / 'logs'}")
