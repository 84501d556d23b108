"""Large tensors take few page faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CODE = """
import resource, sys
from dspark_train.heap import use_huge_pages
if sys.argv[1] == "huge":
    use_huge_pages()
import torch
x = torch.ones(25 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
y = x.clone()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    """Of a clone of 100 MB."""
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    words = [sys.executable, "-c", CODE, how]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


@pytest.mark.skipif(
    not HUGE.is_file() or "[madvise]" not in HUGE.read_text(),
    reason="huge pages are not the process's choice",
)
def test_huge_pages_spare_most_page_faults() -> None:
    assert page_faults("huge") < page_faults("as it is") / 2
