"""Gathers what a plan needs to know: the recipe, the target's config, the draft on ``meta``, the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from dspark_train.cli.plan import PlanOptions
from dspark_train.cli.recipe import parse_recipe
from dspark_train.data.dataset import PreparedSet, SplitCounts
from dspark_train.data.module import DSparkDataModule
from dspark_train.draft.eagle3 import Eagle3Draft
from dspark_train.draft.kinds import Draft
from dspark_train.draft.model import DSparkDraft
from dspark_train.draft.recipe import DraftRecipe, build_config, build_eagle3_config
from dspark_train.errors import UserError
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
from dspark_train.target.frozen import resolve_path
from dspark_train.training.module import answer_token_counts, choose_vocabulary
from dspark_train.training.plan import DataFacts, Plan, make_plan
from dspark_train.training.terms import ObjectiveConfig

LARGEST_FILE = 64 * 2**20
"""Bytes of the largest JSONL file that is tokenized for a plan; a larger one is better prepared first."""

QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
"""What the configs of the Qwen3 targets have in common."""
KNOWN_TARGETS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-14B": {
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 17408,
        "tie_word_embeddings": False,
    },
}
"""What the configs of the recipes' targets say on top of :data:`QWEN3`, so that planning them needs no network."""


def plan(arguments: Sequence[str]) -> Plan:
    """Say what a recipe will need, from its configs, the target's and the data.

    Args:
        arguments: files and flags of ``fit``, and :class:`PlanOptions`.

    Raises:
        UserError: the recipe cannot work, or the target's config cannot be found.
    """
    config = parse_recipe(arguments, PlanOptions).as_dict()
    return plan_of(config, PlanOptions(**{field.name: config[field.name] for field in fields(PlanOptions)}))


def plan_of(config: Mapping[str, Any], options: PlanOptions) -> Plan:
    """Plan a parsed recipe; errors as of :func:`plan`."""
    target, recipe = TargetConfig(**config["target"]), DraftRecipe(**config["draft"])
    data, notes = DSparkDataModule(**config["data"]), list[str]()
    model = target_model(target, options.target_config)
    data.tokenizer = find_tokenizer(target)
    open_data(data)
    draft = draft_model(recipe, target, model, data, notes)
    facts = data_facts(data, options, notes)
    budget = ObjectiveConfig(**config["objective"]).memory_budget
    result = make_plan(config["trainer"], target, model, draft, data, facts, budget, options.gpu)
    result.notes += notes
    return result


def target_model(target: TargetConfig, config_file: Path | None = None) -> Any:
    """The target on the ``meta`` device: all of its shapes, and no weight.

    Its config comes from ``config_file``, a folder or a file that the target's name gives, :data:`KNOWN_TARGETS`, the
    embedded default, or the hub.

    Raises:
        UserError: there is no config, or it is none of a causal language model.
    """
    name = target.name_or_path
    try:
        if config_file is None and name in KNOWN_TARGETS:
            config: Any = Qwen3Config(**QWEN3, **KNOWN_TARGETS[name])
        else:
            config = AutoConfig.from_pretrained(config_file or local_path(target), **hub_options(target))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the config of target {name!r} cannot be found: give --target_config a config.json"
        ) from error
    if reason := refusal(config):
        raise UserError(f"the target {name} {reason}")
    try:
        with torch.device("meta"):
            kind = auto_class(config) or AutoModelForCausalLM
            model = kind.from_config(config, trust_remote_code=target.trust_remote_code)
        drop_towers(model)
        return model
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"the config of target {name!r} makes no causal language model: {str(error).splitlines()[0]}"
        ) from error


def local_path(target: TargetConfig) -> str:
    """Where the target's config is: a folder or a JSON file, no weights needed, or a name on the hub."""
    return target.name_or_path if Path(target.name_or_path).exists() else resolve_path(target)


def find_tokenizer(target: TargetConfig) -> Any:
    """The target's tokenizer, where it is on this machine; else None."""
    return load_tokenizer(local_path(target), target, local_files_only=True)


def open_data(data: DSparkDataModule) -> None:
    """Open the data where they are at hand: a prepared set, or a file that is quickly tokenized.

    Raises:
        UserError: a set for another target, or damaged.
    """
    if data.path.is_dir() and data.tokenizer is None:
        data.prepared = PreparedSet(data.path)
    elif data.path.is_dir() or (
        data.tokenizer is not None and data.path.is_file() and data.path.stat().st_size <= LARGEST_FILE
    ):
        data.setup()


def draft_model(
    recipe: DraftRecipe, target: TargetConfig, model: Any, data: DSparkDataModule, notes: list[str]
) -> Draft:
    """The recipe's draft on the ``meta`` device, as training would build it.

    Args:
        recipe: of the draft.
        target: names the taps.
        model: the target.
        data: whose answers decide a vocabulary of some coverage.
        notes: gets a sentence where they are not at hand.
    """
    layers, vocabulary = (
        len(decoder_layers(language_model(model))),
        model.get_output_embeddings().weight.shape[0],
    )
    taps = spread_layer_ids(layers) if target.layer_ids is None else target.layer_ids
    if recipe.kind == "eagle3":
        chain = build_eagle3_config(
            recipe, text_config(model.config), check_layer_ids(taps, layers), vocab_size=vocabulary
        )
        with torch.device("meta"):
            return Eagle3Draft(chain)
    config = build_config(
        recipe,
        text_config(model.config),
        check_layer_ids(taps, layers),
        vocab_size=vocabulary,
        num_layers=layers,
    )
    if recipe.vocab_size is not None:
        config.draft_vocab_size = min(recipe.vocab_size, vocabulary)
    elif recipe.vocab_coverage is not None and data.prepared is not None:
        counts = answer_token_counts(data.store(data.train_split), vocabulary)
        config.draft_vocab_size = choose_vocabulary(counts, None, recipe.vocab_coverage).numel()
    elif recipe.vocab_coverage is not None:
        notes.append(
            "draft.vocab_coverage depends on the training answers, which are not at hand: the whole vocabulary is "
            "counted, so parameters, memory and FLOPs are upper bounds"
        )
    config.check()
    with torch.device("meta"):
        return DSparkDraft(config)


def data_facts(data: DSparkDataModule, options: PlanOptions, notes: list[str]) -> DataFacts:
    """Training sequences, their mean length and supervised share: as given, of the data, or assumed.

    Args:
        data: opened where they are at hand.
        options: win over the data.
        notes: gets a sentence for what was assumed.
    """
    counts = SplitCounts()
    if data.prepared is not None:
        counts = data.prepared.splits.get(data.train_split, counts)
    longest = data.options.max_length
    if data.prepared is not None and counts.examples:
        longest = int(data.store(data.train_split).lengths.max())
    if counts.examples:
        length, share = counts.tokens / counts.examples, counts.supervised / max(1, counts.tokens)
    else:
        length, share = data.options.max_length / 4, 0.6
    facts = DataFacts(
        samples=options.samples or counts.examples or None,
        length=options.length or length,
        longest=longest,
        answer_share=share if options.answer_share is None else options.answer_share,
    )
    if not counts.examples and options.length is None:
        notes.append(
            f"mean length assumed {facts.length:.0f} tokens, {facts.answer_share:.0%} of them answers: give --length"
        )
    return facts
