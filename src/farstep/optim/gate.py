"""Lets steps of one optimizer run side by side, and stops them for a save, a load or a new group.

A `Stop` belongs to no thread: one message may take it, and another release it. If it lasts longer
than agreed, the next step breaks it, and whoever took it learns that from `release`. So a save whose
worker hangs does not hold up training for ever.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from farstep.errors import OptimError

__all__ = ["Gate", "Stop"]

_numbers = itertools.count()


class Gate:
    """Of one optimizer. `number` is its place in the order in which several are stopped, so that
    no two callers wait for each other."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._changed = threading.Condition()
        self._passing = 0
        """Steps under way."""
        self._stop: Stop | None = None
        self._inside: int | None = None
        """The thread that acts for the one who has stopped the steps."""

    @contextmanager
    def passing(self) -> Iterator[None]:
        """For one step. Waits while steps are stopped."""
        if self._inside == threading.get_ident():
            yield
            return
        with self._changed:
            while self._stop is not None and not self._stop.is_over():
                self._changed.wait(self._stop.left_s())
            self._break()
            self._passing += 1
        try:
            yield
        finally:
            with self._changed:
                self._passing -= 1
                self._changed.notify_all()

    def stop(self, who: str, timeout_s: float = 0.0, lasts_s: float = 0.0) -> Stop:
        """Let no further step begin, and wait for those under way: at most `timeout_s`. The stop
        may last `lasts_s` (0: any time)."""
        deadline = time.monotonic() + timeout_s if timeout_s else None
        with self._changed:
            while self._stop is not None and not self._stop.is_over():
                self._wait(deadline, timeout_s, who, f"{self._stop.who} has stopped its steps")
            self._break()
            stop = self._stop = Stop(self, who)
            try:
                while self._passing:
                    self._wait(deadline, timeout_s, who, "a step of it is still under way")
            except BaseException:
                stop.release()
                raise
            stop.ends = time.monotonic() + lasts_s if lasts_s else None
            return stop

    @contextmanager
    def stopped(self, who: str, timeout_s: float) -> Iterator[None]:
        """The same, for this thread, which may do so again inside of it."""
        if self._inside == threading.get_ident():
            yield
            return
        stop = self.stop(who, timeout_s)
        try:
            with self.inside():
                yield
        finally:
            stop.release()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This thread acts for the one who has stopped the steps."""
        before, self._inside = self._inside, threading.get_ident()
        try:
            yield
        finally:
            self._inside = before

    def _wait(self, deadline: float | None, timeout_s: float, who: str, why: str) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise OptimError(f"{who} has waited {timeout_s:g} s for a DistributedOptimizer: {why}")
        ends = self._stop.left_s() if self._stop is not None else None
        self._changed.wait(min((each for each in (left, ends) if each is not None), default=None))

    def _break(self) -> None:
        if self._stop is not None:
            self._stop.is_broken = True
            self._stop = None


class Stop:
    """Until it is released, or its time is over and a step wants to begin."""

    def __init__(self, gate: Gate, who: str) -> None:
        self._gate, self.who = gate, who
        self.ends: float | None = None
        """By time.monotonic; None: any time."""
        self.is_broken = False

    def left_s(self) -> float | None:
        return None if self.ends is None else max(0.0, self.ends - time.monotonic())

    def is_over(self) -> bool:
        return self.ends is not None and time.monotonic() >= self.ends

    def release(self) -> bool:
        """Steps go on. Returns whether none had begun before this."""
        with self._gate._changed:
            if self._gate._stop is self:
                self._gate._stop = None
                self._gate._changed.notify_all()
            return not self.is_broken
