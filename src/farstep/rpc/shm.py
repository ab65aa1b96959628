"""Large tensors between workers of one host: copied once, into memory that both have mapped.

The sender's `Lender` copies a tensor into a segment (a sealed memfd) and sends its number; a new
segment's file descriptor travels with the frame that first uses it. The receiver's `Borrower` builds the
tensor on the mapping itself. When that tensor is gone the segment's number goes back, and the segment is
lent again: its pages are warm, which is most of the speed. Both sides die safely: a mapping outlives its
sender, and a receiver's loss ends its lender.

[Note: what a borrower checks] A peer may lie. A segment is sealed, so that its memory can't be pulled away (SIGBUS); it is
ordinary memory and has no holes where the tensor lies, so that mapping it takes no memory that its lender has not paid
for; and all segments of a peer together are bounded. A hole that is punched later reads as zeros, and is
within that bound.

[Note: finalizers do not send] A tensor can die anywhere, also in a thread that holds a connection's write
lock. So the finalizer only puts the number on a queue; the queue rides with the next message to that peer.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import threading
import weakref
from collections import deque
from typing import Any, Final

import torch

from farstep.errors import PayloadError, ProtocolError
from farstep.rpc.tensors import Outgoing

__all__ = ["Borrower", "Lender", "SharedBudget", "size_class"]

MAX_NEW_PER_FRAME: Final = 200
"""A frame carries at most 253 file descriptors (Linux's SCM_MAX_FD)."""

MAX_SEGMENTS: Final = min(4096, max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
"""So many segments one worker lends to another: each is a mapping and, as Python maps it, an open file."""

_TOO_MUCH: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedBudget:
    """How many bytes of segments one agent may have, over all its peers."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        with self._lock:
            if self._used_bytes + nbytes > self._limit_bytes:
                return False
            self._used_bytes += nbytes
            return True

    def give(self, nbytes: int) -> None:
        with self._lock:
            self._used_bytes -= nbytes


class Segment:
    """One piece of shared memory, as its sender has it."""

    __slots__ = ("bytes", "fd", "id", "size")

    def __init__(self, id: int, size: int) -> None:
        self.id = id
        self.size = size
        self.fd = os.memfd_create("farstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(self.fd, size, mmap.MAP_SHARED)
        except BaseException:
            os.close(self.fd)
            raise
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def fill(self, tensor: Outgoing) -> None:
        count = tensor.nbytes // tensor.tensor.itemsize
        flat = tensor.tensor.detach().as_strided((count,), (1,)).view(torch.uint8)
        self.bytes[: tensor.nbytes].copy_(flat)

    def close_fd(self) -> None:
        """Once the message has left, the descriptor has done its work. Only the sending thread calls this."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Lender:
    """The segments that this worker lends to one peer. Any thread."""

    def __init__(self, budget: SharedBudget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._next_id = 1
        self._free: dict[int, list[Segment]] = {}
        self._lent: dict[int, Segment] = {}
        self._dropped: dict[int, int] = {}
        self._made = 0
        self._closed = False

    def lend(self, tensor: Outgoing) -> tuple[Segment, bool] | None:
        """A segment that holds the tensor, and whether it is new. None where the budget is used up."""
        size = size_class(tensor.nbytes)
        with self._lock:
            if self._closed:
                return None
            free = self._free.get(size)
            segment = free.pop() if free else None
            if segment is not None:
                self._lent[segment.id] = segment
        is_new = segment is None
        if segment is None:
            segment = self._make(size)
            if segment is None:
                return None
        segment.fill(tensor)
        return segment, is_new

    def _make(self, size: int) -> Segment | None:
        if not self._has_room() or not self._budget.take(size):
            self._drop_free()
            return None
        with self._lock:
            id, self._next_id = self._next_id, self._next_id + 1
            self._made += 1
        try:
            segment = Segment(id, size)
        except OSError:  # no memory or no descriptors: the socket takes it
            self._forget([size])
            return None
        with self._lock:
            self._lent[id] = segment
        return segment

    def _has_room(self) -> bool:
        return self._made < MAX_SEGMENTS

    def _forget(self, sizes: list[int]) -> None:
        """The peer does not have them mapped, or will have unmapped them before it hears of others."""
        with self._lock:
            self._made -= len(sizes)
        for size in sizes:
            self._budget.give(size)

    def _drop_free(self) -> None:
        """Have the peer unmap what it does not use. Room for others there is once it has been told: see `told_dropped`."""
        with self._lock:
            for segments in self._free.values():
                self._dropped.update((s.id, s.size) for s in segments)
            self._free.clear()

    @property
    def has_dropped(self) -> bool:
        return bool(self._dropped)

    def take_dropped(self) -> dict[int, int]:
        """Segments that the peer may unmap, and their sizes; to be told to it with the next frame."""
        if not self._dropped:
            return {}
        with self._lock:
            dropped, self._dropped = self._dropped, {}
        return dropped

    def put_back(self, dropped: dict[int, int]) -> None:
        """The message that was to tell of these did not leave."""
        with self._lock:
            if not self._closed:
                self._dropped.update(dropped)
                return
        self._forget(list(dropped.values()))

    def told_dropped(self, dropped: dict[int, int]) -> None:
        """It left."""
        self._forget(list(dropped.values()))

    def returned(self, ids: list[int]) -> None:
        """The peer let these go, or they were never sent. Numbers that were not lent are ignored."""
        with self._lock:
            for id in ids:
                segment = self._lent.pop(id, None)
                if segment is not None:
                    self._free.setdefault(segment.size, []).append(segment)

    def discard(self, ids: list[int]) -> None:
        """Segments whose frame never left: the peer does not know them."""
        with self._lock:
            segments = [s for s in (self._lent.pop(id, None) for id in ids) if s is not None]
        self._forget([s.size for s in segments])

    def close(self) -> None:
        """The peer is gone: every segment is free memory again."""
        with self._lock:
            self._closed = True
            segments = [*self._lent.values(), *(s for free in self._free.values() for s in free)]
            sizes = [*(s.size for s in segments), *self._dropped.values()]
            self._lent.clear()
            self._free.clear()
            self._dropped.clear()
        self._forget(sizes)


def size_class(nbytes: int) -> int:
    """Round up to a quarter of the power of two below, in whole pages, so that near sizes share segments."""
    step = max(mmap.PAGESIZE, 1 << max(nbytes.bit_length() - 3, 0))
    return -(-nbytes // step) * step


class Borrower:
    """The segments that one peer lends to this worker. `borrow` is called by the thread that unpacks a frame."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._mapped_bytes = 0
        self._maps: dict[int, mmap.mmap] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._let_go: deque[int] = deque()
        self._pinned: set[int] = set()

    def admit(self, id: int, size: int, used: int, fd: int) -> None:
        """Map a new segment, whose first `used` bytes hold a tensor. Called in the order of arrival.

        ProtocolError where it is not as it should be (see [Note: what a borrower checks]), PayloadError where it is too much.
        """
        if type(id) is not int or id in self._maps or not all(type(n) is int for n in (size, used)):
            raise ProtocolError(
                f"a shared-memory segment {id!r} of {size!r} bytes, which cannot be or is there already"
            )
        if len(self._maps) >= MAX_SEGMENTS or self._mapped_bytes + size > self._limit_bytes:
            raise PayloadError(
                f"cannot be taken in: {len(self._maps)} segments of shared memory with {self._mapped_bytes} bytes are in use, and "
                f"{size} bytes more would be over the receiver's RpcOptions.shared_memory_bytes ({self._limit_bytes}); "
                f"set it to the same on all workers"
            )
        try:
            _check(fd, size, used)
            memory = mmap.mmap(fd, size, mmap.MAP_SHARED)
            self._maps[id] = memory
            self._mapped_bytes += size
            try:
                memory.madvise(_MADV_POPULATE_WRITE, 0, used)
            except OSError:
                pass  # an older kernel: pages are mapped as they are used
        except (OSError, ValueError, OverflowError) as exc:
            if isinstance(exc, OSError) and exc.errno in _TOO_MUCH:
                raise PayloadError(f"cannot be taken in: its shared memory cannot be mapped: {exc}") from exc
            raise ProtocolError(f"a shared-memory segment that cannot be mapped: {exc}") from exc

    def borrow(self, id: int, nbytes: int) -> torch.Tensor:
        """The first bytes of a segment as a tensor; when that is gone the segment goes back."""
        memory = self._maps.get(id)
        if memory is None or id in self._watch or not 0 < nbytes <= len(memory):
            raise ProtocolError(f"shared-memory segment {id} is not one that was lent, or is lent already")
        view = memoryview(memory)[:nbytes]

        def let_go(_: Any, id: int = id) -> None:  # See [Note: finalizers do not send]
            del self._watch[id]
            if id not in self._pinned:
                self._let_go.append(id)

        self._watch[id] = weakref.ref(view, let_go)
        return torch.frombuffer(view, dtype=torch.uint8)

    @property
    def has_released(self) -> bool:
        return bool(self._let_go)

    def take_released(self) -> list[int]:
        """Numbers to give back with the next message to the lender."""
        released: list[int] = []
        while self._let_go:
            try:
                released.append(self._let_go.popleft())
            except IndexError:  # another thread took the last one
                break
        return released

    def put_back(self, released: list[int]) -> None:
        """The message that was to give these back did not leave."""
        self._let_go.extend(released)

    def pin(self) -> None:
        """Before a fork: a child shares this memory, so what is borrowed now is never given back."""
        self._pinned.update(self._watch)

    def close(self) -> None:
        """The lender is gone. Tensors on its memory keep that memory; the rest is unmapped."""
        self._maps.clear()
        self._mapped_bytes = 0

    def unmap(self, ids: list[int]) -> None:
        """The lender dropped these; they are not in use here."""
        for id in ids:
            memory = None if id in self._watch else self._maps.pop(id, None)
            if memory is not None:
                self._mapped_bytes -= len(memory)


def _check(fd: int, size: int, used: int) -> None:
    """See [Note: what a borrower checks]."""
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ProtocolError("a shared-memory segment that is not sealed")
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        raise ProtocolError("a shared-memory segment that is not of ordinary pages")
    if not 0 < used <= size or os.fstat(fd).st_size != size:
        raise ProtocolError(f"a shared-memory segment that is not of the {size} bytes that were announced")
    if os.lseek(fd, 0, os.SEEK_HOLE) < used:
        raise ProtocolError("a shared-memory segment with holes in it")
