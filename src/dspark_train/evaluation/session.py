"""``evaluate`` from its options: opens drafts, decodes what is missing, writes the table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark_train.calibration.io import read_sts
from dspark_train.calibration.sts import Scalings
from dspark_train.decoding.policies import Policy, parse_policy
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.draft.kinds import Draft, load_draft
from dspark_train.errors import UserError
from dspark_train.evaluation.baselines import without_head
from dspark_train.evaluation.context import context_edges
from dspark_train.evaluation.evaluate import (
    DraftMethod,
    Evaluation,
    LookupMethod,
    Method,
    PlainMethod,
    fitting,
    run_evaluation,
)
from dspark_train.evaluation.options import EvaluateOptions
from dspark_train.evaluation.records import RecordFile
from dspark_train.evaluation.suites import Suite, load_suite
from dspark_train.evaluation.summary import Bootstrap, EvaluationResult, summarise
from dspark_train.files import write_result
from dspark_train.hub import local_folder
from dspark_train.run import Run, environment
from dspark_train.target.frozen import FrozenTarget


@dataclass(frozen=True, eq=False)
class OpenDraft:
    """A draft, what it is called, and where it came from."""

    label: str
    draft: Draft
    folder: Path
    sts: dict[float, Scalings]
    """``[γ]`` scalings of its confidences by sampling temperature."""


def draft_folder(path: Path) -> Path:
    """Return the folder of the draft itself, given that or a run's folder; its weights must be safetensors."""
    for folder in (path / "draft", path):
        if (folder / "config.json").is_file():
            files = ("model.safetensors", "model.safetensors.index.json")
            if not any((folder / name).is_file() for name in files):
                raise UserError(f"{folder} has no model.safetensors; other weight files are never opened")
            return folder
    raise UserError(f"{path} holds no draft: neither draft/config.json nor config.json")


def weights_digest(folder: Path) -> str:
    """Return 16 hexadecimal digits that name the weights and the configuration of a draft."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def retap(target: FrozenTarget, layer_ids: Sequence[int]) -> FrozenTarget:
    """Return the same target tapped elsewhere: the model is shared, not copied."""
    if tuple(layer_ids) == tuple(target.layer_ids):
        return target
    return FrozenTarget(target.model, list(layer_ids), target.tokenizer, target.name)


def _sts(path: Path, draft: Draft, options: EvaluateOptions) -> dict[float, Scalings]:
    """Return what a run fitted for its confidences, by sampling temperature.

    Nothing for a draft outside a run, or without a confidence head.
    """
    found = {}
    for temperature in options.temperatures if draft.confidence_head is not None else ():
        label = SamplingRule(temperature, options.top_k, options.top_p).label
        sts = read_sts(Run(path), label, draft.config.block_size)
        if sts is not None:
            found[temperature] = sts
    return found


def open_drafts(options: EvaluateOptions, target: FrozenTarget, own: Draft) -> list[OpenDraft]:
    """Return the run's draft and the further ones, in the order of the table."""
    opened = [
        OpenDraft(
            options.run.resolve().name,
            own,
            options.run / "draft",
            _sts(options.run, own, options),
        )
    ]
    for spec in options.drafts:
        label, _, given = spec.rpartition("=")
        path = local_folder(given)
        folder = draft_folder(path)
        draft = load_draft(folder, dtype=target.dtype).eval()
        draft.to(device=target.device)
        draft.borrow(target)
        opened.append(OpenDraft(label or Path(given).name, draft, folder, _sts(path, draft, options)))
    labels = [one.label for one in opened]
    if len(set(labels)) < len(labels):
        raise UserError(f"drafts: two of {', '.join(labels)} have one name; write --drafts name=folder")
    return opened


def make_methods(
    options: EvaluateOptions, target: FrozenTarget, drafts: Sequence[OpenDraft], policy: Policy
) -> list[Method]:
    """Return all methods: plain, the drafts, then the other baselines."""
    methods: list[Method] = [PlainMethod(target)] if "plain" in options.baselines else []
    for one in drafts:
        tapped = retap(target, one.draft.config.layer_ids)
        key = f"draft:{one.label}"
        methods.append(DraftMethod(tapped, one.draft, key, one.label, "draft", one.sts, policy))
    first = drafts[0]
    if "head_off" in options.baselines and first.draft.markov_head is not None:
        tapped = retap(target, first.draft.config.layer_ids)
        label = f"{first.label}, head off"
        off = without_head(first.draft)
        methods.append(DraftMethod(tapped, off, f"head_off:{first.label}", label, "head_off"))
    if "prompt_lookup" in options.baselines:
        methods.append(LookupMethod(target, first.draft.config.block_size))
    for method in methods:
        method.decoder(SamplingRule())  # a pair that does not fit fails here, before an hour of decoding
    return methods


def _settings(
    options: EvaluateOptions,
    template: Mapping[str, Any],
    suites: Sequence[Suite],
    drafts: Sequence[OpenDraft],
) -> dict[str, Any]:
    """What records depend on."""
    return {
        "template": _text(template),
        "max_new_tokens": options.max_new_tokens,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "policy": options.policy,
        "dtype": options.dtype or "the run's",
        "seed": options.seed,
        "drafts": {one.label: weights_digest(one.folder) for one in drafts},
        "confidence_temperatures": {
            f"{one.label} {SamplingRule(temperature, options.top_k, options.top_p).label}": asdict(fitted)
            for one in drafts
            for temperature, fitted in one.sts.items()
        },
        "suites": {suite.name: _texts_digest(suite) for suite in suites},
    }


def _templates(run: Run, wanted: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Chat-template arguments to render with, and those of training; None where these are not known."""
    if wanted is None:
        return run.template, run.template
    try:
        return wanted, run.template
    except UserError:  # its message asks for what is given here
        return wanted, None


def _text(template: Mapping[str, Any]) -> str:
    return json.dumps(dict(template), sort_keys=True, default=str)


def _texts_digest(suite: Suite) -> str:
    return hashlib.sha256(repr([prompt.turns for prompt in suite.prompts]).encode()).hexdigest()[:16]


def evaluate_run(options: EvaluateOptions, progress: Any = None) -> EvaluationResult:
    """Decode what the run's record file does not hold yet, and write ``evaluation/<name>.json``.

    Args:
        options: what is asked for.
        progress: called with (done, all, latest record) after every prompt.

    Returns:
        The result, as written.
    """
    edges = context_edges(options.by_context)
    suites = [
        load_suite(
            spec, folder=options.suites_dir, limit=options.limit, seed=options.seed, turns=options.turns
        )
        for spec in options.suites
    ]
    policy = parse_policy(options.policy, options.costs)
    if policy.learns:
        raise UserError(
            f"policy {options.policy!r} learns from earlier prompts, and an evaluation measures each by itself; "
            "use it with decode or simulate"
        )
    run = Run(options.run, options.dtype)
    run.required_config()
    template, trained = _templates(run, options.template)
    drafts = open_drafts(options, run.target, run.draft)
    evaluation = Evaluation(
        target=run.target,
        methods=make_methods(options, run.target, drafts, policy),
        options=options,
        template=template,
    )
    suites, left_out = fitting(evaluation, suites)
    folder = options.run / "evaluation"
    path = folder / f"{options.name}.records.jsonl"
    if options.restart:
        path.unlink(missing_ok=True)
    settings = _settings(options, template, suites, drafts)
    file = RecordFile(path, settings)
    run_evaluation(evaluation, suites, file, progress)
    described = [{"key": m.key, "label": m.label, "kind": m.kind} for m in evaluation.methods]
    wanted = {(m.key, t) for m in evaluation.methods for t in options.temperatures}
    records = [record for record in file.records.values() if (record.method, record.temperature) in wanted]
    whole = settings | {
        "protocol": options.protocol,
        "target": Path(run.target.name).name,
        "trained_with": None if trained is None else _text(trained),
        "template_share": run.facts.get("data", {}).get("template_share", 1.0),
        "temperatures": list(options.temperatures),
        "turns": options.turns,
        "block_sizes": {one.label: one.draft.config.block_size for one in drafts},
        "sizes": {suite.name: {"prompts": len(suite.prompts), "whole": suite.whole} for suite in suites},
        "prompts_per_suite": options.prompts,
        "too_long": left_out,
        "environment": environment(),
    }
    bootstrap = Bootstrap(options.confidence, options.resamples, options.seed)
    result = summarise(records, described, whole, bootstrap, edges)
    write_result(folder / f"{options.name}.json", result)
    return result
