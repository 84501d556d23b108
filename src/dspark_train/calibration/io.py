"""Scalings of the confidences as they are kept, one file for each way of sampling, in the form that SGLang reads.

Its option ``--speculative-dspark-confidence-sts-path`` takes this file and applies ``sigmoid(logit / T_k)``, so
``temperatures`` are always those that suit the weights beside the file and no bias. What a bias gains on top stands
under ``with_bias``, which this project's decoder uses.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_train.calibration.sts import Scalings
from dspark_train.errors import UserError
from dspark_train.run import Run, sampling_label


@dataclass(frozen=True)
class Sampling:
    """A way of sampling: acceptance, and so calibration, belongs to one."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Tokens kept; 0 keeps all."""
    top_p: float = 1.0
    """Nucleus kept; 1 keeps all."""

    @property
    def label(self) -> str:
        """Its name in file names (``sampling_label``)."""
        return sampling_label(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class WithBias:
    """A bias, and the temperatures that go with it."""

    bias: float
    """Added to every raw logit."""
    temperatures: tuple[float, ...]
    """``T_1..T_γ`` of ``σ((logit_k + bias) / T_k)``, each > 0."""
    ece_after: float
    """Mean over positions on held-out rounds, in [0, 1]."""


@dataclass(frozen=True)
class Calibration:
    """The content of a file of scalings."""

    temperatures: tuple[float, ...]
    """``T_1..T_γ`` of ``σ(logit_k / T_k)``, each > 0: sequential temperature scaling alone."""
    dataset: str
    """Where the rounds came from."""
    num_samples: int
    """Rounds fitted on."""
    ece_before: float
    """Mean over positions, raw confidences, in [0, 1]."""
    ece_after: float
    """The same with the temperatures."""
    sampling: Sampling | None = None
    """That it holds for; None in files of earlier versions."""
    with_bias: WithBias | None = None
    """None where a bias gains nothing, or is folded into the weights."""
    folded_bias: float = 0.0
    """Added to the confidence head of the weights beside this file, for ``sampling`` alone; 0 in a run."""

    @property
    def scalings(self) -> Scalings:
        """The best there is: bias and temperatures, else temperatures alone."""
        best = self.with_bias
        return Scalings(self.temperatures) if best is None else Scalings(best.temperatures, best.bias)

    @property
    def folded(self) -> Calibration:
        """What suits weights that the bias was added to."""
        best = self.with_bias
        if best is None:
            return self
        return dataclasses.replace(
            self,
            temperatures=best.temperatures,
            ece_after=best.ece_after,
            with_bias=None,
            folded_bias=best.bias,
        )

    def sentence(self) -> str:
        """Which way of sampling it holds for, and what a bias gains or has gained, in words."""
        held = "one way of sampling, which its file does not say"
        held = f"{self.sampling.label} decoding" if self.sampling else held
        text = f"temperatures for {held}, mean ECE {100 * self.ece_after:.1f} % on held-out rounds"
        if self.folded_bias:
            return f"{text}, with the bias of {self.folded_bias:+.3f} that is in the weights beside it"
        if self.with_bias is not None:
            text += (
                f", {100 * self.with_bias.ece_after:.1f} % with a bias of {self.with_bias.bias:+.3f} besides "
                "(engines that take temperatures only need it folded into the weights: --fold_bias true)"
            )
        return text

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise UserError("calibration: temperatures is empty; it needs one number per draft position")
        lists = {"temperatures": self.temperatures}
        if self.with_bias is not None:
            lists["with_bias.temperatures"] = self.with_bias.temperatures
            if len(self.with_bias.temperatures) != len(self.temperatures):
                raise UserError("calibration: with_bias.temperatures and temperatures must be equally many")
        for name, values in lists.items():
            for position, value in enumerate(values, 1):
                if not _is_number(value) or not 0 < value < math.inf:
                    raise UserError(
                        f"calibration: {name}[{position}] is {value!r}; it must be a number above 0"
                    )
        for name, value in (
            ("folded_bias", self.folded_bias),
            ("with_bias.bias", 0.0 if self.with_bias is None else self.with_bias.bias),
        ):
            if not _is_number(value) or not math.isfinite(value):
                raise UserError(f"calibration: {name} is {value!r}; it must be a number")
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
        content = dataclasses.asdict(self)
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
        if missing := [key for key in REQUIRED if key not in content]:
            raise UserError(
                f"{path}: missing {missing}; write the file again with `dspark-train calibrate RUN`"
            )
        if not isinstance(content["temperatures"], list):
            raise UserError(
                f"{path}: temperatures must be a list of numbers, got {content['temperatures']!r}"
            )
        try:
            loaded = cls(
                **{
                    **content,
                    "temperatures": tuple(content["temperatures"]),
                    "sampling": _part(Sampling, content.get("sampling")),
                    "with_bias": _part(WithBias, content.get("with_bias")),
                }
            )
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        if block_size is not None and len(loaded.temperatures) != block_size:
            raise UserError(
                f"{path} holds {len(loaded.temperatures)} temperatures, the draft has {block_size} slots; "
                "calibrate it with `dspark-train calibrate RUN`"
            )
        return loaded


def exported_calibration(run: Run, sampling: str | None, fold_bias: bool) -> Calibration | None:
    """What goes along with an exported draft.

    Args:
        run: whose.
        sampling: label of the way of sampling that it must hold for; None takes that of ``calibration.json``.
        fold_bias: its bias goes into the exported weights.

    Returns:
        None where the run was never calibrated and nothing is asked for.

    Raises:
        UserError: the run has no calibration that was asked for, or it has no bias to fold.
    """
    path = run.sts_path(sampling)
    if not path.is_file():
        if sampling is None and not fold_bias:
            return None
        raise UserError(
            f"{run.path} is not calibrated{f' for {sampling}' if sampling else ''}; run `dspark-train calibrate "
            f"{run.path}` for that way of sampling first"
        )
    found = Calibration.load(path)
    if run.confidence_shift:  # of an earlier version: it is in the weights already
        return dataclasses.replace(found, folded_bias=run.confidence_shift)
    if fold_bias and found.with_bias is None:
        raise UserError(
            f"fold_bias: {path} holds no bias, temperatures alone do as well; leave the option out"
        )
    return found.folded if fold_bias else found


def read_calibration(
    run: Run, sampling: str, block_size: int, say: Callable[[str], None] = print
) -> Calibration | None:
    """What was fitted for one way of sampling; what another way has is never taken instead.

    Args:
        run: whose.
        sampling: how it is sampled (``sampling_label``).
        block_size: γ of the draft.
        say: told where none were fitted for this sampling.

    Returns:
        None leaves the confidences raw.

    Raises:
        UserError: the file is damaged, or was fitted for another block size.
    """
    path = run.sts_path(sampling)
    if run.confidence_shift:
        say(
            f"{run.name}: an earlier version wrote a bias of {run.confidence_shift:+.3f}, fitted for one way of "
            "sampling, into the draft's weights (`calibrate` takes it out and fits one for each)"
        )
    if path.is_file():
        return Calibration.load(path, block_size)
    say(f"{run.name}: not calibrated for {sampling}, so its confidences stay raw (`calibrate` fits them)")
    return None


def read_sts(run: Run, sampling: str, block_size: int, say: Callable[[str], None] = print) -> Scalings | None:
    """The scalings of :func:`read_calibration`; None leaves the confidences raw."""
    found = read_calibration(run, sampling, block_size, say)
    return None if found is None else found.scalings


REQUIRED = ("temperatures", "dataset", "num_samples", "ece_before", "ece_after")
"""Keys that every file of scalings has; engines read these."""


def _part(kind: type[Any], content: Any) -> Any:
    """A part of the file; None where it is left out."""
    if content is None:
        return None
    known = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(content, dict) or set(content) != set(known):
        raise UserError(f"expected an object with the keys {known}, got {content!r}")
    if "temperatures" in content:
        if not isinstance(content["temperatures"], list):
            raise UserError(f"temperatures must be a list of numbers, got {content['temperatures']!r}")
        content = {**content, "temperatures": tuple(content["temperatures"])}
    return kind(**content)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
