"""Frames from one peer. The other direction is in sender.py.

[Note: one writer, one reader] A worker writes on the connection that it dialled and reads on the one that
the peer dialled. So no socket is ever read and written, the state of TLS needs no lock of its own, and a peer's
death shows on both.

A `Sender` may be used by any thread; its lock orders whole frames. A `Receiver` is read by whoever holds its
`read_lock`: a reactor thread, or a caller that waits for its own reply.
"""

from __future__ import annotations

import array
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from typing import Final

from farstep.errors import ProtocolError
from farstep.rpc.receive_pool import ReceivePool
from farstep.rpc.records import RecordSocket
from farstep.rpc.sender import close_socket, enlarge_buffer
from farstep.rpc.wire import Frame, FrameReader

__all__ = ["Looking", "Receiver"]

BLOCK_S: Final = 1.0
MAX_WAITS_WITHOUT: Final = 64
NEVER: Final = float("inf")
_DONTWAIT: Final = int(socket.MSG_DONTWAIT)  # plain ints: an enum's `|` takes longer than the system call
_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_CTRUNC: Final = int(socket.MSG_CTRUNC)
_FD_BYTES: Final = array.array("i").itemsize
MAX_FDS: Final = 253
"""So many come with one frame at most (Linux's SCM_MAX_FD)."""
_FD_SPACE: Final = socket.CMSG_SPACE(MAX_FDS * _FD_BYTES)


class Looking:
    """Whether to look for something for a moment before sleeping: each time in vain, twice as many waits go without."""

    __slots__ = ("_in_vain", "_most", "_without")

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_vain = 1
        self._without = 0

    def pays(self) -> bool:
        if self._without:
            self._without -= 1
            return False
        return True

    def ended(self, *, in_vain: bool) -> None:
        if in_vain:
            self._without = self._in_vain
            self._in_vain = min(2 * self._in_vain, self._most)
        else:
            self._in_vain = 1


class Receiver:
    """Reads frames from a connection that a peer dialled."""

    def __init__(
        self, sock: socket.socket, peer_id: int, max_frame_bytes: int, spin_s: float, pool: ReceivePool
    ) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.peer_id = peer_id
        self.read_lock = threading.Lock()
        self.is_closed = False
        """Changes only under the read lock."""
        self.received_bytes = 0
        self.is_taking_in = False
        """Bytes have left the socket and are not yet dealt with: an interrupt now would lose them."""
        self._spin_s = spin_s if (os.cpu_count() or 1) > 1 else 0.0
        self._looking = Looking(MAX_WAITS_WITHOUT)
        self.fds: deque[int] = deque()
        """Descriptors that have come and that no frame has taken."""
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLRDHUP)
        recv = self._recv_with_fds if sock.family == socket.AF_UNIX else self._recv
        self.records = sock if isinstance(sock, RecordSocket) else None
        """The socket, if something may have left it that `read` has not looked at: no event tells of that."""
        self._reader = FrameReader(recv, max_frame_bytes, self.records, pool.take)
        # The socket blocks for up to BLOCK_S where a caller waits, and is told not to elsewhere.
        sock.setblocking(True)
        self._flags = _DONTWAIT
        self._block_until = NEVER
        """From then on it does not block any more: a frame that drips in must not hold whoever waits beyond their deadline."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(BLOCK_S), 0))
        enlarge_buffer(sock, socket.SO_RCVBUF)

    def take_read_lock(self) -> bool:
        """Become the reader, if nobody else is. Not of a closed connection: its descriptor's number may be another's by now."""
        if not self.read_lock.acquire(blocking=False):
            return False
        if self.is_closed:
            self.read_lock.release()
            return False
        return True

    def read(self) -> list[Frame]:
        """What has arrived. EOFError or OSError at the end. Only with `read_lock` held."""
        frames = self._reader.read()
        for frame in frames:
            self.received_bytes += frame.size
        return frames

    def read_waiting(self, timeout_s: float | None) -> list[Frame]:
        """Like `read`, and waits for something, though not always for all of the time.

        Each system call right after a wake-up costs tens of microseconds, so where there is time the wait and the
        read are one blocking call.
        """
        if timeout_s is not None and timeout_s < BLOCK_S:
            self._poll.poll(None if timeout_s is None else max(0.0, timeout_s * 1000))
            return self.read()
        frames = self._spin()
        if frames or self._reader.in_frame:
            return frames
        self._flags = 0
        self._block_until = NEVER if timeout_s is None else time.monotonic() + timeout_s - BLOCK_S
        try:
            return self.read()
        finally:
            self._flags = _DONTWAIT

    def _spin(self) -> list[Frame]:
        """Look again and again for a moment before sleeping: what comes at once is then met by a core that is awake.

        Only where it has paid of late.
        """
        if self._spin_s <= 0 or not self._looking.pays():
            return []
        until = time.perf_counter() + self._spin_s
        poll = self._poll.poll  # a poll in vain costs less than a read in vain, which makes an exception
        while time.perf_counter() < until:
            if poll(0):
                frames = self.read()
                if frames or self._reader.in_frame:
                    self._looking.ended(in_vain=False)
                    return frames
            os.sched_yield()  # to the very worker that is waited for, where cores are few
        self._looking.ended(in_vain=True)
        return []

    @property
    def is_ready(self) -> bool:
        """Whether there is something to read, or the end. Without waiting."""
        return bool(self._poll.poll(0)) or (self.records is not None and self.records.has_more)

    def take_fds(self, count: int) -> list[int]:
        """The descriptors that came with a frame, in the order of its sending."""
        if count > len(self.fds):
            raise ProtocolError(f"a frame announces {count} file descriptors and {len(self.fds)} came")
        return [self.fds.popleft() for _ in range(count)]

    def check_fds(self) -> None:
        """After all frames that came have taken theirs: only one that is still on its way may have some here."""
        if len(self.fds) > MAX_FDS:
            raise ProtocolError(f"{len(self.fds)} file descriptors came that no frame announces")

    def close(self) -> None:
        """Only with `read_lock` held, or where no thread reads any more."""
        self.is_closed = True
        close_socket(self.sock)
        while self.fds:
            os.close(self.fds.popleft())

    def _recv(self, view: memoryview) -> int | None:
        self.is_taking_in = False
        try:
            count = self.sock.recv_into(view, 0, self._flags)
        except BlockingIOError:
            return None
        except ssl.SSLError as exc:
            raise ProtocolError(f"a TLS record that cannot be read: {exc}") from exc
        self.is_taking_in = True
        if not self._flags and time.monotonic() > self._block_until:
            self._flags = _DONTWAIT
        return count

    def _recv_with_fds(self, view: memoryview) -> int | None:
        self.is_taking_in = False
        try:
            count, control, flags, _ = self.sock.recvmsg_into([view], _FD_SPACE, self._flags | _CLOEXEC)
        except BlockingIOError:
            return None
        self.is_taking_in = True
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
                self.fds.extend(fds)
        if flags & _CTRUNC:
            raise ProtocolError("file descriptors were lost on the way: too many are open in this process")
        if not self._flags and time.monotonic() > self._block_until:
            self._flags = _DONTWAIT
        return count
