"""What the frozen target's pass over a batch costs: FLOPs and bytes (letters: :mod:`dspark_train.structures`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark_train.target.config import decoder_layers, language_model, text_config


@dataclass(frozen=True)
class TargetCost:
    """Sizes of a target that its cost follows from."""

    parameters: int
    """All of them, embeddings included."""
    layer_parameters: int
    """Those of the decoder layers."""
    layer_matrices: int
    """Elements of the layers' matrices, which every token is multiplied by."""
    layers: int
    attention_width: int
    """Query heads times their size."""
    hidden_size: int
    intermediate_size: int

    @classmethod
    def of(cls, model: Any) -> TargetCost:
        """Count a Hugging Face causal language model; its weights may lie on the ``meta`` device."""
        config, layers = text_config(model.config), decoder_layers(language_model(model))
        heads = config.num_attention_heads
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            layer_parameters=sum(parameter.numel() for parameter in layers.parameters()),
            layer_matrices=sum(
                parameter.numel() for parameter in layers.parameters() if parameter.dim() == 2
            ),
            layers=len(layers),
            attention_width=heads * (getattr(config, "head_dim", None) or config.hidden_size // heads),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
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
