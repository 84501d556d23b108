"""The frozen target: any Hugging Face causal language model (shape legend: :mod:`dspark_train.structures`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark_train.errors import UserError
from dspark_train.machine import DTYPES, Choice, LayerShape, fastest, layer_pass, made_when_run, tune
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
from dspark_train.target.packed import ROWS, packed_linears, packed_or_plain, rows_stand_alone

PASS_ROWS = 2048
"""Tokens of one pass of the target while states are computed."""


class FrozenTarget:
    """A causal language model that only answers: tapped features, last hidden states, logits.

    Deliberately not an ``nn.Module``: assigned to a module it stays outside that module's parameters, checkpoints,
    optimiser and sharding.
    """

    def __init__(
        self, model: Any, layer_ids: Sequence[int] | None = None, tokenizer: Any = None, name: str = ""
    ):
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
        self.form: Choice | None = None
        """What ``dtype: auto`` chose, and why."""
        self._probe()

    # -- loading ------------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        config: TargetConfig | str,
        device: torch.device | str | None = None,
        rows: int = PASS_ROWS,
        **options: Any,
    ) -> FrozenTarget:
        """Load the target that ``config`` names.

        Args:
            config: what to load, or just its name or path.
            device: where ``config.device`` is ``auto``; None picks the GPU where there is one.
            rows: tokens of the passes at hand, for which ``dtype: auto`` is measured.
            options: fields of :class:`TargetConfig`, where ``config`` is a name.

        Raises:
            UserError: the folder is missing or has no weights, or the name is unknown.
        """
        from transformers import AutoModelForCausalLM

        if isinstance(config, str):
            config = TargetConfig(name_or_path=config, **options)
        chosen = torch.device(config.device if config.device != "auto" else device or default_device())
        path = resolve_path(config)
        form = choose_form(read_target_config(config), chosen, rows) if config.dtype == "auto" else None
        dtype = DTYPES[form.name.split(",")[0] if form else config.dtype]
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=config.attention, **hub_options(config)
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise _cannot_load(config, error) from error
        tokenizer = load_tokenizer(path, config)  # without one, a target still serves pre-tokenised data
        if config.sharding == "zero3":
            from dspark_train.target.sharding import shard_model

            model = shard_model(model, chosen)
        else:
            model = model.to(chosen)
        target = cls(model, config.layer_ids, tokenizer, name=config.name_or_path)
        target.form = form
        return target

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
        packed = self.form is not None and self.form.name == "float32, packed"
        own_dtype = torch.autocast(input_ids.device.type, enabled=False)  # whatever the draft trains in
        with own_dtype, self.tap() as tapped, packed_linears(self.model) if packed else nullcontext():
            output = self.decoder(input_ids=input_ids, use_cache=False)
        return TargetStates(self.concatenate(tapped), output.last_hidden_state)


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_target_config(config: TargetConfig) -> Any:
    """Hugging Face (text) config of a target, without its weights.

    Raises:
        UserError: there is none at that place.
    """
    from transformers import AutoConfig

    path = resolve_path(config)
    try:
        return text_config(AutoConfig.from_pretrained(path, **hub_options(config)))
    except Exception as error:
        raise _cannot_load(config, error) from error


def _cannot_load(config: TargetConfig, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(
        f"the target {config.name_or_path} cannot be loaded: {reason} "
        "(target.name_or_path wants a folder with config.json and weights, or a reachable hub id)"
    )


def choose_form(config: Any, device: torch.device, rows: int = PASS_ROWS) -> Choice:
    """Dtype that ``auto`` means: on a CPU the one that runs a layer of this target fastest.

    Args:
        config: Hugging Face (text) config of the target.
        device: where it runs; a GPU computes in bfloat16 where it has units for it.
        rows: tokens of the passes at hand: thousands while states are computed, a few while decoding. Decoding takes
            bfloat16 only where a verified row gets the bits of a plain one: elsewhere near ties would fall otherwise.

    Returns:
        ``bfloat16``, ``float32``, or ``float32, packed``: weights in half precision where they lose nothing by it.
    """
    purpose = "the target's passes" if rows > 256 else "decoding"
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return Choice(purpose, "bfloat16" if fast else "float32", reason="as the GPU's units are")
    tune()
    shape = LayerShape.of(config)
    packs = "fbgemm" in torch.backends.quantized.supported_engines
    few = rows <= ROWS[0]
    rows = shape.rows_within(rows)

    def form(dtype: torch.dtype, packed: bool) -> Callable[[], object]:
        multiply = packed_or_plain if packed else None
        return made_when_run(partial(layer_pass, shape, rows, dtype, multiply=multiply))

    forms = {"float32": form(torch.float32, few)}
    if packs and not few:
        forms["float32, packed"] = form(torch.float32, True)
    if not few or rows_stand_alone(torch.bfloat16):
        forms["bfloat16"] = form(torch.bfloat16, few)
    return fastest(f"{purpose} ({rows:,} rows of {shape.hidden})", forms)


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
