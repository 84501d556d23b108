"""The optimiser and its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR


@dataclass
class OptimizerConfig:
    """The optimiser: AdamW for everything, or Muon for the layers' matrices and AdamW for the rest.

    Args:
        name: ``adamw`` or ``muon``.
        lr: peak learning rate of AdamW.
        muon_lr: peak learning rate of Muon, for updates scaled to AdamW's usual size.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of both, decoupled.
        warmup: share of all steps during which the rate rises linearly from 0; a cosine then takes it to 0.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 6e-4
    muon_lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: float = 0.04


class MuonAdamW(Optimizer):
    """Muon and AdamW behind one interface, as Lightning's automatic optimisation wants it.

    Their parameter groups are shared: a schedule that changes a group's rate changes the inner optimiser's.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: Iterable[Tensor],
        muon: dict[str, Any],
        adamw: dict[str, Any],
    ) -> None:
        self.parts: list[Optimizer] = [Muon(list(matrices), **muon), AdamW(list(others), fused=True, **adamw)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        start = 0
        for part in self.parts:
            end = start + len(part.param_groups)
            part.param_groups = self.param_groups[start:end]
            start = end

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Advance both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
            self.state.update(part.state)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both from one flat state."""
        super().load_state_dict(state_dict)
        self._share()
        for part in self.parts:
            owned = {id(parameter) for group in part.param_groups for parameter in group["params"]}
            part.state.update({key: value for key, value in self.state.items() if id(key) in owned})


def schedule(total_steps: int, warmup: float) -> Callable[[int], float]:
    """Factor of the learning rate at each step: linear from 0 over the warm-up share, then a cosine to 0."""
    rising = max(1, math.ceil(total_steps * warmup))

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rising) / max(1, total_steps - rising))))

    return factor


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon treats this parameter: the layers' projections, not embeddings, heads or norms.

    Nor the projection of the features (``fc``): AdamW trains it better (``benchmarks/quickstart_trials.md``), and as
    the widest matrix it would cost a quarter of the iterations.
    """
    return parameter.ndim == 2 and name.startswith("layers.")


def build_optimizer(
    config: OptimizerConfig, module: nn.Module, total_steps: int
) -> tuple[Optimizer, LambdaLR]:
    """Optimiser and per-step schedule over the trained parameters of ``module``.

    Args:
        config: the user's choices.
        module: the draft.
        total_steps: optimiser steps of the run.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    adamw: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    optimizer: Optimizer
    if config.name == "muon":
        matrices = [parameter for name, parameter in named if is_matrix(name, parameter)]
        others = [parameter for name, parameter in named if not is_matrix(name, parameter)]
        muon = {"lr": config.muon_lr, "weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        optimizer = MuonAdamW(matrices, others, muon, adamw)
    else:
        optimizer = AdamW([parameter for _, parameter in named], fused=True, **adamw)
        # a fused step would also unscale fp16 gradients, so Lightning refuses to clip before it; nothing here is scaled
        optimizer._step_supports_amp_scaling = False
    return optimizer, LambdaLR(optimizer, schedule(total_steps, config.warmup))
