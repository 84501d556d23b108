"""The confidence head's bias in a run's draft, and how far calibration has moved it since training."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark_train.calibration.report import shifted
from dspark_train.run import Run
from dspark_train.structures import DecodingTrace

_BIAS = "confidence_head.proj.bias"


class ShiftedRun:
    """A run's draft and recorded rounds, which always belong to the same bias."""

    def __init__(self, run: Path) -> None:
        """Read how far the bias has been moved (``confidence_shift`` in ``run.json``)."""
        self.run = run
        self.shift = Run(run).confidence_shift
        """Of the draft as it is, from the draft as trained."""
        self.weights = run / "draft" / "model.safetensors"

    def storable(self, shift: float) -> float:
        """The shift nearest to ``shift`` that the dtype of the draft's weights can hold.

        The present one where the run holds rounds but no draft.
        """
        if not self.weights.is_file():
            return self.shift
        with safe_open(self.weights, framework="pt") as file:
            bias: Tensor = file.get_tensor(_BIAS)
        return self.shift + float(self._moved(bias, shift).double() - bias.double())

    def move(self, shift: float) -> None:
        """Give the draft, and every recorded round, the bias that is ``shift`` from the trained one."""
        if shift == self.shift:
            return
        tensors = load_file(self.weights)
        tensors[_BIAS] = self._moved(tensors[_BIAS], shift)
        aside = self.weights.with_suffix(".tmp")
        save_file(tensors, str(aside), metadata={"format": "pt"})
        aside.replace(self.weights)
        for path in sorted((self.run / "traces").glob("*.safetensors")):
            shifted(DecodingTrace.load(path), shift - self.shift).save(path)
        Run(self.run).update(confidence_shift=shift)
        self.shift = shift

    def _moved(self, bias: Tensor, shift: float) -> Tensor:
        return (bias.double() + (shift - self.shift)).to(bias.dtype)
