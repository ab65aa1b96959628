"""Memory that the host of a virtual machine has taken back, had again before anything is timed.

A host may take back what its machine has had free for a second or two (free page reporting). The next who needs it waits for the host, ten times longer than
for the copy into it, and whom that hits is chance. So the memory that a way will need is taken and given back right before it begins.
"""

from __future__ import annotations

import mmap

import torch

__all__ = ["warm"]


def warm(nbytes: int) -> None:
    """Touch so much memory, in huge pages where there are any, and let it go."""
    if not nbytes:
        return
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(memory, dtype=torch.uint8).zero_()
