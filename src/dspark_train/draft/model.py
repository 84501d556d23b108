"""The draft model: parallel backbone, sequential head, confidence head (legend: :mod:`dspark_train.structures`)."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark_train.draft.attention import AttentionLayout, block_attention
from dspark_train.draft.config import DSparkConfig
from dspark_train.draft.families import to_gemma4
from dspark_train.draft.flex import FlexLayout, flex_block_attention
from dspark_train.draft.heads import ConfidenceHead, SequentialHead
from dspark_train.draft.layers import DraftLayer, RMSNorm
from dspark_train.draft.vocabulary import BorrowedVocabulary, TargetBound
from dspark_train.errors import UserError
from dspark_train.structures import Blocks, DraftOutput
from dspark_train.target.frozen import FrozenTarget


class DSparkDraft(TargetBound):
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
            self.make_copies()
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

    # -- passes -------------------------------------------------------------------------------------------------

    def context(self, features: Tensor) -> Tensor:
        """``H_ctx = RMSNorm(W_c features)``: ``[.., m·d] -> [.., d]``."""
        return self.hidden_norm(self.projected(features))

    def forward(self, features: Tensor, blocks: Blocks, input_ids: Tensor | None = None) -> DraftOutput:
        """Training pass: all blocks of a batch at once, teacher forcing in the sequential head.

        Args:
            features: ``[B, T, m·d]`` of the target.
            blocks: N packed blocks.
            input_ids: read by other kinds of drafts.
        """
        batch, length = features.shape[:2]
        form = FlexLayout if features.is_cuda else AttentionLayout
        layouts = {sight: form.of(blocks, batch, length, sight) for sight in set(self.config.sights)}
        context = self.context(features)
        context_rotation = self.rotation(torch.arange(length, device=features.device))
        rotation = self.rotation(blocks.positions)
        x = self.embed(blocks.slot_ids)
        for layer, sight in zip(self.layers, self.config.sights, strict=True):
            keys, values = layer.self_attn.keys_values(context, context_rotation)
            x = layer(x, rotation, partial(self._attend, keys, values, layouts[sight], layer.self_attn.scale))
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

    def write_config(self, config: DSparkConfig, folder: Path) -> None:
        """Write ``config.json``, in the form of its layers' family."""
        config.save_pretrained(folder)
        if config.layer_family == "gemma4":
            written = to_gemma4(config.to_dict())
            (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The second projection of the sequential head starts at zero: the draft starts as its parallel backbone."""
        super()._init_weights(module)
        if isinstance(module, DraftLayer) and module.layer_scalar is not None:
            module.layer_scalar.fill_(1.0)
        if isinstance(module, SequentialHead):
            module.markov_w2.weight.zero_()


def tensor_shapes(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a draft, its copies of the target's matrices included; nothing is allocated.

    Raises:
        UserError: the configuration cannot work.
    """
    with torch.device("meta"):
        state = DSparkDraft(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name != "d2t"}
