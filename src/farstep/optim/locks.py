"""Who may step on a parameter: one at a time, and each set of parameters by itself.

Every parameter that has an optimizer has a `StepLock`. A new optimizer gives those of its parameters that have none one new lock together.
So optimizers over the same parameters share a lock, those over different ones share none, and where sets overlap in part
an optimizer has several. It takes them in the order of their numbers, so no two optimizers can wait for each other.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Iterable, Iterator

import torch

from farstep.errors import OptimError

__all__ = ["StepLock", "held", "locks_for"]


class StepLock:
    """A lock that knows its place in the order, and who has it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()
        self.holder = ""


_numbers = itertools.count()
_registry_lock = threading.Lock()
_by_parameter: weakref.WeakValueDictionary[int, StepLock] = weakref.WeakValueDictionary()
"""id of a parameter -> its lock. Optimizers keep both; an entry that outlives its parameter only makes two sets share a lock."""


def locks_for(parameters: Iterable[torch.Tensor]) -> list[StepLock]:
    """The locks of these parameters, in the order in which they are to be taken. The caller keeps them, and the parameters."""
    found: dict[int, StepLock] = {}
    fresh: StepLock | None = None
    with _registry_lock:
        for parameter in parameters:
            lock = _by_parameter.get(id(parameter))
            if lock is None:
                fresh = fresh or StepLock(next(_numbers))
                _by_parameter[id(parameter)] = lock = fresh
            found[lock.number] = lock
    return [found[number] for number in sorted(found)]


@contextlib.contextmanager
def held(locks: Iterable[StepLock], who: str, timeout_s: float) -> Iterator[None]:
    """Hold all of these. OptimError where one is not free in time (0: wait for ever)."""
    deadline = time.monotonic() + timeout_s
    taken: list[StepLock] = []
    try:
        for each in locks:
            left = max(0.0, deadline - time.monotonic()) if timeout_s else -1
            if not each.lock.acquire(timeout=left):
                raise OptimError(
                    f"{who} has waited {timeout_s:g} s for its parameters, on which {each.holder or 'another optimizer'} is still "
                    f"working; give more time with timeout=, or see why that takes so long"
                )
            each.holder = who
            taken.append(each)
        yield
    finally:
        for each in reversed(taken):
            each.holder = ""
            each.lock.release()
