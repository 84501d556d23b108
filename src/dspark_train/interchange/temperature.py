"""One temperature for engines that take none per position, and what it costs in calibration error."""

from __future__ import annotations

from dataclasses import dataclass

from dspark_train.calibration.io import Calibration
from dspark_train.calibration.sts import Scalings
from dspark_train.errors import UserError
from dspark_train.run import Run
from dspark_train.structures import DecodingTrace


@dataclass(frozen=True)
class SingleTemperature:
    """The temperature that one number allows, and mean expected calibration errors on held-out rounds."""

    temperature: float
    ece_raw: float
    """Without any temperature."""
    ece_single: float
    """With the one temperature."""
    ece_sequential: float
    """With one per position."""
    rounds: int
    """Held-out rounds."""

    def sentence(self) -> str:
        """What folding costs, in words."""
        return (
            f"One temperature, {self.temperature:.3f}, is folded into the confidence head. Mean ECE on "
            f"{self.rounds} "
            f"held-out rounds: {100 * self.ece_raw:.2f} % raw, {100 * self.ece_single:.2f} % with it, "
            f"{100 * self.ece_sequential:.2f} % with one per position: folding costs "
            f"{100 * (self.ece_single - self.ece_sequential):+.2f} points."
        )


def fit_single(fit: DecodingTrace, heldout: DecodingTrace, sequential: Scalings) -> SingleTemperature:
    """Choose one temperature on ``fit``, by mean ECE of the running product, and judge it on ``heldout``.

    Args:
        fit: rounds that it is chosen on.
        heldout: rounds that it is judged on.
        sequential: one temperature for each position, for comparison; their bias is that of the one, too.
    """
    from dspark_train.calibration.reliability import measure_reliability
    from dspark_train.calibration.sts import GRID

    def single(temperature: float) -> Scalings:
        return Scalings((temperature,) * fit.block_size, sequential.bias)

    errors = {float(t): measure_reliability(fit, single(float(t))).mean_ece for t in GRID[::4]}
    best = min(errors, key=lambda t: (errors[t], abs(t - 1.0)))
    return SingleTemperature(
        temperature=best,
        ece_raw=measure_reliability(heldout).mean_ece,
        ece_single=measure_reliability(heldout, single(best)).mean_ece,
        ece_sequential=measure_reliability(heldout, sequential).mean_ece,
        rounds=int(heldout.request.numel()),
    )


def single_temperature(run: Run, calibration: Calibration | None) -> SingleTemperature:
    """Choose the one temperature of a run for the way of sampling of a calibration, and for its folded bias.

    Raises:
        UserError: the run was not calibrated for one way of sampling, or its rounds are gone.
    """
    if calibration is None or calibration.sampling is None:
        raise UserError(
            f"fold_temperature needs a calibration; run `dspark-train calibrate {run.path}` first"
        )
    fit, heldout = (run.trace(split, calibration.sampling.label) for split in ("calibration", "test"))
    if fit is None or heldout is None:
        raise UserError(
            f"fold_temperature needs the {calibration.sampling.label} rounds of both splits in {run.path / 'traces'}; "
            f"run `dspark-train calibrate {run.path}` first"
        )
    return fit_single(fit, heldout, Scalings(calibration.temperatures, calibration.folded_bias))
