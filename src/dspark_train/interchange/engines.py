"""What each serving engine cannot do with a draft, said by name before anything is written.

The facts were read from the engines' own loaders, at the versions named in :data:`VERSIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from dspark_train.run import STS_FILE

Engine = Literal["vllm", "sglang"]

ExportFormat = Literal["native", "speculators", "sglang", "dflash"]

ENGINES: dict[ExportFormat, tuple[Engine, ...]] = {
    "native": ("vllm", "sglang"),
    "speculators": ("vllm",),
    "sglang": ("sglang",),
    "dflash": (),
}
"""Engines that each format is for."""

DFLASH_WARNING = (
    "vLLM 0.27 to 0.33 refuses sample_from_anchor in DFlash drafts, and z-lab's and SGLang's DFlash loaders "
    "ignore it and would accept almost nothing: to serve this draft, export it as native"
)
"""Why no engine serves a DFlash export."""

VERSIONS: dict[Engine, str] = {"vllm": "vLLM 0.27 to 0.33", "sglang": "SGLang 0.5.23"}
"""Engine versions whose loaders the rules below describe."""

VLLM_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Attention head sizes that vLLM's attention kernels share."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rope scalings that the draft, the engines and the independent reader all compute alike."""


def problems(config: Mapping[str, Any], engine: Engine) -> list[str]:
    """Return why ``engine`` cannot serve a draft with the acceptance that it has here; empty where it can.

    Args:
        config: canonical native configuration, as it would be written.
        engine: to serve it.
    """
    if config.get("layer_family") == "gemma4":
        return gemma4_problems(config, engine)
    rope = config["rope_parameters"] or {}
    kind, partial = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    rules = {
        "markov_rank 0 (no sequential head) crashes its loader": config["markov_rank"] == 0,
        "its DSpark draft samples from the anchor on; this draft does not": not config["sample_from_anchor"],
        f"mask_token_id {config['mask_token_id']} is outside the vocabulary {config['vocab_size']}": (
            config["mask_token_id"] >= config["vocab_size"]
        ),
        f"rope_type {kind!r} is not one of {', '.join(ROPE_TYPES)}": kind not in ROPE_TYPES,
        "it scales yarn's rotations by factor alone, and draft.rope sets attention_factor": (
            kind == "yarn" and rope.get("attention_factor") is not None
        ),
        "it applies no soft-cap to draft logits, and this target caps at "
        f"{config['final_logit_softcapping']}: "
        "drafts, and so acceptance, differ from what is measured here": bool(
            config["final_logit_softcapping"]
        ),
    }
    if engine == "vllm":
        rules |= {
            f"its loader knows vanilla heads only, not {config['markov_head_type']}": (
                config["markov_head_type"] in ("gated", "rnn")
            ),
            "it scales yarn's rotations by factor alone, and draft.rope sets mscale and mscale_all_dim": bool(
                kind == "yarn" and rope.get("mscale") and rope.get("mscale_all_dim")
            ),
            f"head_dim {config['head_dim']} is not one of {', '.join(map(str, VLLM_HEAD_DIMS))}": (
                config["head_dim"] not in VLLM_HEAD_DIMS
            ),
        }
    else:
        rules |= {
            "it embeds draft tokens with the target's unscaled table; this target scales its embeddings by "
            f"{config['embedding_scale']:g}": config["embedding_scale"] != 1.0,
            "its layers with a window are causal within a block, and this draft's see all of it (train with "
            "draft.sliding_window_non_causal false)": config["sliding_window_non_causal"],
            "it has no reduced draft vocabulary": config.get("draft_vocab_size") is not None,
            f"it rotates whole heads; partial_rotary_factor is {partial}": partial not in (None, 1.0),
            f"its feed-forward layers know silu only, not {config['hidden_act']}": config["hidden_act"]
            != "silu",
        }
    return [f"{VERSIONS[engine]}: {text}" for text, wrong in rules.items() if wrong]


def gemma4_problems(config: Mapping[str, Any], engine: Engine) -> list[str]:
    """Return why ``engine`` cannot serve a Gemma 4 draft; empty where it can."""
    if engine == "sglang":
        return [f"{VERSIONS[engine]}: it has no Gemma4DSparkModel"]
    rules = {
        "it caches one projection for keys and values, and this target projects values of their own "
        "(attention_k_eq_v false)": not config["attention_k_eq_v"],
        f"its loader knows vanilla heads only, not {config['markov_head_type']}": (
            config["markov_head_type"] in ("gated", "rnn")
        ),
        "it has no reduced draft vocabulary for Gemma 4": config.get("draft_vocab_size") is not None,
    }
    return [f"{VERSIONS[engine]}: {text}" for text, wrong in rules.items() if wrong]


def serving_commands(
    engines: Mapping[Engine, list[str]],
    target: str,
    folder: str,
    block_size: int,
    *,
    calibrated: bool,
    folded: bool,
) -> list[str]:
    """Return the command that serves a written draft in each engine that can, with the versions it is for.

    Args:
        engines: problems of each engine that the layout is for.
        target: name or path of the target.
        folder: of the draft.
        block_size: γ.
        calibrated: the file of scalings lies in the folder.
        folded: a temperature is folded into the confidence head.
    """
    commands = []
    if "vllm" in engines and not engines["vllm"]:
        adaptive = ', "enable_adaptive_verification": true' if folded else ""
        settings = (
            f'"method": "dspark", "model": "{folder}", "num_speculative_tokens": {block_size}{adaptive}'
        )
        versions = "vLLM 0.28 to 0.33" if folded else VERSIONS["vllm"]
        commands.append(f"# {versions}\nvllm serve {target} --speculative-config '{{{settings}}}'")
    if "sglang" in engines and not engines["sglang"]:
        calibration = f" --speculative-dspark-confidence-sts-path {folder}/{STS_FILE}" if calibrated else ""
        commands.append(
            f"# {VERSIONS['sglang']}\npython -m sglang.launch_server --model-path {target} "
            f"--speculative-algorithm DSPARK --speculative-draft-model-path {folder} "
            f"--speculative-num-draft-tokens {block_size + 1}{calibration}"
        )
    return commands
