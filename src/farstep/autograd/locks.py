"""Locks of parameters: who works on some of them excludes others who do, and nobody else.

Each parameter that was asked for has a lock. A set of parameters gives those of them that have none one new lock together.
So equal sets share a lock, disjoint ones share none, and where sets overlap in part a set has several. They are taken in the
order of their numbers, so no two threads can wait for each other.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = ["ParameterLock", "ParameterLocks", "held"]


class ParameterLock:
    """A lock that knows its place in the order, and who has it."""

    def __init__(self, number: int, lock: Any) -> None:
        self.number = number
        self.lock = lock
        self.holder = ""


class ParameterLocks:
    """The locks for one kind of work. `reentrant`: a thread that has one may take it again."""

    def __init__(self, *, reentrant: bool = False) -> None:
        self._make: Callable[[], Any] = threading.RLock if reentrant else threading.Lock
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._by_parameter: weakref.WeakValueDictionary[int, ParameterLock] = weakref.WeakValueDictionary()
        """By the parameter's id. An entry that outlives its parameter only makes two sets share a lock."""

    def of(self, parameters: Iterable[torch.Tensor]) -> list[ParameterLock]:
        """Those of these parameters, in the order in which they are to be taken. The caller keeps them, and the parameters."""
        found: dict[int, ParameterLock] = {}
        fresh: ParameterLock | None = None
        with self._lock:
            for parameter in parameters:
                lock = self._by_parameter.get(id(parameter))
                if lock is None:
                    fresh = fresh or ParameterLock(next(self._numbers), self._make())
                    self._by_parameter[id(parameter)] = lock = fresh
                found[lock.number] = lock
        return [found[number] for number in sorted(found)]


@contextlib.contextmanager
def held(
    locks: Iterable[ParameterLock], who: str, timeout_s: float, raises: Callable[[str], Exception]
) -> Iterator[None]:
    """Hold all of these. `raises` makes the error where one is not free in time (0: wait for ever)."""
    deadline = time.monotonic() + timeout_s
    taken: list[tuple[ParameterLock, str]] = []
    try:
        for each in locks:
            left = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX) if timeout_s else -1
            if not each.lock.acquire(timeout=left):
                raise raises(
                    f"{who} has waited {timeout_s:g} s for its parameters, on which {each.holder or 'another thread'} is still "
                    f"working; give more time with timeout=, or see why that takes so long"
                )
            taken.append((each, each.holder))
            each.holder = who
        yield
    finally:
        for each, before in reversed(taken):
            each.holder = before
            each.lock.release()
