"""The feature cache: exact, resumable, checked, and refused by name where it does not fit."""

from __future__ import annotations

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
from dspark_train.training import cache_builder
from dspark_train.training.cache_builder import LENGTH_STEP, CacheBuilder, CacheFeatures
from dspark_train.training.feature_cache import (
    MANIFEST,
    FeatureCache,
    decode_fp8,
    digest_tokens,
    encode_fp8,
    estimate_cache,
    identity_of,
)
from dspark_train.training.objective import target_logsumexp

STORE = tiny.MemoryStore(12, 5)


def build(folder: Path, target: Any = None, **options: Any) -> FeatureCache:
    builder = CacheBuilder(
        folder, target or tiny.tiny_target(), [STORE], **({"shard_tokens": 120, "batch_tokens": 1} | options)
    )
    builder.build()
    return builder.finish()


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
    level = cache.logsumexp(tokens, "cpu")[0]
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
    states, level = cache.states(tokens, "cpu"), cache.logsumexp(tokens, "cpu")
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
        assert "feature_cache" not in module.outside
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


def test_building_continues_after_an_interruption(tmp_path: Path, monkeypatch: Any) -> None:
    build(tmp_path / "whole")
    interrupted = CacheBuilder(
        tmp_path / "part", tiny.tiny_target(), [STORE], shard_tokens=120, batch_tokens=1
    )
    written: list[int] = []
    original = CacheBuilder._write

    def fail_at_the_third(self: CacheBuilder, number: int) -> None:
        if number == 2 and len(written) == 2:
            raise KeyboardInterrupt
        written.append(number)
        original(self, number)

    monkeypatch.setattr(CacheBuilder, "_write", fail_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        interrupted.build()
    with pytest.raises(UserError, match="no finished feature cache"):
        FeatureCache(tmp_path / "part", interrupted.identity)
    written.append(-1)
    interrupted.build()
    assert written[:3] == [0, 1, -1]
    assert 0 not in written[3:]
    interrupted.finish()
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "part" / path.name).read_bytes() == path.read_bytes()


def test_ranks_share_the_work(tmp_path: Path) -> None:
    build(tmp_path / "one")
    builders = [
        CacheBuilder(tmp_path / "two", tiny.tiny_target(), [STORE], shard_tokens=120, batch_tokens=1)
    ] * 2
    for rank, builder in enumerate(builders):
        builder.build(rank, 2)
    builders[0].finish()
    assert (tmp_path / "two" / MANIFEST).read_text() == (tmp_path / "one" / MANIFEST).read_text()


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
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(UserError, match="made from something else"):
        build(tmp_path, tiny.tiny_target(seed=1))
    with pytest.raises(UserError, match="made from other data"):
        CacheBuilder(
            tmp_path, tiny.tiny_target(), [tiny.MemoryStore(12, 6)], shard_tokens=120, batch_tokens=1
        ).build()


def test_a_callback_refuses_a_cache_that_lacks_samples(tmp_path: Path) -> None:
    build(tmp_path / "cache")
    trainer = tiny.tiny_trainer(tmp_path, callbacks=[CacheFeatures(str(tmp_path / "cache"))])
    with pytest.raises(UserError, match="built from other data"):
        tiny.fit(tiny.tiny_module(), tiny.TinyData(16), trainer)


def test_the_size_is_known_beforehand_and_compared_with_the_disk(tmp_path: Path, monkeypatch: Any) -> None:
    for storage in ("exact", "fp8"):
        cache = build(tmp_path / storage, storage=storage, shard_tokens=10_000)
        estimate = estimate_cache(tiny.tiny_target(), STORE.lengths, storage)
        stored = sum(path.stat().st_size for path in shard_files(tmp_path / storage))
        assert abs(stored - estimate.bytes) < 2_000
        assert cache.tokens == estimate.tokens
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(cache_builder.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    builder = CacheBuilder(tmp_path / "new", tiny.tiny_target(), [STORE])
    with pytest.raises(UserError, match=r"needs .* GiB, but its disk has only"):
        builder.check_disk()
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    assert (builder.check_disk().seconds or 0) > 0


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


def test_a_shared_sample_of_two_splits_is_stored_once_with_both_masks(tmp_path: Path) -> None:
    import dataclasses

    first = STORE[0]
    second = dataclasses.replace(first, loss_mask=np.ones_like(first.loss_mask))
    store = tiny.MemoryStore(1, 0)
    store.examples = [first, second]
    builder = CacheBuilder(tmp_path, tiny.tiny_target(), [store])
    builder.build()
    cache = builder.finish()
    assert len(cache) == 1
    assert int(cache.logsumexp(collate(store, [0]), "cpu").isnan().sum()) == 1
    assert digest_tokens(first.input_ids) == digest_tokens(first.input_ids.astype(np.int64))


def test_the_manifest_says_what_the_cache_holds(tmp_path: Path) -> None:
    build(tmp_path)
    content = json.loads((tmp_path / MANIFEST).read_text())
    assert content["identity"]["target_name"] == "tiny"
    assert content["identity"]["layer_ids"] == [0, 1, 3]
    assert all(len(shard["sha256"]) == 64 for shard in content["shards"])
