"""One temperature for engines that take none per position, and what it costs in calibration error."""

from __future__ import annotations

from dataclasses import dataclass

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


def fit_single(fit: DecodingTrace, heldout: DecodingTrace, sts: tuple[float, ...]) -> SingleTemperature:
    """Choose one temperature on ``fit``, by mean ECE of the running product, and judge it on ``heldout``.

    Args:
        fit: rounds that it is chosen on.
        heldout: rounds that it is judged on.
        sts: ``[γ]`` of sequential temperature scaling, for comparison.
    """
    from dspark_train.calibration.reliability import measure_reliability
    from dspark_train.calibration.sts import GRID

    gamma = fit.block_size
    errors = {float(t): measure_reliability(fit, [float(t)] * gamma).mean_ece for t in GRID[::4]}
    best = min(errors, key=lambda t: (errors[t], abs(t - 1.0)))
    return SingleTemperature(
        temperature=best,
        ece_raw=measure_reliability(heldout).mean_ece,
        ece_single=measure_reliability(heldout, [best] * gamma).mean_ece,
        ece_sequential=measure_reliability(heldout, sts).mean_ece,
        rounds=int(heldout.request.numel()),
    )


def single_temperature(run: Run) -> SingleTemperature:
    """Choose the one temperature of a run, from its greedy traces and the scalings fitted for greedy decoding.

    Raises:
        UserError: the run was not calibrated for greedy decoding.
    """
    from dspark_train.calibration.io import Calibration

    paths = [run.recorded_path(split, "greedy") for split in ("calibration", "test")]
    needed = [*paths, run.sts_path("greedy")]
    missing = [str(path) for path in needed if not path.is_file()]
    if missing:
        raise UserError(
            f"fold_temperature needs {', '.join(missing)}; run `dspark-train calibrate {run.path}` first"
        )
    fit, heldout = map(DecodingTrace.load, paths)
    sts = Calibration.load(run.sts_path("greedy"), fit.block_size).temperatures
    return fit_single(fit, heldout, sts)
