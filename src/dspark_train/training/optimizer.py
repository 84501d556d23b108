"""The optimiser and its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim import Muon as TorchMuon
from torch.optim.lr_scheduler import LambdaLR

from dspark_train.machine import Choice, choose_newton_schulz


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


class Muon(TorchMuon):
    """PyTorch's Muon, with its iterations in a dtype that the processor multiplies fast.

    PyTorch's run in bfloat16 everywhere, which a processor without units for it emulates: a third of a step.
    """

    iterations: torch.dtype = torch.bfloat16
    found_inf: Tensor | None = None
    """1 where the gradients are not finite: they then count as zero."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Momentum, orthogonalisation of the update, decoupled decay, and a rate matched to AdamW's RMS."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                momentum, beta = state["momentum_buffer"], group["momentum"]
                gradient = parameter.grad
                if self.found_inf is not None:
                    gradient = torch.where(self.found_inf > 0, 0.0, gradient)
                momentum.lerp_(gradient, 1 - beta)
                update = gradient.lerp(momentum, beta) if group["nesterov"] else momentum
                update = orthogonalise(
                    update, group["ns_coefficients"], group["ns_steps"], group["eps"], self.iterations
                )
                scale = 0.2 * math.sqrt(max(parameter.shape))  # adjust_lr_fn "match_rms_adamw"
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)
        return loss


def orthogonalise(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """Newton-Schulz iterations towards the nearest semi-orthogonal matrix.

    Args:
        matrix: ``[m, n]``.
        coefficients: of the odd polynomial of degree five.
        steps: iterations.
        eps: smallest norm.
        dtype: of the products.

    Returns:
        ``[m, n]`` in the dtype of ``matrix``, singular values near one.
    """
    a, b, c = coefficients
    x = matrix.to(dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)


def skip_where_not_finite(optimizer: Optimizer, gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Make the next step leave the weights alone if a gradient is not finite; nothing waits for a GPU to know.

    Fused AdamW reads ``found_inf``, as it does under a gradient scaler, and makes no step.

    Args:
        optimizer: with fused AdamW in it, or other ones that know ``found_inf``.
        gradients: of all parameters.

    Returns:
        The gradients' norm, and 1 where the step is skipped, else 0; both fp32 scalars on their device.
    """
    norm = torch.nn.utils.get_total_norm(gradients)
    skipped = (~norm.isfinite()).float()
    parts: list[Any] = getattr(optimizer, "parts", [optimizer])
    for part in parts:
        if isinstance(part, Muon) or all(group.get("fused") for group in part.param_groups):
            part.found_inf = skipped
    return norm, skipped


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
        self.muon = Muon(list(matrices), **muon)
        self.parts: list[Optimizer] = [self.muon, AdamW(list(others), fused=True, **adamw)]
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


class Schedule:
    """Factor of the learning rate at each step: linear from 0 over the warm-up share, then a cosine to 0.

    ``total_steps`` may change while training goes on, where a budget of time decides it.
    """

    def __init__(self, total_steps: int, warmup: float) -> None:
        self.total_steps, self.warmup = total_steps, warmup

    def factor(self, step: int) -> float:
        """Of the step after ``step`` steps."""
        rising = max(1, math.ceil(self.total_steps * self.warmup))
        if step < rising:
            return (step + 1) / rising
        share = (step - rising) / max(1, self.total_steps - rising)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon treats this parameter: the layers' projections, not embeddings, heads or norms.

    Nor the projection of the features (``fc``): AdamW trains it better (``benchmarks/quickstart_trials.md``), and as
    the widest matrix it would cost a quarter of the iterations.
    """
    return parameter.ndim == 2 and name.startswith("layers.")


def iterations_of(config: OptimizerConfig, module: nn.Module) -> Choice | None:
    """Dtype of Muon's iterations on a CPU, measured for the widest matrix; None where it stays bfloat16."""
    matrices = [parameter for name, parameter in module.named_parameters() if is_matrix(name, parameter)]
    if config.name != "muon" or not matrices or matrices[0].device.type != "cpu":
        return None
    return choose_newton_schulz(*max(matrices, key=Tensor.numel).shape)


def build_optimizer(
    config: OptimizerConfig,
    module: nn.Module,
    schedule: Schedule,
    iterations: torch.dtype = torch.bfloat16,
) -> tuple[Optimizer, LambdaLR]:
    """Optimiser and per-step schedule over the trained parameters of ``module``.

    Args:
        config: the user's choices.
        module: the draft.
        schedule: of the learning rate.
        iterations: dtype of Muon's.
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
        optimizer.muon.iterations = iterations
    else:
        optimizer = AdamW([parameter for _, parameter in named], fused=True, **adamw)
        # a fused step would also unscale fp16 gradients, so Lightning refuses to clip before it; nothing here is scaled
        optimizer._step_supports_amp_scaling = False
    return optimizer, LambdaLR(optimizer, schedule.factor)
