"""A realistic run folder, made of numbers with the shape of real ones."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import random
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from dspark_train.calibration.fit import calibrate_traces
from dspark_train.calibration.fit import write_report as write_calibration
from dspark_train.decoding.acceptance import acceptance_by_position
from dspark_train.files import write_result
from dspark_train.structures import DecodingTrace
from dspark_train.studies.online_threshold import threshold_drift
from dspark_train.studies.rounds import (
    AcceptanceStudy,
    ThresholdStudy,
    drift_study,
    threshold_sweep,
)
from dspark_train.studies.simulate import LoadPoint, LoadStudy

GAMMA = 7


def _mode(tau_shift: float, temperature: float) -> dict:
    conditional = [0.62 + tau_shift - 0.012 * k for k in range(GAMMA)]
    cumulative = [math.prod(conditional[: k + 1]) for k in range(GAMMA)]
    tau = 1 + sum(cumulative)
    mode = {
        "temperature": temperature,
        "prompts": 40,
        "tau": tau,
        "acceptance": {"conditional": conditional, "cumulative": cumulative},
        "verified_rows_per_round": 5.1,
        "plain": {"tokens_per_second": 21.4, "round_milliseconds": 46.1},
        "speculative": {
            "tokens_per_second": 21.4 * tau * 0.74,
            "round_milliseconds": 62.4,
            "milliseconds": {"draft": 6.1, "head": 1.9, "schedule": 0.2, "verify": 49.0, "sampling": 0.1},
        },
        "speedup": {
            "value": tau * 0.74,
            "low": tau * 0.61,
            "high": tau * 0.88,
            "spread": "over prompts (10–90 %)",
        },
        "domains": {"math": {"tau": tau + 0.41}, "code": {"tau": tau + 0.1}, "chat": {"tau": tau - 0.33}},
    }
    if temperature == 0:
        mode["identical"] = {"prompts": 40, "failures": 0}
    return mode


def make_trace(seed: int, rounds: int = 1500) -> DecodingTrace:
    """Rounds of an over-confident draft: acceptance is drawn from milder logits than the ones it states."""
    generator = torch.Generator().manual_seed(seed)
    true_logits = torch.randn(rounds, GAMMA, generator=generator) * 1.2 + 1.1
    kept = torch.rand(rounds, GAMMA, generator=generator) < true_logits.sigmoid()
    accepted = kept.int().cumprod(1).sum(1)
    request = torch.arange(rounds) * 30 // rounds
    return DecodingTrace(
        request=request,
        anchor=torch.arange(rounds),
        proposed=torch.zeros(rounds, GAMMA, dtype=torch.int64),
        confidence_logits=true_logits * 1.6,
        verify_length=torch.full((rounds,), GAMMA),
        accepted=accepted,
        committed=accepted + 1,
        domains=tuple(("math", "code", "chat")[i % 3] for i in range(30)),
    )


def write_metrics(path: Path, steps: int = 600) -> None:
    rng = random.Random(1)
    names = [
        "step",
        "epoch",
        "train/loss",
        "train/ce",
        "train/tv",
        "train/confidence",
        "train/tau",
        "val/loss",
    ]
    names += [
        "val/ce",
        "val/tv",
        "val/confidence",
        "val/tau",
        "decode/tau",
        "decode/speedup",
        "lr",
        "grad_norm",
    ]
    names += ["memory_gib", "time/data", "time/target", "time/draft", "decode/ece", "tokens_per_second"]
    names += [*(f"val/accept_{k + 1}" for k in range(GAMMA))]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for step in range(1, steps + 1):
            fade = math.exp(-step / 160)
            row = {"step": step, "epoch": step // 100}
            row["train/loss"] = 1.35 + 2.1 * fade + rng.gauss(0, 0.05)
            row["train/tau"] = 2.25 - 1.2 * fade + rng.gauss(0, 0.05)
            row |= {"memory_gib": 3.5, "time/data": 0.01, "time/target": 0.4, "time/draft": 0.59}
            row["lr"] = 3e-3 * min(1, step / 24) * 0.5 * (1 + math.cos(math.pi * step / steps))
            row["grad_norm"] = 0.8 + 2 * fade + abs(rng.gauss(0, 0.1))
            row["tokens_per_second"] = 840 + rng.gauss(0, 25)
            writer.writerow(row)
            if step % 60 == 0:
                row = {
                    "step": step,
                    "val/loss": 1.48 + 2 * fade,
                    "val/ce": 2.3 + 3 * fade,
                    "val/tv": 0.9 + 0.7 * fade,
                }
                row |= {"val/confidence": 0.48 + 0.2 * fade, "val/tau": 2.15 - 1.15 * fade}
                row |= {
                    "decode/tau": 2.2 - 1.15 * fade,
                    "decode/speedup": 1.62 - 0.7 * fade,
                    "decode/ece": 0.08,
                }
                row |= {f"val/accept_{k + 1}": (0.62 - 0.02 * k) * (1 - fade) for k in range(GAMMA)}
                writer.writerow(row)


def write_run(path: Path) -> Path:
    """Write a complete run folder with the layout of a real one."""
    path.mkdir(parents=True)
    for folder in ("draft", "studies", "evaluation"):
        (path / folder).mkdir()

    def save(name: str, value: dict) -> None:
        (path / name).write_text(json.dumps(value))

    config = {
        "seed_everything": 0,
        "target": {"name_or_path": "smollm2-135m-instruct"},
        "draft": {"num_layers": 2, "block_size": 7, "head": "vanilla"},
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "data": {"global_batch_size": 8, "max_length": 512, "num_anchors": 32},
        "trainer": {"max_steps": 600, "precision": "32-true"},
        "run": {"folder": str(path)},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    write_metrics(path / "metrics.csv")
    save(
        "run.json",
        {
            "wall_seconds": {"fit": 1012.4, "calibrate": 71.0, "decode": 122.0},
            "versions": {"dspark-train": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
            "machine": "a processor, 2 threads",
            "commit": "0123456",
            "finished": True,
        },
    )
    weights = {"fc.weight": torch.zeros(30, 40), "embed_tokens.weight": torch.zeros(500, 30)}
    save_file(weights, path / "draft" / "model.safetensors")
    save(
        "draft/config.json",
        {
            "num_hidden_layers": 2,
            "block_size": GAMMA,
            "markov_head_type": "vanilla",
            "markov_rank": 128,
            "target_layer_ids": [1, 8, 15, 22, 28],
            "draft_vocab_size": 7080,
            "enable_confidence_head": True,
            "dtype": "float32",
        },
    )
    text = [
        "Let",
        " us",
        " count",
        " the",
        " apples",
        ":",
        "\n\n",
        "1.",
        " She",
        " starts",
        " with",
        " ",
        "1",
        "2",
        ".",
    ]
    origin = ["target", "draft", "draft", "target", "draft", "draft", "draft", "target", "draft", "target"]
    origin += ["draft", "draft", "draft", "draft", "target"]
    sample = {"tokens": text * 4, "origin": origin * 4}
    save(
        "decode.json",
        {
            "policy": "scheduled",
            "batch_size": 1,
            "split": "heldout",
            "modes": {"greedy": _mode(0.0, 0.0), "t1.0": _mode(-0.06, 1.0)},
            "examples": [
                {
                    "prompt": "Ann has twelve apples and eats three. How many are left?",
                    "domain": "math",
                    **sample,
                },
                {
                    "prompt": "Write <b>bold</b> & \"quoted\" <script>alert('x')</script>",
                    "domain": "code",
                    **sample,
                },
                {"prompt": "Tell me about the moon.", "domain": "chat", **sample},
            ],
        },
    )
    write_calibration(path / "calibration_report.json", [calibrate_traces(make_trace(0), make_trace(1))])
    trace = make_trace(1)
    of = {"split": "heldout", "sampling_temperature": 0.0, "rounds": len(trace.request)}
    groups = {part.group: part for part in acceptance_by_position(trace)}
    write_result(path / "studies" / "acceptance.json", AcceptanceStudy(**of, groups=groups))
    sweep = ThresholdStudy(**of, groups=threshold_sweep(trace))
    write_result(path / "studies" / "threshold_sweep.json", sweep)
    drifting = drift_study(make_trace(0), trace)
    assert drifting is not None
    write_result(path / "studies" / "online.json", dataclasses.replace(drifting, **of))
    moving = threshold_drift(make_trace(0), trace, 0.8)
    assert moving is not None
    write_result(path / "studies" / "online_threshold.json", dataclasses.replace(moving, **of))
    loads = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    policies = {
        policy: [
            LoadPoint(
                requests=r,
                throughput=21 * gain * r / (1 + waste * r / 40),
                throughput_error=0.1,
                per_user=21 * gain / (1 + waste * r / 40),
                tau=1.0 + gain,
                verified_per_request=budget / (1 + (r / 60 if policy == "scheduled" else 0)),
                acceptance_rate=0.5 if budget else None,
                tokens_per_row=1.0,
                seconds_per_round=0.05,
                extrapolated=r > 128,
                rate=r / 10,
                first_token_seconds=0.1,
                prompt_share=0.1,
            )
            for r in loads
        ]
        for policy, gain, waste, budget in (
            ("plain", 1.0, 0.3, 0.0),
            ("one draft token", 1.3, 0.5, 1.0),
            ("fixed γ", 1.6, 1.3, 7.0),
            ("threshold", 1.58, 0.8, 3.1),
            ("scheduled", 1.62, 0.5, 5.4),
        )
    }
    load = LoadStudy(
        **of,
        block_size=GAMMA,
        context=256,
        machine="a processor",
        measured_rows=128,
        arrivals="poisson",
        slots=512,
        cache_tokens=90_000,
        prompt_tokens=80.0,
        answer_tokens=64.0,
        speeds=[20.0, 30.0],
        policies=policies,
    )
    write_result(path / "studies" / "simulate.json", load)
    save("evaluation/suites.json", suites_summary())
    return path


def _estimate(value: float, width: float = 0.08) -> dict:
    return {"value": value, "low": value - width, "high": value + width}


def suites_summary() -> dict:
    methods = [
        ("plain", "plain"),
        ("draft", "draft"),
        ("draft-head_off", "head off"),
        ("lookup", "prompt lookup"),
    ]
    gains = {"draft": 2.2, "draft-head_off": 1.9, "lookup": 1.35}
    suites = {"gsm8k": ("math", 0.4), "humaneval": ("code", 0.15), "mt-bench": ("chat", -0.25)}

    def cell(key: str, shift: float) -> dict:
        tau = 1.0 if key == "plain" else gains[key] + shift
        conditional = [] if key == "plain" else [(tau - 1) / 2 * (0.97**k) for k in range(GAMMA)]
        return {
            "tau": _estimate(tau, 0 if key == "plain" else 0.08),
            "conditional": conditional,
            "speedup": _estimate(tau * 0.75),
            "tokens_per_second": 20 * tau,
        }

    results = []
    for temperature in (0.0, 1.0):
        results.append(
            {
                "temperature": temperature,
                "suites": {
                    name: {
                        "domain": domain,
                        "prompts": 20,
                        "methods": {key: cell(key, shift - temperature / 10) for key, _ in methods},
                    }
                    for name, (domain, shift) in suites.items()
                },
                "macro": {key: cell(key, 0.1 - temperature / 10) for key, _ in methods},
                "differences": [
                    {"first": "draft", "second": "draft-head_off", "macro": _estimate(0.3), "relative": 0.158}
                ],
            }
        )
    return {
        "settings": {"confidence": 0.95},
        "methods": [{"key": key, "label": label} for key, label in methods],
        "results": results,
    }


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete synthetic run, made once."""
    return write_run(tmp_path_factory.mktemp("runs") / "quickstart")
