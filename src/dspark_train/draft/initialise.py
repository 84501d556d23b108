"""Starting points of a draft's weights."""

from __future__ import annotations

import torch

from dspark_train.draft.model import DSparkDraft
from dspark_train.draft.recipe import DraftRecipe
from dspark_train.errors import UserError
from dspark_train.target.frozen import FrozenTarget


@torch.no_grad()
def initialise(draft: DSparkDraft, recipe: DraftRecipe, target: FrozenTarget) -> None:
    """Apply the recipe's starting point to a freshly made draft.

    Args:
        draft: whose weights are random.
        recipe: says what to start from.
        target: the draft's target.

    Raises:
        UserError: the target's layers have another shape than the draft's.
    """
    draft.norm.weight.fill_(recipe.norm_init)
    if recipe.init == "target_layers":
        copy_target_layers(draft, target)


@torch.no_grad()
def copy_target_layers(draft: DSparkDraft, target: FrozenTarget) -> None:
    """Start the backbone from the target's last decoder layers, and the context from its deepest tapped state.

    Projections and norms are copied by name; norms that the target lacks keep their start. Gemma 4 layers come from
    the target's last full-attention layers, which have their shape.
    """
    sources, kind = list(target.layers), "layers"
    if draft.config.layer_family == "gemma4":
        kinds = target.config.layer_types
        sources = [layer for layer, name in zip(sources, kinds, strict=True) if name == "full_attention"]
        kind = "layers of full attention"
    if len(sources) < len(draft.layers):
        raise UserError(
            f"draft.init target_layers: the draft has {len(draft.layers)} layers, the target only {len(sources)} {kind}"
        )
    for layer, source in zip(draft.layers, sources[-len(draft.layers) :], strict=True):
        theirs = dict(source.named_parameters())
        for name, parameter in layer.named_parameters():
            if name not in theirs:
                continue
            if theirs[name].shape != parameter.shape:
                raise UserError(
                    f"draft.init target_layers: {name} is {tuple(theirs[name].shape)} in the target and "
                    f"{tuple(parameter.shape)} in the draft; use init: random"
                )
            parameter.copy_(theirs[name])
    size = draft.config.hidden_size
    draft.fc.weight.normal_(0.0, draft.config.initializer_range / 4)
    draft.fc.weight[:, -size:] += torch.eye(size, device=draft.fc.weight.device, dtype=draft.fc.weight.dtype)
