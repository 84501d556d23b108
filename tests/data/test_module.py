from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from dspark_train.data.blocks import FIXED_EPOCH, build_blocks, slot_weights
from dspark_train.data.build import BuildOptions, build_set
from dspark_train.data.module import DSparkDataModule, TrainingLoader, collate
from dspark_train.data.sampler import GlobalBatchSampler
from dspark_train.errors import UserError
from dspark_train.structures import TrainingBatch

SIZES: dict[str, Any] = {
    "global_batch_size": 16,
    "micro_batch_size": 4,
    "max_length": 96,
    "num_anchors": 5,
    "block_size": 4,
    "mask_token_id": 2,
    "decay": 3.0,
    "seed": 11,
}


@pytest.fixture
def make(conversations_file: Path, tmp_path: Path, chatml: Any) -> Any:
    def build(path: Path = conversations_file, tokenizer: Any = chatml, **options: Any) -> DSparkDataModule:
        module = DSparkDataModule(path, **SIZES | {"cache_dir": tmp_path} | options)
        module.tokenizer = tokenizer
        return module

    return build


def loaders(module: DSparkDataModule, world_size: int, micro: int, epoch: int = 0) -> list[TrainingLoader]:
    found = []
    for rank in range(world_size):
        dataset = module.batches("train")
        sampler = GlobalBatchSampler(
            dataset.store.lengths,
            global_batch_size=16,
            micro_batch_size=micro,
            seed=11,
            rank=rank,
            world_size=world_size,
        )
        sampler.set_epoch(epoch)
        found.append(TrainingLoader(dataset, sampler, 0))
    return found


def weight_of(batch: TrainingBatch) -> float:
    return float((batch.blocks.supervised.double() @ slot_weights(4, 3.0).double()).sum())


@pytest.mark.parametrize(("world_size", "micro"), [(1, 16), (2, 4), (4, 1), (16, 1)])
def test_denominator_is_that_of_all_ranks_and_micro_batches(make: Any, world_size: int, micro: int) -> None:
    ranks = [list(loader) for loader in loaders(make(), world_size, micro, epoch=3)]
    accumulated = 16 // world_size // micro
    for start in range(0, len(ranks[0]), accumulated):
        window = [batch for rank in ranks for batch in rank[start : start + accumulated]]
        total = sum(weight_of(batch) for batch in window)
        assert total > 0
        assert [batch.global_weight for batch in window] == pytest.approx([total] * len(window), rel=1e-12)


def test_anchors_do_not_depend_on_the_cut(make: Any) -> None:
    def anchors(world_size: int, micro: int) -> dict[int, list[list[int]]]:
        found: dict[int, list[list[int]]] = {}
        for loader in loaders(make(), world_size, micro, epoch=1):
            for batch in loader:
                ids = batch.tokens.sample_ids[batch.blocks.sequence]
                for sample, anchor, labels in zip(
                    ids.tolist(), batch.blocks.anchor.tolist(), batch.blocks.labels.tolist(), strict=True
                ):
                    found.setdefault(sample, []).append([anchor, *labels])
        return found

    assert anchors(1, 16) == anchors(2, 4) == anchors(8, 1)


def test_fillers_keep_ranks_in_step_and_add_nothing(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "three.jsonl"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one two three"}]
    path.write_text(
        "".join(json.dumps({"id": str(i), "split": "train", "messages": messages}) + "\n" for i in range(3))
    )
    ranks = [list(loader) for loader in loaders(make(path), 4, 2)]
    assert [len(rank) for rank in ranks] == [2] * 4
    batches = list(chain(*ranks))
    empty = [batch for batch in batches if not batch.tokens.loss_mask.any()]
    assert len(empty) == 5
    assert all(batch.blocks.anchor.numel() == 0 and batch.tokens.lengths[0] > 0 for batch in empty)
    assert {round(batch.global_weight, 9) for batch in batches} == {
        round(sum(weight_of(batch) for batch in batches), 9)
    }


def test_what_is_left_out_is_said_with_its_reasons(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.jsonl"
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one two three"}]
    silent = [{"role": "user", "content": "hi"}]
    rows = [{"id": str(i), "split": "train", "messages": said if i else silent} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for _ in range(2):  # made, and found again
        make(path).setup()
        assert "1 of 30 conversations are left out (no assistant turn: 1)" in capsys.readouterr().out


def test_workers_give_the_same_batches(make: Any) -> None:
    def epoch(workers: int) -> list[tuple[list[int], list[int], float]]:
        loader = make(num_workers=workers).train_dataloader()
        return [
            (batch.tokens.sample_ids.tolist(), batch.blocks.anchor.tolist(), batch.global_weight)
            for batch in loader
        ]

    assert epoch(0) == epoch(2)


def test_validation_is_the_same_every_time(make: Any) -> None:
    module = make()
    first, second = (list(module.val_dataloader()) for _ in range(2))
    assert len(first) == 4
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one.blocks.anchor, two.blocks.anchor)
        assert one.global_weight == pytest.approx(weight_of(one), rel=1e-12)
        again = build_blocks(
            one.tokens, num_anchors=5, block_size=4, mask_token_id=2, seed=11, epoch=FIXED_EPOCH
        )
        assert torch.equal(again.anchor, one.blocks.anchor)


def test_padding_is_on_the_right_and_unsupervised(make: Any) -> None:
    store = make().store("train")
    tokens = collate(store, [0, 1, 2, 3])
    for row in range(4):
        length = int(tokens.lengths[row])
        assert tokens.input_ids[row, :length].tolist() == store[row].input_ids.tolist()
        assert tokens.loss_mask[row, :length].tolist() == store[row].loss_mask.tolist()
        assert not tokens.loss_mask[row, length:].any()


def test_prompts_end_where_the_answer_begins(make: Any, chatml: Any) -> None:
    prompts = make().prompts("validation")
    assert len(prompts) == 15
    assert {prompt.domain for prompt in prompts} == {"math", "code", "chat"}
    for prompt in prompts:
        text = chatml.decode(prompt.ids)
        assert text.endswith("<|im_start|>assistant\n")
        assert text.count("<|im_start|>assistant") == 1


class Recorder(LightningModule):
    """Records the samples that it sees; one parameter, so that there is something to optimise."""

    def __init__(self, tokenizer: Any, seen: list[list[int]]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.target = type("Target", (), {"tokenizer": tokenizer})()
        self.seen = seen

    def training_step(self, batch: TrainingBatch, index: int) -> torch.Tensor:
        self.seen.append([self.current_epoch, *batch.tokens.sample_ids.tolist()])
        return (self.weight * batch.global_weight).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class SaveAt(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_lightning_continues_in_the_middle_of_an_epoch(
    make: Any, tmp_path: Path, num_workers: int, chatml: Any
) -> None:
    def trainer(*callbacks: Callback) -> Trainer:
        return Trainer(
            max_steps=25,
            callbacks=list(callbacks),
            accelerator="cpu",
            accumulate_grad_batches=4,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )

    path = tmp_path / "middle.ckpt"
    whole: list[list[int]] = []
    trainer(SaveAt(18, path)).fit(
        Recorder(chatml, whole), datamodule=make(tokenizer=None, num_workers=num_workers)
    )
    assert {row[0] for row in whole} == {0, 1}
    after: list[list[int]] = []
    module = make(tokenizer=None, num_workers=num_workers)
    trainer().fit(Recorder(chatml, after), datamodule=module, ckpt_path=path, weights_only=False)
    assert after == whole[18 * 4 :]


def test_clear_errors(make: Any, tmp_path: Path, build_tokenizer: Any, conversations_file: Path) -> None:
    with pytest.raises(UserError, match="neither a file nor a folder"):
        make(tmp_path / "nowhere.jsonl").setup()
    with pytest.raises(UserError, match="no tokenizer"):
        make(tokenizer=None).setup()
    with pytest.raises(UserError, match="has no chat template"):
        make(tokenizer=build_tokenizer(None)).setup()
    silent = tmp_path / "silent.jsonl"
    silent.write_text(json.dumps({"messages": [{"role": "user", "content": "hello?"}]}) + "\n")
    with pytest.raises(
        UserError, match=r"no supervised token in the data: none of the 1 conversations .*no assistant"
    ):
        make(silent).setup()
    one = tmp_path / "one.jsonl"
    one.write_text(conversations_file.read_text().splitlines()[0] + "\n")
    with pytest.raises(UserError, match=r"split 'validation' .* is empty"):
        make(one).val_dataloader()
    with pytest.raises(UserError, match="not a finished prepared set"):
        make(tmp_path).setup()
    with pytest.raises(UserError, match=r"data\.block_size is 0"):
        make(block_size=0)


def test_a_prepared_set_is_opened_and_checked(
    make: Any, tmp_path: Path, conversations_file: Path, chatml: Any, build_tokenizer: Any
) -> None:
    build_set(conversations_file, tmp_path / "set", chatml, BuildOptions(max_length=96))
    module = make(tmp_path / "set")
    assert len(module.store("train")) == len(make().store("train"))
    with pytest.raises(UserError, match="was made for another target"):
        make(tmp_path / "set", tokenizer=build_tokenizer("{{ messages }}")).setup()
    with pytest.raises(UserError, match=r"data\.max_length is 50"):
        make(tmp_path / "set", max_length=50).setup()


def test_what_selects_reads_validation_also_in_earlier_configurations(make: Any) -> None:
    module = make()
    assert make(val_split="heldout").val_split == module.val_split == "validation"
    names = [set(module.store(split).column("conversation")) for split in ("train", "validation", "test")]
    assert all(not one & other for one in names for other in names if one is not other)


def test_template_arguments_belong_to_the_set(
    make: Any, tmp_path: Path, conversations_file: Path, chatml: Any
) -> None:
    thinking = {"enable_thinking": True}
    build_set(
        conversations_file, tmp_path / "set", chatml, BuildOptions(96, template={"enable_thinking": False})
    )
    assert make(tmp_path / "set").template == {"enable_thinking": False}
    assert make(template=thinking).template == thinking
    with pytest.raises(UserError, match=r"data\.template is .*True.* were rendered with .*False"):
        make(tmp_path / "set", template=thinking).setup()
