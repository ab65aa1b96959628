"""Memory of this process that a state is copied into, so that it can be changed again while the copy is written.

The memory is kept for the next save: what has never been touched costs more than the copy itself.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove

import torch
from torch import Tensor

from farstep.checkpoint.memory import is_plain
from farstep.checkpoint.writing import Write
from farstep.errors import CheckpointError
from farstep.state.room import aligned

__all__ = ["Copy", "Staging", "give_back", "release_staging", "spare_staging", "staging"]

_SMALL_BYTES = 64 << 10
_PIECE_BYTES = 8 << 20
_MOST_THREADS = 4
_HUGE_PAGE_BYTES = 2 << 20
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Staging:
    def __init__(self) -> None:
        self._memory: dict[bool, Tensor] = {}
        """By whether it is pinned, which is what a GPU copies into."""

    def copy(self, writes: Sequence[Write], ranks: int) -> Copy:
        """What is written, as it is now. Copies of before are gone. `ranks` share the processors."""
        sizes = [aligned(each.tensor.nbytes) for each in writes]
        pinned = [each.tensor.device.type == "cuda" for each in writes]
        ends = {True: 0, False: 0}
        at = []
        for nbytes, is_pinned in zip(sizes, pinned, strict=True):
            at.append(ends[is_pinned])
            ends[is_pinned] += nbytes
        memory = {kind: self._room(end, kind) for kind, end in ends.items() if end}
        found = Copy(list(writes), at, [memory.get(kind, _NOTHING) for kind in pinned])
        found.fill(max(1, min(_MOST_THREADS, os.cpu_count() or 1) // ranks))
        return found

    def release(self) -> None:
        self._memory.clear()

    def _room(self, nbytes: int, pinned: bool) -> Tensor:
        memory = self._memory.pop(pinned, None)
        if memory is None or memory.nbytes < nbytes:
            del memory  # before there is another
            memory = _new_memory(nbytes, pinned)
        self._memory[pinned] = memory
        return memory


class Copy:
    """`at[i]` is where the tensor of the i-th write goes in its memory."""

    def __init__(self, writes: list[Write], at: list[int], memory: list[Tensor]) -> None:
        self._writes, self._at, self._memory = writes, at, memory

    def writes(self) -> list[Write]:
        """The same writes, of the copies, each as one row. After this the tensors themselves are let go."""
        self._writes = [each._replace(tensor=self._row(i)) for i, each in enumerate(self._writes)]
        return self._writes

    def _row(self, i: int) -> Tensor:
        tensor, at = self._writes[i].tensor, self._at[i]
        return self._memory[i][at : at + tensor.nbytes].view(tensor.dtype)

    def fill(self, threads: int) -> None:
        """Large pieces are shared with other threads; the caller does all that is small, or needs more than its bytes moved."""
        pieces: deque[tuple[int, int, int]] = deque()
        others, devices = [], set()
        base = {id(each): each.data_ptr() for each in self._memory}
        for i, write in enumerate(self._writes):
            tensor = write.tensor
            if not is_plain(tensor):
                others.append(i)
                continue
            nbytes, to, of = tensor.nbytes, base[id(self._memory[i])] + self._at[i], tensor.data_ptr()
            if nbytes < _SMALL_BYTES:
                memmove(to, of, nbytes)
                continue
            for first in range(0, nbytes, _PIECE_BYTES):
                pieces.append((to + first, of + first, min(_PIECE_BYTES, nbytes - first)))
        with ThreadPoolExecutor(threads, "farstep-stage") as pool:
            helpers = [pool.submit(_move_all, pieces) for _ in range(min(threads - 1, len(pieces) // 2))]
            for i in others:
                tensor = self._writes[i].tensor.detach()
                self._row(i).view(tensor.shape).copy_(tensor, non_blocking=self._memory[i].is_pinned())
                devices.add(tensor.device)
            _move_all(pieces)
            for each in helpers:
                each.result()
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


def _move_all(pieces: deque[tuple[int, int, int]]) -> None:
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:
            return
        memmove(*piece)  # which lets other threads run


def _new_memory(nbytes: int, pinned: bool) -> Tensor:
    try:
        if pinned or nbytes < _HUGE_PAGE_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        memory = mmap.mmap(-1, -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # fmt: skip
    except (OSError, RuntimeError) as exc:
        raise CheckpointError(
            f"there is no room for a copy of the {nbytes} bytes that this rank saves ({exc}): save, which needs no copy, will do"
        ) from exc
    for advice in (
        "MADV_HUGEPAGE",
        "MADV_DONTFORK",
    ):  # a forked process, such as a data loader's, must not make the next copy slow
        if hasattr(mmap, advice):
            try:
                memory.madvise(getattr(mmap, advice))
            except OSError:
                pass  # a kernel that cannot
    return torch.frombuffer(memory, dtype=torch.uint8)


staging = Staging()
"""For what this process saves."""
_spare: list[Staging] = []
"""For what it copies aside for saves of other workers, of which there may be several at once; one is kept."""


def spare_staging() -> Staging:
    try:
        return _spare.pop()
    except IndexError:
        return Staging()


def give_back(spare: Staging) -> None:
    """Nothing has its memory any more."""
    _spare[:] = [spare]


def release_staging() -> None:
    """Give back the memory that async_save keeps for the next copy, when the save under way, if there is one, has ended."""
    staging.release()
    _spare.clear()


os.register_at_fork(after_in_child=release_staging)  # a child does not have the memory
