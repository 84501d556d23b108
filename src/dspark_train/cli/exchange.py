"""The commands of this package: ``export``, ``import``, ``serve-check``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

from dspark_train.errors import UserError
from dspark_train.interchange.engines import ExportFormat


def export(
    run: Path,
    format: ExportFormat = "native",
    output: Path | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    fold_temperature: bool = False,
) -> None:
    """Write a run's draft in the layout of a serving engine, with a model card, and read it back.

    Args:
        run: folder of a finished run.
        format: ``native`` for vLLM and SGLang, ``speculators`` for vLLM, ``sglang`` for SGLang alone,
            ``dflash`` for drafts without heads.
        output: folder to write; left out: ``RUN/export/FORMAT``.
        dtype: of the weights; ``auto`` is that of the target in the run.
        fold_temperature: divide the confidence logits by one temperature, for engines that take none; says
            what that costs in calibration error.
    """
    import torch

    from dspark_train.interchange.export import TargetWeights, export_draft
    from dspark_train.interchange.temperature import single_temperature
    from dspark_train.report.model_card import CardFacts, copy_plots, model_card, write_tokenizer
    from dspark_train.run import STS_FILE, Run

    opened = Run(run)
    cost = single_temperature(opened) if fold_temperature else None
    folder = output or run / "export" / format
    kind = None if dtype == "auto" else getattr(torch, dtype)
    weights = TargetWeights.of(opened.target)
    result = export_draft(
        opened.draft,
        weights,
        folder,
        format,
        kind,
        cost.temperature if cost else None,
        warn=lambda line: print(f"warning: {line}", flush=True),
    )
    if opened.sts_path().is_file() and cost is None and result.config.get("enable_confidence_head"):
        shutil.copy2(opened.sts_path(), folder / STS_FILE)
    write_tokenizer(opened.target, folder)
    copy_plots(opened, folder)
    gap = result.read_back
    facts = CardFacts(
        folder=folder,
        target=weights.name,
        format=format,
        config=result.config,
        notes=result.notes,
        warnings=result.warnings,
        commands=result.commands,
        equal_drafts=gap.drafts,
        logits_gap=gap.logits,
        confidence_gap=gap.confidence,
        folding=cost.sentence() if cost else "",
    )
    (folder / "README.md").write_text(model_card(opened, facts), encoding="utf-8")
    print(f"wrote {folder} ({format}, {result.config['dtype']})")
    print(f"read back: {gap.drafts} draft tokens equal, logits within {gap.logits:.1e}")
    for line in (*result.notes, *((cost.sentence(),) if cost else ())):
        print(f"note: {line}")
    for line in result.commands:
        print(line)


def import_draft(
    source: Path,
    output: Path,
    target: str,
    layout: Literal["auto", "native", "speculators", "dflash", "specforge"] = "auto",
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    trust_remote_code: bool = False,
) -> None:
    """Read a draft made elsewhere, check it against its target, and write it as a native folder.

    No code that the draft's folder brings along is ever run.

    Args:
        source: folder of the draft, in any known layout.
        output: folder to write.
        target: folder or hub id of the target.
        layout: of the source; ``auto`` detects it.
        dtype: of the target.
        trust_remote_code: run Python code that the target's folder brings along. Only for sources that you
            trust.
    """
    from dspark_train.interchange.detect import detect, read_draft
    from dspark_train.interchange.importing import import_folder
    from dspark_train.target.config import TargetConfig
    from dspark_train.target.frozen import FrozenTarget

    if output.exists() and any(output.iterdir()):
        raise UserError(f"output {output} is not empty; choose another folder")
    chosen = detect(source) if layout == "auto" else layout
    taps = read_draft(source, chosen).config["target_layer_ids"]
    config = TargetConfig(target, layer_ids=taps, dtype=dtype, trust_remote_code=trust_remote_code)
    result = import_folder(source, output, FrozenTarget.load(config), chosen)
    print(f"read {source} as {result.layout}; wrote {output}")
    for note in result.notes:
        print(f"note: {note}")
    if result.read_back is not None:
        gap = result.read_back
        print(f"compared with the source: {gap.drafts} draft tokens equal, logits within {gap.logits:.1e}")


def serve_check(
    run: Path,
    url: str,
    plain_url: str | None = None,
    prompts: Path | None = None,
    limit: int = 8,
    max_new_tokens: int = 64,
    key_variable: str | None = None,
    dtype: Literal["auto", "bfloat16", "float32"] | None = None,
    output: Path | None = None,
) -> None:
    """Compare what a running vLLM or SGLang server accepts with this project's decoder, on the same prompts.

    Greedy, one request at a time, fixed verify length. Run nothing else on the server meanwhile: its
    counters are read before and after.

    Args:
        run: folder of the run whose draft is served.
        url: address of the server, such as http://localhost:8000.
        plain_url: address of a server of the same target without a draft, to compare completions with.
        prompts: JSONL file with one ``{"prompt_token_ids": [...]}`` or ``{"prompt": "..."}`` a line; left
            out: held-out prompts of the run.
        limit: prompts to use.
        max_new_tokens: longest completion.
        key_variable: name of the environment variable that holds the server's key, where it wants one.
        dtype: that the server computes in: two greedy decodings agree token for token only in one dtype. Left out: the
            run's.
        output: JSON file for the numbers; left out: ``RUN/serve_check.json``.
    """
    from dspark_train.interchange.native import dtype_name
    from dspark_train.interchange.serve_check import Server, ask, compare, own_rounds, side_by_side, to_json
    from dspark_train.run import Run

    server = Server(url, key_variable)
    server.engine()
    plain_server = Server(plain_url, key_variable) if plain_url else None
    opened = Run(run, dtype)
    if prompts is None:
        opened.data.setup()
        ids = [list(prompt.ids) for prompt in opened.data.prompts("heldout")[:limit]]
    else:
        ids = read_prompts(prompts, opened.target.tokenizer)[:limit]
    if not ids:
        raise UserError("serve-check: there is no prompt; name a file with `--prompts`")
    tokens, trace = own_rounds(opened.target, opened.draft, ids, max_new_tokens)
    served = ask(server, ids, max_new_tokens)
    plain = ask(plain_server, ids, max_new_tokens) if plain_server else None
    comparison = compare(served, tokens, trace, plain)
    print("\n".join(side_by_side(comparison)))
    if comparison.identical < comparison.prompts and dtype is None:
        kind = dtype_name(opened.target.dtype)
        print(f"this project decoded in {kind}; name the server's dtype with --dtype where it is another")
    path = output or run / "serve_check.json"
    path.write_text(json.dumps(to_json(comparison), indent=2) + "\n", encoding="utf-8")


def read_prompts(path: Path, tokenizer: Any) -> list[list[int]]:
    """Read token ids of prompts from a JSONL file; texts go through the tokenizer without a chat template."""
    if not path.is_file():
        raise UserError(f"prompts {path}: no such file")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found.append(
                row["prompt_token_ids"]
                if "prompt_token_ids" in row
                else tokenizer(row["prompt"])["input_ids"]
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number}: expected prompt_token_ids or prompt ({error})") from error
    return found
