"""Which job runs next: queues by peer and depth, and how many of each may run at once.

[Note: depth] A call made while running a call of depth d has depth d + 1, here and on the callee. Each depth
has its own allowance of running jobs. A job waits only for deeper ones, so by induction no number of
calls in flight can use up the threads that their own completion needs; and threads are bounded by
allowance times depth, not by calls.

[Note: shares] A depth is what the caller says it is, so all threads are bounded too. One peer's jobs may take half as
many threads as are left free by all, so k peers that take all they can leave some for the others. Of these, and of all
threads, half are for jobs that are the first at their depth: calls may nest that deep however many there are at each
depth. A peer's jobs are its lane; lanes are served in turn. Where one peer holds all of a depth's allowance, another that
runs nothing there may run one job beyond it.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["OWN", "Job", "Lane", "Lanes", "Work"]

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

    __slots__ = ("depths", "is_held", "key", "queued", "queues", "running", "running_at")

    def __init__(self, key: int) -> None:
        self.key = key
        self.is_held = False
        self.queues: dict[int, deque[Job]] = {}
        self.depths: list[int] = []
        """Those that have a queue, in order."""
        self.queued = 0
        self.running = 0
        self.running_at: dict[int, int] = {}

    def put(self, depth: int, job: Job) -> None:
        queue = self.queues.get(depth)
        if queue is None:
            queue = self.queues[depth] = deque()
            bisect.insort(self.depths, depth)
        queue.append(job)
        self.queued += 1

    def take(self, depth: int) -> Job:
        queue = self.queues[depth]
        job = queue.popleft()
        self.queued -= 1
        if not queue:
            del self.queues[depth]
            del self.depths[bisect.bisect_left(self.depths, depth)]
        return job


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
        lane = self._lanes.get(key) or self.lane(key)
        if not lane.queued:
            self._turns[key] = lane
        lane.put(depth, job)
        self.queued += 1

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
                lane.running_at[depth] = lane.running_at.get(depth, 0) + 1
                return depth, lane, self._take(lane, depth)
        return None

    def next_like(self, depth: int, lane: Lane) -> Found | None:
        """After a job that is over: the next one in its place, where all that is queued is alike."""
        if len(self._turns) != 1 or len(lane.depths) != 1 or lane.is_held:
            return None
        if lane.depths[0] != depth or lane.key not in self._turns:
            return None
        return depth, lane, self._take(lane, depth)

    def _take(self, lane: Lane, depth: int) -> Job:
        job = lane.take(depth)
        self.queued -= 1
        if not lane.queued:
            del self._turns[lane.key]
        elif len(self._turns) > 1:
            self._turns[lane.key] = self._turns.pop(lane.key)
        return job

    def finished(self, depth: int, lane: Lane) -> None:
        """A job that `next` gave out is over."""
        self._all_running -= 1
        lane.running -= 1
        for running in (self._running, lane.running_at):
            left = running[depth] - 1
            if left:
                running[depth] = left
            else:
                del running[depth]

    @property
    def has_runnable(self) -> bool:
        return any(self._runnable(lane) is not None for lane in self._turns.values())

    def _runnable(self, lane: Lane) -> int | None:
        """The depth of a job of this lane's that may run. See [Note: depth] and [Note: shares]."""
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
            if not only_first and (running < self._allowance or self._is_kept_out(lane, depth, running)):
                return depth
        return None

    def _is_kept_out(self, lane: Lane, depth: int, running: int) -> bool:
        """Where the allowance is used up: whether one other peer alone did that."""
        if self._allowance == 1 or running >= 2 * self._allowance or lane.running_at.get(depth):
            return False
        return any(other.running_at.get(depth, 0) >= self._allowance for other in self._lanes.values())

    def clear(self) -> list[Job]:
        """Forget all that is queued. The jobs that nobody has begun."""
        left_over = [job for lane in self._turns.values() for queue in lane.queues.values() for job in queue]
        self._lanes.clear()
        self._turns.clear()
        self.queued = 0
        return left_over
