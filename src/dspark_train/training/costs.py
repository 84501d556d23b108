"""What one training step costs: the parts, each counted beside the module whose cost it is."""

from __future__ import annotations

from dataclasses import dataclass

from dspark_train.data.load import Load
from dspark_train.draft.cost import activation_bytes, pass_flops, trained_parameters
from dspark_train.draft.kinds import Draft
from dspark_train.target.cost import TargetCost
from dspark_train.training.objective import objective_bytes, objective_flops
from dspark_train.training.zero_state import bucket_bytes, state_bytes

GPUS = {
    "a100-40gb": (312.0, 40),
    "a100-80gb": (312.0, 80),
    "h100": (989.0, 80),
    "h200": (989.0, 141),
    "b200": (2250.0, 180),
    "l40s": (362.0, 48),
    "rtx-4090": (165.0, 24),
    "rtx-5090": (210.0, 32),
    "mi300x": (1307.0, 192),
}
"""Dense bf16 TFLOP/s and memory in GB, from the vendors' data sheets."""


def peak_rate(name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by the name that its driver gives; None where it is not known."""
    words = name.lower()
    found = [gpu for gpu in GPUS if all(part in words for part in gpu.split("-"))]
    return GPUS[found[0]][0] * 1e12 if found else None


@dataclass(frozen=True)
class StepCost:
    """A draft beside its target, and how they are trained."""

    target: TargetCost
    draft: Draft
    """Its weights may lie on the ``meta`` device."""
    budget: int | None
    """Bytes for one chunk of logits; None takes the device's default."""
    mixed: bool
    """Products in bfloat16."""
    target_item: int
    """Bytes of an element of the target."""
    offload: bool = False
    """The optimiser's state is kept in the host's memory."""
    target_sharded: bool = False
    """The target's layers are shared by the ranks."""
    cached: bool = False
    """The target's states and normalisers are stored: no step runs it."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""

    def memory(self, load: Load, stage: int, ranks: int) -> dict[str, int]:
        """Bytes per GPU by part.

        Args:
            load: of one micro-batch.
            stage: 0 for none (fp32 weights, autocast), else ZeRO's (weights of the compute dtype, fp32 masters).
            ranks: number of GPUs.
        """
        config, item = self.draft.config, 2 if self.mixed else 4
        weights, gradients, state = state_bytes(
            trained_parameters(self.draft), stage, ranks, mixed=self.mixed
        )
        return {
            "target": self.target.weight_bytes(self.target_item, ranks if self.target_sharded else 1),
            "weights": weights,
            "gradients": gradients,
            "optimiser": 0 if self.offload else state,
            "buckets": bucket_bytes(trained_parameters(self.draft), stage, ranks),
            "target states": self.target.pass_bytes(load.tokens, len(config.layer_ids), self.target_item),
            "activations": activation_bytes(self.draft, load, item),
            "objective": objective_bytes(
                load.rows,
                config.hidden_size,
                config.markov_rank,
                config.draft_vocabulary,
                item,
                self.budget,
                self.device,
            ),
        }

    def flops(self, load: Load) -> dict[str, float]:
        """FLOPs of one micro-batch by part."""
        config = self.draft.config
        return {
            "target": 0.0 if self.cached else self.target.pass_flops(load.tokens, load.length),
            "draft": pass_flops(self.draft, load),
            "objective": objective_flops(
                load.rows,
                load.positions,
                config.hidden_size,
                config.markov_rank,
                config.draft_vocabulary,
                config.draft_vocabulary if self.cached else config.vocab_size,
            ),
        }
