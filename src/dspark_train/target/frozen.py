"""The frozen target: any Hugging Face causal language model (shape legend: :mod:`dspark_train.structures`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark_train.errors import UserError
from dspark_train.structures import TargetStates
from dspark_train.target.config import (
    TargetConfig,
    check_layer_ids,
    hub_options,
    language_model,
    load_tokenizer,
    spread_layer_ids,
    text_config,
)
from dspark_train.target.embedded import NAME, embedded_target


class FrozenTarget:
    """A causal language model that only answers: tapped features, last hidden states, logits.

    Deliberately not an ``nn.Module``: assigned to a module it stays outside that module's parameters, checkpoints,
    optimiser and sharding.
    """

    def __init__(self, model: Any, layer_ids: list[int] | None = None, tokenizer: Any = None, name: str = ""):
        """Freeze ``model``.

        Args:
            model: a Hugging Face causal language model.
            layer_ids: tapped layers; None spreads five evenly.
            tokenizer: of the model, where there is one.
            name: what messages call it.

        Raises:
            UserError: bad taps, or a model whose logits are not ``lm_head(last_hidden)``.
        """
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = text_config(self.model.config)
        self.name = name or str(self.model.config.name_or_path) or type(model).__name__
        self.decoder: Any = language_model(self.model)
        self.layers: Any = self.decoder.layers
        self.num_layers = len(self.layers)
        ids = spread_layer_ids(self.num_layers) if layer_ids is None else layer_ids
        self.layer_ids = check_layer_ids(ids, self.num_layers)
        self.logit_softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self._probe()

    # -- loading ------------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls, config: TargetConfig | str, device: torch.device | str | None = None, **options: Any
    ) -> FrozenTarget:
        """Load the target that ``config`` names.

        Args:
            config: what to load, or just its name or path.
            device: where ``config.device`` is ``auto``; None picks the GPU where there is one.
            options: fields of :class:`TargetConfig`, where ``config`` is a name.

        Raises:
            UserError: the folder is missing or has no weights, or the name is unknown.
        """
        from transformers import AutoModelForCausalLM

        if isinstance(config, str):
            config = TargetConfig(name_or_path=config, **options)
        chosen = torch.device(config.device if config.device != "auto" else device or default_device())
        path = resolve_path(config)
        dtype = resolve_dtype(config.dtype, chosen)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=config.attention, **hub_options(config)
            )
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"the target {config.name_or_path} cannot be loaded: {reason} "
                "(target.name_or_path wants a folder with config.json and weights, or a reachable hub id)"
            ) from error
        tokenizer = load_tokenizer(path, config)  # without one, a target still serves pre-tokenised data
        if config.sharding == "zero3":
            from dspark_train.target.sharding import shard_model

            model = shard_model(model, chosen)
        else:
            model = model.to(chosen)
        return cls(model, config.layer_ids, tokenizer, name=config.name_or_path)

    def _probe(self) -> None:
        """Measure the embedding scale, and check that the LM head on the last hidden state gives the logits."""
        ids = torch.arange(4, device=self.device).remainder(self.vocab_size)[None]
        embedded: list[Tensor] = []
        handle = self.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: embedded.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        try:
            with torch.no_grad():
                expected = self.model(input_ids=ids, use_cache=False).logits
        finally:
            handle.remove()
        raw = nn.functional.embedding(ids, self.embedding_weight).float()
        self.embedding_scale = float((embedded[0].float() * raw).sum() / (raw * raw).sum())
        if abs(self.embedding_scale - 1.0) < 1e-3:
            self.embedding_scale = 1.0
        error = (embedded[0].float() - raw * self.embedding_scale).abs().max() / raw.abs().max()
        if not error < 0.02 * max(1.0, self.embedding_scale):
            raise UserError(
                f"{self.name} feeds its layers something other than scaled token embeddings; such targets are not "
                "supported"
            )
        logits = self.lm_head(self.states(ids).last_hidden)
        tolerance = 1e-3 if self.dtype == torch.float32 else 5e-2
        if not torch.allclose(logits.float(), expected.float(), rtol=tolerance, atol=tolerance * 10):
            gap = (logits.float() - expected.float()).abs().max()
            raise UserError(
                f"{self.name} computes its logits from more than the last hidden state, LM head and soft-cap "
                f"(largest difference {gap:.3g}); such targets are not supported"
            )

    # -- facts --------------------------------------------------------------------------------------------------

    @property
    def hidden_size(self) -> int:
        """d."""
        return int(self.head_weight.shape[1])

    @property
    def vocab_size(self) -> int:
        """V: rows of the LM head (may exceed the tokenizer's)."""
        return int(self.head_weight.shape[0])

    @property
    def context_length(self) -> int | None:
        """Positions that the target can hold; None where its config names no bound."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return self.head_weight.dtype

    @property
    def embedding_weight(self) -> Tensor:
        """``[V, d]``, without the embedding scale."""
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        """``[V, d]``."""
        return self.model.get_output_embeddings().weight

    def to(self, device: torch.device | str) -> FrozenTarget:
        """Move the model."""
        self.model.to(device)
        return self

    # -- passes -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Embed token ids ``[..]`` to ``[.., d]``, embedding scale included."""
        return self.model.get_input_embeddings()(ids)

    @torch.no_grad()
    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits ``[.., V]`` of last hidden states ``[.., d]``, soft-cap included."""
        logits = self.model.get_output_embeddings()(hidden.to(self.dtype))
        cap = self.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    @contextmanager
    def tap(self) -> Iterator[dict[int, Tensor]]:
        """Collect the tapped layers of every forward pass inside the block, by layer id.

        Each pass overwrites the states of the one before.
        """
        states: dict[int, Tensor] = {}
        handles = []

        def keep(layer_id: int) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                states[layer_id] = output[0] if isinstance(output, tuple) else output

            return hook

        def keep_input(_module: nn.Module, args: Any, kwargs: Any) -> None:
            states[-1] = args[0] if args else kwargs["hidden_states"]

        for layer_id in self.layer_ids:
            if layer_id == -1:
                handles.append(self.layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
            else:
                handles.append(self.layers[layer_id].register_forward_hook(keep(layer_id)))
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    def concatenate(self, states: dict[int, Tensor]) -> Tensor:
        """Join tapped states ``[.., d]`` in the order of the layer ids: ``[.., m·d]``."""
        return torch.cat([states[layer_id] for layer_id in self.layer_ids], dim=-1)

    @torch.no_grad()
    def states(self, input_ids: Tensor) -> TargetStates:
        """Run the target without its LM head.

        Args:
            input_ids: ``[B, T]``, right-padded. A causal model never lets padding reach a real token, so no mask is
                needed; states at padding mean nothing.
        """
        with self.tap() as tapped:
            output = self.decoder(input_ids=input_ids, use_cache=False)
        return TargetStates(self.concatenate(tapped), output.last_hidden_state)


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether the hardware computes in bfloat16, rather than emulating it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Dtype that ``auto``, ``bfloat16`` or ``float32`` means on ``device``."""
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def resolve_path(config: TargetConfig) -> str:
    """Folder or hub id of the target, with local folders checked before anything is loaded.

    Raises:
        UserError: the folder is missing, or holds no config or no weights.
    """
    name = config.name_or_path
    if name == NAME:
        return str(embedded_target())
    folder = Path(name)
    looks_local = folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if not looks_local:
        return name
    if not folder.is_dir():
        raise UserError(f"target.name_or_path {name!r}: no such folder (a hub id looks like 'owner/model')")
    if config.gguf_file:
        if not (folder / config.gguf_file).is_file():
            raise UserError(f"target.gguf_file {config.gguf_file!r} is not in {name}")
        return name
    if not (folder / "config.json").is_file():
        raise UserError(
            f"target.name_or_path {name!r} holds no config.json: is it a Hugging Face model folder?"
        )
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(
            f"target.name_or_path {name!r} holds no weights (*.safetensors): download the whole model"
        )
    return name
