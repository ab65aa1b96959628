"""Which job runs next: queues by peer and depth, and how many of each may run at once.

[Note: depth] A call made while running a call of depth d has depth d + 1, here and on the callee. Each depth
has its own allowance of running jobs. A job waits only for deeper ones, so by induction no number of
calls in flight can use up the threads that their own completion needs; and threads are bounded by
allowance times depth, not by calls.

[Note: shares] A depth is what the caller says it is, so all threads are bounded too. One peer's jobs may take half as
many threads as are left free by all, so k peers that take all they can leave some for the others. Of these, and of all
threads, half are for jobs that are the first at their depth: calls may nest that deep however many there are at each
depth. A peer's jobs are its lane; lanes are served in turn. Where one peer alone runs as many jobs as a depth's allowance,
another that runs nothing may run one job beyond it.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["OWN", "Found", "Job", "Lane", "Lanes", "Work"]

ROOM: Final = 8
"""There may be at least so many times as many threads as one depth may have running."""
LISTENERS: Final = 4
"""So many threads run no jobs: they listen, and read."""
OWN: Final = -1
"""The lane of jobs that no peer's message asked for."""

Job = Callable[[], None]
Work = tuple[int, int, Job]
"""Depth, lane, job."""


class Lane:
    """The jobs of one peer."""

    __slots__ = ("depths", "is_held", "key", "queues", "running")

    def __init__(self, key: int) -> None:
        self.key = key
        self.is_held = False
        self.queues: dict[int, deque[Job]] = {}
        self.depths: list[int] = []
        """Those that have a queue, in order."""
        self.running = 0

    def open(self, depth: int) -> deque[Job]:
        """A queue, where there is none."""
        queue = self.queues[depth] = deque()
        bisect.insort(self.depths, depth)
        return queue

    def shut(self, depth: int) -> None:
        """A queue is empty."""
        del self.queues[depth]
        del self.depths[bisect.bisect_left(self.depths, depth)]


Found = tuple[int, Lane, Job]


class Lanes:
    """All jobs that wait. Not thread-safe: used under the reactor's lock."""

    def __init__(self, threads_per_depth: int, max_threads: int) -> None:
        self._allowance = threads_per_depth
        self.max_threads = max(max_threads, ROOM * threads_per_depth)
        self._lanes: dict[int, Lane] = {}
        self._turns: dict[int, Lane] = {}
        """The lanes with something queued; the one whose turn it is comes first."""
        self._running: dict[int, int] = {}
        self._all_running = 0
        self.queued = 0

    def lane(self, key: int) -> Lane:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key)
        return lane

    def put(self, depth: int, key: int, job: Job) -> None:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self.lane(key)
        if not lane.queues:
            self._turns[key] = lane
        queue = lane.queues.get(depth)
        if queue is None:
            queue = lane.open(depth)
        queue.append(job)
        self.queued += 1

    def start(self, depth: int, key: int, job: Job) -> Found | None:
        """A job that may run at once, because there is no other: as `put` and `next`, in short. None where it may not."""
        lane = self._lanes.get(key)
        if lane is None or self.queued or self._running or lane.is_held:
            return None
        self._running[depth] = self._all_running = lane.running = 1
        return depth, lane, job

    def next(self) -> Found | None:
        """A job that may run now: from each lane in turn, and there the deepest first, for others wait for it."""
        if not self.queued:
            return None
        for lane in self._turns.values():
            depth = self._runnable(lane)
            if depth is not None:
                self._running[depth] = self._running.get(depth, 0) + 1
                self._all_running += 1
                lane.running += 1
                return depth, lane, self._take(lane, depth)
        return None

    def next_like(self, depth: int, lane: Lane) -> Found | None:
        """After a job that is over: the next one in its place, where all that is queued is alike."""
        if len(self._turns) == 1 and len(lane.queues) == 1 and depth in lane.queues and not lane.is_held:
            return depth, lane, self._take(lane, depth)
        return None

    def _take(self, lane: Lane, depth: int) -> Job:
        queue = lane.queues[depth]
        job = queue.popleft()
        self.queued -= 1
        if not queue:
            lane.shut(depth)
            if not lane.queues:
                del self._turns[lane.key]
                return job
        if len(self._turns) > 1:
            self._turns[lane.key] = self._turns.pop(lane.key)
        return job

    def finished(self, depth: int, lane: Lane) -> None:
        """A job that `next` gave out is over."""
        self._all_running -= 1
        lane.running -= 1
        left = self._running[depth] - 1
        if left:
            self._running[depth] = left
        else:
            del self._running[depth]

    @property
    def has_runnable(self) -> bool:
        return any(self._runnable(lane) is not None for lane in self._turns.values())

    def _runnable(self, lane: Lane) -> int | None:
        """The depth of a job of this lane's that may run. See [Note: depth] and [Note: shares]."""
        if not self._running and not lane.is_held:
            return lane.depths[-1]
        free = self.max_threads - self._all_running
        if lane.is_held or free <= LISTENERS:
            return None
        only_first = 2 * free <= self.max_threads
        if lane.key != OWN:
            if 2 * lane.running >= free:
                return None
            only_first = only_first or 4 * lane.running >= free
        for depth in reversed(lane.depths):
            running = self._running.get(depth, 0)
            if not running:
                return depth
            if not only_first and (running < self._allowance or self._is_kept_out(lane, running)):
                return depth
        return None

    def _is_kept_out(self, lane: Lane, running: int) -> bool:
        """Where the allowance is used up: whether one other peer may have done that alone, and this one runs nothing."""
        if lane.running or self._allowance == 1 or running >= 2 * self._allowance:
            return False
        return any(other.running >= self._allowance for other in self._lanes.values())

    def clear(self) -> list[Job]:
        """Forget all that is queued. The jobs that nobody has begun."""
        left_over = [job for lane in self._turns.values() for queue in lane.queues.values() for job in queue]
        self._lanes.clear()
        self._turns.clear()
        self.queued = 0
        return left_over
