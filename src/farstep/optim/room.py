"""Memory for many tensors at once, in huge pages where the kernel has them.

A page that a process has never touched costs a fault and is filled with zeros first: with pages of 4 KiB that takes longer than the copy into it.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Room", "aligned"]

ALIGNMENT = 64
SMALL_BYTES = 4 << 20
"""Where less is wanted in all, ordinary memory will do."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Room:
    """`nbytes` for tensors in main memory, each `aligned`. The memory is given back when the last of them is gone."""

    def __init__(self, nbytes: int) -> None:
        self._memory: mmap.mmap | None = None
        self._at = 0
        if nbytes >= SMALL_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                memory.madvise(mmap.MADV_HUGEPAGE)
                self._memory = memory
            except OSError:  # a kernel without them
                pass

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that is not filled, and has a storage of its own."""
        numel = math.prod(shape)
        if self._memory is None or device.type != "cpu" or numel == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=self._at)
        self._at += aligned(numel * dtype.itemsize)
        return tensor.view(tuple(shape))
