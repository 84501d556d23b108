"""What a sharded target needs to know before there are ranks."""

from __future__ import annotations

import pytest
import torch

from dspark_train.target.sharding import local_rank


def test_the_rank_on_a_node_is_slurm_s_or_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_LOCALID", raising=False)
    assert local_rank(torch.device("cuda", 3)) == "3"
    assert local_rank(torch.device("cpu")) == "0"
    monkeypatch.setenv("SLURM_LOCALID", "5")
    assert local_rank(torch.device("cpu")) == "5"
