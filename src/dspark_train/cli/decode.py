"""The ``decode`` command: plain against speculative decoding."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dspark_train.errors import UserError
from dspark_train.lists import Numbers


@dataclass(frozen=True)
class DecodeOptions:
    """Options of ``decode``."""

    run: Path
    """Folder of a finished run."""
    policy: str = "auto"
    """fixed, fixed:K, threshold:P, scheduled or asynchronous. auto: scheduled by costs measured on the spot
    where the draft has a confidence head, else fixed."""
    temperatures: Numbers = Numbers((0.0, 1.0))
    """Sampling temperatures, with commas between; 0 is greedy."""
    prompts: int | None = None
    """Prompts at most; left out, as many as fit into the time."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    batch_size: int = 1
    """Requests decoded at once."""
    top_k: int = 0
    """Tokens kept by sampling; 0 keeps all."""
    top_p: float = 1.0
    """Nucleus kept by sampling; 1 keeps all."""
    seconds: float = 120.0
    """Time for each sampling temperature; prompts of all domains take turns until it is over."""
    split: Literal["heldout", "calibration", "train"] = "heldout"
    """Whose prompts."""
    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Of target and draft. Left out: the run's, which is bfloat16 where the hardware computes in it."""
    costs: Path | None = None
    """Cost table for the schedulers; left out, costs are measured on the spot."""
    seed: int = 0
    """Of sampling and bootstrap."""
    graphs: bool = False
    """Run rounds in a few fixed shapes, captured as CUDA graphs; on a CPU the same shapes, uncaptured."""
    compile: bool = False
    """Compile the norms and MLPs of target and draft (needs a C++ compiler)."""

    def __post_init__(self) -> None:
        few = self.prompts is not None and self.prompts < 1
        if not self.temperatures or few or self.max_new_tokens < 2 or self.seconds <= 0:
            raise UserError(
                f"decode: temperatures {list(self.temperatures)} must not be empty, prompts ({self.prompts}) at least "
                f"1, max_new_tokens ({self.max_new_tokens}) at least 2, seconds ({self.seconds}) above 0"
            )


def decode(options: DecodeOptions) -> None:
    """Decode prompts plainly and speculatively, and compare speed, acceptance and output.

    Both decode the same prompts in this process, in turns. Writes decode.json, and the rounds to
    traces/decode_LABEL.safetensors.
    """
    from dspark_train.calibration.report import trace_label
    from dspark_train.cli.tables import print_comparison
    from dspark_train.decoding.measure import Settings, compare, examples, interleave, to_json
    from dspark_train.decoding.sampling import SamplingRule
    from dspark_train.run import load_run
    from dspark_train.studies.profile import measured_policy

    run = options.run
    rules = [SamplingRule(temperature, options.top_k, options.top_p) for temperature in options.temperatures]
    opened = load_run(run, options.dtype)
    chosen = interleave(opened.data.prompts(options.split))[: options.prompts]
    if not chosen:
        raise UserError(f"run {run}: its data have no {options.split} prompts; name another split")
    picked, named = measured_policy(
        opened.target, opened.draft, options.policy, options.costs, options.batch_size
    )
    content: dict[str, Any] = {
        "policy": named,
        "batch_size": options.batch_size,
        "max_new_tokens": options.max_new_tokens,
        "split": options.split,
        "dtype": str(opened.target.dtype).removeprefix("torch."),
        "seed": options.seed,
        "graphs": options.graphs,
        "compile": options.compile,
        "modes": {},
    }
    (run / "traces").mkdir(exist_ok=True)
    for rule in rules:
        label = trace_label(rule.temperature)
        calibrated = _calibration(run, label, opened.draft)
        settings = Settings(
            options.max_new_tokens,
            options.batch_size,
            picked,
            calibrated,
            options.seed,
            options.graphs,
            options.compile,
        )
        found = compare(opened.target, opened.draft, chosen, rule, settings, options.seconds)
        found.trace.save(run / "traces" / f"decode_{label}.safetensors")
        content["modes"][label] = to_json(found, options.seed) | {"sts": calibrated}
        if rule.greedy:
            content["identical"] = not found.divergences
        if rule.greedy or len(rules) == 1:
            content["examples"] = examples(found, opened.target.tokenizer, 12)
        print_comparison(found, label, content["modes"][label])
    (run / "decode.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {run / 'decode.json'}")


def _calibration(run: Path, label: str, draft: Any) -> list[float] | None:
    """Temperatures of the confidences at this sampling temperature, where the run is calibrated."""
    from dspark_train.calibration.io import Calibration

    for name in (f"calibration_{label}.json", "calibration.json"):
        if draft.confidence_head is not None and (run / name).is_file():
            return list(Calibration.load(run / name, draft.config.block_size).temperatures)
    return None
