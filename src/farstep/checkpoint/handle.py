"""A save that goes on in the background, and what becomes of its error.

[Note: one at a time] A process has at most one such save under way, for it holds a copy of the state. Whoever saves next waits for it. An error
that nobody has seen by then is raised there; one that nobody sees at all is told of when the process ends, which waits as well.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from farstep.checkpoint.ranks import Ranks, kind_named
from farstep.checkpoint.writing import Progress
from farstep.errors import StorageFailed

__all__ = ["SaveHandle", "SaveProgress", "begin", "settle"]


class SaveProgress(NamedTuple):
    """Of this rank's part."""

    bytes_done: int
    bytes_total: int


class SaveHandle:
    """A save under way, as `async_save` returns it."""

    def __init__(self, where: str, bytes_total: int) -> None:
        self._where = where
        self._progress = SaveProgress(0, bytes_total)
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._is_seen = False

    def done(self) -> bool:
        """Whether it has come to an end: the checkpoint is whole, or `wait` raises."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until the checkpoint is whole and safe on all ranks. Raises what went wrong, each time it is called; TimeoutError if there is no end in time."""
        if not self._finished.wait(timeout_s):
            done, total = self._progress
            raise TimeoutError(
                f"saving into {self._where} goes on after {timeout_s:g} s, with {done} of {total} bytes of this rank written. It has not been stopped: wait again"
            )
        self._is_seen = True
        if self._error is not None:
            raise self._error

    @property
    def progress(self) -> SaveProgress:
        return self._progress

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self.done() else "under way"
        return f"<SaveHandle {state}, {self._progress.bytes_done} of {self._progress.bytes_total} bytes, into {self._where}>"

    def _failure(self) -> str:
        error = self._error
        return f"the save into {self._where} that went on in the background has failed, and nobody had waited for it: {type(error).__name__}: {error}"

    def _run(self, work: Callable[[Progress], None], told: Progress | None) -> None:
        def progress(done: int, total: int) -> None:
            self._progress = SaveProgress(done, total)
            if told is not None:
                told(done, total)

        try:
            work(progress)
        except BaseException as exc:
            self._error = exc
        finally:
            self._finished.set()


class _Latest:
    """The save that was begun last in this process."""

    def __init__(self) -> None:
        self.handle: SaveHandle | None = None
        self._lock = threading.Lock()

    def ended(self) -> SaveHandle | None:
        """Wait for it. Returns it if it failed and nobody knows.

        It is forgotten when it has ended and not before: whoever else comes meanwhile, or after this wait was interrupted, has to wait for it too.
        """
        handle = self.handle
        if handle is None:
            return None
        handle._finished.wait()
        with self._lock:
            if self.handle is handle:
                self.handle = None
            is_news = handle._error is not None and not handle._is_seen
            handle._is_seen = True
        return handle if is_news else None

    def settle(self, doing: str) -> None:
        failed = self.ended()
        if failed is not None:
            error = kind_named(type(failed._error).__name__)(
                f"{failed._failure()}. Therefore {doing} has not been begun: try again"
            )
            if isinstance(error, StorageFailed):
                error.errno = getattr(failed._error, "errno", None)
            raise error from failed._error

    def at_exit(self) -> None:
        failed = self.ended()
        if failed is not None:
            warnings.warn(failed._failure(), RuntimeWarning, stacklevel=1)

    def in_child(self) -> None:
        self.handle = None  # the thread is the parent's
        self._lock = threading.Lock()


_latest = _Latest()
os.register_at_fork(after_in_child=_latest.in_child)
# An ordinary exit function would come too late: by then threads can hand no work to others any more.
getattr(threading, "_register_atexit", lambda _: None)(_latest.at_exit)


def begin(where: str, bytes_total: int, work: Callable[[Progress], Any], told: Progress | None) -> SaveHandle:
    """Do the work on a thread of its own, when the save before has been settled."""
    handle = SaveHandle(where, bytes_total)
    _latest.handle = handle
    try:
        threading.Thread(target=handle._run, args=(work, told), name="farstep-async-save").start()
    except RuntimeError:  # there are as many threads as there may be
        handle._run(work, told)
    return handle


def settle(ranks: Ranks, doing: str) -> None:
    """Wait for the save under way, if there is one. If it failed on some rank, where nobody has seen it, all raise. See [Note: one at a time]."""
    with ranks.all_or_none(doing):
        _latest.settle(doing)
