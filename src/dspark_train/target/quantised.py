"""Quantised targets: found by their config before weights are read, loaded as transformers loads them.

Layers run as they are stored where this machine has what they need. Where it has not, weights are dequantised while
they load, and a line says so: FP8 and MXFP4 by transformers, GPTQ and AWQ (on a CPU) here. Embedding and LM head, which
draft and objective multiply by, are dequantised once in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dspark_train.errors import UserError

UNPACKED_HERE = ("gptq", "awq")
"""Schemes whose packages are hard to come by on a CPU; their layouts are plain, and read here."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each of the eight numbers in a word of AWQ's, lowest bits first."""
_ROWS = 4096


@dataclass(frozen=True)
class Quantisation:
    """How a quantised target was stored, and how it runs."""

    scheme: str
    """As the checkpoint's ``quantization_config`` names it."""
    settings: dict[str, Any]
    """That configuration."""
    dequantised: bool
    """Its weights become plain while they load."""

    def describe(self) -> str:
        """One line about the states that a draft of this target is trained on."""
        bits = self.settings.get("bits") or self.settings.get("w_bit")
        name = f"{self.scheme}, {bits} bits" if bits else self.scheme
        if self.dequantised:
            return (
                f"{name}: dequantised while loading, since this machine has no kernels for it; where a server rounds "
                "activations too, its states differ a little from these"
            )
        return f"{name}: the quantised layers run as they are stored, and a draft is trained on their states"

    @property
    def unpacked_here(self) -> bool:
        """The weights are dequantised by this project, not by transformers."""
        return self.dequantised and self.scheme in UNPACKED_HERE


def quantisation_of(config: Any, device: torch.device, name: str) -> Quantisation | None:
    """How a target is quantised, from its config; None where it is not.

    Args:
        config: Hugging Face config of the whole model.
        device: where it is to run.
        name: of the target, for messages.

    Raises:
        UserError: transformers does not know the scheme, or a package or a device that it needs is missing.
    """
    from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

    raw = getattr(config, "quantization_config", None)
    if raw is None:
        return None
    settings = dict(raw if isinstance(raw, dict) else raw.to_dict())
    scheme = str(settings.get("quant_method", "unknown scheme"))
    if scheme in UNPACKED_HERE and device.type == "cpu":
        _check_layout(scheme, settings, name)
        return Quantisation(scheme, settings, dequantised=True)
    try:
        parsed = AutoQuantizationConfig.from_dict(settings)
        if device.type == "cpu" and hasattr(parsed, "dequantize") and scheme != "compressed-tensors":
            parsed.dequantize = True  # transformers does so only where it sees no GPU at all
        AutoHfQuantizer.from_config(parsed, pre_quantized=True).validate_environment(device_map={"": device})
    except (ImportError, RuntimeError, ValueError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, ModuleNotFoundError):
            reason += f" (`pip install {error.name}`)"
        raise UserError(
            f"the target {name} is quantised ({scheme}) and cannot be loaded here: {reason}"
        ) from error
    return Quantisation(scheme, settings, dequantised=bool(getattr(parsed, "dequantize", False)))


def _check_layout(scheme: str, settings: dict[str, Any], name: str) -> None:
    bits = settings.get("bits") or settings.get("w_bit")
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    fits = bits in (2, 4, 8) if scheme == "gptq" else bits == 4 and version == "gemm"
    if not fits:
        raise UserError(
            f"the target {name} is quantised ({scheme}, {bits} bits, {version}); on a CPU, GPTQ of 2, 4 or 8 bits and "
            "AWQ of 4 bits (gemm) are read: run it on a GPU with the package gptqmodel"
        )


def load_quantised(loader: Any, path: str, stored: Quantisation, device: torch.device, **options: Any) -> Any:
    """Load a quantised causal language model, its embedding and LM head plain.

    Args:
        loader: the Hugging Face class that loads.
        path: folder or hub id.
        stored: how it is quantised.
        device: where it runs.
        options: for ``from_pretrained``.
    """
    from transformers.quantizers.auto import AutoQuantizationConfig

    if stored.unpacked_here:
        model = _load_unpacked(loader, path, stored, **options)
        return model.to(device)
    if stored.dequantised:
        options["quantization_config"] = AutoQuantizationConfig.from_dict(
            {**stored.settings, "dequantize": True}
        )
    model = loader.from_pretrained(path, device_map={"": device}, **options)
    with torch.no_grad():
        model(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False
        )  # some unpack only now
    plain_vocabulary(model)
    return model


@torch.no_grad()
def plain_vocabulary(model: Any) -> None:
    """Put plain modules in place of a quantised embedding and LM head, found through the modules' own products."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not is_plain(head):
        size = head.in_features
        dtype = next(
            p.dtype for p in model.parameters() if p.dtype in (torch.float32, torch.bfloat16, torch.float16)
        )
        bias = None if head.bias is None else head.bias.to(dtype)
        rows = torch.eye(size, dtype=dtype, device=head.weight.device)
        weight = torch.cat([head(part) if bias is None else head(part) - bias for part in rows.split(_ROWS)])
        plain = nn.Linear(size, weight.shape[1], bias=bias is not None, device="meta")
        plain.weight = nn.Parameter(weight.T.contiguous(), requires_grad=False)
        if bias is not None:
            plain.bias = nn.Parameter(bias, requires_grad=False)
        model.set_output_embeddings(plain)
    if not is_plain(embedding):
        ids = torch.arange(embedding.num_embeddings, device=embedding.weight.device)
        table = torch.cat([embedding(part) for part in ids.split(_ROWS)])
        scale = float(getattr(embedding, "embed_scale", 1.0))
        model.set_input_embeddings(ScaledEmbedding(table / scale, scale))


class ScaledEmbedding(nn.Embedding):
    """A table of embeddings and their factor, kept apart."""

    def __init__(self, weight: Tensor, scale: float) -> None:
        super().__init__(weight.shape[0], weight.shape[1], _weight=weight)
        self.embed_scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        """``[..] -> [.., d]``."""
        return super().forward(ids) * self.embed_scale


def is_plain(module: nn.Module) -> bool:
    """Whether a module's weight is a matrix of floating-point numbers that its forward pass multiplies by as it is."""
    weight: Any = getattr(module, "weight", None)
    return (
        type(weight) in (nn.Parameter, Tensor)
        and weight.is_floating_point()
        and weight.element_size() > 1
        and not hasattr(module, "quantization_scheme")
    )


# -- GPTQ and AWQ -------------------------------------------------------------------------------------------------


def _load_unpacked(loader: Any, path: str, stored: Quantisation, **options: Any) -> Any:
    from transformers import AutoConfig

    revision, trusted = options.pop("revision", None), options.pop("trust_remote_code", False)
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trusted)
    del config.quantization_config
    folder = Path(path) if Path(path).is_dir() else _download(path, revision)
    tensors = dict(unpacked(_tensors(folder), stored, options["dtype"]))
    with torch.device("meta"):
        kind: Any = type(loader.from_config(config, trust_remote_code=trusted))
    model, info = kind.from_pretrained(
        None, config=config, state_dict=tensors, output_loading_info=True, **options
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"its quantised weights lack {', '.join(missing[:3])}")
    return model


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, allow_patterns=["*.safetensors", "*.json"]))


def _tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def unpacked(
    tensors: dict[str, Tensor], stored: Quantisation, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a GPTQ or AWQ checkpoint with plain weights ``[out, in]``.

    Args:
        tensors: of the checkpoint; each is let go of once it is read.
        stored: its settings.
        dtype: of the weights.
    """
    bits = int(stored.settings.get("bits") or stored.settings["w_bit"])
    offset = 0 if stored.scheme == "awq" or stored.settings.get("checkpoint_format") == "gptq_v2" else 1
    for name in [name for name in tensors if name.endswith(".qweight")]:
        prefix = name.removesuffix("qweight")
        parts = [tensors.pop(prefix + part, None) for part in ("qweight", "qzeros", "scales", "g_idx")]
        weight, zeros, scales, groups = parts
        if weight is None or zeros is None or scales is None:
            raise ValueError(f"{name} has no qzeros or no scales")
        if stored.scheme == "awq":
            numbers, zeros = _columns(weight, bits, AWQ_ORDER), _columns(zeros, bits, AWQ_ORDER)
        else:
            numbers, zeros = _columns(weight.T, bits).T, _columns(zeros, bits)
        if groups is None:
            groups = torch.arange(numbers.shape[0]) // (numbers.shape[0] // scales.shape[0])
        shifted = numbers.float() - (zeros.float() + offset)[groups.long()]
        yield prefix + "weight", (shifted * scales.float()[groups.long()]).T.to(dtype).contiguous()
    yield from ((name, t.to(dtype) if t.is_floating_point() else t) for name, t in tensors.items())


def _columns(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Numbers of ``bits`` each, ``[n, m·32/bits]``, of int32 words ``[n, m]``, lowest bits first."""
    count = 32 // bits
    shifts = torch.arange(count, dtype=torch.int32) * bits
    numbers = (words.to(torch.int32)[..., None] >> shifts) & (2**bits - 1)
    if order is not None:
        numbers = numbers[..., torch.tensor(order).argsort()]
    return numbers.flatten(-2)
