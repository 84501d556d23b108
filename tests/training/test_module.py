"""The LightningModule on a tiny pair: it learns, it is exact about what it owns, and its sums add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import tiny
import torch
from tiny_data import tiny_conversations, tiny_tokenizer, write_rows
from tiny_models import tiny_target

from dspark_train.data.module import DSparkDataModule
from dspark_train.draft.recipe import DraftRecipe
from dspark_train.target.config import TargetConfig
from dspark_train.training.module import DSparkModule, choose_vocabulary
from dspark_train.training.optimizer import OptimizerConfig, Schedule, orthogonalise
from dspark_train.training.terms import ObjectiveConfig


def make(tmp_path: Path, rows: list | None = None, **kw) -> tuple[DSparkModule, DSparkDataModule]:
    recipe = {"num_layers": 1, "block_size": 3, "markov_rank": 4, **kw.pop("draft", {})}
    module = DSparkModule(
        TargetConfig(name_or_path="tiny", layer_ids=[0, 1, 2]),
        DraftRecipe(**recipe),
        ObjectiveConfig(),
        OptimizerConfig(**{"lr": 3e-3, **kw.pop("optimizer", {})}),
    )
    module.target = tiny_target()
    module.target.tokenizer = tiny_tokenizer()
    settings = {"global_batch_size": 4, "micro_batch_size": 4, "max_length": 64, "num_anchors": 4, **kw}
    data = DSparkDataModule(
        write_rows(tmp_path / "rows.jsonl", rows or tiny_conversations()),
        block_size=recipe["block_size"],
        cache_dir=tmp_path / "cache",
        **settings,
    )
    return module, data


def trainer(tmp_path: Path, steps: int, **kw) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        **kw,
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_it_learns(head: str, optimizer: str, tmp_path: Path) -> None:
    shape = {"head": head} | ({"markov_rank": 0, "confidence_with_markov": False} if head == "none" else {})
    module, data = make(tmp_path, draft=shape, optimizer={"name": optimizer})
    pl.seed_everything(0)
    run = trainer(tmp_path, 40)
    run.fit(module, datamodule=data)
    before = {}
    fresh, _ = make(tmp_path, draft=shape)
    pl.seed_everything(0)
    check = trainer(tmp_path, 1)
    before = check.validate(fresh, datamodule=make(tmp_path)[1], verbose=False)[0]
    after = trainer(tmp_path, 1).validate(module, datamodule=data, verbose=False)[0]
    assert after["val/loss"] < before["val/loss"] - 0.02
    assert 1 <= after["val/tau"] <= 4


def test_checkpoint_and_optimizer_hold_the_draft_alone(tmp_path: Path) -> None:
    module, data = make(tmp_path)
    run = trainer(tmp_path, 1)
    run.fit(module, datamodule=data)
    assert all(name.startswith("draft.") for name in module.state_dict())
    assert not any("embed_tokens" in name or "lm_head" in name for name in module.state_dict())
    owned = {id(parameter) for group in run.optimizers[0].param_groups for parameter in group["params"]}
    assert owned == {id(parameter) for parameter in module.draft.parameters()}
    path = tmp_path / "x.ckpt"
    run.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)["state_dict"]
    assert set(saved) == set(module.state_dict())


def test_two_validations_compare(tmp_path: Path) -> None:
    module, data = make(tmp_path)
    trainer(tmp_path, 2).fit(module, datamodule=data)
    first = trainer(tmp_path, 1).validate(module, datamodule=data, verbose=False)
    assert first == trainer(tmp_path, 1).validate(module, datamodule=data, verbose=False)


def test_metrics_do_not_depend_on_the_cut(tmp_path: Path) -> None:
    results = []
    for size in (4, 1):
        module, data = make(tmp_path, micro_batch_size=size)
        pl.seed_everything(0)
        results.append(trainer(tmp_path, 1).validate(module, datamodule=data, verbose=False)[0])
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_one_sequence_does_not_move_anothers_loss(tmp_path: Path) -> None:
    module, data = make(tmp_path)
    run = trainer(tmp_path, 1)
    run.fit(module, datamodule=data)
    batch = next(iter(data.val_dataloader()))
    prepared = module.on_before_batch_transfer(batch, 0)
    states = module._states(prepared.batch.tokens)
    output = module.draft(states.features, batch.blocks)
    changed = states.features.clone()
    changed[1] += 1.0
    other = module.draft(changed, batch.blocks)
    rows = batch.blocks.sequence
    assert torch.equal(output.hidden[rows != 1], other.hidden[rows != 1])
    assert not torch.equal(output.hidden[rows == 1], other.hidden[rows == 1])


def test_a_batch_without_an_anchor_costs_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    module, data = make(tmp_path)
    run = trainer(tmp_path, 1)
    run.fit(module, datamodule=data)
    batch = next(iter(data.val_dataloader()))
    mask = torch.zeros_like(batch.tokens.loss_mask)
    tokens = type(batch.tokens)(batch.tokens.input_ids, batch.tokens.lengths, mask, batch.tokens.sample_ids)
    empty = type(batch)(tokens, _no_blocks(tokens), 3.0)
    module.zero_grad()
    loss, terms = module.compute(module.on_before_batch_transfer(empty, 0))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert float(terms.weight) == 0.0
    assert float(terms.blocks) == 0.0
    for name, parameter in module.draft.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.eq(0).all(), name


def _no_blocks(tokens):
    from dspark_train.data.blocks import build_blocks

    return build_blocks(tokens, num_anchors=4, block_size=3, mask_token_id=4, seed=0, epoch=0)


def test_reduced_vocabulary_trains_and_covers_what_was_asked(tmp_path: Path) -> None:
    module, data = make(tmp_path, draft={"vocab_coverage": 0.5})
    trainer(tmp_path, 2).fit(module, datamodule=data)
    assert module.draft.head_weight.shape[0] == module.draft.config.draft_vocab_size < 80


def test_choose_vocabulary_by_hand() -> None:
    counts = torch.tensor([0, 5, 1, 3, 1])
    assert choose_vocabulary(counts, 2, None).tolist() == [1, 3]
    assert choose_vocabulary(counts, None, 0.5).tolist() == [1]
    assert choose_vocabulary(counts, None, 0.8).tolist() == [1, 3]
    assert choose_vocabulary(counts, None, 1.0).tolist() == [1, 2, 3, 4]


def test_schedule_by_hand() -> None:
    factor = Schedule(100, 0.04).factor
    assert [factor(step) for step in (0, 1, 3)] == [0.25, 0.5, 1.0]
    assert factor(4) == 1.0
    assert factor(52) == pytest.approx(0.5)
    assert factor(100) == pytest.approx(0.0)


def test_perfect_and_hopeless_drafts_by_hand() -> None:
    from dspark_train.data.blocks import slot_weights
    from dspark_train.structures import DraftOutput
    from dspark_train.training.objective import ObjectiveSums
    from dspark_train.training.terms import ObjectiveMetrics, SupervisedRows, collect_terms

    slots, count = 3, 2
    rows = SupervisedRows(torch.arange(6), torch.arange(6), torch.arange(6))
    for l1, tau in ((0.0, slots + 1.0), (2.0, 1.0)):
        logit = torch.full((count, slots), 30.0 if l1 == 0 else -30.0)
        output = DraftOutput(torch.zeros(count, slots, 1), None, logit)
        weights = slot_weights(slots, 4.0)[rows.slot % slots]
        sums = ObjectiveSums(torch.zeros(()), torch.zeros(6), torch.full((6,), l1))
        terms = collect_terms(output, rows, sums, torch.zeros(6), weights)
        metrics = ObjectiveMetrics(slots, ObjectiveConfig())
        metrics.update(terms)
        metrics.update(terms)
        values = metrics.compute()
        assert float(values["tau"]) == pytest.approx(tau)
        assert float(values["confidence_error"]) == pytest.approx(0.0, abs=1e-6)
        assert float(values["accept_2"]) == pytest.approx(1 - l1 / 2)


def test_muon_is_pytorchs_and_its_iterations_need_no_bfloat16() -> None:
    """The same steps as the library's, in bfloat16; in float32, nearer to the exact polynomial than those."""
    from torch.optim import Muon as Library

    from dspark_train.training.optimizer import Muon

    torch.manual_seed(0)
    start, gradients = torch.randn(24, 40), [torch.randn(24, 40) for _ in range(4)]
    ends = []
    for kind in (Library, Muon):
        weight = torch.nn.Parameter(start.clone())
        optimizer = kind([weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        ends.append(weight.detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-6)
    settings = ((3.4445, -4.775, 2.0315), 5, 1e-7)
    exact, single, half = (
        orthogonalise(gradients[0].double(), *settings, dtype)
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    )
    assert (single - exact).norm() < 1e-5 * exact.norm()
    assert (half - exact).norm() < 0.1 * exact.norm()


def test_fillers_of_a_batch_larger_than_the_data_cost_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three samples in a global batch of 16: as many passes as samples, and the step of one micro-batch of three."""
    passes: list[int] = []
    compute = DSparkModule.compute

    def counted(self: Any, prepared: Any) -> Any:
        passes.append(prepared.rows.slot.numel())
        return compute(self, prepared)

    monkeypatch.setattr(DSparkModule, "compute", counted)
    found = []
    for micro in (1, 16):
        data = tiny.TinyData(3, global_batch_size=16, micro_batch_size=micro)
        module = tiny.fit(tiny.tiny_module(), data, tiny.tiny_trainer(tmp_path, max_steps=2))
        found.append(tiny.weights_of(module))
        assert len(passes) == 2 * (3 if micro == 1 else 1)
        assert all(passes)
        passes.clear()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], msg=name)
