"""Memory for large tensors that come by TCP, used again once they are gone.

Fresh memory is slow: the kernel clears each page when it is first touched, at a fraction of the speed of a copy. So buffers come back here when the
tensors that lie in them are gone, and the next message finds them warm.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from typing import Any, Final

import torch

from farstep.rpc.shm import size_class

__all__ = ["ReceivePool"]

MIN_BYTES: Final = 256 << 10
"""Smaller ones come from malloc, whose memory is mostly warm."""

POOL_BYTES: Final = 256 << 20
"""So much is kept for later; what comes back beyond it is given to the system."""


class ReceivePool:
    """Buffers of one agent. Any thread."""

    def __init__(self, limit_bytes: int = POOL_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[mmap.mmap]] = {}
        self._free_bytes = 0
        self._let_go: deque[mmap.mmap] = deque()
        self._watch: dict[int, weakref.ref[Any]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """Memory as a tensor of bytes, with whatever was in it before. RuntimeError or OSError where there is none."""
        if nbytes < MIN_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        size = size_class(nbytes)
        with self._lock:
            self._collect()
            free = self._free.get(size)
            memory = free.pop() if free else None
            if memory is not None:
                self._free_bytes -= size
        if memory is None:
            memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(memory)[:nbytes]
        key = id(view)

        def let_go(_: Any, key: int = key, memory: mmap.mmap = memory) -> None:
            # A tensor can die in any thread, whatever locks that one holds: never wait here.
            del self._watch[key]
            self._let_go.append(memory)
            if self._lock.acquire(blocking=False):
                self._collect()
                self._lock.release()

        self._watch[key] = weakref.ref(view, let_go)
        return torch.frombuffer(view, dtype=torch.uint8)

    def _collect(self) -> None:
        """Under the lock."""
        while self._let_go:
            memory = self._let_go.popleft()
            if self._free_bytes + len(memory) <= self._limit_bytes:
                self._free.setdefault(len(memory), []).append(memory)
                self._free_bytes += len(memory)
