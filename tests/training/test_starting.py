"""The samples behind a linear start, and runs that begin with one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from dspark_train.data.module import collate
from dspark_train.errors import UserError
from dspark_train.structures import TokenBatch
from dspark_train.training import module as module_file
from dspark_train.training.cache_builder import CacheFeatures
from dspark_train.training.starting import gather_samples

LINEAR: dict[str, Any] = {"init": "linear"}


def batches_of(store: tiny.MemoryStore) -> Iterator[TokenBatch]:
    for start in range(0, len(store), 8):
        yield collate(store, list(range(start, min(start + 8, len(store)))))


def states_of(target: Any) -> Any:
    return lambda tokens: target.states(tokens.input_ids)


def test_samples_are_the_anchors_whose_next_tokens_are_all_supervised() -> None:
    target, store = tiny.tiny_target(), tiny.MemoryStore(5, 7)
    samples = gather_samples(batches_of(store), states_of(target))
    expected = []
    for example in store.examples:
        for place in range(1, len(example.input_ids) - 4):
            if example.loss_mask[place + 1 : place + 5].all():
                expected.append((example, place))
    assert len(samples.features) == len(expected) > 20
    found = {tuple(row.tolist()) for row in samples.tokens}
    assert found == {tuple(e.input_ids[p : p + 4].tolist()) for e, p in expected}
    for example, place in expected[::9]:
        alone = target.states(torch.from_numpy(example.input_ids.astype("int64"))[None])
        row = next(
            i
            for i, t in enumerate(samples.tokens)
            if t.tolist() == example.input_ids[place : place + 4].tolist()
        )
        torch.testing.assert_close(samples.features[row], alone.features[0, place - 1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            samples.hidden[row], alone.last_hidden[0, place : place + 4], rtol=1e-4, atol=1e-5
        )


def test_no_batch_is_read_beyond_the_limit() -> None:
    target, store, asked = tiny.tiny_target(), tiny.MemoryStore(40, 7), []

    def states(tokens: Any) -> Any:
        asked.append(len(tokens.lengths))
        return target.states(tokens.input_ids)

    assert len(gather_samples(batches_of(store), states, limit=30).features) >= 30
    assert asked == [8]


def test_a_run_reads_first_what_its_steps_will_read_first() -> None:
    """So that no state is computed for the start alone."""
    data = tiny.TinyData(40)
    first = [batch.sample_ids.tolist() for batch in data.first_batches()]
    steps = [batch.tokens.sample_ids.tolist() for batch in data.train_dataloader()]
    assert first == steps


def test_answers_too_short_to_look_ahead_are_named() -> None:
    store = tiny.MemoryStore(3, 7, empty=(0, 1, 2))
    with pytest.raises(UserError, match=r"init linear: no training answer has 5 tokens"):
        gather_samples(batches_of(store), states_of(tiny.tiny_target()))


def test_a_run_starts_alike_from_target_and_cache(tmp_path: Path) -> None:
    weights = []
    for cached in (False, True):
        callbacks = [CacheFeatures(str(tmp_path / "cache"))] if cached else []
        trainer = tiny.tiny_trainer(tmp_path, callbacks=callbacks, max_steps=1)
        module = tiny.tiny_module(lr=0.0, **LINEAR)
        tiny.fit(module, tiny.TinyData(16), trainer)
        weights.append(tiny.weights_of(module))
    assert float(weights[0]["layers.1.self_attn.o_proj.weight"].abs().max()) == 0.0
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-3, msg=name)


def test_a_resumed_run_keeps_what_it_has_learnt(tmp_path: Path) -> None:
    trainer = tiny.tiny_trainer(tmp_path, max_steps=2)
    whole = tiny.fit(tiny.tiny_module(**LINEAR), tiny.TinyData(16), trainer)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    trainer = tiny.tiny_trainer(tmp_path, max_steps=2)
    again = tiny.fit(tiny.tiny_module(**LINEAR), tiny.TinyData(16), trainer, ckpt_path=tmp_path / "two.ckpt")
    for name, value in tiny.weights_of(whole).items():
        assert torch.equal(tiny.weights_of(again)[name], value), name


@pytest.mark.parametrize("together", [1, 50, 2**22])
@pytest.mark.parametrize("reduced", [False, True])
def test_token_pairs_are_counted_piece_by_piece(
    together: int, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_file, "PAIRS_AT_ONCE", together)
    store, kept = tiny.MemoryStore(9, 7), torch.arange(0, 90, 3)
    expected: Counter[tuple[int, int]] = Counter()
    for example in store.examples:
        ids = [int(token) for token in example.input_ids[example.loss_mask]]  # one answer, at the end
        pairs = itertools.pairwise(ids)
        expected.update((a, b // 3 if reduced else b) for a, b in pairs if not reduced or b in kept)
    found = module_file.answer_pairs(store, kept if reduced else None)
    assert (
        Counter({(a, b): n for a, b, n in zip(*(part.tolist() for part in found), strict=True)}) == expected
    )
