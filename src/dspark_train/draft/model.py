"""The draft model: parallel backbone, sequential head, confidence head (legend: :mod:`dspark_train.structures`)."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark_train.draft.attention import AttentionLayout, block_attention
from dspark_train.draft.config import DSparkConfig
from dspark_train.draft.flex import FlexLayout, flex_block_attention
from dspark_train.draft.heads import ConfidenceHead, SequentialHead
from dspark_train.draft.layers import DraftLayer, RMSNorm, Rotation
from dspark_train.errors import UserError
from dspark_train.structures import Blocks, DraftOutput
from dspark_train.target.frozen import FrozenTarget


@dataclass(frozen=True, eq=False)
class BorrowedVocabulary:
    """The target's embedding and the draft's rows of its head: used, never owned, never saved by training."""

    embedding: Tensor
    """``[V, d]``, without the embedding scale."""
    head: Tensor
    """``[U, d]``."""


class DSparkDraft(PreTrainedModel):
    """A DSpark draft for one target.

    Made from a target (``DSparkDraft(config, target=target)``) it borrows the target's embedding and LM head, which
    are then no parameters of it. Loaded from a checkpoint (``DSparkDraft.from_pretrained(folder)``) it owns frozen
    copies of both, and :meth:`borrow` gives them up for a target's.
    """

    config: DSparkConfig
    layers: Any
    config_class = DSparkConfig
    base_model_prefix = ""
    main_input_name = "features"
    _no_split_modules = ["DraftLayer"]  # noqa: RUF012 (the base class declares it)
    _supports_sdpa = True

    def __init__(
        self, config: DSparkConfig, target: FrozenTarget | None = None, draft_token_ids: Tensor | None = None
    ) -> None:
        super().__init__(config)
        config.check()
        size, taps = config.hidden_size, len(config.layer_ids)
        self.fc = nn.Linear(taps * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)
        self.markov_head = SequentialHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.borrowed: BorrowedVocabulary | None = None
        if config.draft_vocab_size is not None:
            ids = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
            self.register_buffer("d2t", ids, persistent=True)
        if target is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
            self.lm_head = nn.Linear(size, config.draft_vocabulary, bias=False)
        self.post_init()
        self._freeze_copies()
        if draft_token_ids is not None:
            self.set_draft_vocabulary(draft_token_ids)
        if target is not None:
            self.borrow(target)

    # -- vocabulary ---------------------------------------------------------------------------------------------

    @property
    def draft_token_ids(self) -> Tensor | None:
        """``[U]`` int64, ascending: target id of every draft token. None where the vocabulary is the target's.

        Stored as offsets (``d2t``), the form that engines read: target id = index + offset.
        """
        if self.config.draft_vocab_size is None:
            return None
        offsets: Tensor = self.d2t
        return offsets + torch.arange(offsets.numel(), device=offsets.device)

    def set_draft_vocabulary(self, token_ids: Tensor) -> None:
        """Choose the target ids ``[U]`` (ascending, distinct) that this draft can propose."""
        expected = self.config.draft_vocab_size
        if expected is None or token_ids.numel() != expected:
            raise UserError(f"draft_vocab_size is {expected}, but {token_ids.numel()} token ids were given")
        self.d2t = token_ids.to(torch.int64) - torch.arange(expected, device=token_ids.device)

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

    # -- passes -------------------------------------------------------------------------------------------------

    def context(self, features: Tensor) -> Tensor:
        """``H_ctx = RMSNorm(W_c features)``: ``[.., m·d] -> [.., d]``."""
        # autocast would only narrow again what is widened here
        if not torch.is_autocast_enabled(features.device.type):
            features = features.to(self.fc.weight.dtype)
        return self.hidden_norm(self.fc(features))

    def rotation(self, positions: Tensor) -> Rotation:
        """Cosines and sines of true positions ``[..]``, ``[.., h]`` each, float32."""
        flat = positions.reshape(1, -1)
        cos, sin = self.rotary(torch.empty(0, dtype=torch.float32, device=positions.device), flat)
        return cos.view(*positions.shape, -1), sin.view(*positions.shape, -1)

    def forward(self, features: Tensor, blocks: Blocks) -> DraftOutput:
        """Training pass: all blocks of a batch at once, teacher forcing in the sequential head.

        Args:
            features: ``[B, T, m·d]`` of the target.
            blocks: N packed blocks.
        """
        batch, length = features.shape[:2]
        layout: AttentionLayout | FlexLayout = (FlexLayout if features.is_cuda else AttentionLayout).of(
            blocks, batch, length
        )
        context = self.context(features)
        context_rotation = self.rotation(torch.arange(length, device=features.device))
        rotation = self.rotation(blocks.positions)
        x = self.embed(blocks.slot_ids)
        for layer in self.layers:
            keys, values = layer.self_attn.keys_values(context, context_rotation)
            x = layer(x, rotation, partial(self._attend, keys, values, layout, layer.self_attn.scale))
        hidden = self.norm(x)
        latent = embedded = None
        if self.markov_head is not None:
            # one look-up for both heads: the gradient of each has the size of the table
            embedded = self.markov_head.markov_w1(blocks.previous)
            latent = self.markov_head(hidden, embedded)
        confidence = None if self.confidence_head is None else self.confidence_head(hidden, embedded)
        return DraftOutput(hidden, latent, confidence)

    @staticmethod
    def _attend(
        context_key: Tensor,
        context_value: Tensor,
        layout: AttentionLayout | FlexLayout,
        scale: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        if isinstance(layout, FlexLayout):
            return flex_block_attention(query, context_key, context_value, key, value, layout, scale)
        return block_attention(query, context_key, context_value, key, value, layout, scale)

    def bias(self, latent: Tensor) -> Tensor:
        """Logit bias ``W2 z``: ``[.., r] -> [.., U]``."""
        if self.markov_head is None:
            raise ValueError("a parallel draft has no logit bias")
        return self.markov_head.markov_w2(latent)

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

    def logits(self, hidden: Tensor, latent: Tensor | None) -> Tensor:
        """Draft logits ``[.., U]`` from states ``[.., d]`` and latents ``[.., r]``."""
        logits = self.base_logits(hidden)
        return logits if latent is None else logits + self.bias(latent).to(logits.dtype)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Confidence logits ``[..]`` of slots with states ``[.., d]`` and previous tokens ``[..]``."""
        if self.confidence_head is None:
            return None
        embedded = None
        if self.confidence_head.with_markov and self.markov_head is not None:
            embedded = self.markov_head.markov_w1(previous)
        return self.confidence_head(hidden, embedded)

    # -- weights ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise trained parts; frozen copies become NaN, so that one that was not loaded cannot go unnoticed.

        The second projection of the sequential head starts at zero: the draft starts as its parallel backbone.
        """
        std = self.config.initializer_range
        if module is self._modules.get("embed_tokens") or module is self._modules.get("lm_head"):
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
        if isinstance(module, SequentialHead):
            module.markov_w2.weight.zero_()

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
        config.save_pretrained(aside)
        save_file(state, aside / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(folder, ignore_errors=True)
        aside.replace(folder)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as every Hugging Face model does; the copies of the target's matrices stay frozen."""
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded)._freeze_copies()
        return loaded

    @classmethod
    def load(cls, folder: str | Path, **kwargs: Any) -> DSparkDraft:
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


def tensor_shapes(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a draft, its copies of the target's matrices included; nothing is allocated.

    Raises:
        UserError: the configuration cannot work.
    """
    with torch.device("meta"):
        state = DSparkDraft(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name != "d2t"}
