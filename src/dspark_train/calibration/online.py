"""Scalings that follow a drifting load while decoding.

Frozen scalings are right for the traffic that they were fitted on. When code gives way to chat, what a
confidence of 0.9 is worth changes. The correction below reads only finished rounds, so what it changes acts on
later rounds alone and verification stays lossless; it needs memory of a fixed size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_train.calibration.sts import Scalings, Sts, survival
from dspark_train.errors import UserError

STEPS = torch.linspace(-3, 3, 49, dtype=torch.float64).exp2()
"""Factors tried on a starting scaling: 1/8 to 8; the middle one is 1."""


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
        sts: Sts,
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
            prior_rounds: Weight of the starting scalings, in rounds.
        """
        if window < 1 or refit_every < 1 or prior_rounds < 0:
            raise UserError(
                f"online scalings: window ({window}) and refit_every ({refit_every}) must be at least 1, "
                f"prior_rounds ({prior_rounds}) at least 0"
            )
        given = Scalings.of(sts)
        self.start, self.bias = torch.tensor(given.temperatures, dtype=torch.float64), given.bias
        if not bool((self.start > 0).all()):
            raise UserError(f"online scalings: start values must be above 0, got {list(given.temperatures)}")
        self.window, self.refit_every, self.prior_rounds = window, refit_every, prior_rounds
        self._current = self.start.clone()
        self._logits = torch.zeros(window, len(self.start), dtype=torch.float32)
        self._verified = torch.zeros(window, dtype=torch.int64)
        self._accepted = torch.zeros(window, dtype=torch.int64)
        self._seen = self._fitted_at = 0

    @property
    def sts(self) -> Scalings:
        """``[γ]`` scalings to use from now on; the bias is that of the start."""
        return Scalings(tuple(self._current.tolist()), self.bias)

    def update(self, confidence_logits: Tensor, verify_length: Tensor, accepted: Tensor) -> None:
        """Remember finished rounds, and refit when enough of them have passed.

        Args:
            confidence_logits: ``[N, γ]`` raw logits of N rounds.
            verify_length: ``[N]``.
            accepted: ``[N]`` in 0..verify_length.
        """
        count = min(len(accepted), self.window)
        at = (self._seen + len(accepted) - count + torch.arange(count)) % self.window
        self._logits[at] = confidence_logits[-count:].detach().to("cpu", torch.float32) + self.bias
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
