"""Reliability diagrams, and the look that every plot of the package shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours: told apart with any kind of colour vision."""


def finish(axis: Axes) -> None:
    """Leave only what is read: no box, light horizontal grid, left-aligned title."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="0.9", lw=0.6)
    axis.set_axisbelow(True)
    axis.set_title(axis.get_title(), loc="center", fontsize="medium")
