"""A message <-> bytes on a stream.

    ┌──────────── 24 bytes ─────────────┬──────────────┬─────────┬───────────┬──
    │ magic version kind depth          │ length of    │ meta    │ buffer 0  │ …
    │ call id, meta length, fds, buffers│ each buffer  │ (pickle)│ (raw)     │
    └───────────────────────────────────┴──────────────┴─────────┴───────────┴──

Nothing here unpickles, and nothing here knows a socket: `FrameReader` is given a function that
fills memory. Lengths are checked against the limit before memory is taken for them. Small
frames are cut out of one receive buffer, so a burst of calls costs one system call; what is
large is received straight into the memory where it will stay.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, Protocol

import numpy
import torch

from farstep.errors import ProtocolError
from farstep.rpc.memory import Bytes, bytes_of

__all__ = ["Frame", "FrameReader", "Kind", "frame_bytes"]

MAGIC: Final = 0xFA57
VERSION: Final = 1
HEADER: Final = struct.Struct("<HBBHHIIQ")
"""magic, version, kind, depth, fds, meta length, buffer count, call id."""

MAX_BUFFERS: Final = 1 << 20
RECEIVE_BYTES: Final = 256 << 10
DRAIN_BYTES: Final = 4 << 20
"""One `read` takes not much more than this, though there may be more."""
OWN_MEMORY_BYTES: Final = 32 << 10
"""A buffer of at least this size gets memory of its own; smaller ones are copied out of the receive buffer."""


class Kind(IntEnum):
    """What a frame is. The comment says who sends it."""

    CALL = 1  # a caller: run this function
    REMOTE = 2  # a caller: run this function and keep its result as an RRef
    REPLY = 3  # a callee: the result
    ERROR = 4  # a callee: the exception
    FETCH = 5  # an RRef's user: send me the value
    RREF = 6  # users and owners of RRefs: forks added, confirmed, deleted
    RELEASE = 7  # a receiver: these shared-memory segments are free again
    GATHER = 8  # a member: my part of an all_gather, to the leader
    LOST = 9  # a member that noticed: this worker is gone
    GOODBYE = 10  # a member that leaves of its own accord
    BUNDLE = 11  # anyone: many small calls, replies and errors together
    EXTENSION = 12  # the layer above: whatever it says


CALLS: Final = frozenset({Kind.CALL, Kind.REMOTE, Kind.FETCH})
"""What users send, as opposed to what the agents do among themselves."""
KNOWN_KINDS: Final = frozenset(int(kind) for kind in Kind)


class Frame:
    """One received message. `meta` is still pickled; `buffers` are raw, in the order they were sent."""

    __slots__ = ("buffers", "call_id", "depth", "fds", "kind", "meta", "missing_bytes", "size")

    def __init__(self, kind: int, call_id: int, depth: int, fds: int) -> None:
        self.kind = kind
        self.call_id = call_id
        self.depth = depth
        self.fds = fds
        self.meta: bytes | memoryview = b""
        self.buffers: list[Bytes | torch.Tensor] = []
        self.size = 0
        self.missing_bytes = 0
        """There was no memory for so many: the buffers are empty. So is the meta, if there was none for that either."""


def frame_bytes(
    kind: int, call_id: int, meta: bytes, buffer_lengths: Sequence[int] = (), *, depth: int = 0, fds: int = 0
) -> bytes:
    """All of a frame but its buffers, which follow it on the stream."""
    count = len(buffer_lengths)
    head = HEADER.pack(MAGIC, VERSION, kind, depth, fds, len(meta), count, call_id)
    if not count:
        return head + meta
    return head + struct.pack(f"<{count}Q", *buffer_lengths) + meta


class Records(Protocol):
    """What a stream of records can say: see records.py."""

    has_more: bool


def _fresh(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


class FrameReader:
    """Cuts a stream into frames. `recv_into(view)` returns a count, 0 at the end, or None when it would block.

    Not thread-safe: whoever holds the connection's read lock calls `read`.
    """

    def __init__(
        self,
        recv_into: Callable[[memoryview], int | None],
        max_frame_bytes: int,
        records: Records | None = None,
        take: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """`records`: says whether bytes have come that no wait for the stream will tell of. `take`: memory for a large buffer."""
        self._recv_into = recv_into
        self._max_frame_bytes = max_frame_bytes
        self._records = records
        self._take = take or _fresh
        self._memory = memoryview(bytearray(RECEIVE_BYTES))
        self._start = 0
        self._end = 0
        self._large: _LargeFrame | None = None

    @property
    def in_frame(self) -> bool:
        """Whether part of a frame has arrived and the rest has not."""
        return self._large is not None or self._start != self._end

    def read(self) -> list[Frame]:
        """The frames that have arrived in full; empty when the stream would block. EOFError at its end."""
        frames: list[Frame] = []
        nbytes = 0
        while not frames or (self._records is not None and self._records.has_more and nbytes < DRAIN_BYTES):
            if self._large is not None:
                if not self._fill_large():
                    break
                frames.append(self._large.frame)
                nbytes += self._large.frame.size
                self._large = None
                self._cut(frames)
                continue
            if self._end == len(self._memory):
                self._move_to_front()
            count = self._recv_into(self._memory[self._end :])
            if count is None:
                break
            if count == 0:
                if frames:
                    break  # hand out what came before the end; the next read says it again
                raise EOFError("stream ended inside a frame" if self.in_frame else "stream ended")
            self._end += count
            nbytes += count
            self._cut(frames)
        return frames

    def _move_to_front(self, need: int = 0) -> None:
        """Make room behind what is there; for a table of very many buffers, take more memory (see MAX_BUFFERS)."""
        rest = bytes(self._memory[self._start : self._end])
        if need > len(self._memory):
            self._memory = memoryview(bytearray(need))
        self._memory[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def _cut(self, frames: list[Frame]) -> None:
        """Take every whole frame out of the receive buffer; turn to large mode when one cannot fit."""
        while self._end - self._start >= HEADER.size:
            magic, version, kind, depth, fds, meta_length, count, call_id = HEADER.unpack_from(
                self._memory, self._start
            )
            if magic != MAGIC or version != VERSION or kind not in KNOWN_KINDS or count > MAX_BUFFERS:
                self._refuse(magic, version, kind, count)
            table_end = self._start + HEADER.size + 8 * count
            if table_end > self._end:
                if table_end > len(self._memory):
                    self._move_to_front(HEADER.size + 8 * count)
                return
            lengths = (
                struct.unpack_from(f"<{count}Q", self._memory, self._start + HEADER.size) if count else ()
            )
            body = meta_length + sum(lengths)
            if body > self._max_frame_bytes:
                raise ProtocolError(
                    f"a frame claims {body} bytes, the limit (max_frame_bytes) is {self._max_frame_bytes}"
                )
            frame = Frame(kind, call_id, depth, fds)
            frame.size = HEADER.size + 8 * count + body
            if frame.size > len(self._memory) or (count and max(lengths) >= OWN_MEMORY_BYTES):
                self._begin_large(frame, table_end, meta_length, lengths)
                if not self._large:
                    frames.append(frame)
                    continue
                return
            if table_end + body > self._end:
                if table_end + body > len(self._memory):
                    self._move_to_front()
                return
            at = table_end + meta_length
            frame.meta = bytes(self._memory[table_end:at])
            for length in lengths:
                frame.buffers.append(bytearray(self._memory[at : at + length]))
                at += length
            self._start = table_end + body
            frames.append(frame)
        if self._start == self._end:
            self._start = self._end = 0

    @staticmethod
    def _refuse(magic: int, version: int, kind: int, count: int) -> None:
        if magic != MAGIC:
            raise ProtocolError(f"not a farstep frame (it begins with {magic:#06x})")
        if version != VERSION:
            raise ProtocolError(f"a frame of wire version {version}, this worker speaks version {VERSION}")
        if kind not in KNOWN_KINDS:
            raise ProtocolError(f"a frame of unknown kind {kind}")
        raise ProtocolError(f"a frame claims {count} buffers, the limit is {MAX_BUFFERS}")

    def _begin_large(self, frame: Frame, body_at: int, meta_length: int, lengths: Sequence[int]) -> None:
        large = _LargeFrame(frame, meta_length, lengths, self._take)
        self._start = body_at + large.take(self._memory[body_at : self._end])
        self._large = None if large.is_full else large

    def _fill_large(self) -> bool:
        large = self._large
        if large is None:  # the caller has just looked
            return False
        while not large.is_full:
            count = self._recv_into(large.rest)
            if count is None:
                return False
            if count == 0:
                raise EOFError("stream ended inside a frame")
            large.advance(count)
        self._start = self._end = 0
        return True


class _LargeFrame:
    """A frame whose parts are received where they will stay; or thrown away, where there is no memory for them."""

    def __init__(
        self, frame: Frame, meta_length: int, lengths: Sequence[int], take: Callable[[int], torch.Tensor]
    ) -> None:
        self.frame = frame
        self._views: list[memoryview] = []
        self._to_skip = 0
        self._scratch = memoryview(b"")
        try:
            # Not a bytearray, which would touch memory that is only announced.
            frame.meta = numpy.empty(meta_length, dtype=numpy.uint8).data
            self._views.append(frame.meta)
            self._make_room(lengths, take)
        except (MemoryError, RuntimeError, OSError):  # torch and mmap raise the latter ones
            frame.buffers[:] = [b""] * len(lengths)
            del self._views[1:]
            self._to_skip = sum(lengths) + (0 if self._views else meta_length)
            self._scratch = memoryview(bytearray(RECEIVE_BYTES))
            frame.missing_bytes = self._to_skip
            frame.size -= self._to_skip
        self._index = 0
        self._at = 0
        self.advance(0)

    def _make_room(self, lengths: Sequence[int], take: Callable[[int], torch.Tensor]) -> None:
        for length in lengths:
            if length >= OWN_MEMORY_BYTES:
                tensor = take(length)
                self.frame.buffers.append(tensor)
                self._views.append(bytes_of(tensor))
            else:
                small = bytearray(length)
                self.frame.buffers.append(small)
                self._views.append(memoryview(small))

    @property
    def is_full(self) -> bool:
        return self._index == len(self._views) and not self._to_skip

    @property
    def rest(self) -> memoryview:
        if self._index < len(self._views):
            return self._views[self._index][self._at :]
        return self._scratch[: self._to_skip]

    def advance(self, count: int) -> None:
        if self._index == len(self._views):
            self._to_skip -= count
            return
        self._at += count
        while self._index < len(self._views) and self._at == len(self._views[self._index]):
            self._index += 1
            self._at = 0

    def take(self, data: memoryview) -> int:
        """Copy from what was already received; say how much of it was ours."""
        taken = 0
        while taken < len(data) and not self.is_full:
            rest = self.rest
            count = min(len(rest), len(data) - taken)
            rest[:count] = data[taken : taken + count]
            self.advance(count)
            taken += count
        return taken
