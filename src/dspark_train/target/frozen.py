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
from dspark_train.progress import say
from dspark_train.structures import TargetStates
from dspark_train.target.config import (
    TargetConfig,
    auto_class,
    check_layer_ids,
    decoder_layers,
    drop_towers,
    hub_options,
    language_model,
    load_tokenizer,
    refusal,
    spread_layer_ids,
    text_config,
)
from dspark_train.target.embedded import NAME, embedded_target
from dspark_train.target.packed import ROWS, packed_linears, packed_or_plain, rows_stand_alone
from dspark_train.target.quantised import Quantisation, load_quantised, quantisation_of

PROBE_ROWS = 7
"""Tokens by which a target is probed when it is loaded."""
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
            UserError: bad taps, a model without a language-model head, one whose layers see what comes later, or
                one whose logits are no scaled, shifted or soft-capped ``lm_head(last_hidden)``.
        """
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = text_config(self.model.config)
        self.name = name or str(self.model.config.name_or_path) or type(model).__name__
        if self.model.get_output_embeddings() is None:
            raise UserError(f"{self.name} has no LM head: a target is a causal language model")
        self.decoder: Any = language_model(self.model)
        self.layers: Any = decoder_layers(self.decoder)
        self.num_layers = len(self.layers)
        ids = spread_layer_ids(self.num_layers) if layer_ids is None else layer_ids
        self.layer_ids = check_layer_ids(ids, self.num_layers)
        self.embedding_scale = 1.0
        """Factor of the token embeddings before the first layer; 1 where something else is done to them."""
        self.logit_scale = 1.0
        """Factor of the LM head's product; :attr:`head_weight` holds it already."""
        self.logit_bias: Tensor | None = None
        """``[V]`` added to the logits, before the soft-cap."""
        self.logit_softcap: float | None = None
        """Logits are squashed to ``cap · tanh(logit / cap)``."""
        self._scaled: Tensor | None = None
        self._streams: int | None = None
        """Axis of the residual streams in a layer's states, where there are several: ``[n, B, T, d]``,
        ``[B, T, n, d]``, or ``[B, T, n·d]`` with the streams one after the other."""
        self.form: Choice | None = None
        """What ``dtype: auto`` chose, and why."""
        self.quantisation: Quantisation | None = None
        """How its layers are stored, where they are quantised."""
        try:
            self._probe()
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise UserError(
                f"{self.name} fails in its own forward pass ({type(error).__name__}: {reason}); it cannot be a target"
            ) from error

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
        whole = _read_config(config)
        stored = quantisation_of(whole, chosen, config.name_or_path)
        if stored is not None and config.sharding == "zero3":
            raise UserError(
                f"target.sharding zero3 shards plain weights, and {config.name_or_path} is quantised"
            )
        form = choose_form(text_config(whole), chosen, rows) if config.dtype == "auto" else None
        dtype = DTYPES[form.name.split(",")[0] if form else config.dtype]
        kind = auto_class(whole) or AutoModelForCausalLM
        load = kind.from_pretrained
        if stored is not None:
            say(f"target {config.name_or_path}: {stored.describe()}")
            load = partial(load_quantised, kind, stored=stored, device=chosen)
        try:
            model: Any = load(path, dtype=dtype, attn_implementation=config.attention, **hub_options(config))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise _cannot_load(config, error) from error
        drop_towers(model)
        tokenizer = load_tokenizer(path, config)  # without one, a target still serves pre-tokenised data
        if config.sharding == "zero3":
            from dspark_train.target.sharding import shard_model

            model = shard_model(model, chosen)
        elif stored is None:
            model = model.to(chosen)
        target = cls(model, config.layer_ids, tokenizer, name=config.name_or_path)
        target.form, target.quantisation = form, stored
        return target

    @torch.no_grad()
    def _probe(self) -> None:
        """Find how embeddings and logits are made, and hold :meth:`states` and :meth:`lm_head` to the model's own.

        In a batch, with padding on the right: a model that sees what comes later gives other states there.
        """
        generator = torch.Generator().manual_seed(0)
        batch = torch.randint(self.vocab_size, (2, PROBE_ROWS + 4), generator=generator).to(self.device)
        ids = batch[:1, :PROBE_ROWS]
        embedded: list[Tensor] = []
        outputs: list[Any] = []
        handles = [
            self.layers[0].register_forward_pre_hook(
                lambda _, args, kwargs: embedded.append(_first_tensor(args, kwargs)), with_kwargs=True
            ),
            self.decoder.register_forward_hook(lambda _, _args, output: outputs.append(output)),
        ]
        try:
            expected = self.model(input_ids=ids, use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        if not outputs or not embedded:
            raise UserError(
                f"{self.name} does not run its decoder as one stack of layers; it cannot be a target"
            )
        bound = tolerance(self.dtype)
        padded = self.model(input_ids=batch, use_cache=False).logits[:1, :PROBE_ROWS]
        gap = distances(padded, expected).median()
        if not gap <= (bound if self.dtype == torch.float32 else 0.3):
            raise UserError(
                f"{self.name} gives a token other logits when more tokens follow it (relative difference "
                f"{float(gap):.3g}): it does not read from left to right, row by row, and cannot be a target"
            )
        if (
            outputs[0].last_hidden_state.shape[-1] != self.hidden_size
            or expected.shape[-1] != self.vocab_size
        ):
            raise UserError(
                f"the LM head of {self.name} does not read the decoder's last hidden state "
                f"({outputs[0].last_hidden_state.shape[-1]} against {self.hidden_size}); it cannot be a target"
            )
        raw = nn.functional.embedding(ids, self.embedding_weight).float()
        entering = embedded[0].float()
        if entering.dim() == 3 and entering.shape[-1] > self.hidden_size:
            blocks = entering.split(self.hidden_size, dim=-1)
            if all(torch.equal(block, blocks[0]) for block in blocks[1:]):
                self._streams, entering = 2, blocks[0]
        elif entering.dim() == 4:
            self._streams = 2 if entering.shape[:2] == ids.shape else 0
            entering = entering.select(self._streams, 0)
        if entering.shape == raw.shape:
            scale = float((entering * raw).sum() / (raw * raw).sum())
            error = (entering - raw * scale).abs().max() / raw.abs().max()
            if error < 0.02 * max(1.0, scale) and abs(scale - 1.0) >= 1e-3:
                self.embedding_scale = scale
        self._find_logits(ids, outputs[0])
        alone = self.states(ids)
        if alone.features.shape[-1] != len(self.layer_ids) * self.hidden_size:
            raise UserError(
                f"{self.name} has layers of other sizes than its LM head ({self.hidden_size}); they cannot be tapped"
            )
        gap = distances(self.lm_head(alone.last_hidden), expected).max()
        if not gap <= bound:
            raise UserError(
                f"{self.name} computes its logits from more than the last hidden state, LM head, scale, bias and "
                f"soft-cap (relative difference {float(gap):.3g}); such targets are not supported"
            )

    def _find_logits(self, ids: Tensor, output: Any) -> None:
        """Measure scale, bias and soft-cap of the logits: the model's own, over last states of our choice."""
        hidden = output.last_hidden_state

        def own(states: Tensor) -> Tensor:
            replaced = type(output)(**{**output, "last_hidden_state": states})
            self.decoder.forward = lambda *_, **__: replaced
            try:
                return self.model(input_ids=ids, use_cache=False).logits.float()
            finally:
                del self.decoder.forward

        facts, plain = _numbers(self.config), own(hidden)
        far, farther = own(hidden * 1e4).abs().max(), own(hidden * 1e5).abs().max()
        if far.isfinite() and abs(float(farther / far) - 1.0) < 1e-2:
            self.logit_softcap = _snap(float(farther), facts)
        cap = self.logit_softcap
        step = 1.0 if cap is None else 0.1 * cap / max(float(plain.abs().max()), 1e-6)

        def uncapped(logits: Tensor) -> Tensor:
            return logits if cap is None else cap * torch.atanh((logits / cap).clamp(-0.999, 0.999))

        rest = uncapped(own(torch.zeros_like(hidden)))
        product = nn.functional.linear(hidden.float() * step, self._head.float())
        change = uncapped(own(hidden * step)) - rest
        scale = float((change * product).sum() / (product * product).sum())
        self.logit_scale = 1.0 if abs(scale - 1.0) < 1e-3 else _snap(scale, facts)
        if float(rest.abs().max()) > 0:
            self.logit_bias = rest[0, 0].to(self.dtype)

    # -- facts --------------------------------------------------------------------------------------------------

    @property
    def hidden_size(self) -> int:
        """d."""
        return int(self._head.shape[1])

    @property
    def vocab_size(self) -> int:
        """V: rows of the LM head (may exceed the tokenizer's)."""
        return int(self._head.shape[0])

    @property
    def context_length(self) -> int | None:
        """Positions that the target can hold; None where its config names no bound."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def media_tokens(self) -> set[int]:
        """Ids that stand for an image, a video or sound in a multimodal model's text."""
        fields = vars(self.model.config).items()
        named = [f"{medium}_token_{end}" for medium in ("image", "video", "audio") for end in ("id", "index")]
        return {value for name, value in fields if name in named and isinstance(value, int)}

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._head.device

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return self._head.dtype

    @property
    def embedding_weight(self) -> Tensor:
        """``[V, d]``, without the embedding scale."""
        return self.model.get_input_embeddings().weight

    @property
    def _head(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        """``[V, d]``: logits before the soft-cap are ``head_weight @ last_hidden``, so a logit scale is in it.

        Raises:
            UserError: the logits have a bias, which drafts have not.
        """
        if self.logit_bias is not None:
            raise UserError(
                f"{self.name} adds a bias to its logits; it can be decoded, but a draft for it cannot be trained"
            )
        weight = self._head
        if self.logit_scale == 1.0:
            return weight
        if self._scaled is None or self._scaled.device != weight.device or self._scaled.dtype != weight.dtype:
            self._scaled = (weight.detach().float() * self.logit_scale).to(weight.dtype)
        return self._scaled

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
        """Logits ``[.., V]`` of last hidden states ``[.., d]``: scale, bias and soft-cap included."""
        logits = self.model.get_output_embeddings()(hidden.to(self.dtype))
        bias = getattr(self.model.get_output_embeddings(), "bias", None)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_bias is not None and bias is None:
            logits = logits + self.logit_bias
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
                states[layer_id] = self._one_stream(output if isinstance(output, Tensor) else output[0])

            return hook

        def keep_input(_module: nn.Module, args: Any, kwargs: Any) -> None:
            states[-1] = self._one_stream(_first_tensor(args, kwargs))

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

    def _one_stream(self, states: Tensor) -> Tensor:
        """States of one layer ``[B, T, d]``; of a model of several residual streams, their mean."""
        if self._streams is None:
            return states
        return (states.unflatten(-1, (-1, self.hidden_size)) if states.dim() == 3 else states).mean(
            self._streams
        )

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
        packing = packed_linears(self.model) if packed else nullcontext()
        with own_dtype, self.tap() as tapped, packing, one_sequence_per_row():
            output = self.decoder(input_ids=input_ids, use_cache=False)
        return TargetStates(self.concatenate(tapped), output.last_hidden_state)


@contextmanager
def one_sequence_per_row() -> Iterator[None]:
    """Transformers looks whether a row holds several sequences, and waits for the device to tell; none does here."""
    from transformers import masking_utils

    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = found


def distances(logits: Tensor, expected: Tensor) -> Tensor:
    """Root mean square difference of logits ``[.., V]`` from the expected, in their standard deviations: ``[..]``."""
    gap = (logits.float() - expected.float()).square().mean(-1).sqrt()
    return gap / expected.float().std(-1).clamp_min(1e-30)


def tolerance(dtype: torch.dtype) -> float:
    """Distance of logits that rounding explains: some tens of layers' worth of a dtype's roundings."""
    return max(5e-4, 16 * torch.finfo(dtype).eps)


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """States that a layer is called with."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _numbers(config: Any) -> list[float]:
    """Numbers in a Hugging Face config, and their inverses."""
    values = [float(v) for v in vars(config).values() if isinstance(v, int | float) and v and v is not True]
    return values + [1.0 / value for value in values]


def _snap(value: float, facts: list[float]) -> float:
    """The number of the config that a measured one is, within its rounding; else what was measured."""
    nearest = min(facts, key=lambda fact: abs(fact - value), default=value)
    return nearest if abs(nearest - value) < 4e-3 * abs(value) else value


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_target_config(config: TargetConfig) -> Any:
    """Hugging Face (text) config of a target, without its weights.

    Raises:
        UserError: there is none at that place, or no model of this kind can be a target.
    """
    return text_config(_read_config(config))


def _read_config(config: TargetConfig) -> Any:
    """Config of the whole model, towers included."""
    from transformers import AutoConfig

    path = resolve_path(config)
    try:
        found = AutoConfig.from_pretrained(path, **hub_options(config))
    except Exception as error:
        raise _cannot_load(config, error) from error
    if reason := refusal(found):
        raise UserError(f"the target {config.name_or_path} {reason}")
    return found


def _cannot_load(config: TargetConfig, error: Exception) -> UserError:
    if "trust_remote_code" in str(error):
        return UserError(
            f"the target {config.name_or_path} comes with Python code of its own: read it, and set "
            "target.trust_remote_code if you trust it"
        )
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
