"""The feature cache: exact, resumable, checked, and refused by name where it does not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from dspark_train.data.module import collate
from dspark_train.errors import UserError
from dspark_train.structures import TargetStates, TokenBatch
from dspark_train.target.frozen import FrozenTarget
from dspark_train.training import feature_cache
from dspark_train.training.cache_builder import CacheFeatures
from dspark_train.training.feature_cache import (
    LENGTH_STEP,
    FeatureCache,
    cache_bytes,
    check_disk,
    decode_fp8,
    digest_sample,
    encode_fp8,
    identity_of,
)
from dspark_train.training.objective import target_logsumexp
from dspark_train.training.states import LiveStates

STORE = tiny.MemoryStore(12, 5)


def build(folder: Path, target: Any = None, storage: Any = "exact") -> FeatureCache:
    """A cache that was asked for every sample once, one at a time, and computes no more."""
    target = target or tiny.tiny_target()
    cache = FeatureCache(folder, identity_of(target, storage), target)
    for index in range(len(STORE)):
        cache.states(collate(STORE, [index]), "cpu")
    cache.target = None
    return cache


def fresh_states(tokens: TokenBatch) -> TargetStates:
    """What the target says now, of sequences padded as the cache pads them."""
    length = tokens.input_ids.shape[1]
    states = tiny.tiny_target().states(torch.nn.functional.pad(tokens.input_ids, (0, -length % LENGTH_STEP)))
    return TargetStates(states.features[:, :length], states.last_hidden[:, :length])


def test_cached_states_equal_fresh_ones_bit_for_bit(tmp_path: Path) -> None:
    """One sample at a time on both sides, padded alike, so that the target does the same arithmetic."""
    cache = build(tmp_path)
    for index in range(len(STORE)):
        tokens = collate(STORE, [index])
        fresh, cached = fresh_states(tokens), cache.states(tokens, "cpu")
        assert torch.equal(fresh.features, cached.features)
        assert torch.equal(fresh.last_hidden, cached.last_hidden)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2


def test_a_batch_is_padded_with_zeros_and_holds_each_sequence(tmp_path: Path) -> None:
    target, cache = tiny.tiny_target(), build(tmp_path)
    tokens = collate(STORE, [3, 0, 7])
    fresh, cached = target.states(tokens.input_ids), cache.states(tokens, "cpu")
    for row, length in enumerate(tokens.lengths.tolist()):
        torch.testing.assert_close(cached.features[row, :length], fresh.features[row, :length])
        assert not cached.features[row, length:].any()


def test_normalisers_are_known_exactly_where_a_slot_can_ask(tmp_path: Path) -> None:
    target, cache = tiny.tiny_target(), build(tmp_path)
    tokens = collate(STORE, [4])
    level = cache.states(tokens, "cpu").logsumexp[0]
    mask = tokens.loss_mask[0]
    wanted = torch.zeros_like(mask)
    wanted[:-1] = mask[:-1] & mask[1:]
    assert torch.equal(~level.isnan(), wanted)
    oracle = target_logsumexp(target.states(tokens.input_ids).last_hidden[0], target.head_weight)
    torch.testing.assert_close(level[wanted], oracle[wanted])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what is mapped")
def test_nothing_stays_mapped_between_batches(tmp_path: Path) -> None:
    """A cache larger than the memory would otherwise count as the process's own."""
    cache = build(tmp_path)
    tokens = collate(STORE, list(range(len(STORE))))
    states = cache.states(tokens, "cpu")
    level = states.logsumexp
    assert states.features.any()
    assert level.isfinite().any()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("reduced", [False, True])
def test_training_from_the_cache_equals_training_beside_the_target(tmp_path: Path, reduced: bool) -> None:
    """Two epochs; fp32 rounding of the target's padding is the only difference."""
    recipe = {"vocab_size": 60} if reduced else {}
    weights = []
    for cached in (False, True):
        callbacks = [CacheFeatures(str(tmp_path / "cache"))] if cached else []
        trainer = tiny.tiny_trainer(tmp_path, callbacks=callbacks, max_steps=4)
        module = tiny.fit(tiny.tiny_module(**recipe), tiny.TinyData(16), trainer)
        weights.append(tiny.weights_of(module))
        assert isinstance(module.source, LiveStates)
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_the_target_does_not_run_when_everything_is_cached(tmp_path: Path, monkeypatch: Any) -> None:
    data = tiny.TinyData(16)
    tiny.fit(
        tiny.tiny_module(),
        data,
        tiny.tiny_trainer(tmp_path, callbacks=[CacheFeatures(str(tmp_path / "cache"))]),
    )
    module = tiny.tiny_module()
    monkeypatch.setattr(type(module.target), "states", None)
    tiny.fit(module, data, tiny.tiny_trainer(tmp_path, callbacks=[CacheFeatures(str(tmp_path / "cache"))]))


def test_one_place_serves_other_taps_and_other_targets(tmp_path: Path) -> None:
    """Those of the same identity share a cache there; the others get their own."""
    identity = identity_of(tiny.tiny_target())
    others = [
        identity_of(FrozenTarget(tiny.tiny_target().model, [0, 2])),
        identity_of(tiny.tiny_target(seed=1)),
        identity_of(tiny.tiny_target(), "fp8"),
    ]
    assert len({identity.short, *(other.short for other in others)}) == 4
    assert identity.short == identity_of(tiny.tiny_target()).short
    for _ in range(2):
        callback = CacheFeatures(str(tmp_path / "caches"), by_identity=True)
        tiny.fit(tiny.tiny_module(), tiny.TinyData(16), tiny.tiny_trainer(tmp_path, callbacks=[callback]))
    assert [path.name for path in (tmp_path / "caches").iterdir()] == [identity.short]


def test_only_what_a_step_asks_for_is_computed(tmp_path: Path) -> None:
    """Two steps of eight of forty samples: the rest is never run."""
    callback = CacheFeatures(str(tmp_path / "cache"))
    tiny.fit(
        tiny.tiny_module(), tiny.TinyData(40), tiny.tiny_trainer(tmp_path, callbacks=[callback], max_steps=2)
    )
    assert len(FeatureCache(tmp_path / "cache", identity_of(tiny.tiny_target()))) == 16


def test_a_kill_loses_nothing_that_was_written(tmp_path: Path, monkeypatch: Any) -> None:
    target = tiny.tiny_target()
    cache = FeatureCache(tmp_path, identity_of(target), target)
    cache.states(collate(STORE, [0, 1, 2]), "cpu")

    def dies(tensors: Any, path: str) -> None:
        Path(path).write_bytes(b"half a file")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "save_file", dies)
        with pytest.raises(KeyboardInterrupt):
            cache.states(collate(STORE, [3, 4]), "cpu")
    again = FeatureCache(tmp_path, identity_of(target), target)
    assert len(again) == 3
    passes: list[Any] = []
    original = target.states
    monkeypatch.setattr(target, "states", lambda ids: passes.append(ids) or original(ids))
    again.states(collate(STORE, [0, 2]), "cpu")
    assert not passes
    again.states(collate(STORE, [2, 3, 4]), "cpu")
    assert [len(ids) for ids in passes] == [2]


def test_a_batch_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Resumed, it must be computed in the same company again: other company may round otherwise."""
    target = tiny.tiny_target()
    cache = FeatureCache(tmp_path, identity_of(target), target, pass_tokens=32)
    cache.states(collate(STORE, [0, 1, 2, 3]), "cpu")
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert len(cache) == 4


def test_a_rank_finds_what_another_has_written(tmp_path: Path) -> None:
    target = tiny.tiny_target()
    one, two = (FeatureCache(tmp_path, identity_of(target), target) for _ in range(2))
    one.states(collate(STORE, [0, 1]), "cpu")
    two.target = None
    assert torch.equal(
        two.states(collate(STORE, [1, 0]), "cpu").features, one.states(collate(STORE, [1, 0]), "cpu").features
    )


def test_ranks_of_a_sharded_target_take_part_in_every_pass(tmp_path: Path, monkeypatch: Any) -> None:
    """Where another rank lacks a sample, this one runs a pass beside it, and writes nothing."""
    target, passes = tiny.tiny_target(), []
    cache = FeatureCache(tmp_path, identity_of(target), target, together=lambda own: True)
    original = target.states
    monkeypatch.setattr(target, "states", lambda ids: passes.append(ids) or original(ids))
    for _ in range(2):
        cache.states(collate(STORE, [0, 1]), "cpu")
    assert len(passes) == 2
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_the_pace_of_filling_is_known(tmp_path: Path) -> None:
    cache = build(tmp_path)
    assert cache.filling.tokens == cache.filling.held == int(STORE.lengths.sum())
    assert cache.filling.seconds > 0
    opened = FeatureCache(tmp_path, cache.identity)
    assert (opened.filling.tokens, opened.filling.held) == (0, int(STORE.lengths.sum()))


def test_a_cache_of_an_earlier_version_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="format of an earlier version: delete it"):
        FeatureCache(tmp_path, identity_of(tiny.tiny_target()))


def shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_a_corrupt_shard_is_refused_by_name(tmp_path: Path) -> None:
    cache = build(tmp_path)
    path = shard_files(tmp_path)[1]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(UserError, match=f"{path.name} is corrupt"):
        FeatureCache(tmp_path, cache.identity)
    FeatureCache(tmp_path, cache.identity, verify=False)


def test_a_truncated_or_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    cache = build(tmp_path)
    path = shard_files(tmp_path)[1]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=f"{path.name} is truncated"):
        FeatureCache(tmp_path, cache.identity, verify=False)
    path.unlink()
    with pytest.raises(UserError, match=f"{path.name} is missing"):
        FeatureCache(tmp_path, cache.identity)


def test_another_target_other_taps_and_other_data_are_refused(tmp_path: Path) -> None:
    cache = build(tmp_path)
    with pytest.raises(UserError, match="target '"):
        FeatureCache(tmp_path, identity_of(tiny.tiny_target(seed=1)))
    other = tiny.tiny_target()
    other.layer_ids = (0, 2, 3)
    with pytest.raises(UserError, match=r"layer ids \(0, 1, 3\) instead of \(0, 2, 3\)"):
        FeatureCache(tmp_path, identity_of(other))
    with pytest.raises(UserError, match="storage 'exact' instead of 'fp8'"):
        FeatureCache(tmp_path, identity_of(tiny.tiny_target(), "fp8"))
    with pytest.raises(UserError, match="sample 0 is not in the feature cache"):
        cache.states(collate(tiny.MemoryStore(2, 77), [0]), "cpu")
    with pytest.raises(UserError, match="made from something else"):
        build(tmp_path, tiny.tiny_target(seed=1))


def test_the_size_is_known_beforehand_and_compared_with_the_disk(tmp_path: Path, monkeypatch: Any) -> None:
    tokens = int(STORE.lengths.sum())
    for storage in ("exact", "fp8"):
        build(tmp_path / storage, storage=storage)
        estimate = cache_bytes(tiny.tiny_target(), tokens, storage)  # type: ignore[arg-type]
        stored = sum(path.stat().st_size for path in shard_files(tmp_path / storage))
        assert abs(stored - estimate) < 1_000 * len(STORE)  # a header for every file
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(feature_cache.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"needs .* GiB, but its disk has only"):
        check_disk(tmp_path / "new", estimate)
    callback = CacheFeatures(str(tmp_path / "new"))
    with pytest.raises(UserError, match=r"needs .* GiB, but its disk has only"):
        tiny.fit(tiny.tiny_module(), tiny.TinyData(16), tiny.tiny_trainer(tmp_path, callbacks=[callback]))
    assert not (tmp_path / "new").exists()


def test_fp8_keeps_three_significant_bits(tmp_path: Path) -> None:
    features = torch.randn(50, 24) * torch.logspace(-3, 3, 50)[:, None]
    stored, scale = encode_fp8(features, 3)
    back = decode_fp8(stored, scale, torch.float32)
    floor = scale.repeat_interleave(8, 1) * 2**-6
    assert bool(((back - features).abs() <= torch.maximum(features.abs() * 2**-4, floor)).all())
    assert stored.element_size() == 1
    cache = build(tmp_path, storage="fp8")
    tokens = collate(STORE, [1])
    fresh = fresh_states(tokens)
    cached = cache.states(tokens, "cpu")
    assert float((cached.features - fresh.features).norm() / fresh.features.norm()) < 0.04
    assert torch.equal(cached.last_hidden, fresh.last_hidden)


def test_a_sample_with_another_mask_has_normalisers_of_its_own(tmp_path: Path) -> None:
    first = STORE[0]
    store = tiny.MemoryStore(1, 0)
    store.examples = [first, dataclasses.replace(first, loss_mask=np.ones_like(first.loss_mask))]
    target = tiny.tiny_target()
    cache = FeatureCache(tmp_path, identity_of(target), target)
    for index in range(2):
        asked = store.loss_mask(index)
        level = cache.states(collate(store, [index]), "cpu").logsumexp[0]
        assert torch.equal(~level.isnan()[:-1], torch.from_numpy(asked[:-1] & asked[1:]))
    ids = first.input_ids
    assert digest_sample(ids, first.loss_mask) == digest_sample(ids.astype(np.int64), first.loss_mask)


def test_every_file_says_what_it_was_made_from(tmp_path: Path) -> None:
    build(tmp_path)
    for path in shard_files(tmp_path):
        record = json.loads(path.with_suffix(".json").read_text())
        assert record["identity"]["target_name"] == "tiny"
        assert record["identity"]["layer_ids"] == [0, 1, 3]
        assert len(record["sha256"]) == 64
