"""Metrics of a run in one CSV file that survives an interruption."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.csv_logs import _ExperimentWriter as _Writer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from typing_extensions import override


class RunCSVLogger(CSVLogger):
    """``metrics.csv`` in the run's folder: kept when the run is resumed, cut back to the checkpoint's step."""

    def __init__(self, folder: Path | str, flush_logs_every_n_steps: int = 1) -> None:
        """Say where.

        Args:
            folder: of the run.
            flush_logs_every_n_steps: logging steps between writes.
        """
        super().__init__(folder, name="", version="", flush_logs_every_n_steps=flush_logs_every_n_steps)

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer."""
        if self._experiment is None:
            os.makedirs(self.root_dir, exist_ok=True)
            self._experiment = _KeepingWriter(self.log_dir)
        return self._experiment

    def rewind(self, step: int) -> None:
        """Drop the rows after ``step`` optimiser steps: a resumed run writes them again.

        Lightning labels a row with the number of steps *before* the one that it is about.
        """
        experiment = self.experiment
        if isinstance(experiment, _KeepingWriter):
            experiment.rewind(step)


class _KeepingWriter(_Writer):
    """Appends to an existing file instead of deleting it."""

    @override
    def _check_log_dir_exists(self) -> None:
        path = Path(self.metrics_file_path)
        if path.is_file():
            with path.open(newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])

    def rewind(self, step: int) -> None:
        path = Path(self.metrics_file_path)
        if not path.is_file():
            return
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if float(row["step"]) < step]
        aside = path.with_suffix(".tmp")
        with aside.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)
        aside.replace(path)
