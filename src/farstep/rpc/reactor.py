"""The threads of one agent: they wait for sockets, and they run what arrives.

All threads wait in one epoll. The kernel wakes the one that went to sleep last, so a lone stream of calls
stays on one warm thread, and the thread that reads a call runs it: no hand-over, no queue. While it runs,
the connection is armed again, and the next arrival wakes another thread.

[Note: someone always listens] Before a thread runs foreign code it makes sure that another waits in the
epoll, starting one if need be. So a function may block, or call back, without stopping the agent.

Which job may run, and in which order, is in lanes.py: see [Note: depth] and [Note: shares] there.

[Note: stalls] When several calls arrive at once, one thread runs them in turn, for that is fastest when they
are short, and sends their replies together. A second thread looks after TICK_S whether it gets on; if it does
not, the second sends the replies that are ready (the tick) and takes over the rest.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Final

from farstep.rpc.forked import end_child
from farstep.rpc.lanes import OWN, Found, Job, Lane, Lanes, Work

__all__ = ["OWN", "Job", "Reactor", "Work", "current_depth"]

TICK_S: Final = 0.001
NEVER: Final = float("inf")
SPARE_THREADS: Final = 4
SPARE_LIFE_S: Final = 10.0
_READ: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
_READ_WRITE: Final = _READ | select.EPOLLOUT

log = logging.getLogger("farstep.rpc")


class _Local(threading.local):
    depth = 0
    drainer: _Drainer | None = None


_local = _Local()


def current_depth() -> int:
    """The depth of the job that this thread runs; 0 in a thread of the user's."""
    return _local.depth


class _Drainer:
    """A thread that is running queued jobs. `ran` tells a watcher whether it gets on."""

    __slots__ = ("ran", "seen")

    def __init__(self) -> None:
        self.ran = 0
        self.seen = -1


class Reactor:
    """Waits on file descriptors and runs jobs. Every method may be called from any thread."""

    def __init__(
        self,
        name: str,
        threads_per_depth: int,
        max_threads: int,
        *,
        on_thread_start: Callable[[], None],
        on_wake: Callable[[], None],
        on_tick: Callable[[], None],
    ) -> None:
        self._name = name
        self._on_thread_start = on_thread_start
        self._on_tick = on_tick
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._lanes = Lanes(threads_per_depth, max_threads)
        self._drainers: set[_Drainer] = set()
        self._threads: set[threading.Thread] = set()
        self._waiting = 0
        self._staying = False
        self._tick_at = NEVER
        self._corked = False
        self._watchers = 0
        self._called = False
        self._closed = False
        self.is_forked = False
        """In a child that this process forked: the epoll and all that it waits for are the parent's."""
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Edge-triggered and never read: every write wakes one more thread.
        self._epoll.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)
        self._handlers[self._wake_fd] = on_wake
        with self._lock:
            self._start_thread()

    @property
    def thread_count(self) -> int:
        return len(self._threads)

    def thread_ids(self) -> set[int | None]:
        """The identifiers of its threads, as `threading.get_ident` gives them."""
        with self._lock:
            return {thread.ident for thread in self._threads}

    # -- descriptors ---------------------------------------------------------------------------------

    def watch(
        self, fd: int, handler: Callable[[], None], on_writable: Callable[[], None] | None = None
    ) -> None:
        """Call `handler` once when `fd` is readable or has ended; `arm` it again afterwards.

        `on_writable` is called once after `arm(fd, for_writing=True)`, when it is.
        """
        self._handlers[fd] = handler
        if on_writable is not None:
            self._writers[fd] = on_writable
        self._epoll.register(fd, _READ)

    def arm(self, fd: int, *, for_writing: bool = False) -> None:
        try:
            self._epoll.modify(fd, _READ_WRITE if for_writing else _READ)
        except (OSError, ValueError):
            pass  # closed meanwhile

    def disarm(self, fd: int) -> None:
        try:
            self._epoll.modify(fd, 0)
        except (OSError, ValueError):
            pass

    def forget(self, fd: int) -> None:
        """Before `fd` is closed."""
        self._handlers.pop(fd, None)
        self._writers.pop(fd, None)
        try:
            self._epoll.unregister(fd)
        except (OSError, ValueError):
            pass

    # -- jobs ----------------------------------------------------------------------------------------

    def submit(self, jobs: list[Work]) -> bool:
        """Have reactor threads run the jobs. False where the reactor has closed."""
        with self._lock:
            if self._closed:
                return False
            for depth, lane, job in jobs:
                self._lanes.put(depth, lane, job)
            # With a drainer at work, one watcher is enough: see [Note: stalls].
            wake = self._call_watcher() if self._drainers else self._call_anyone()
        if wake:
            self.wake()
        return True

    def run(self, jobs: list[Work]) -> None:
        """Run jobs on this reactor thread, as many as the allowance has room for; queue the rest."""
        wake = False
        with self._lock:
            found = self._lanes.start(*jobs[0]) if len(jobs) == 1 else None
            if found is None:
                for depth, lane, job in jobs:
                    self._lanes.put(depth, lane, job)
                if self._lanes.queued > 1:
                    wake = self._call_watcher()
            if not self._waiting:  # See [Note: someone always listens]
                self._start_thread()
        if wake:
            self.wake()
        self._drain(found)

    def _call_anyone(self) -> bool:
        """Under the lock. Whether to wake a thread; where none waits one is started instead."""
        if self._waiting:
            return True
        self._start_thread()
        return False

    def _call_watcher(self) -> bool:
        """Under the lock. The same, if nobody watches yet or has been called to."""
        if self._watchers or self._called:
            return False
        self._called = self._call_anyone()  # a thread that is started looks by itself
        return self._called

    def wake(self) -> None:
        """Wake one thread. Takes no lock: safe in a finalizer."""
        try:
            os.eventfd_write(self._wake_fd, 1)
        except (OSError, ValueError):
            pass  # closed

    def hold(self, key: int, is_held: bool) -> None:
        """Begin no more jobs of a lane, or go on with them."""
        wake = False
        with self._lock:
            lane = self._lanes.lane(key)
            lane.is_held = is_held
            if not is_held and lane.queues and not self._closed:
                wake = self._call_anyone()
        if wake:
            self.wake()

    def _drain(self, found: Found | None = None) -> None:
        """Run a job that has been found, and what is queued, until nothing is left that may run."""
        drainer = _Drainer()
        lanes = self._lanes
        depth = 0
        lane: Lane | None = None  # of the job just run
        while True:
            with self._lock:
                if lane is not None:
                    found = lanes.next_like(depth, lane)
                    if found is None:
                        lanes.finished(depth, lane)
                if found is None:
                    found = lanes.next()
                if found is None:
                    self._drainers.discard(drainer)
                    uncork, self._corked = self._corked, False
                    break
                self._drainers.add(drainer)
                drainer.ran += 1
                if not self._waiting:
                    self._start_thread()
            depth, lane, job = found
            _local.depth = depth
            _local.drainer = drainer
            try:
                job()
            except BaseException:
                log.exception("worker %r: a job failed unexpectedly", self._name)
            if self.is_forked:
                end_child(None)
            job = found = None  # type: ignore[assignment]  # an idle thread must not keep a call's objects alive
            _local.depth = 0
            _local.drainer = None
        if uncork:
            self._on_tick()

    @property
    def queued(self) -> int:
        return self._lanes.queued

    def cork(self) -> bool:
        """Whether what a job has put aside to send may wait until its thread has run what is queued, or for the tick."""
        if self._corked:
            return (
                True  # it is reset before `on_tick` is called, which then sees what has been put aside by now
            )
        with self._lock:
            if not self._lanes.queued or not (self._watchers or self._called):
                return False
            self._corked = True
            if self._tick_at == NEVER:
                self._tick_at = time.monotonic() + TICK_S
            return True

    def tick_soon(self) -> None:
        """Have `on_tick` called in TICK_S."""
        if self._tick_at != NEVER:
            return  # it is reset before it is called, so that call sees what has been put aside by now
        with self._lock:
            if self._tick_at == NEVER:
                self._tick_at = time.monotonic() + TICK_S
            wake = self._call_watcher()
        if wake:
            self.wake()

    def _tick(self) -> None:
        with self._lock:
            if time.monotonic() < self._tick_at:
                return
            self._tick_at = NEVER
            self._corked = False
        self._on_tick()

    def about_to_wait(self) -> None:
        """A job is about to wait for another worker: what is queued behind it must not wait as well."""
        drainer = _local.drainer
        if drainer is not None:
            with self._lock:
                self._drainers.discard(drainer)
                wake = bool(self._lanes.queued and self._waiting)
            if wake:
                self.wake()

    def may_stay(self) -> bool:
        """Whether this thread may wait elsewhere than in the epoll; `moved_on` afterwards. One at a time."""
        with self._lock:
            if self._closed or self._staying or not self._waiting or self._lanes.queued:
                return False
            self._staying = True
            return True

    def moved_on(self) -> None:
        with self._lock:
            self._staying = False

    # -- threads -------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        """Under the lock."""
        if self._closed or len(self._threads) >= self._lanes.max_threads:
            return
        thread = threading.Thread(target=self._loop, name=f"farstep-{self._name}", daemon=True)
        self._threads.add(thread)
        self._waiting += 1  # it counts from now on, so that a burst does not start a crowd
        try:
            thread.start()
        except RuntimeError:
            self._threads.discard(thread)
            self._waiting -= 1
            log.exception("worker %r cannot start a thread", self._name)

    def _loop(self) -> None:
        try:
            self._on_thread_start()
            while self._wait_once():
                pass
        finally:
            with self._lock:
                self._waiting -= 1
                self._threads.discard(threading.current_thread())
                self._close_when_last()

    def _wait_once(self) -> bool:
        """One turn: wait, handle, run. The thread counts as waiting except while it works."""
        timeout, watches = self._patience()
        if timeout is None:
            return False
        events = self._epoll.poll(timeout, 1)
        with self._lock:
            if watches:
                self._watchers -= 1
            self._called = False
            if self._closed:
                return False
            if not events and timeout == SPARE_LIFE_S and self._waiting > SPARE_THREADS:
                return False
            self._waiting -= 1
        try:
            for fd, mask in events:
                if fd != self._wake_fd:
                    self._hand_on_watch()
                if mask & select.EPOLLOUT:
                    self._handle(self._writers.get(fd))
                if mask != select.EPOLLOUT:
                    self._handle(self._handlers.get(fd))
            if self._tick_at != NEVER:
                try:
                    self._tick()
                except BaseException:
                    log.exception("worker %r: a tick failed", self._name)
            if self._lanes.queued and self._may_take_over(watches and not events):
                self._hand_on_watch()
                self._drain()
        finally:
            with self._lock:
                self._waiting += 1
        return True

    def _handle(self, handler: Callable[[], None] | None) -> None:
        if handler is not None:
            try:
                handler()
            except BaseException:
                log.exception("worker %r: an event could not be handled", self._name)

    def _hand_on_watch(self) -> None:
        """This thread may be gone for long: if there is something to watch, call another."""
        if self._lanes.queued or self._tick_at != NEVER:
            with self._lock:
                wake = self._call_watcher()
            if wake:
                self.wake()

    def _patience(self) -> tuple[float | None, bool]:
        """How long to wait (None to end the thread), and whether that is a watch."""
        with self._lock:
            if self._closed:
                return None, False
            work = self._lanes.queued > 0 and self._lanes.has_runnable
            if work and not self._drainers:
                return 0.0, False  # nobody runs it: look at the sockets, and do so
            if work or self._tick_at != NEVER:
                self._watchers += 1
                return TICK_S if work else max(self._tick_at - time.monotonic(), 0.0), True
            return SPARE_LIFE_S if self._waiting > SPARE_THREADS else -1, False

    def _may_take_over(self, waited: bool) -> bool:
        with self._lock:
            if not self._drainers:
                return True
            if not waited:
                return False
            self._drainers = {d for d in self._drainers if d.ran != d.seen}
            for drainer in self._drainers:
                drainer.seen = drainer.ran
            return not self._drainers

    # -- end -----------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> tuple[int, list[Job]]:
        """Stop every thread but the caller's.

        Says how many are still running foreign code at the deadline, and which jobs nobody has begun.
        """
        with self._lock:
            self._closed = True
            left_over = self._lanes.clear()
        deadline = time.monotonic() + timeout_s
        me = threading.current_thread()
        while True:
            with self._lock:
                others = [t for t in self._threads if t is not me]
            if not others or time.monotonic() > deadline:
                break
            for _ in others:
                self.wake()
            others[0].join(min(0.01, max(0.0, deadline - time.monotonic())))
        with self._lock:
            self._close_when_last()
        return len(others), left_over

    def _close_when_last(self) -> None:
        """Under the lock. A thread still in foreign code closes the epoll when it comes back."""
        if self._closed and not self._threads and not self._epoll.closed:
            self._epoll.close()
            os.close(self._wake_fd)
            self._wake_fd = -1
            self._handlers.clear()
            self._writers.clear()
