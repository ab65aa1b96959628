"""Waiting for many futures at once.

`torch.futures.collect_all` and `wait_all` work on the futures of calls too; but they can only learn of a failed Python call
when every other call has ended. These two end as soon as one has failed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["collect_all", "wait_all"]

Future = torch.futures.Future[Any]


def collect_all(futures: Sequence[Future]) -> torch.futures.Future[list[Future]]:
    """A future of the list of futures: done when all are, or failed when the first of them has."""
    futures = list(futures)
    result: torch.futures.Future[list[Future]] = torch.futures.Future()
    lock = threading.Lock()
    left = len(futures)
    if not left:
        result.set_result(futures)

    def one_is_done(future: Future) -> None:
        nonlocal left
        error: BaseException | None = None
        try:
            future.value()
        except BaseException as exc:
            error = exc
        with lock:
            if left <= 0:
                return
            left = 0 if error is not None else left - 1
            if left:
                return
        if isinstance(error, Exception):
            result.set_exception(error)  # type: ignore[arg-type]
        elif error is not None:
            result.set_exception(RuntimeError(repr(error)))  # type: ignore[arg-type]
        else:
            result.set_result(futures)

    for future in futures:
        future.add_done_callback(one_is_done)
    return result


def wait_all(futures: Sequence[Future]) -> list[Any]:
    """The values of all, or the first error as soon as there is one."""
    return [future.wait() for future in collect_all(futures).wait()]
