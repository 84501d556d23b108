"""Scalings of the confidences as they are kept: in the form that SGLang reads.

Its option ``--speculative-dspark-confidence-sts-path`` takes this file and applies ``sigmoid(logit / T_k)``.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dspark_train.errors import UserError
from dspark_train.run import Run


@dataclass(frozen=True)
class Calibration:
    """The content of a file of scalings."""

    temperatures: tuple[float, ...]
    """``T_1..T_γ``, each > 0."""
    dataset: str
    """Where the rounds came from."""
    num_samples: int
    """Rounds fitted on."""
    ece_before: float
    """Mean over positions, raw confidences, in [0, 1]."""
    ece_after: float
    """The same with the temperatures."""

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise UserError("calibration: temperatures is empty; it needs one number per draft position")
        for position, value in enumerate(self.temperatures, 1):
            if not _is_number(value) or not 0 < value < math.inf:
                raise UserError(
                    f"calibration: temperatures[{position}] is {value!r}; it must be a number above 0"
                )
        if not isinstance(self.dataset, str):
            raise UserError(f"calibration: dataset is {self.dataset!r}; it must be a text")
        if (
            not isinstance(self.num_samples, int)
            or isinstance(self.num_samples, bool)
            or self.num_samples < 0
        ):
            raise UserError(f"calibration: num_samples is {self.num_samples!r}; it must be a count of rounds")
        for name in ("ece_before", "ece_after"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= 1:
                raise UserError(f"calibration: {name} is {value!r}; it must be a number from 0 to 1")

    def save(self, path: str | Path) -> None:
        """Write the file."""
        content = {**dataclasses.asdict(self), "temperatures": list(self.temperatures)}
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, block_size: int | None = None) -> Calibration:
        """Read and check the file.

        Args:
            path: The file.
            block_size: γ of the draft that it is for; None skips the check of the length.

        Raises:
            UserError: missing file, wrong JSON, missing or unknown keys, impossible values, wrong length.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(f"no calibration at {path}; write one with `dspark-train calibrate RUN`")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise UserError(f"{path} is not valid JSON ({error})") from None
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(content, dict):
            raise UserError(
                f"{path}: expected an object with the keys {known}, got a {type(content).__name__}"
            )
        for key in content.keys() - set(known):
            near = difflib.get_close_matches(key, known, n=1)
            raise UserError(f"{path}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if missing := [key for key in known if key not in content]:
            raise UserError(
                f"{path}: missing {missing}; write the file again with `dspark-train calibrate RUN`"
            )
        if not isinstance(content["temperatures"], list):
            raise UserError(
                f"{path}: temperatures must be a list of numbers, got {content['temperatures']!r}"
            )
        try:
            loaded = cls(**{**content, "temperatures": tuple(content["temperatures"])})
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        if block_size is not None and len(loaded.temperatures) != block_size:
            raise UserError(
                f"{path} holds {len(loaded.temperatures)} temperatures, the draft has {block_size} slots; "
                "calibrate it with `dspark-train calibrate RUN`"
            )
        return loaded


def read_sts(
    run: Run, sampling: str, block_size: int, say: Callable[[str], None] = print
) -> list[float] | None:
    """Scalings of a run's confidences for one way of sampling; those of another way are never taken instead.

    Args:
        run: whose.
        sampling: how it is sampled (``sampling_label``).
        block_size: γ of the draft.
        say: told where none were fitted for this sampling.

    Returns:
        ``[γ]``; None leaves the confidences raw.

    Raises:
        UserError: the file is damaged, or was fitted for another block size.
    """
    path = run.sts_path(sampling)
    if path.is_file():
        return list(Calibration.load(path, block_size).temperatures)
    say(f"{run.name}: not calibrated for {sampling}, so its confidences stay raw (`calibrate` fits them)")
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
