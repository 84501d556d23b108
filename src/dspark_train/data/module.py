"""The LightningDataModule: a prepared set or a file of conversations to training batches and prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from dspark_train.data.blocks import build_blocks, sample_weight, slot_weights
from dspark_train.data.build import BuildOptions, build_set, new_manifest
from dspark_train.data.conversations import HELD_OUT, Prompt, Split, SplitShares
from dspark_train.data.dataset import MANIFEST, ExampleStore, PreparedSet
from dspark_train.data.sampler import GlobalBatchSampler, MicroBatch, ValidationSampler, accumulation
from dspark_train.data.tokenize import tokenizer_fingerprint
from dspark_train.errors import UserError
from dspark_train.files import cache_folder, file_digest
from dspark_train.progress import say
from dspark_train.progress import stage as shown_stage
from dspark_train.structures import TokenBatch, TrainingBatch


def collate(store: ExampleStore, samples: Sequence[int], *, filler: bool = False) -> TokenBatch:
    """Pad examples on the right to the longest of them.

    Args:
        store: where they are.
        samples: B sample ids.
        filler: empty the loss masks.
    """
    examples = [store[sample] for sample in samples]
    lengths = torch.tensor([len(example.input_ids) for example in examples])
    input_ids = torch.zeros(len(examples), int(lengths.max()), dtype=torch.int64)
    loss_mask = torch.zeros(input_ids.shape, dtype=torch.bool)
    for row, example in enumerate(examples):
        input_ids[row, : lengths[row]] = torch.from_numpy(example.input_ids.astype(np.int64))
        if not filler:
            loss_mask[row, : lengths[row]] = torch.from_numpy(example.loss_mask.copy())
    return TokenBatch(input_ids, lengths, loss_mask, torch.tensor(samples))


class BatchDataset(Dataset[TrainingBatch]):
    """Gives the tokens and draft blocks of a micro-batch, and the weight of its global batch.

    Every process computes that weight by itself: the anchors of any sample follow from seed, epoch and sample id.

    Args:
        store: examples of one split.
        num_anchors: the most anchors per sequence.
        block_size: γ.
        mask_token_id: id fed to all slots but the first.
        decay: of the slot weights.
        seed: the run's seed.
    """

    def __init__(
        self,
        store: ExampleStore,
        *,
        num_anchors: int,
        block_size: int,
        mask_token_id: int,
        decay: float,
        seed: int,
    ) -> None:
        self.store = store
        self._num_anchors, self._block_size, self._mask_token_id = num_anchors, block_size, mask_token_id
        self._decay, self._seed = decay, seed
        self._weight_of_step: tuple[tuple[int, int], float] | None = None

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, micro: MicroBatch) -> TrainingBatch:
        tokens = collate(self.store, micro.samples, filler=micro.filler)
        blocks = build_blocks(
            tokens,
            num_anchors=self._num_anchors,
            block_size=self._block_size,
            mask_token_id=self._mask_token_id,
            seed=self._seed,
            epoch=micro.epoch,
        )
        if set(micro.samples) == set(micro.global_samples) and not micro.filler:
            weights = slot_weights(self._block_size, self._decay).double()
            weight = float((blocks.supervised.double() @ weights).sum())
        else:
            weight = self._global_weight(micro)
        return TrainingBatch(tokens, blocks, weight)

    def __getitems__(self, micro: MicroBatch) -> TrainingBatch:
        """Answer a batch sampler's request (the DataLoader calls this with whatever the sampler yields)."""
        return self[micro]

    def _global_weight(self, micro: MicroBatch) -> float:
        key = (micro.epoch, micro.step)
        if self._weight_of_step is None or self._weight_of_step[0] != key:
            weight = sum(
                sample_weight(
                    self.store.loss_mask(sample),
                    num_anchors=self._num_anchors,
                    block_size=self._block_size,
                    decay=self._decay,
                    seed=self._seed,
                    epoch=micro.epoch,
                    sample_id=sample,
                )
                for sample in micro.global_samples
            )
            self._weight_of_step = (key, weight)
        return self._weight_of_step[1]


class TrainingLoader(DataLoader[TrainingBatch]):
    """A DataLoader whose position a checkpoint can hold.

    It counts the micro-batches that it has handed out. What workers have read ahead does not count.
    """

    def __init__(self, dataset: BatchDataset, sampler: GlobalBatchSampler, num_workers: int) -> None:
        super().__init__(
            dataset,
            batch_sampler=sampler,  # type: ignore[arg-type]
            num_workers=num_workers,
            collate_fn=_unchanged,  # type: ignore[arg-type]
            persistent_workers=num_workers > 0,
            worker_init_fn=_start_worker,
        )
        self.micro_batches, self._yielded = sampler, 0

    def __iter__(self) -> Iterator[TrainingBatch]:  # type: ignore[override]
        self._yielded = self.micro_batches.start
        for batch in super().__iter__():
            self._yielded += 1
            yield batch
        self.micro_batches.start = self._yielded = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch (Lightning puts it into checkpoints)."""
        return self.micro_batches.state_dict(self._yielded)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Begin the next iteration at a saved position."""
        self.micro_batches.load_state_dict(state)
        self._yielded = self.micro_batches.start


def _unchanged(batch: TrainingBatch) -> TrainingBatch:
    return batch


def _start_worker(_index: int) -> None:
    torch.set_num_threads(1)


class DSparkDataModule(LightningDataModule):
    """Batches for training and validation, prompts for decoding.

    Args:
        path: a JSONL file of conversations, or the folder of a prepared set. A file is tokenized once, into
            a cache that is found again by its content.
        global_batch_size: sequences per optimiser step, over all ranks and accumulated micro-batches.
        micro_batch_size: sequences per forward pass of one rank.
        max_length: most tokens per sequence; longer ones are cut. A prepared set must have been made with it.
        num_anchors: most anchors, so draft blocks, per sequence.
        block_size: draft tokens per block (γ).
        mask_token_id: token id fed to the slots after the anchor.
        decay: slot k weighs exp(-k / decay) in the losses.
        seed: of the data order and the anchors.
        num_workers: processes per rank that read ahead; 0 reads in the training process.
        token_budget: most padded tokens per micro-batch. Then micro-batches hold about equal numbers of
            padded tokens instead of equal numbers of sequences.
        train_split: split to train on.
        val_split: split to validate on: what is chosen by it must not be reported on. ``heldout``, in
            configurations of earlier versions, is read as validation.
        calibration_share: share of conversations for calibration, where a file does not say so itself.
        heldout_share: share of conversations held out, where a file does not say so itself: one half of them
            for validation, the other for the test.
        template: extra chat-template arguments of a file's conversations, such as ``{enable_thinking: false}``. A
            prepared set has its own: leave this out there.
        cache_dir: where tokenized files are kept; the user's cache by default.
        max_error_share: stop where more than this share of the conversations is faulty.
    """

    def __init__(
        self,
        path: Path,
        global_batch_size: int = 512,
        micro_batch_size: int = 1,
        max_length: int = 4096,
        num_anchors: int = 512,
        block_size: int = 7,
        mask_token_id: int = 0,
        decay: float = 4.0,
        seed: int = 0,
        num_workers: int = 0,
        token_budget: int | None = None,
        train_split: Split = "train",
        val_split: Split | Literal["heldout"] = "validation",
        calibration_share: float = 0.05,
        heldout_share: float = 0.05,
        template: dict[str, Any] | None = None,
        cache_dir: Path | None = None,
        max_error_share: float = 0.05,
    ) -> None:
        super().__init__()
        for name, value in (("num_anchors", num_anchors), ("block_size", block_size)):
            if value < 1:
                raise UserError(f"data.{name} is {value}: it must be at least 1")
        if decay <= 0:
            raise UserError(f"data.decay is {decay}: it must be above 0")
        self.path = Path(path)
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.num_anchors, self.block_size, self.mask_token_id = num_anchors, block_size, mask_token_id
        self.decay, self.seed, self.num_workers, self.token_budget = decay, seed, num_workers, token_budget
        self.train_split = train_split
        self.val_split: Split = "validation" if val_split == HELD_OUT else val_split
        self.options = BuildOptions(
            max_length=max_length,
            template=template,
            shares=SplitShares(calibration_share, heldout_share),
            max_error_share=max_error_share,
        )
        self.cache_dir = cache_dir
        self.tokenizer: Any = None
        """The target's; :meth:`setup` takes it from ``trainer.lightning_module.target`` where it was not set."""
        self.prepared: PreparedSet | None = None

    def accumulation(self, world_size: int) -> int:
        """Micro-batches per rank and optimiser step (Lightning's ``accumulate_grad_batches``)."""
        return accumulation(self.global_batch_size, self.micro_batch_size, world_size)

    def setup(self, stage: str | None = None) -> None:
        """Open the prepared set, or make it from the file; every rank may call this at once.

        Raises:
            UserError: nothing at ``path``, a set for another target, or nothing to train on.
        """
        if self.prepared is not None:
            return
        if not self.path.exists():
            raise UserError(
                f"data.path: there is neither a file nor a folder {self.path}. Make it with `prepare`"
            )
        tokenizer = self._find_tokenizer()
        if self.path.is_dir():
            prepared = PreparedSet(self.path)
            prepared.check_tokenizer(tokenizer_fingerprint(tokenizer), str(tokenizer.name_or_path))
            if prepared.manifest.max_length > self.options.max_length:
                raise UserError(
                    f"data.max_length is {self.options.max_length}, but {self.path} was prepared with "
                    f"{prepared.manifest.max_length}: set data.max_length to that, or prepare it again"
                )
        else:
            manifest = new_manifest(self.path, file_digest(self.path), tokenizer, self.options, None)
            folder = (self.cache_dir or cache_folder() / "data") / manifest.fingerprint
            if (folder / MANIFEST).exists():
                prepared = PreparedSet(folder)
            else:
                with shown_stage(f"tokenizing {self.path.name}", unit="conversations") as shown:
                    prepared = build_set(
                        self.path,
                        folder,
                        tokenizer,
                        self.options,
                        progress=lambda done, total: shown.update(shown.done + done, total=total),
                    )
        wish, made = self.options.template or {}, prepared.template
        if any(name not in made or made[name] != value for name, value in wish.items()):
            raise UserError(
                f"data.template is {dict(wish)}, but the conversations of {self.path} were rendered with {made}: leave "
                "data.template out, or prepare them again"
            )
        if lost := prepared.manifest.losses():
            say(f"{self.path}: {lost}")
        self.prepared = prepared

    def _find_tokenizer(self) -> Any:
        if self.tokenizer is None and self.trainer is not None:
            target = getattr(self.trainer.lightning_module, "target", None)
            self.tokenizer = getattr(target, "tokenizer", None)
        if self.tokenizer is None:
            raise UserError(
                "the data module has no tokenizer: set `datamodule.tokenizer`, or give the trainer a "
                "module with a target"
            )
        return self.tokenizer

    def store(self, split: str) -> ExampleStore:
        """The examples of one split."""
        if self.prepared is None:
            self.setup()
        assert self.prepared is not None
        return self.prepared.split(split)

    def batches(self, split: str) -> BatchDataset:
        """The examples of one split as training batches."""
        return BatchDataset(
            self.store(split),
            num_anchors=self.num_anchors,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            decay=self.decay,
            seed=self.seed,
        )

    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def train_dataloader(self) -> TrainingLoader:
        """Micro-batches of this rank."""
        dataset, (rank, world_size) = self.batches(self.train_split), self._ranks()
        sampler = GlobalBatchSampler(
            dataset.store.lengths,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
            token_budget=self.token_budget,
        )
        return TrainingLoader(dataset, sampler, self.num_workers)

    def first_batches(self) -> Iterator[TokenBatch]:
        """Tokens of the first epoch's micro-batches, as a single rank takes them."""
        store = self.store(self.train_split)
        sampler = GlobalBatchSampler(
            store.lengths,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            seed=self.seed,
            token_budget=self.token_budget,
        )
        for micro in sampler:
            yield collate(store, list(micro.samples))

    def val_dataloader(self) -> DataLoader[TrainingBatch]:
        """Micro-batches of this rank, with fixed anchors; each batch's ``global_weight`` is its own."""
        dataset, (rank, world_size) = self.batches(self.val_split), self._ranks()
        sampler = ValidationSampler(
            dataset.store.lengths, micro_batch_size=self.micro_batch_size, rank=rank, world_size=world_size
        )
        return DataLoader(dataset, batch_sampler=sampler, collate_fn=_unchanged)  # type: ignore[arg-type]

    @property
    def template(self) -> dict[str, Any]:
        """Chat-template arguments that the conversations were rendered with; of several, the most common ones."""
        if self.prepared is None:
            self.setup()
        assert self.prepared is not None
        return self.prepared.template

    def prompts(self, split: str) -> list[Prompt]:
        """The tokens of each conversation of a split before its first supervised one."""
        store = self.store(split)
        names, domains = store.column("conversation").tolist(), store.column("domain").tolist()
        found: dict[str, Prompt] = {}
        for index, name in enumerate(names):
            if name not in found:
                example = store[index]
                first = int(np.argmax(example.loss_mask))
                found[name] = Prompt(name, str(domains[index]), tuple(example.input_ids[:first].tolist()))
        return list(found.values())
