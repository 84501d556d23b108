"""Freed memory is used again instead of being asked for anew, page by page."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys
import torch
from dspark_train.heap import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
x = torch.ones(25 * 2**20)
for _ in range(2):
    y = x.clone(); del y
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
y = x.clone()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_tensor_of_a_hundred_megabytes_takes_no_new_pages() -> None:
    assert page_faults("kept") < 100
    assert page_faults("as it is") > page_faults("kept")
