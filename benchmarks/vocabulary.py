"""What a reduced draft vocabulary costs in acceptance: the target's probability outside it, on held-out answers.

``python benchmarks/vocabulary.py RUN`` counts the training answers' tokens as ``draft.vocab_coverage`` does and sums
the target's probabilities of the tokens left out. A draft can lose no more acceptance than that at any position. The
table goes into ``benchmarks/README.md``; what the reduction saves stands in that of ``step.py``.
"""

from __future__ import annotations

import torch
from table import machine, run_argument, write_table

from dspark_train.training.module import answer_token_counts, choose_vocabulary

COVERAGES = (1.0, 0.999, 0.99, 0.95)


@torch.inference_mode()
def main() -> None:
    run = run_argument(__doc__)
    train, held = run.data.store(run.data.train_split), run.data.store(run.data.val_split)
    size = run.target.vocab_size
    counts = answer_token_counts(train, size)
    chosen = {coverage: choose_vocabulary(counts, None, coverage) for coverage in COVERAGES}
    outside_mass = dict.fromkeys(COVERAGES, 0.0)
    outside_tokens = dict.fromkeys(COVERAGES, 0)
    positions = 0
    for index in range(len(held)):
        example = held[index]
        ids = torch.from_numpy(example.input_ids.astype("int64"))
        following = torch.from_numpy(example.loss_mask[1:]).nonzero()[:, 0]
        hidden = run.target.states(ids[None]).last_hidden[0, following]
        probabilities = run.target.lm_head(hidden).float().softmax(-1)
        positions += len(following)
        for coverage, vocabulary in chosen.items():
            outside_mass[coverage] += float((1 - probabilities[:, vocabulary].sum(-1)).sum())
            outside_tokens[coverage] += int((~torch.isin(ids[following + 1], vocabulary)).sum())
    lines = [
        "| coverage | tokens | of the full vocabulary | held-out tokens outside | target's probability outside |",
        "|--:|--:|--:|--:|--:|",
    ]
    for coverage, vocabulary in chosen.items():
        lines.append(
            f"| {coverage} | {len(vocabulary):,} | {len(vocabulary) / size:.1%} "
            f"| {outside_tokens[coverage] / positions:.2%} | {outside_mass[coverage] / positions:.2%} |"
        )
    caption = f"{len(held)} held-out conversations, {positions:,} answer tokens. {machine()}"
    write_table("vocabulary", "python benchmarks/vocabulary.py RUN", caption, lines)


if __name__ == "__main__":
    main()
