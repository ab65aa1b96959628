"""Reads from the memory of neighbours, some of them by other threads: a rank that only takes has the others' cores while they wait for it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Generic, TypeVar

from torch import Tensor

from farstep.errors import ExchangeError
from farstep.state.neighbours import Neighbours

__all__ = ["Reads"]

T = TypeVar("T")


class Reads(Generic[T]):
    """Reads that have been added and are done by whoever comes to them: `threads`, and the one that asks for the `rest`."""

    def __init__(self, neighbours: Neighbours | None, threads: int) -> None:
        self._neighbours, self._threads = neighbours, threads
        self._waiting: deque[tuple[T, int, int, Tensor]] = deque()
        self._done: deque[tuple[T, ExchangeError | None]] = deque()
        self._left = 0

    def add(self, what: T, rank: int, address: int, memory: Tensor) -> None:
        """Fill the memory from that address of a rank's."""
        self._waiting.append((what, rank, address, memory))
        self._left += 1

    @contextmanager
    def begun(self) -> Iterator[None]:
        """The threads read while this is entered. Nothing is read any more when it is left."""
        threads = [
            Thread(target=self._read_all, name="farstep-read")
            for _ in range(self._threads if self._waiting else 0)
        ]
        try:
            for thread in threads:
                thread.start()
            yield
        finally:
            self._waiting.clear()
            for thread in threads:
                thread.join()

    def rest(self) -> Iterator[tuple[T, ExchangeError | None]]:
        """All that has been added, each as it has been read, with what went wrong with it."""
        told = 0
        while self._read_one():
            while self._done:
                yield self._done.popleft()
                told += 1
        # What others are still reading. Each is a few MiB, so they are done at once, or find that the giver is gone.
        while told < self._left:
            if self._done:
                yield self._done.popleft()
                told += 1
            else:
                os.sched_yield()

    def _read_all(self) -> None:
        while self._read_one():
            pass

    def _read_one(self) -> bool:
        try:
            what, rank, address, memory = self._waiting.popleft()
        except IndexError:
            return False
        assert self._neighbours is not None
        error: ExchangeError | None = None
        try:
            self._neighbours.read(rank, [(address, memory.nbytes)], [(memory.data_ptr(), memory.nbytes)])
        except ExchangeError as exc:
            error = exc
        self._done.append((what, error))
        return True
