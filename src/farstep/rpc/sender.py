"""Writing frames to one peer, and keeping what it does not read.

[Note: one place that writes] All bytes leave in `_write_some`, with the lock held, and `_wait_writable` is where a thread waits for
the peer to read. A frame that has been begun is always finished with the same bytes.

[Note: backlog] A thread that makes a call waits until its deadline for the peer to read. What an agent sends of its own
accord, answers above all, holds its thread for a moment only (`send_soon`): then a copy of what has not left is kept, the
reactor writes it when the peer reads, and what is sent later goes behind it. When the backlog is full (`is_full`), the peer's
calls are not run (see pressure.py); when it is several times that, whoever sends waits after all.
"""

from __future__ import annotations

import array
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from farstep.errors import RpcTimeout
from farstep.rpc.bundle import Rider, bundle
from farstep.rpc.memory import Bytes
from farstep.rpc.records import MacSocket

__all__ = ["JOIN_BYTES", "Sender", "Stalled", "close_socket", "enlarge_buffer"]

JOIN_BYTES: Final = 64 << 10
"""Parts up to this size together are joined: one copy costs less than a scattered write."""

MAX_PARTS: Final = 512
SOCKET_BUFFER_BYTES: Final = 4 << 20
BACKLOG_BYTES: Final = 64 << 20
OVERFULL: Final = 4
"""A backlog of so many times its bound takes no more."""
MOMENT_S: Final = 1.0
SLOW_BYTES_PER_S: Final = 16 << 20
"""`send_soon` waits for a moment, and longer for a large message: as long as it takes at this speed."""
FLUSH_S: Final = 0.02


class Stalled(RpcTimeout):
    """The peer did not read in time. `began`: part of the frame is out, and the rest will follow."""

    def __init__(self, began: bool) -> None:
        super().__init__("the peer does not read")
        self.began = began


class _Late:
    """Whole frames that wait to be written, and file descriptors of their own."""

    __slots__ = ("fds", "nbytes", "parts")

    def __init__(self, parts: Sequence[Bytes], fds: Sequence[int]) -> None:
        self.fds: list[int] = []
        try:
            for fd in fds:
                self.fds.append(os.dup(fd))
            self.parts = [bytes(part) for part in parts]
        except BaseException:
            self.close_fds()
            raise
        self.nbytes = sum(len(part) for part in self.parts)

    def close_fds(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


class Sender:
    """Writes frames on a connection that this worker dialled."""

    def __init__(
        self, sock: socket.socket, max_frame_bytes: int, max_backlog_bytes: int = BACKLOG_BYTES
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._has_records = isinstance(sock, ssl.SSLSocket | MacSocket)
        self.shares_host = sock.family == socket.AF_UNIX
        self.sent_bytes = 0
        self.is_full = False
        self.arm: Callable[[bool], None] = lambda for_writing: None
        """Have `flush_now` called when the peer reads, or not. Called under a lock."""
        self.on_full: Callable[[bool], None] = lambda is_full: None
        """`is_full` has changed. Called under a lock."""
        self._lock = threading.Lock()
        self._riders: deque[Rider] = deque()
        self._max_frame_bytes = max_frame_bytes
        self._max_backlog_bytes = max_backlog_bytes
        self._rest: list[Bytes] = []
        """What is left of a frame that has been begun. Under the lock."""
        self._rest_bytes = 0
        self._state = threading.Lock()
        self._late: deque[_Late] = deque()
        """What goes after it. Put in under `_state`, taken out under both locks."""
        self._late_bytes = 0
        self._closed = False
        self._poll = select.poll()
        self._poll.register(sock, select.POLLOUT)
        enlarge_buffer(sock, socket.SO_SNDBUF)

    def ride(self, rider: Rider) -> int:
        """Queue a small message that may wait for the next one; say how many do. Takes no lock: safe in any thread."""
        riders = self._riders
        riders.append(rider)
        return len(riders) or 1  # another thread may have sent it already

    @property
    def riders(self) -> int:
        return len(self._riders)

    @property
    def has_backlog(self) -> bool:
        return bool(self._rest or self._late)

    @property
    def backlog_bytes(self) -> int:
        return self._rest_bytes + self._late_bytes

    # -- sending

    def send(self, parts: Sequence[Bytes], deadline: float | None, fds: Sequence[int] = ()) -> None:
        """Write whole frames. OSError when the connection is broken, RpcTimeout when the peer does not read.

        After a timeout the stream is still whole: what was begun is kept and goes out before anything else,
        and `Stalled.began` says whether the peer will see these parts then.
        """
        if not self._lock.acquire(blocking=False) and not self._lock.acquire(
            timeout=_remaining(deadline, forever=-1)
        ):
            raise Stalled(began=False)
        try:
            if self._rest or self._late:
                self._finish_backlog(deadline)
            if self._riders or fds or len(parts) > 1:
                self._write_with_riders(parts, deadline, fds)
                return
            part = parts[0]  # the usual case: one piece, and room for it
            sent = self._write_some(parts, ()) or 0
            self.sent_bytes += sent
            if sent != len(part):
                self._write([memoryview(part)[sent:]], deadline, (), began=sent > 0)
        finally:
            self._lock.release()
            if self._rest or self._late or self.is_full:
                self._tell()

    def send_soon(self, parts: Sequence[Bytes], deadline: float | None, fds: Sequence[int] = ()) -> None:
        """The same, for what must not hold its thread for long. See [Note: backlog]."""
        if not (self._rest or self._late):
            nbytes = len(parts[0]) if len(parts) == 1 else sum(len(part) for part in parts)
            until = time.monotonic() + MOMENT_S + nbytes / SLOW_BYTES_PER_S
            try:
                self.send(parts, until if deadline is None else min(until, deadline), fds)
                return
            except Stalled as stalled:
                if stalled.began:
                    return  # the rest follows
        if self.backlog_bytes > OVERFULL * self._max_backlog_bytes or not self._keep(parts, fds):
            self.send(parts, deadline, fds)

    def flush(self, deadline: float | None) -> None:
        """Write what rides, and what a timeout left behind. Stalled where the peer does not read."""
        while self._riders or self._rest or self._late:
            if not self._lock.acquire(timeout=_remaining(deadline, forever=-1)):
                raise Stalled(began=False)
            try:
                self._finish_backlog(deadline)
                self._write_with_riders((), deadline, ())
            finally:
                self._release()

    def flush_soon(self) -> None:
        """Write what rides; what the peer does not read now is kept. See [Note: backlog]."""
        if self._riders and not (self._rest or self._late) and self._lock.acquire(timeout=FLUSH_S):
            try:
                self._write_with_riders((), 0.0, ())
            except Stalled:
                pass
            finally:
                self._release()
        if self._riders:
            self._keep((), ())

    def flush_now(self) -> None:
        """The peer has read: write what it now takes of the backlog, and see to being called again for the rest."""
        if self._lock.acquire(blocking=False):
            try:
                self._finish_backlog(0.0)
            except Stalled:
                pass
            finally:
                self._release(always=True)
        else:
            self._tell()  # who has the lock may have looked already

    def close(self) -> None:
        with self._state:
            self._closed = True  # the descriptor's number may soon be another's: it is not armed any more
        close_socket(self.sock)
        if self._lock.acquire(timeout=1.0):  # a writer notices that the socket is closed
            with self._state:
                while self._late:
                    self._late.popleft().close_fds()
                self._late_bytes = 0
            self._lock.release()

    # -- the backlog

    def _keep(self, parts: Sequence[Bytes], fds: Sequence[int]) -> bool:
        """Have it written later, with what rides. False where it cannot be kept."""
        riders = self._take_riders()
        frames = bundle(riders, self._max_frame_bytes)
        try:
            late = _Late([p for p in (*frames, *parts) if len(p)], fds)
        except OSError:  # there are no descriptors left
            self._riders.extendleft(reversed(riders))
            return False
        with self._state:
            if self._closed:
                late.close_fds()
                raise BrokenPipeError("the connection is closed")
            if late.parts:
                self._late.append(late)
                self._late_bytes += late.nbytes
        self._tell()
        return True

    def _tell(self) -> None:
        """Say what is so now, in the order in which it came to be."""
        with self._state:
            if not self._closed:
                self.arm(self.has_backlog)
            is_full = self.backlog_bytes > self._max_backlog_bytes
            if is_full != self.is_full:
                self.is_full = is_full
                self.on_full(is_full)

    def _release(self, *, always: bool = False) -> None:
        self._lock.release()
        if self._rest or self._late or self.is_full or always:
            self._tell()

    def _finish_backlog(self, deadline: float | None) -> None:
        """With the lock. Stalled, never `began`, where the peer does not take all of it."""
        try:
            while self._rest or self._late:
                if self._rest:
                    rest, self._rest, self._rest_bytes = self._rest, [], 0
                    self._write(rest, deadline, (), began=True, is_ours=True)
                    continue
                late = self._late[0]
                try:
                    self._write(late.parts, deadline, late.fds, is_ours=True)
                except BaseException as exc:
                    if getattr(exc, "began", False):
                        self._drop_first()
                    raise
                self._drop_first()
        except Stalled:
            raise Stalled(began=False) from None
        except BaseException as exc:  # Ctrl-C: what the caller wanted to send has not been begun
            exc.began = False  # type: ignore[attr-defined]
            raise

    def _drop_first(self) -> None:
        with self._state:
            late = self._late.popleft()
            self._late_bytes -= late.nbytes
        late.close_fds()

    # -- writing

    def _take_riders(self) -> list[Rider]:
        riders: list[Rider] = []
        while self._riders:
            try:
                riders.append(self._riders.popleft())
            except IndexError:  # another thread took the last one
                break
        return riders

    def _write_with_riders(self, parts: Sequence[Bytes], deadline: float | None, fds: Sequence[int]) -> None:
        riders: list[Rider] = []
        try:
            riders = self._take_riders()
            frames = bundle(riders, self._max_frame_bytes)
            self._write([p for p in (*frames, *parts) if len(p)], deadline, fds)
        except BaseException as exc:  # a timeout, or Ctrl-C
            is_broken = isinstance(exc, OSError) and not isinstance(exc, Stalled)
            if not is_broken and not getattr(exc, "began", False):
                self._riders.extendleft(reversed(riders))
            raise

    def _write(
        self,
        parts: Sequence[Bytes],
        deadline: float | None,
        fds: Sequence[int],
        *,
        began: bool = False,
        is_ours: bool = False,
    ) -> None:
        """With the lock. What has been begun and is not finished becomes `_rest`, as a copy unless it is ours."""
        if len(parts) > 1 and sum(len(p) for p in parts) <= JOIN_BYTES:
            parts = [b"".join(parts)]
        rest = list(parts)
        # A record that has been begun must be finished with the same bytes.
        began = began or self._has_records
        try:
            while rest:
                sent = self._write_some(rest, fds)
                if sent is None:
                    if self._wait_writable(deadline):
                        continue
                    raise Stalled(began)
                self.sent_bytes += sent
                began, fds = True, ()
                done = 0
                while done < len(rest) and sent >= len(rest[done]):
                    sent -= len(rest[done])
                    done += 1
                del rest[:done]
                if sent:
                    rest[0] = memoryview(rest[0])[sent:]
        except BaseException as exc:  # a timeout, or Ctrl-C: the stream must stay whole
            if began and (isinstance(exc, Stalled) or not isinstance(exc, OSError)):
                self._rest = rest if is_ours else [bytes(part) for part in rest]
                self._rest_bytes = sum(len(part) for part in rest)
                exc.began = True  # type: ignore[attr-defined]
            raise

    def _write_some(self, views: Sequence[Bytes], fds: Sequence[int]) -> int | None:
        try:
            if fds:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                return self.sock.sendmsg(views[:MAX_PARTS], [rights])
            if len(views) == 1 or self._has_records:
                return self.sock.send(views[0])
            return self.sock.sendmsg(views[:MAX_PARTS])
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return None

    def _wait_writable(self, deadline: float | None) -> bool:
        timeout = _remaining(deadline, forever=-1)
        return bool(self._poll.poll(timeout * 1000 if timeout >= 0 else None))


def close_socket(sock: socket.socket) -> None:
    """End a connection now, waking whoever waits on it."""
    try:
        # Not SSLSocket's own: that would drop the TLS layer under a writer, which then would go on in the clear.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        pass
    sock.close()


def enlarge_buffer(sock: socket.socket, which: int) -> None:
    if sock.family == socket.AF_UNIX:  # TCP tunes itself
        sock.setsockopt(socket.SOL_SOCKET, which, SOCKET_BUFFER_BYTES)


def _remaining(deadline: float | None, *, forever: float) -> float:
    return forever if deadline is None else max(0.0, deadline - time.monotonic())
