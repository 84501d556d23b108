"""A start of the whole draft in closed form: a linear predictor from the target's features and the token before.

What the target says after a token is, to a fair part, a linear function of its features one position earlier and of
that token. Least squares finds the function in seconds, and a draft has room for it:

    fc              a whitened basis of the feature directions that matter, a constant, and a mark of position 0
    queries, keys   of the first layer: constant vectors, which rotary positions turn into a preference for the end
                    of the context, whatever is written there
    values, o_proj  from the basis to the target's last hidden state
    final norm      the usual size of each of its dimensions
    head            the token's own part of the prediction: a table of one vector per token, at the head's rank

One group of heads serves the anchor's slot, the other the masked slots, which are further from their context; a
slot sends the heads of the other group to position 0, where there is nothing to read. All other updates of the
residual stream start as zero. A random start has to find out first that the end of the context is where to look,
which takes it hundreds of steps.

    n  samples      F  size of the features, m·d      G  query heads per key-value head
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_train.draft.heads import SequentialHead
from dspark_train.draft.layers import DraftAttention
from dspark_train.draft.markov_start import set_factors
from dspark_train.draft.model import DSparkDraft
from dspark_train.errors import UserError

SLOT_WEIGHTS = (1.0, 0.8, 0.6, 0.5)
"""Weights of the anchor's slot and of the masked ones that one common map is fitted to; later ones say too little."""
_RIDGE = 1e-3
_TABLE_PRIOR = 5.0
"""Pseudo-observations of the linear map behind every token's own vector."""
_RESIDUAL = 16.0
"""Size of the first layer's update: far above the token embedding that the residual stream begins with."""
_PREDICTION = 0.5
"""Size of a prediction, where what it predicts has size 1 before the final norm's weight."""
_SHARPNESS = 2.0
"""Weights of the query and key norms."""
_STIFFNESS = 20.0
"""Size of the query and key projections. The norms after them take it out again; large ones turn slowly."""
_CONTEXT_STIFFNESS = 50.0
"""Size of ``fc``, which the context's norm takes out again: raw features are large, and so is what an update does."""
_CONSTANT, _MARK = 4.0, 100.0
"""Size of the basis' constant, and of its mark at position 0, before the context's norm."""
_CHUNK = 8192


@dataclass(frozen=True)
class StartSamples:
    """Positions ``p`` of training answers, each as the anchor of a block."""

    features: Tensor
    """``[n, F]`` of the target at position ``p - 1``."""
    tokens: Tensor
    """``[n, 4]`` int64: tokens at positions ``p, p + 1, …``."""
    hidden: Tensor
    """``[n, 4, d]``: target's last hidden states at the same positions."""
    first: Tensor
    """``[F]``: features of position 0, the same wherever conversations begin with the same token."""


@dataclass(frozen=True)
class _Predictor:
    """Predicted hidden state: ``standardised features @ map + table[token before]``."""

    mean: Tensor
    deviation: Tensor
    covariance: Tensor
    """``[F, F]`` of the standardised features."""
    anchor: Tensor
    """``[F, d]``: map of the anchor's slot."""
    masked: Tensor
    """``[F, d]``: map of the slots after it."""
    table: Tensor
    """``[V, d]``."""
    counts: Tensor
    """``[V]``: how often each token came before."""


@torch.no_grad()
def start_linearly(draft: DSparkDraft, samples: StartSamples) -> None:
    """Set the weights of a fresh draft, its sequential head's too, in place.

    Args:
        draft: a draft with the target's vocabulary at hand, on the samples' device.
        samples: some ten thousand positions of the training answers.

    Raises:
        UserError: the draft has a single key-value head, where two groups are needed, or other layers than Qwen3's.
    """
    if draft.config.layer_family != "qwen3":
        raise UserError(
            "draft.init linear sets Qwen3 layers, and this draft has Gemma 4's: set draft.init: random or target_layers"
        )
    attention = draft.layers[0].self_attn
    heads, channels = draft.config.num_key_value_heads or 0, attention.head_dim
    if heads < 2:
        raise UserError(
            "draft.init linear needs at least two key-value heads: set draft.num_key_value_heads, or init: random"
        )
    unit = samples.hidden[:, 0].float().square().mean(0).sqrt().clamp(min=1e-6)
    embedding = draft.embedding_weight.float() * draft.config.embedding_scale
    found = _fit(samples, embedding, tokens=draft.markov_head is not None)
    metric = _metric(draft, found.counts)
    first_heads = max(1, round(heads * 2 / 3))
    room = draft.config.hidden_size - 2
    ranks = min(first_heads * channels, room), min((heads - first_heads) * channels, room)
    ranks = ranks[0], min(ranks[1], room - ranks[0])
    bases = [
        _reduce(map_, found.covariance, metric, rank)
        for map_, rank in zip((found.anchor, found.masked), ranks, strict=True)
    ]
    size = _set_context(draft, samples, found, [basis for basis, _ in bases])
    _set_attention(draft, samples, first_heads)
    value = torch.zeros_like(attention.v_proj.weight)
    output = torch.zeros(heads * channels, draft.config.hidden_size, device=value.device)
    coordinate, starts = 1, (0, first_heads * channels)
    for start, rank, (_, back) in zip(starts, ranks, bases, strict=True):
        places = torch.arange(rank, device=value.device)
        value[start + places, coordinate + places] = size
        output[start : start + rank] = back / unit
        coordinate += rank
    attention.v_proj.weight.copy_(value)
    queries = draft.config.num_attention_heads
    shared = (
        output.view(heads, 1, channels, -1)
        .expand(-1, queries // heads, -1, -1)
        .reshape(queries * channels, -1)
    )
    attention.o_proj.weight.copy_(_RESIDUAL * heads / queries * shared.T)
    for index, layer in enumerate(draft.layers):
        layer.mlp.down_proj.weight.zero_()
        if index:
            layer.self_attn.o_proj.weight.zero_()
    draft.norm.weight.copy_(_PREDICTION * unit)
    if draft.markov_head is not None:
        _set_head(draft.markov_head, draft.head_weight.float(), found, metric)


# -- the predictor --------------------------------------------------------------------------------------------


def _thin(values: Tensor) -> Tensor:
    """About ``_CHUNK`` of them, evenly spread."""
    return values[:: max(1, len(values) // _CHUNK)]


def _ridge(gram: Tensor, products: Tensor, count: int) -> Tensor:
    return torch.linalg.solve(gram + _RIDGE * count * torch.eye(len(gram), device=gram.device), products)


def _parts(samples: StartSamples) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, len(samples.features), _CHUNK))


def _fit(samples: StartSamples, embedding: Tensor, tokens: bool) -> _Predictor:
    """Ridge regression of the hidden states on features and token; then what each token adds of its own.

    Without ``tokens`` on the features alone, for drafts without a head to hold the tokens' part.
    """
    count, width = samples.features.shape
    probe = _thin(samples.features).float()
    mean, deviation = probe.mean(0), probe.std(0) + 1e-6

    def standard(part: slice) -> Tensor:
        values = (samples.features[part].float() - mean) / deviation
        return torch.cat([values, torch.ones_like(values[:, :1])], dim=1)

    scale = embedding.square().mean().sqrt()
    hidden_size, inputs = samples.hidden.shape[-1], width + 1 + embedding.shape[1]
    gram = embedding.new_zeros(inputs, inputs)
    products = embedding.new_zeros(inputs, hidden_size)
    for part in _parts(samples):
        x = torch.cat([standard(part), embedding[samples.tokens[part, 0]] / scale], dim=1)
        gram.addmm_(x.T, x)
        products.addmm_(x.T, samples.hidden[part, 0].float())
    known = inputs if tokens else width + 1
    solved = torch.zeros_like(products)
    solved[:known] = _ridge(gram[:known, :known], products[:known], count)
    anchor, linear = solved[: width + 1], solved[width + 1 :] / scale

    residuals = torch.zeros_like(embedding)
    counts = embedding.new_zeros(len(embedding))
    for part in _parts(samples):
        token = samples.tokens[part, 0]
        left = samples.hidden[part, 0].float() - standard(part) @ anchor - embedding[token] @ linear
        counts.index_add_(0, token, torch.ones_like(left[:, 0]))
        if tokens:
            residuals.index_add_(0, token, left)
    table = embedding @ linear + residuals / (counts + _TABLE_PRIOR)[:, None]

    weights = torch.tensor(SLOT_WEIGHTS[1:], device=table.device)
    products = embedding.new_zeros(width + 1, hidden_size)
    for part in _parts(samples):
        left = samples.hidden[part, 1:].float() - table[samples.tokens[part, 1:]]
        products.addmm_(standard(part).T, (left * weights[:, None]).sum(1) / weights.sum())
    inner = gram[: width + 1, : width + 1]
    masked = _ridge(inner, products, count)
    return _Predictor(
        mean, deviation, inner[:width, :width] / count, anchor[:width], masked[:width], table, counts
    )


def _metric(draft: DSparkDraft, counts: Tensor) -> Tensor:
    """``[d, d]``: square root of how much a change of the hidden state changes the logits of likely tokens."""
    head, ids = draft.head_weight.float(), draft.draft_token_ids
    likely = (counts if ids is None else counts[ids]) + 0.5
    likely /= likely.sum()
    centred = head - likely @ head
    second = (centred * likely[:, None]).T @ centred
    values, vectors = torch.linalg.eigh(second.double())
    values = values.clamp(min=0) + 1e-4 * values.mean()
    return ((vectors * values.sqrt()) @ vectors.T).float()


def _reduce(map_: Tensor, covariance: Tensor, metric: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best map of a rank in the metric: ``[F, rank]`` to coordinates of variance 1, and ``[rank, d]`` back."""
    weighted = map_ @ metric
    values, vectors = torch.linalg.eigh(weighted.T @ covariance @ weighted)
    size, vectors = values[-rank:].clamp(min=1e-12).sqrt(), vectors[:, -rank:]
    back = torch.linalg.solve(metric, vectors * size).T
    return weighted @ vectors / size, back


# -- the weights ----------------------------------------------------------------------------------------------


def _set_context(draft: DSparkDraft, samples: StartSamples, found: _Predictor, bases: list[Tensor]) -> float:
    """Fill ``fc``: constant, bases, and the mark of position 0, which is zero in all other directions.

    Returns:
        Usual size of a context vector before its norm.
    """
    mean, deviation, first = found.mean, found.deviation, samples.first.float()
    ratio = mean / deviation
    second = found.covariance + torch.outer(ratio, ratio)
    second = second + _RIDGE * torch.eye(len(mean), device=mean.device)
    constant = torch.linalg.solve(second, ratio) / deviation
    mark = torch.linalg.solve(second, first / deviation) / deviation
    mark /= mark @ first
    constant = constant - (constant @ first) * mark
    rows = [_CONSTANT * constant[None]]
    for basis in bases:
        raw = (basis / deviation[:, None]).T
        raw = raw - torch.outer(raw @ mean, constant)
        rows.append(raw - torch.outer(raw @ first, mark))
    rows.append(_MARK * mark[None])
    weight = _CONTEXT_STIFFNESS * torch.cat(rows)
    draft.fc.weight.zero_()
    draft.fc.weight[: len(weight)] = weight.to(draft.fc.weight.dtype)
    draft.hidden_norm.weight.fill_(1.0)
    probe = _thin(samples.features).float() @ weight.T
    return float(probe.square().sum(1).div(draft.config.hidden_size).sqrt().mean()) / _CONTEXT_STIFFNESS


def _detector(wanted: list[tuple[Tensor, float]]) -> Tensor:
    """``[d]``: direction whose product with each group's vectors is the group's number; groups weigh alike."""
    size = wanted[0][0].shape[-1]
    gram = 1e-2 * torch.eye(size, device=wanted[0][0].device)
    product = torch.zeros(size, device=gram.device)
    for vectors, answer in wanted:
        gram += vectors.T @ vectors / len(vectors)
        product += answer * vectors.mean(0)
    return torch.linalg.solve(gram, product)


def _set_attention(draft: DSparkDraft, samples: StartSamples, first_heads: int) -> None:
    """Make queries and keys of the first layer constant vectors: of the near end, and of position 0."""
    attention: DraftAttention = draft.layers[0].self_attn
    norm, size = draft.layers[0].input_layernorm, attention.head_dim
    norm.weight.fill_(1.0)
    tokens = _thin(samples.tokens)[:, 0]
    token = norm(draft.embed(tokens)).float()
    masked = norm(draft.embed(torch.full_like(tokens[:1], draft.config.mask_token_id))).float()
    context = draft.context(_thin(samples.features)).float()
    first = draft.context(samples.first[None]).float()

    # high rotary frequencies tell near from far; low ones see every position alike
    pairs = size // 2
    near, far = (torch.zeros(size, device=token.device) for _ in range(2))
    near[: max(1, pairs * 3 // 8)] = 1.0
    far[pairs - max(1, pairs // 4) : pairs] = 1.0
    near, far = near / near.norm(), far / far.norm()

    is_token = _detector([(token, 1.0), (masked, 0.0)])
    is_masked = _detector([(token, 0.0), (masked, 1.0)])
    is_context = _detector([(context, 1.0), (token, -1.0), (masked, -1.0), (first, 0.0)])
    is_first = _detector([(context, 0.0), (token, 0.0), (masked, 0.0), (first, 1.0)])
    ours = torch.outer(near, is_token) + torch.outer(far, is_masked)
    theirs = torch.outer(near, is_masked) + torch.outer(far, is_token)
    keys = torch.outer(near, is_context) + torch.outer(far, is_first)
    kv_heads = attention.k_proj.weight.shape[0] // size
    groups = attention.q_proj.weight.shape[0] // size // kv_heads
    queries = [ours if head < first_heads else theirs for head in range(kv_heads) for _ in range(groups)]
    attention.q_proj.weight.copy_(_STIFFNESS * torch.cat(queries))
    attention.k_proj.weight.copy_(_STIFFNESS * keys.repeat(kv_heads, 1))
    for part in (attention.q_norm, attention.k_norm):
        part.weight.fill_(_SHARPNESS)


def _set_head(head: SequentialHead, rows: Tensor, found: _Predictor, metric: Tensor) -> None:
    """Bring the tokens' table to the head's rank: ``W2 W1[token] ≈ head_weight @ table[token]``."""
    seen = found.counts > 0
    share = (found.counts[seen] / found.counts.sum()).sqrt()[:, None]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        rank = min(head.rank, *found.table[seen].shape)
        left, size, right = torch.svd_lowrank((found.table[seen] * share) @ metric, q=rank, niter=3)
    w1 = rows.new_zeros(head.markov_w1.weight.shape)
    w2 = rows.new_zeros(head.markov_w2.weight.shape)
    w1[:, :rank] = found.table @ metric @ right
    w1[seen, :rank] = left * size / share
    w2[:, :rank] = rows @ torch.linalg.solve(metric, right)
    set_factors(head, w1, w2, w1[seen])
