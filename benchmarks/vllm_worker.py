"""Serves prompts in vLLM and prints tokens and speculative counters; run by the interpreter of a vLLM
environment.

usage: VENV/bin/python vllm_worker.py JOBS.json

JOBS.json: a list of {"target": DIR, "draft": DIR or null, "prompts": [[ids], ...], "max_tokens": N,
"max_model_len": N, "mend": bool}. Prints a line for each, RESULT and a JSON object: tokens, counters, versions.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(os.cpu_count() or 1),
    "TRITON_INTERPRET": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""vLLM on the CPU: one process, its draft through Triton's own interpreter."""


def mend_grouped_norm() -> bool:
    """Give every draft layer its own key norm where the engine's kernel does not; whether that was needed.

    vLLM norms the context keys of all draft layers in one call, with one row of weights for each layer. The CPU kernel
    of 0.32.0 reads the first row for all of them, so that every layer but the first attends with wrong keys.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models import qwen3_dflash

    weights = torch.tensor([[1.0] * 8, [2.0] * 8])
    found = torch.empty(2, 1, 1, 8)
    ops.rms_norm(found, torch.ones(2, 1, 1, 8), weights, 0.0)
    if torch.allclose(found[1], torch.full((1, 1, 8), 2.0), atol=1e-3):
        return False

    def normalise(model: Any, keys: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(keys)
        for layer, weight in enumerate(model._k_norm_weights):
            ops.rms_norm(normed[layer], keys[layer], weight, model._rms_norm_eps)
        return normed

    qwen3_dflash.DFlashQwen3Model._normalize_context_k = normalise
    return True


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Load the pair, answer the prompts greedily in float32, and read the counters."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    mended = mend_grouped_norm() if job["mend"] else False

    speculative = {"method": "dspark", "model": job["draft"]} if job["draft"] else None
    engine = LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=4,
        max_num_batched_tokens=job["max_model_len"],
        kv_cache_memory_bytes=1 << 30,
        speculative_config=speculative,
        disable_log_stats=False,
        async_scheduling=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    settings = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"])
    answers = engine.generate(prompts, settings, use_tqdm=False)
    counters: dict[str, Any] = {}
    for metric in engine.get_metrics():
        if "spec_decode" in metric.name:
            counters[metric.name.split("spec_decode_")[1]] = getattr(
                metric, "values", getattr(metric, "value", None)
            )
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
    return {"tokens": tokens, "counters": counters, "mended": mended}


def versions() -> dict[str, str]:
    """Of the engine and what it runs on."""
    names = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return {name: names[name] for name in ("vllm", "vllm-cpu", "torch", "transformers") if name in names}


def main() -> None:
    os.environ.update({**ENVIRONMENT, **os.environ})
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        print("RESULT " + json.dumps({**serve(job), "versions": versions()}), flush=True)


if __name__ == "__main__":
    main()
