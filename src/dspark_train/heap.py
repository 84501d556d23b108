"""Memory of large tensors on a CPU."""

from __future__ import annotations

import os


def use_huge_pages() -> None:
    """Let PyTorch ask for huge pages behind large CPU tensors, unless the environment says otherwise.

    The system clears every page that a new tensor gets; for tensors of tens of megabytes, page by page of 4 KB, that
    takes longer than the arithmetic on them. PyTorch looks at the variable when it first allocates, so this has to
    come before it is imported.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
