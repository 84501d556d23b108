"""What the frozen target's pass over a batch costs: FLOPs and bytes (letters: :mod:`dspark_train.structures`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark_train.target.config import config_size, decoder_layers, language_model, text_config

EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
"""Names under which configs say how many experts a layer has."""
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Names under which they say to how many of them a token is sent."""


@dataclass(frozen=True)
class TargetCost:
    """Sizes of a target that its cost follows from."""

    parameters: int
    """All of them, embeddings included."""
    layer_parameters: int
    """Those of the decoder layers."""
    layer_matrices: int
    """Elements of the layers' matrices that a token is multiplied by: of experts, those that it is sent to."""
    layers: int
    attention_width: int
    """Query heads times their size."""
    hidden_size: int
    intermediate_size: int
    """Width of the feed-forward networks that a token passes in one layer."""
    experts: int = 0
    """Elements of the experts' matrices, of all layers."""
    idle: int = 0
    """Those of them that a token is not sent to."""

    @property
    def active(self) -> int:
        """Parameters that a token meets."""
        return self.parameters - self.idle

    @classmethod
    def of(cls, model: Any) -> TargetCost:
        """Count a Hugging Face causal language model; its weights may lie on the ``meta`` device."""
        config, layers = text_config(model.config), decoder_layers(language_model(model))
        heads = config_size(config, "num_attention_heads") or 0
        head_dim = config_size(config, "head_dim") or config.hidden_size // max(1, heads)
        matrices = [(name, p.numel()) for name, p in layers.named_parameters() if p.dim() in (2, 3)]
        total = next((n for n in (config_size(config, name) for name in EXPERTS) if n), 0)
        chosen = next((n for n in (config_size(config, name) for name in EXPERTS_PER_TOKEN) if n), total)
        experts = sum(size for name, size in matrices if ".experts." in name) if total else 0
        idle = experts - experts * chosen // max(1, total)
        width = config_size(config, "moe_intermediate_size")
        if width is not None and total:
            width *= chosen + (config_size(config, "n_shared_experts") or 0)
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            layer_parameters=sum(parameter.numel() for parameter in layers.parameters()),
            layer_matrices=sum(size for _, size in matrices) - idle,
            layers=len(layers),
            attention_width=heads * head_dim,
            hidden_size=config.hidden_size,
            intermediate_size=max(width or 0, config_size(config, "intermediate_size") or 0)
            or 4 * config.hidden_size,
            experts=experts,
            idle=idle,
        )

    def pass_flops(self, tokens: int, length: float) -> float:
        """FLOPs of a pass without the LM head (a multiply and an add are two).

        Causal attention counts half: kernels skip what the mask hides.

        Args:
            tokens: of the batch.
            length: tokens of a sequence.
        """
        return 2.0 * tokens * self.layer_matrices + 2.0 * self.layers * tokens * length * self.attention_width

    def pass_bytes(self, tokens: int, taps: int, item: int) -> int:
        """Bytes of the states of a pass: tapped twice (as they come, and joined), the last, one layer's MLP.

        Args:
            tokens: of the batch.
            taps: m, tapped layers.
            item: bytes of an element.
        """
        return tokens * ((2 * taps + 1) * self.hidden_size + 3 * self.intermediate_size) * item

    def weight_bytes(self, item: int, sharded_over: int = 1) -> int:
        """Bytes of the weights on one device, the layers' shared by ``sharded_over`` ranks.

        A rank that shares its layers still gathers a whole one while it runs.
        """
        whole = self.parameters - self.layer_parameters
        gathered = self.layer_parameters // max(1, self.layers) if sharded_over > 1 else 0
        return (whole + self.layer_parameters // sharded_over + gathered) * item
