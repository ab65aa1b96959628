"""Worker processes for tests: forked quickly, told what to do, killed when they should be.

A `Worker` is a real process, forked from a server that has torch loaded, with one thread for computing. It runs the
functions it is given, each on a thread of its own, and sends back what they return or raise. Every wait is bounded; a
wait that ends in vain makes all workers of the group write their stacks into their logs first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from farstep import rpc
from farstep.rpc import Agent
from farstep.rpc.current import serving

__all__ = [
    "Group",
    "Pending",
    "Worker",
    "WorkerFailed",
    "bounded",
    "eventually",
    "multiprocess",
    "results",
    "speaking_for",
]

PATIENCE_S = 90.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "torch.nn",
        "torch.distributed.tensor.parallel",
        "torch.distributed.fsdp",
        "pytest",
        "farstep.rpc",
        "farstep.checkpoint",
    ]
)


class WorkerFailed(AssertionError):
    """A worker died, or did not answer, while a test waited for it."""


def eventually(condition: Callable[[], Any], what: str = "it", timeout_s: float = 10.0) -> Any:
    """Wait until `condition()` is true, and return what it returned."""
    deadline = time.monotonic() + timeout_s
    pause = 0.001
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    return value


@contextlib.contextmanager
def speaking_for(agent: Agent) -> Iterator[None]:
    """The module-level functions mean this agent, on this thread."""
    token = serving.set(agent)
    try:
        yield
    finally:
        serving.reset(token)


def bounded(function: Callable[..., Any], *args: Any, timeout_s: float = PATIENCE_S) -> Any:
    """Call a function that might block for ever, such as a future's `wait`, which no signal interrupts."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, function(*args)))
        except BaseException as exc:
            outcome.append((False, exc))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        faulthandler.dump_traceback(all_threads=True)
        raise AssertionError(f"{function} did not return within {timeout_s:g} s")
    ok, value = outcome.pop()
    if ok:
        return value
    raise value


def results(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """The values of futures, each waited for in turn."""
    return bounded(lambda: [f.wait() for f in futures])  # type: ignore[no-any-return]


class Pending:
    """The outcome of a function that a worker is running."""

    def __init__(self, worker: Worker, id: int) -> None:
        self._worker = worker
        self._id = id

    @property
    def done(self) -> bool:
        return self._worker._has_answer(self._id)

    def result(self, timeout_s: float = PATIENCE_S) -> Any:
        """What the function returned; raises what it raised."""
        ok, value, trace = self._worker._await_answer(self._id, timeout_s)
        if ok:
            return value
        value.add_note(f"in worker process {self._worker.name!r}:\n{trace}")
        raise value


class Worker:
    """One process. Not thread-safe: one test thread talks to it."""

    def __init__(
        self, name: str, log: Path, env: dict[str, str] | None = None, setup: Callable[[], None] | None = None
    ) -> None:
        """`setup` is run first, on the process's main thread."""
        self.name = name
        self.log = log
        self.is_stopped = False
        self._ids = itertools.count()
        self._answers: dict[int, tuple[bool, Any, str]] = {}
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(
            target=_main, args=(theirs, str(log), dict(env or {}), setup), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending:
        """Have the worker run a function; go on at once."""
        id = next(self._ids)
        try:
            self._connection.send((id, function, args, kwargs))
        except OSError as exc:
            raise WorkerFailed(f"worker process {self.name!r} is gone") from exc
        return Pending(self, id)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Have the worker run a function, and wait for its result."""
        return self.start(function, *args, **kwargs).result()

    def kill(self) -> None:
        """kill -9, and wait until the process is gone."""
        self._process.kill()
        self._process.join(PATIENCE_S)

    def stop(self) -> None:
        """The process stays, and does nothing more until `cont`."""
        os.kill(self.pid, signal.SIGSTOP)
        self.is_stopped = True

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.is_stopped = False

    def write_stacks(self) -> None:
        """Have the worker write what each of its threads does into its log."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)

    def close(self) -> None:
        if self._process.is_alive():
            self.kill()
        self._connection.close()
        self._process.close()

    def _has_answer(self, id: int) -> bool:
        self._receive(0.0)
        return id in self._answers

    def _await_answer(self, id: int, timeout_s: float) -> tuple[bool, Any, str]:
        deadline = time.monotonic() + timeout_s
        while id not in self._answers:
            left = deadline - time.monotonic()
            if left <= 0:
                self.write_stacks()
                time.sleep(0.2)  # for the stacks to be written; the test has failed already
                raise WorkerFailed(f"worker process {self.name!r} did not answer within {timeout_s:g} s")
            self._receive(left)
        return self._answers.pop(id)

    def _receive(self, timeout_s: float) -> None:
        try:
            if self._connection.poll(timeout_s):
                id, *answer = self._connection.recv()
                self._answers[id] = tuple(answer)
        except (EOFError, OSError) as exc:
            raise WorkerFailed(
                f"worker process {self.name!r} died (its log is shown with the failure)"
            ) from exc


class Group:
    """Worker processes that have called init_rpc with one another."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers

    def __getitem__(self, rank: int) -> Worker:
        return self.workers[rank]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers)

    def start_all(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Pending]:
        return [worker.start(function, *args, **kwargs) for worker in self.workers if worker.is_alive]

    def run_all(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The same on every worker that is alive; the results by rank."""
        pending = self.start_all(function, *args, **kwargs)
        try:
            return [p.result() for p in pending]
        except WorkerFailed:
            for worker in self.workers:
                worker.write_stacks()
            time.sleep(0.2)
            raise

    def init(self, init_method: str, **options: Any) -> None:
        """init_rpc on every worker: `worker0`, `worker1` and so on."""
        self.finish(
            [
                worker.start(init_rpc, worker.name, rank, len(self.workers), init_method, **options)
                for rank, worker in enumerate(self.workers)
            ]
        )

    @staticmethod
    def finish(pending: Sequence[Pending], timeout_s: float = PATIENCE_S) -> list[Any]:
        return [p.result(timeout_s) for p in pending]


def init_rpc(name: str, rank: int, world_size: int | None, init_method: str, **options: Any) -> None:
    """In a worker process."""
    rpc.init_rpc(
        name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.RpcOptions(init_method=init_method, **options),
    )


def multiprocess(world_size: int, **options: Any) -> Callable[[Callable[[int], None]], Callable[..., None]]:
    """Run a test's body once in each of `world_size` workers that form a group; the body gets its rank."""

    def decorate(body: Callable[[int], None]) -> Callable[..., None]:
        def test(workers: Callable[..., Group]) -> None:
            group = workers(world_size, **options)
            pending = [
                worker.start(_run_body, body.__module__, body.__qualname__, rank)
                for rank, worker in enumerate(group)
            ]
            group.finish(pending)

        functools.update_wrapper(test, body)
        del test.__wrapped__  # type: ignore[attr-defined]  # pytest would look for fixtures there
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def _run_body(module: str, name: str, rank: int) -> None:
    getattr(importlib.import_module(module), name).body(rank)


# -- in the worker's process


def _main(connection: Connection, log: str, env: dict[str, str], setup: Callable[[], None] | None) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(env)
    torch.set_num_threads(1)
    if setup is not None:
        setup()
    lock = threading.Lock()
    while True:
        try:
            id, function, args, kwargs = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # the test is over
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        threading.Thread(
            target=_answer, args=(connection, lock, id, function, args, kwargs), daemon=True
        ).start()
        del function, args, kwargs


def _answer(connection: Connection, lock: Any, id: int, function: Any, args: Any, kwargs: Any) -> None:
    answer: tuple[Any, ...]
    try:
        answer = (id, True, function(*args, **kwargs), "")
    except BaseException as exc:
        traceback.print_exc()
        trace = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(exc))
            answer = (id, False, exc, trace)
        except Exception:
            answer = (id, False, RuntimeError(f"{type(exc).__name__}: {exc}"), trace)
    with lock:
        connection.send(answer)
