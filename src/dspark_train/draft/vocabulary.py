"""What drafts of every kind share: the target's embedding and LM head, borrowed or frozen copies, and their files."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark_train.draft.layers import RMSNorm, Rotation
from dspark_train.errors import UserError
from dspark_train.target.frozen import FrozenTarget


@dataclass(frozen=True, eq=False)
class BorrowedVocabulary:
    """The target's embedding and the draft's rows of its head: used, never owned, never saved by training."""

    embedding: Tensor
    """``[V, d]``, without the embedding scale."""
    head: Tensor
    """``[U, d]``."""


class TargetBound(PreTrainedModel):
    """A draft with its target's embedding and head: made from a target it borrows them; loaded, it owns frozen copies.

    ``config`` has hidden_size, vocab_size and embedding_scale; ``fc`` is the first trained layer.
    """

    config: Any
    fc: nn.Linear
    rotary: Qwen3RotaryEmbedding
    embed_tokens: Any
    lm_head: Any
    borrowed: BorrowedVocabulary | None

    @property
    def draft_token_ids(self) -> Tensor | None:
        """``[U]`` int64, ascending: target id of every draft token. None where the vocabulary is the target's."""
        return None

    def make_copies(self) -> None:
        """Make room for copies of the target's embedding and head, to be loaded from a checkpoint."""
        config = self.config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocabulary, bias=False)

    def is_copy(self, module: nn.Module) -> bool:
        """Whether ``module`` is a frozen copy of one of the target's matrices."""
        return module is self._modules.get("embed_tokens") or module is self._modules.get("lm_head")

    def borrow(self, target: FrozenTarget) -> None:
        """Use the target's embedding and head instead of copies of its own."""
        if target.hidden_size != self.config.hidden_size or target.vocab_size != self.config.vocab_size:
            raise UserError(
                f"this draft was made for a target of hidden size {self.config.hidden_size} and vocabulary "
                f"{self.config.vocab_size}; {target.name} has {target.hidden_size} and {target.vocab_size}"
            )
        ids = self.draft_token_ids
        head = target.head_weight if ids is None else target.head_weight[ids.to(target.head_weight.device)]
        for name in ("embed_tokens", "lm_head"):
            if name in self._modules:
                del self._modules[name]
        self.config.embedding_scale = target.embedding_scale  # the target's table is the unscaled one
        self.config.final_logit_softcapping = (
            target.logit_softcap
        )  # as measured; a logit scale is in the head
        self.borrowed = BorrowedVocabulary(target.embedding_weight, head)

    def _freeze_copies(self) -> None:
        for name in ("embed_tokens", "lm_head"):
            if name in self._modules:
                getattr(self, name).requires_grad_(False)

    @property
    def embedding_weight(self) -> Tensor:
        """``[V, d]``, without the embedding scale."""
        return self.borrowed.embedding if self.borrowed else self.embed_tokens.weight

    @property
    def head_weight(self) -> Tensor:
        """``[U, d]``: base logits are ``hidden @ head_weight.T``."""
        return self.borrowed.head if self.borrowed else self.lm_head.weight

    def embed(self, ids: Tensor) -> Tensor:
        """Embed token ids ``[..]`` to ``[.., d]``, scaled as the target scales, in the draft's own dtype."""
        embedded = nn.functional.embedding(ids, self.embedding_weight).to(self.fc.weight.dtype)
        return embedded * self.config.embedding_scale if self.config.embedding_scale != 1.0 else embedded

    def base_logits(self, hidden: Tensor, product: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """``lm_head(h)``, soft-capped as the target's, without the sequential bias: ``[.., d] -> [.., U]``.

        Args:
            hidden: states after the final norm.
            product: a faster way to multiply by the head; None multiplies plainly.
        """
        hidden = hidden.to(self.head_weight.dtype)
        logits = nn.functional.linear(hidden, self.head_weight) if product is None else product(hidden)
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(logits / cap) if cap else logits

    def projected(self, features: Tensor) -> Tensor:
        """``W_c features``: ``[.., m·d] -> [.., d]``."""
        # autocast would only narrow again what is widened here
        if not torch.is_autocast_enabled(features.device.type):
            features = features.to(self.fc.weight.dtype)
        return self.fc(features)

    def rotation(self, positions: Tensor) -> Rotation:
        """Cosines and sines of true positions ``[..]``, ``[.., h]`` each, float32."""
        flat = positions.reshape(1, -1)
        cos, sin = self.rotary(torch.empty(0, dtype=torch.float32, device=positions.device), flat)
        return cos.view(*positions.shape, -1), sin.view(*positions.shape, -1)

    # -- weights --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise trained parts; frozen copies become NaN, so that one that was not loaded cannot go unnoticed."""
        std = self.config.initializer_range
        if self.is_copy(module):
            module.weight.fill_(math.nan)  # type: ignore[operator]
        elif isinstance(module, nn.Linear):
            module.weight.normal_(0.0, std)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, std)
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, Qwen3RotaryEmbedding):
            fresh = Qwen3RotaryEmbedding(self.config)
            module.inv_freq.copy_(fresh.inv_freq)
            module.original_inv_freq.copy_(fresh.original_inv_freq)

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write this draft, copies of the target's matrices included, so that :meth:`load` gives it back.

        The folder appears whole or not at all. With the full vocabulary it is a checkpoint in the native layout.

        Args:
            folder: to write; an earlier draft in it is replaced.
            dtype: of the stored weights; None keeps each parameter's own.
        """
        folder = Path(folder)
        state = {name: tensor.detach().cpu() for name, tensor in self.state_dict().items()}
        state |= {"embed_tokens.weight": self.embedding_weight.detach().cpu()}
        state |= {"lm_head.weight": self.head_weight.detach().cpu().clone()}  # may be tied to the embedding
        kind = dtype or self.fc.weight.dtype
        state = {
            name: (tensor.to(kind) if tensor.is_floating_point() else tensor).contiguous()
            for name, tensor in state.items()
        }
        config = copy.deepcopy(self.config)
        config.dtype = kind
        aside = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        self.write_config(config, aside)
        save_file(state, aside / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(folder, ignore_errors=True)
        aside.replace(folder)

    def write_config(self, config: Any, folder: Path) -> None:
        """Write ``config.json``."""
        config.save_pretrained(folder)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as every Hugging Face model does; the copies of the target's matrices stay frozen."""
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded)._freeze_copies()
        return loaded

    @classmethod
    def load(cls, folder: str | Path, **kwargs: Any) -> Self:
        """Read a checkpoint in the native layout; nothing may be missing or left over.

        Raises:
            UserError: names the folder, and the missing or unexpected tensors.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} holds no draft: config.json is missing")
        try:
            model, info = cls.from_pretrained(
                folder, output_loading_info=True, local_files_only=True, use_safetensors=True, **kwargs
            )
        except (OSError, ValueError, RuntimeError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise UserError(
                f"the draft in {folder} cannot be read (truncated or foreign?): {first_line}"
            ) from error
        except SafetensorError as error:
            raise UserError(f"the weights in {folder} are damaged or truncated: {error}") from error
        wrong = {kind: sorted(info[kind]) for kind in ("missing_keys", "unexpected_keys") if info[kind]}
        if wrong:
            text = "; ".join(f"{kind.replace('_', ' ')}: {', '.join(names)}" for kind, names in wrong.items())
            raise UserError(f"the draft in {folder} does not fit its config.json: {text}")
        return model
