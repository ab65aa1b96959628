"""What a rank does together with others, and its waits for them: entered here, watched by the watcher."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import cast

import torch.distributed as dist

from farstep.dist.adapters import is_about_ranks
from farstep.dist.notes import Failure
from farstep.dist.verdict import Verdict
from farstep.dist.watcher import Job, Members, Operation, Wait, diagnose, give_up, watcher
from farstep.errors import FarstepError, RankLost

__all__ = ["current_operation", "operation", "waiting"]


class _Current(threading.local):
    operation: Operation | None = None


_current = _Current()


def current_operation() -> str:
    """The name of the operation that this thread is in; "" outside of any."""
    return "" if _current.operation is None else _current.operation.name


class operation(ContextDecorator):
    """`with operation("save"):`, or `@operation("save")`: all that ranks do together under one name.

    Inside another operation it does nothing: what the user called is what errors name. One of a background thread
    says by `home` which process group it works for; else ranks of any group may wait for it. `timeout_s` is how
    long its waits last, instead of the option.
    """

    def __init__(
        self, name: str, home: dist.ProcessGroup | None = None, timeout_s: float | None = None
    ) -> None:
        self._name, self._home, self._timeout_s = name, home, timeout_s
        self._entered: Operation | None = None

    def _recreate_cm(self) -> operation:
        return operation(self._name, self._home, self._timeout_s)

    def __enter__(self) -> None:
        if _current.operation is not None:
            return
        job = Job.current()
        if job is None:
            return
        home = "" if self._home is None else self._home.group_name
        self._entered = _current.operation = Operation(self._name, job, home, self._timeout_s)
        watcher().enter(self._entered)

    def __exit__(self, *_: object) -> None:
        if self._entered is not None:
            watcher().leave(self._entered)
            self._entered = _current.operation = None


class waiting:
    """`with waiting(group, "the manifest"):` around a call that blocks until other ranks come.

    `peers` are the ranks within the group that it waits for, by default all. `what` says what for, at once or when it
    is asked, and `help` what the user should know if it fails. Raises RankLost.
    """

    __slots__ = ("_group", "_help", "_operation", "_outer", "_peers", "_wait", "_what")

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        what: str | Callable[[], str],
        *,
        peers: tuple[int, ...] | None = None,
        help: str = "",
    ) -> None:
        self._group, self._what, self._peers, self._help = group, what, peers, help
        self._outer: operation | None = None
        self._wait: Wait | None = None

    def __enter__(self) -> None:
        if not dist.is_available() or not dist.is_initialized():
            return
        group = cast(dist.ProcessGroup, self._group or dist.group.WORLD)
        members = Members.of(group)
        if not members.others:
            return
        if members.failure is not None:
            raise _given_up(members.failure)
        if _current.operation is None:  # a part of the library, called by itself
            self._outer = operation(self._what if isinstance(self._what, str) else self._what())
            self._outer.__enter__()
        self._operation = cast(Operation, _current.operation)
        peers = members.others
        if self._peers is not None:
            peers = tuple(members.ranks[peer] for peer in self._peers)
        self._wait = Wait(group, members, peers, self._what, self._operation.deadline_s)
        watcher().begin_wait(self._operation, self._wait)

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        wait = self._wait
        if wait is None:
            return
        try:
            if _is_from_torch(error) and watcher().claim(wait):
                wait.verdict = diagnose(self._operation.job, self._operation, wait)
                give_up(self._operation.job, self._operation.name, wait, wait.verdict)
            verdict = watcher().end_wait(self._operation, wait)
            if verdict is not None and (error is None or _is_from_torch(error)):
                raise _lost(self._operation, wait, verdict, error, self._help) from error
        finally:
            self._wait = None
            if self._outer is not None:
                self._outer.__exit__()


def _is_from_torch(error: BaseException | None) -> bool:
    is_plain = isinstance(error, RuntimeError) and not isinstance(error, FarstepError)
    return is_plain and error is not None and is_about_ranks(error)


def _given_up(failure: Failure) -> RankLost:
    lost = RankLost(
        f"the process group was given up before, in {failure.operation}: {failure.cause}. It cannot be used any more: end the job, "
        f"or destroy the group and make another"
    )
    lost.operation, lost.ranks = failure.operation, failure.ranks
    return lost


def _lost(
    operation: Operation, wait: Wait, verdict: Verdict, error: BaseException | None, help: str
) -> RankLost:
    rank, deadline_s = operation.job.rank, wait.deadline_s
    waited_s = time.monotonic() - wait.began
    cause = verdict.cause(operation.name, deadline_s) or f"the process group failed: {error}"
    happened = verdict.too_late(rank, operation.name, wait.what) or (
        f"rank {rank} waited {waited_s:.3g} s in {operation.name} ({wait.what}): {cause}"
    )
    advice = verdict.advice(wait.members.ranks, operation.name, deadline_s)
    text = f"{happened}. {advice}. The process group cannot be used any more"
    lost = RankLost(f"{text}. {help}" if help else text)
    lost.operation, lost.ranks = operation.name, verdict.ranks
    return lost
