"""One thread of each process, which writes down what its rank does, and finds out whom the rank waits for.

[Note: who is absent] While all goes well nothing is written, sent or asked: an operation is entered in a set of
this process, and that is all. An operation that takes longer than a part of the deadline is noted in the job's
store, and again at every tick while it lasts; so its rank is seen to be there, whether it waits or works. A wait
that has lasted for half the deadline looks at the notes of the others. At the deadline those who have no note of an
operation are absent. A rank that works in an operation (it writes a large file) is not: the wait goes on, up to
the process group's own timeout. A rank that gives up first notes why, then breaks the process group: whoever waits
in it, or comes to it later, fails at once and finds that note.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch.distributed as dist

from farstep.dist.adapters import break_group, closed_peers, store_of, timeout_of
from farstep.dist.notes import Activity, Board, Failure, Note
from farstep.dist.options import rank_timeout_s
from farstep.dist.verdict import Sight, Verdict, busy_among, judge

__all__ = ["Job", "Members", "Operation", "Wait", "diagnose", "give_up", "watcher"]

_log = logging.getLogger(__name__)
_STOPPED_S = 1.0
"""A thread that sleeps for so much longer than it asked for was stopped, or its machine was."""
_TICKS = 8
"""In a deadline: how often a rank that is in an operation says so."""
_OF_TIMEOUT = 0.8
"""The longest deadline, as a part of the process group's timeout: after that torch raises, and names nobody."""
_NOTES_S = 1.0
"""How long a rank whose connections fail waits for others' notes on why."""


class Job:
    """This process among all of the job: its rank, and what it has written."""

    def __init__(self, rank: int, board: Board, timeout_s: float | None) -> None:
        self.rank, self.board, self.timeout_s = rank, board, timeout_s
        self.failures: dict[str, Failure] = {}
        self._beat = 0
        self._writing = threading.Lock()

    def write(self, activities: tuple[Activity, ...]) -> None:
        with self._writing:
            self._beat += 1
            self.board.write(self.rank, Note(self._beat, activities, dict(self.failures)))

    @classmethod
    def current(cls) -> Job | None:
        """Return that of the default process group; None where there is none, or only this rank."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        world = dist.group.WORLD
        assert world is not None
        if not Members.of(world).others:
            return None
        job = _jobs.get(world)
        if job is None:
            job = cls(dist.get_rank(), Board(store_of(world)), Members.of(world).timeout_s)
            _jobs[world] = job
        return job


_jobs: WeakKeyDictionary[dist.ProcessGroup, Job] = WeakKeyDictionary()


class Members:
    """What a wait needs to know of a process group, found out once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.name = group.group_name
        self.ranks = dist.get_process_group_ranks(group)
        """Ranks of the job, by rank within the group."""
        own = dist.get_rank()
        self.others = tuple(rank for rank in self.ranks if rank != own)
        timeout = timeout_of(group)
        self.timeout_s = None if timeout is None else timeout.total_seconds()
        self.failure: Failure | None = None
        """Why this rank gave the group up."""

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Members:
        found = _members.get(group)
        if found is None:
            found = _members[group] = cls(group)
        return found


_members: WeakKeyDictionary[dist.ProcessGroup, Members] = WeakKeyDictionary()


class Operation:
    """What a thread of this rank does together with other ranks."""

    __slots__ = ("began", "deadline_s", "home", "job", "name", "wait", "waits")

    def __init__(self, name: str, job: Job, home: str, timeout_s: float | None) -> None:
        self.name, self.job, self.home = name, job, home
        self.began = time.monotonic()
        self.deadline_s = bounded(rank_timeout_s() if timeout_s is None else timeout_s, job.timeout_s)
        self.wait: Wait | None = None
        self.waits = 0

    @property
    def tick_s(self) -> float:
        return self.deadline_s / _TICKS

    @property
    def activity(self) -> Activity:
        wait = self.wait
        if wait is None:
            return Activity(self.name, self.home, waits=self.waits)
        return Activity(self.name, self.home, wait.name, wait.what, wait.peers, self.waits)


class Wait:
    """A blocking call of an operation: for whom, in which group, and since when."""

    __slots__ = ("_what", "began", "deadline_s", "group", "members", "next_look", "peers", "seen", "verdict")

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Members,
        peers: tuple[int, ...],
        what: str | Callable[[], str],
        deadline_s: float,
    ) -> None:
        self.group, self.members, self.peers, self._what = group, members, peers, what
        self.began = time.monotonic()
        self.deadline_s = bounded(deadline_s, members.timeout_s)
        self.next_look = self.began + self.deadline_s / 2
        self.seen: dict[int, _Seen] = {}
        self.verdict: Verdict | None = None

    @property
    def name(self) -> str:
        return self.members.name

    @property
    def what(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()


class _Seen:
    """When a rank's note was last seen to change."""

    def __init__(self) -> None:
        self.note: Note | None = None
        self.beaten = self.moved = time.monotonic()

    def see(self, note: Note | None) -> Sight:
        now = time.monotonic()
        if note is None or self.note is None or note.activities != self.note.activities:
            self.moved = now
        if note is None or self.note is None or note.beat != self.note.beat:
            self.beaten = now
        self.note = note
        return Sight(note, now - self.beaten, now - self.moved)


class Watcher:
    """The operations of this process, and the thread that watches them. It starts with the first."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.Lock())
        self._operations: set[Operation] = set()
        self._noted: set[Job] = set()
        """Those whose notes say that this rank is in an operation."""
        self._thread: threading.Thread | None = None
        self._tick_s = float("inf")
        self._is_stopped = False

    @property
    def is_of_this_process(self) -> bool:
        return self._pid == os.getpid()

    def enter(self, operation: Operation) -> None:
        with self._changed:
            self._operations.add(operation)
            if operation.tick_s < self._tick_s:
                self._tick_s = operation.tick_s
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="farstep-ranks", daemon=True)
                    self._thread.start()
                    atexit.register(self.stop)
                self._changed.notify()

    def leave(self, operation: Operation) -> None:
        with self._changed:
            self._operations.discard(operation)

    def stop(self) -> None:
        """End the thread: one that is still inside torch when Python ends would abort the process."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(10)

    def begin_wait(self, operation: Operation, wait: Wait) -> None:
        operation.wait = wait
        if wait.deadline_s < operation.deadline_s:
            operation.deadline_s = wait.deadline_s
            self.enter(operation)

    def claim(self, wait: Wait) -> bool:
        """Return True if the caller is the one who finds out why the wait failed."""
        with self._changed:
            if wait.verdict is not None:
                return False
            wait.verdict = Verdict()
            return True

    def end_wait(self, operation: Operation, wait: Wait) -> Verdict | None:
        """Return why it was given up; None if it was not, and now it will not be."""
        with self._changed:
            operation.wait = None
            operation.waits += 1
            return wait.verdict

    def _run(self) -> None:
        while True:
            with self._changed:
                asleep_s = min(self._tick_s, threading.TIMEOUT_MAX)
                began = time.monotonic()
                self._changed.wait(asleep_s)
                overslept_s = time.monotonic() - began - asleep_s
                if self._is_stopped:
                    return
                operations = [*self._operations]
                if overslept_s > max(asleep_s, _STOPPED_S):
                    _leave_out(operations, overslept_s)
                self._tick_s = min((each.tick_s for each in operations), default=self._tick_s)
            try:
                self._write_notes(operations)
                self._look_at_all(operations)
            except Exception:  # such as a process group that is destroyed meanwhile: the next tick tries again
                _log.warning("could not find out which ranks are absent", exc_info=True)

    def _write_notes(self, operations: list[Operation]) -> None:
        now = time.monotonic()
        with self._changed:
            noted = set(self._noted)
        jobs = {each.job for each in operations if now - each.began >= each.tick_s}
        for job in jobs | noted:
            self.write_note(job)

    def write_note(self, job: Job) -> None:
        """Write down the operations of this rank that last."""
        now = time.monotonic()
        with self._changed:
            mine = [each for each in self._operations if each.job is job]
            lasting = [each.activity for each in mine if now - each.began >= each.tick_s]
            (self._noted.add if lasting else self._noted.discard)(job)
        job.write(tuple(lasting))

    def _look_at_all(self, operations: list[Operation]) -> None:
        notes: Notes = {}
        for operation in operations:
            wait = operation.wait
            if wait is not None and wait.verdict is None and time.monotonic() >= wait.next_look:
                self._look(operation, wait, notes)

    def _look(self, operation: Operation, wait: Wait, notes: Notes) -> None:
        job, now = operation.job, time.monotonic()
        waited_s = now - wait.began
        is_late = waited_s > 2 * wait.deadline_s
        wait.next_look = now + (wait.deadline_s / 2 if is_late else operation.tick_s)
        verdict = judge(wait.name, operation.activity, sights(job, wait, notes), waited_s, wait.deadline_s)
        if verdict is None:
            return
        with self._changed:
            if operation.wait is not wait or wait.verdict is not None:
                return  # the rank came meanwhile
            wait.verdict = verdict
        wait.verdict = verdict = with_closed(job, wait, verdict)
        give_up(operation.job, operation.name, wait, verdict)


def _leave_out(operations: list[Operation], seconds: float) -> None:
    """Do not count a time in which this process was stopped: the other ranks may have been, too."""
    for operation in operations:
        if operation.wait is not None:
            operation.wait.began += seconds
            operation.wait.next_look += seconds


Notes = dict[tuple[Job, int], Note | None]
"""Those that were read just now: waits of several threads look at the same."""


def sights(job: Job, wait: Wait, notes: Notes) -> dict[int, Sight]:
    """Look at the notes of the group's other ranks."""
    found = {}
    for rank in wait.members.others:
        if (job, rank) not in notes:
            notes[job, rank] = job.board.read(rank)
        found[rank] = wait.seen.setdefault(rank, _Seen()).see(notes[job, rank])
    return found


def with_closed(job: Job, wait: Wait, verdict: Verdict) -> Verdict:
    """Tell ranks that died from those that gave the group up: these noted why before they closed it."""
    closed = [wait.members.ranks[peer] for peer in closed_peers(wait.group)]
    failures = dict(verdict.failures)
    for rank in closed:
        note = job.board.read(rank)
        if note is not None and wait.name in note.failures:
            failures[rank] = note.failures[wait.name]
    return replace(verdict, failures=failures).with_closed(closed)


def give_up(job: Job, operation: str, wait: Wait, verdict: Verdict) -> None:
    """Say why, then end everything that waits in the group. See [Note: who is absent]"""
    cause = verdict.cause(operation, wait.deadline_s)
    failure = Failure(operation, cause, verdict.ranks, time.monotonic() - wait.began)
    if verdict.failures and not verdict.found:  # told on as it was told
        failure = next(iter(verdict.failures.values()))
    job.failures[wait.name] = wait.members.failure = failure
    watcher().write_note(job)
    break_group(wait.group)


def diagnose(job: Job, operation: Operation, wait: Wait) -> Verdict:
    """Find out why a collective failed: a rank died, or gave the group up and noted why."""
    end = time.monotonic() + min(_NOTES_S, wait.deadline_s)
    while True:
        seen = sights(job, wait, {})
        known = judge(wait.name, operation.activity, seen, 0.0, wait.deadline_s) or Verdict()
        verdict = with_closed(job, wait, known)
        if verdict.ranks:
            return verdict
        if time.monotonic() > end:
            waited_s = time.monotonic() - wait.began
            late = judge(wait.name, operation.activity, seen, waited_s, wait.deadline_s)
            return late or Verdict(busy=busy_among(wait.name, seen))
        time.sleep(_NOTES_S / 20)


def bounded(seconds: float, group_timeout_s: float | None) -> float:
    return seconds if group_timeout_s is None else min(seconds, _OF_TIMEOUT * group_timeout_s)


_watcher = Watcher()


def watcher() -> Watcher:
    """Return this process's. A fork has its own."""
    global _watcher
    if not _watcher.is_of_this_process:
        _watcher = Watcher()
    return _watcher
