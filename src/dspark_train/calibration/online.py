"""Correction while decoding: scalings, or the threshold, that follow a drifting load.

Frozen scalings are right for the traffic that they were fitted on. When code gives way to chat, what a
confidence of 0.9 is worth changes. Both corrections below read only finished rounds, so what they change acts
on later rounds alone and verification stays lossless; both need memory of a fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dspark_train.calibration.sts import survival
from dspark_train.errors import UserError

STEPS = torch.linspace(-3, 3, 49, dtype=torch.float64).exp2()
"""Factors tried on a starting temperature: 1/8 to 8; the middle one is 1."""


class OnlineSts:
    """Scalings refitted on a sliding window of the last rounds.

    Sequential as the offline fit, but ``T_k`` minimises the Brier score of the running product over the
    window's verified slots instead of its calibration error: a proper score is smooth, and with a few hundred
    rounds the minimum of a binned error is mostly noise. ``prior_rounds`` pseudo-rounds that behave as the
    starting scalings say keep a thin window from changing much. Temperatures stretch a logit and cannot
    move its sign, so of a drift that shifts all logits a part remains.

    Memory: ``window`` rounds of γ logits and two lengths.
    """

    def __init__(
        self,
        sts: Sequence[float],
        *,
        window: int = 1024,
        refit_every: int = 64,
        prior_rounds: float = 32.0,
    ) -> None:
        """Start from fitted scalings.

        Args:
            sts: ``[γ]`` starting values, each > 0; ones where nothing was fitted.
            window: Rounds remembered.
            refit_every: Rounds between two refits.
            prior_rounds: Weight of the starting temperatures, in rounds.
        """
        if window < 1 or refit_every < 1 or prior_rounds < 0:
            raise UserError(
                f"online scalings: window ({window}) and refit_every ({refit_every}) must be at least 1, "
                f"prior_rounds ({prior_rounds}) at least 0"
            )
        self.start = torch.tensor(list(sts), dtype=torch.float64)
        if not bool((self.start > 0).all()):
            raise UserError(f"online scalings: start values must be above 0, got {list(sts)}")
        self.window, self.refit_every, self.prior_rounds = window, refit_every, prior_rounds
        self._current = self.start.clone()
        self._logits = torch.zeros(window, len(self.start), dtype=torch.float32)
        self._verified = torch.zeros(window, dtype=torch.int64)
        self._accepted = torch.zeros(window, dtype=torch.int64)
        self._seen = self._fitted_at = 0

    @property
    def sts(self) -> Tensor:
        """``[γ]`` float64: to use from now on."""
        return self._current

    def update(self, confidence_logits: Tensor, verify_length: Tensor, accepted: Tensor) -> None:
        """Remember finished rounds, and refit when enough of them have passed.

        Args:
            confidence_logits: ``[N, γ]`` raw logits of N rounds.
            verify_length: ``[N]``.
            accepted: ``[N]`` in 0..verify_length.
        """
        count = min(len(accepted), self.window)
        at = (self._seen + len(accepted) - count + torch.arange(count)) % self.window
        self._logits[at] = confidence_logits[-count:].detach().to("cpu", torch.float32)
        self._verified[at] = verify_length[-count:].to("cpu")
        self._accepted[at] = accepted[-count:].to("cpu")
        self._seen += len(accepted)
        if self._seen - self._fitted_at >= self.refit_every:
            self._fitted_at = self._seen
            self._current = self._fit()

    def _fit(self) -> Tensor:
        """Fit the window, one grid per position around the starting value."""
        filled = min(self._seen, self.window)
        logits = self._logits[:filled].to(torch.float64)
        slots = torch.arange(1, logits.shape[1] + 1)
        verified = (slots <= self._verified[:filled, None]).to(torch.float64)  # [W, γ]
        accepted = (self._accepted[:filled, None] >= slots).to(torch.float64)
        expected = survival(logits, self.start)
        fitted = self.start.clone()
        running = torch.ones(filled, dtype=torch.float64)
        for position, start in enumerate(self.start):
            tried = running * (logits[:, position] / (start * STEPS[:, None])).sigmoid()  # [G, W]
            score = (tried - accepted[:, position]).square() @ verified[:, position]
            drift = (tried - expected[:, position]).square().mean(-1)
            best = (score + self.prior_rounds * drift).argmin()
            fitted[position] = start * STEPS[best]
            running = tried[best]
        return fitted


class OnlineThreshold:
    """A static threshold that moves until the wanted share of verified draft tokens is accepted.

    After each batch of N rounds, ``logit(θ) += rate · N · (wanted − accepted share of the verified tokens)``:
    below the wanted share it rises, above it falls, and where nothing was verified the share counts as 1,
    so that a threshold too high for new traffic comes down. Summing the updates telescopes: over any
    stretch in which θ stays inside its limits, the mean share over rounds differs from the wanted one by at
    most ``range of logit(θ) / (rate · rounds)``, whatever the traffic does. Memory: one number.
    """

    def __init__(
        self, threshold: float, *, wanted: float, rate: float = 5e-3, low: float = 0.01, high: float = 0.99
    ) -> None:
        """Start from a threshold.

        Args:
            threshold: Starting value, in [low, high].
            wanted: Share of the verified draft tokens that should be accepted, in (0, 1).
            rate: Change of the threshold's logit per round and unit of share.
            low: Smallest threshold, above 0.
            high: Largest threshold, below 1, so that some tokens are verified and the share stays measurable.
        """
        if not (0 < wanted < 1 and rate > 0 and 0 < low <= threshold <= high < 1):
            raise UserError(
                f"online threshold: need 0 < wanted < 1, rate > 0 and 0 < low ≤ threshold ≤ high < 1, got "
                f"wanted={wanted}, rate={rate}, low={low}, threshold={threshold}, high={high}"
            )
        self.wanted, self.rate = wanted, rate
        self._low, self._logit, self._high = map(_logit, (low, threshold, high))

    @property
    def threshold(self) -> float:
        """To use from now on."""
        return 1 / (1 + math.exp(-self._logit))

    def update(self, verify_length: Tensor, accepted: Tensor) -> None:
        """Count finished rounds: ``[N]`` verified and ``[N]`` accepted draft tokens."""
        verified = float(verify_length.sum())
        share = float(accepted.sum()) / verified if verified else 1.0
        moved = self._logit + self.rate * len(accepted) * (self.wanted - share)
        self._logit = min(self._high, max(self._low, moved))


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))
