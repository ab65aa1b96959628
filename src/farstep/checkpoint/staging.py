"""Memory of this process that a state is copied into, so that it can be changed again while the copy is written.

The memory is kept for the next save: what has never been touched costs more than the copy itself.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farstep.checkpoint.memory import is_plain
from farstep.checkpoint.writing import Write
from farstep.errors import CheckpointError
from farstep.state.room import aligned

__all__ = ["Staging", "release_staging", "staging"]

_SMALL_BYTES = 64 << 10
"""Smaller tensors are copied together."""
_CHUNK_BYTES = 8 << 20
_MOST_THREADS = 4
_HUGE_PAGE_BYTES = 2 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Staging:
    def __init__(self) -> None:
        self._memory: dict[bool, Tensor] = {}
        """By whether it is pinned, which is what a GPU copies into."""

    def copied(self, writes: Sequence[Write], ranks: int) -> list[Write]:
        """The same writes, of copies in this memory, each as one row. Copies of before are gone. `ranks` share the processors."""
        found: dict[int, Tensor] = {}
        for pinned in (True, False):
            chosen = [i for i, each in enumerate(writes) if (each.tensor.device.type == "cuda") == pinned]
            if chosen:
                copies = self._copied([writes[i].tensor.detach() for i in chosen], pinned, ranks)
                found |= zip(chosen, copies, strict=True)
        return [each._replace(tensor=found[i]) for i, each in enumerate(writes)]

    def release(self) -> None:
        self._memory.clear()

    def _copied(self, tensors: Sequence[Tensor], pinned: bool, ranks: int) -> list[Tensor]:
        batches = _batches(tensors)
        sizes = [aligned(sum(tensors[i].nbytes for i in batch)) for batch in batches]
        memory = self._room(sum(sizes), pinned)
        found: dict[int, Tensor] = {}
        rows: list[tuple[Tensor, Tensor]] = []
        others: list[tuple[Tensor, Sequence[Tensor]]] = []
        at = 0
        for batch, nbytes in zip(batches, sizes, strict=True):
            sources = [tensors[i] for i in batch]
            numels = [each.numel() for each in sources]
            into = memory[at : at + nbytes].view(sources[0].dtype)[: sum(numels)]
            at += nbytes
            found |= zip(batch, into.split(numels), strict=True)
            if len(batch) == 1 and is_plain(sources[0]):
                rows.append((into, sources[0].reshape(-1)))
            else:
                others.append((into, sources))
        threads = max(1, min(_MOST_THREADS, os.cpu_count() or 1) // ranks)
        _copy_all(rows, others, threads)
        return [found[i] for i in range(len(tensors))]

    def _room(self, nbytes: int, pinned: bool) -> Tensor:
        memory = self._memory.pop(pinned, None)
        if memory is None or memory.nbytes < nbytes:
            del memory  # before there is another
            memory = _new_memory(nbytes, pinned)
        self._memory[pinned] = memory
        return memory


def _batches(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Which are copied together: small ones of a dtype; any other by itself."""
    small: dict[torch.dtype, list[int]] = {}
    large: list[list[int]] = []
    for i, tensor in enumerate(tensors):
        if tensor.nbytes < _SMALL_BYTES and is_plain(tensor):
            small.setdefault(tensor.dtype, []).append(i)
        else:
            large.append([i])
    return large + list(small.values())


def _copy_all(
    rows: Sequence[tuple[Tensor, Tensor]], others: Sequence[tuple[Tensor, Sequence[Tensor]]], threads: int
) -> None:
    chunks: deque[tuple[Any, Any]] = deque()
    for into, source in rows:
        to, of = (each.view(torch.uint8).numpy() for each in (into, source))
        chunks += ((to[at : at + _CHUNK_BYTES], of[at : at + _CHUNK_BYTES]) for at in range(0, len(of), _CHUNK_BYTES))  # fmt: skip

    def work() -> None:
        try:
            while True:
                np.copyto(*chunks.popleft())  # which lets other threads run
        except IndexError:
            pass

    helpers = min(threads - 1, len(chunks) - 1)
    with ThreadPoolExecutor(max(1, helpers), "farstep-stage") as pool:
        tasks = [pool.submit(work) for _ in range(helpers)]
        devices = set()
        for into, sources in others:
            if len(sources) > 1:
                torch.cat([_as_integers(each.reshape(-1)) for each in sources], out=_as_integers(into))
            else:
                (source,) = sources
                into.view(source.shape).copy_(source, non_blocking=into.is_pinned())
                devices.add(source.device)
        work()
        for each in tasks:
            each.result()
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


def _as_integers(row: Tensor) -> Tensor:
    """Not every operation is there for every dtype."""
    return row.view(_INTEGERS[row.itemsize]) if row.itemsize in _INTEGERS else row


def _new_memory(nbytes: int, pinned: bool) -> Tensor:
    try:
        if pinned or nbytes < _HUGE_PAGE_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        memory = mmap.mmap(-1, -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # fmt: skip
    except (OSError, RuntimeError) as exc:
        raise CheckpointError(
            f"there is no room for a copy of the {nbytes} bytes that this rank saves ({exc}): save, which needs no copy, will do"
        ) from exc
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a forked process, such as a data loader's, must not make the next copy slow
        if hasattr(mmap, advice):
            try:
                memory.madvise(getattr(mmap, advice))
            except OSError:
                pass  # a kernel that cannot
    return torch.frombuffer(memory, dtype=torch.uint8)


staging = Staging()
"""This process's."""
os.register_at_fork(after_in_child=staging.release)  # which does not have the memory


def release_staging() -> None:
    """Give back the memory that async_save keeps for the next copy, when the save under way, if there is one, has ended."""
    staging.release()
