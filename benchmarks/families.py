"""The table of model families: how each is run while decoding, or why it is refused.

``python benchmarks/families.py`` builds a tiny random model of every causal language model that the installed
transformers has, loads it as a target, and writes what was found to ``benchmarks/families.md``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tiny_families import NOT_TINY, family_names, tiny_family

from dspark_train.decoding.pass_choice import choose_pass
from dspark_train.errors import UserError
from dspark_train.target.frozen import FrozenTarget

TABLE = Path(__file__).parent / "families.md"
TITLES = {
    "ragged": "Decoded in packed passes, all requests at once",
    "general": "Decoded over the model's own cache, each request alone",
    "general, by token": "Decoded over the model's own cache, a token at a time after the prompt",
}


def logits_form(target: FrozenTarget) -> str:
    """What is done to embeddings and logits, in words; empty where nothing is."""
    found = {
        f"embeddings × {target.embedding_scale:.4g}": target.embedding_scale != 1.0,
        f"logits × {target.logit_scale:.4g}": target.logit_scale != 1.0,
        "bias": target.logit_bias is not None,
        f"soft-cap {target.logit_softcap}": target.logit_softcap is not None,
    }
    return ", ".join(words for words, holds in found.items() if holds)


def main() -> None:
    """Write the table."""
    transformers.logging.set_verbosity_error()
    rows: dict[str, list[str]] = {name: [] for name in TITLES}
    refused: list[str] = []
    for kind in family_names():
        if kind in NOT_TINY:
            continue
        try:
            target = FrozenTarget(tiny_family(kind), name=kind)
            way = choose_pass(target).name
        except UserError as error:
            reason = re.sub(
                r" \(relative difference [^)]*\)|ragged: [^;]*; ", "", str(error).removeprefix(f"{kind} ")
            )
            refused.append(f"| `{kind}` | {reason.split('; such')[0].split('; it cannot')[0]} |")
            continue
        rows[way].append(f"`{kind}`" + (f" ({form})" if (form := logits_form(target)) else ""))
        print(f"{kind}: {way}", flush=True)
    listed = [f"| `{kind}` | not tried: {why} |" for kind, why in sorted(NOT_TINY.items())]
    encoders = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*family_names()})
    works = sum(map(len, rows.values()))
    lines = [
        "# Model families",
        "",
        f"Written by `python benchmarks/families.py`, transformers {transformers.__version__}: {works} kinds of model "
        f"decode as they do themselves, {len(refused)} are refused by name. Tiny random models; logits of prompts, "
        "uneven rounds and rejections are held against the model without a cache (`tests/target/test_families.py`).",
        "",
    ]
    for name, title in TITLES.items():
        lines += [f"## {title} ({len(rows[name])})", "", ", ".join(rows[name]), ""]
    lines += ["## Refused, or not tried", "", "| Kind | Why |", "| --- | --- |", *refused, *listed]
    lines += ["", f"Refused for their encoder: {', '.join(f'`{kind}`' for kind in encoders)}."]
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
