"""Workers as processes of this machine: started, watched, ended and cleaned up after.

The processes come from a fork server that has imported torch once, so that each starts in a moment and none
inherits a thread, a lock or a connection of the caller's. Each joins one RPC group over a rendezvous file in a private
directory, runs the caller's function, shuts down gracefully and reports over a pipe of its own.

[Note: the first failure] When one worker dies or raises, the others soon fail too, by WorkerLost, and their reports may
arrive first. So after a failure the parent listens a little longer, and tells the caller of a cause rather
than of a consequence.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection, process
from typing import TYPE_CHECKING, Any, Final

import torch

from farstep import rpc
from farstep.errors import NotInitialized, RemoteError, RemoteTraceback, RpcTimeout, WorkerLost
from farstep.rpc.directories import Hold, PrivateDirectory
from farstep.rpc.forked import end_child

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["LocalWorkers", "run_local", "tell"]

DEFAULT_TIMEOUT_S: Final = 300.0
LISTEN_ON_S: Final = 0.3
EXIT_S: Final = 5.0
OnMessage = Callable[[str, Any], None]


def run_local(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    options: rpc.RpcOptions | None = None,
    names: Sequence[str] | None = None,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    threads: int = 1,
    on_message: OnMessage | None = None,
) -> list[Any]:
    """Run `fn(rank, *args)` on `world_size` workers of a new group; return what each returned, by rank.

    Inside `fn` RPC is initialized; when all have returned, the group shuts down. An exception in a worker ends all of them and
    is raised here, with that worker's name and traceback as its cause. A worker that dies raises `WorkerLost`, and
    `RpcTimeout` says who was still running after `timeout_s`.

    `fn` must be importable by its name: a function at the top level of a module or of the script itself, and a
    script must call this under `if __name__ == "__main__":`, since the workers import it too.

    Args:
        fn: called as `fn(rank, *args)` on each worker.
        world_size: how many workers.
        args: passed by pickling, as by torch.multiprocessing.
        options: for `init_rpc`; the `init_method` is replaced by a private one.
        names: the workers' names by rank. Default: `worker0`, `worker1`, and so on.
        timeout_s: how long the whole may last; None sets no limit.
        threads: how many threads torch may use for the work inside one operator, in each worker.
        on_message: called here as `on_message(worker name, message)` for each `tell(message)` in a worker.
    """
    with LocalWorkers(
        fn, world_size, *args, options=options, names=names, timeout_s=timeout_s, threads=threads
    ) as workers:
        return workers.wait(on_message)


def tell(message: Any) -> None:
    """In a worker of `run_local`: send something to the `on_message` of the process that started it."""
    if _to_parent is None:
        raise NotInitialized(
            "tell() has nobody to tell: this process was not started by farstep.launch.run_local, or was forked by one that was"
        )
    _to_parent.send("message", message)


@dataclass(frozen=True)
class _Job:
    """What a worker process is to do."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    names: tuple[str, ...]
    options: rpc.RpcOptions
    directory: str
    threads: int
    env: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.names[self.rank]


@dataclass
class _Worker:
    """One worker process, as its parent sees it."""

    name: str
    process: process.BaseProcess
    pipe: Connection
    outcome: tuple[str, Any] | None = None  # ("value", x) or ("error", exception)
    may_die: bool = False

    @property
    def failure(self) -> BaseException | None:
        return self.outcome[1] if self.outcome is not None and self.outcome[0] == "error" else None


class LocalWorkers:
    """A group of worker processes. A context manager: on leaving, none of them is left, nor any file of theirs.

    `run_local` is the short way. This is for those who want to look in between, or to kill one.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        options: rpc.RpcOptions | None = None,
        names: Sequence[str] | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        threads: int = 1,
    ) -> None:
        _check_not_in_import()
        _check_importable(fn)
        self.names = _checked_names(world_size, names)
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._args = args
        self._fn = fn
        self._options = options or rpc.RpcOptions()
        self._threads = threads
        self._workers: list[_Worker] = []
        self._ended: list[_Worker] = []  # in the order of their ends
        self._directory: PrivateDirectory | None = None

    def __enter__(self) -> LocalWorkers:
        self._directory = PrivateDirectory("farstep-run-", tempfile.gettempdir())
        try:
            for rank in range(len(self.names)):
                self._workers.append(self._start(rank, self._directory.path))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, rank: int, directory: str) -> _Worker:
        limit_s = self._options.init_deadline_s if self._timeout_s is None else self._timeout_s
        options = replace(
            self._options,
            init_method=f"file://{directory}/rendezvous",
            init_timeout_s=min(self._options.init_deadline_s, limit_s),
        )
        env = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        job = _Job(self._fn, self._args, rank, self.names, options, directory, self._threads, env)
        context = _fork_server()
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_work, args=(job, theirs), name=job.name)
        try:
            child.start()
        except (pickle.PicklingError, AttributeError, TypeError) as exc:
            ours.close()
            raise TypeError(
                f"worker {job.name!r} cannot be started: fn or its arguments cannot be sent to another process ({exc}). "
                f"Give run_local a function at the top level of a module, and arguments that can be pickled"
            ) from exc
        finally:
            theirs.close()
        return _Worker(job.name, child, ours)

    def pid(self, name: str) -> int:
        """The process id of a worker."""
        return self._find(name).process.pid or -1

    def kill(self, name: str) -> None:
        """SIGKILL a worker, to see how the others take it. Its death is then no failure; its result is None."""
        worker = self._find(name)
        worker.may_die = True
        worker.process.kill()

    def _find(self, name: str) -> _Worker:
        for worker in self._workers:
            if worker.name == name:
                return worker
        raise ValueError(f"there is no worker {name!r}; there are: {', '.join(self.names)}")

    def wait(self, on_message: OnMessage | None = None) -> list[Any]:
        """Until all have ended; what each returned, by rank. Raises as `run_local` does."""
        while any(w.outcome is None for w in self._workers):
            if self._deadline is not None and time.monotonic() >= self._deadline:
                raise self._too_late()
            self._listen(self._deadline, on_message)
            if any(w.failure for w in self._workers):
                self._listen_on(on_message)
                raise self._cause()
        self._join()
        return [w.outcome[1] if w.outcome else None for w in self._workers]

    def _listen(self, deadline: float | None, on_message: OnMessage | None) -> None:
        """Take what the workers have to say, waiting for something until the deadline."""
        running = [w for w in self._workers if w.outcome is None]
        ends: dict[Any, _Worker] = {}
        for worker in running:
            ends[worker.pipe] = ends[worker.process.sentinel] = worker
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        for worker in {
            id(w): w for w in (ends[end] for end in connection.wait(list(ends), timeout_s))
        }.values():
            self._hear(worker, on_message)

    def _hear(self, worker: _Worker, on_message: OnMessage | None) -> None:
        ended = not worker.process.is_alive()
        try:
            while worker.outcome is None and worker.pipe.poll():
                kind, body = _load(worker.name, worker.pipe.recv_bytes())
                if kind != "message":
                    worker.outcome = (kind, body)
                elif on_message is not None:
                    on_message(worker.name, body)
        except (EOFError, OSError):
            worker.process.join(EXIT_S)
            ended = True
        if ended and worker.outcome is None:
            worker.outcome = ("value", None) if worker.may_die else ("error", _death(worker))
        if worker.outcome is not None:
            self._ended.append(worker)

    def _listen_on(self, on_message: OnMessage | None) -> None:
        """See [Note: the first failure]."""
        until = time.monotonic() + LISTEN_ON_S
        while time.monotonic() < until and any(w.outcome is None for w in self._workers):
            self._listen(until, on_message)

    def _cause(self) -> BaseException:
        failures = [w.failure for w in self._ended if w.failure is not None]
        dead = {
            w.name for w in self._workers if isinstance(w.failure, WorkerLost) and w.failure.worker == w.name
        }

        def is_consequence(failure: BaseException) -> bool:
            return isinstance(failure, WorkerLost) and getattr(failure, "remote_worker", None) not in {
                None,
                *dead,
            }

        return min(failures, key=is_consequence)

    def _too_late(self) -> RpcTimeout:
        running = [w.name for w in self._workers if w.outcome is None]
        return RpcTimeout(
            f"after {self._timeout_s:g} s {len(running)} of {len(self._workers)} workers were still running "
            f"({', '.join(running)}) and have been killed; pass a larger timeout_s (None for none), or see where they "
            f"wait with `py-spy dump` or faulthandler.dump_traceback_later in fn"
        )

    def _join(self) -> None:
        until = time.monotonic() + EXIT_S
        for worker in self._workers:
            worker.process.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Kill whoever still runs, and remove the files. May be called twice."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(EXIT_S)
            worker.pipe.close()
        if self._directory is not None:
            self._directory.close()


# -- checks, each with what to do instead ----------------------------------------------------------------


def _checked_names(world_size: int, names: Sequence[str] | None) -> tuple[str, ...]:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if names is None:
        return tuple(f"worker{rank}" for rank in range(world_size))
    if len(names) != world_size or len(set(names)) != world_size:
        raise ValueError(f"names must be {world_size} different names, one for each rank, not {list(names)}")
    return tuple(names)


def _check_not_in_import() -> None:
    """A worker imports the script that started it. If that starts workers again, say so before it goes round."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            raise RuntimeError(
                "run_local was called while a worker imports the script: put the call under `if __name__ == '__main__':`"
            )


def _check_importable(fn: Callable[..., Any]) -> None:
    plain = fn.func if isinstance(fn, functools.partial) else fn
    name = getattr(plain, "__qualname__", type(plain).__name__)
    if "<" in name:
        raise ValueError(
            f"{name} cannot be found by its name in another process: define it at the top level of a module or script"
        )
    if getattr(plain, "__module__", None) != "__main__":
        return
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is None and not (file and os.path.exists(file)):
        raise ValueError(
            f"{name} is defined in an interactive session (a prompt, a notebook or `python -c`), which worker processes "
            f"cannot import: put it into a file, and import it from there"
        )


def _death(worker: _Worker) -> WorkerLost:
    code = worker.process.exitcode
    if code is not None and code < 0:
        return WorkerLost(worker.name, f"its process was killed by {_signal_name(-code)}")
    hint = ""
    if code == 1:
        hint = "; if the script starts workers at its top level, put that under `if __name__ == '__main__':`"
    return WorkerLost(
        worker.name,
        f"its process exited with code {code} before it had reported (see its output above){hint}",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -- the fork server -------------------------------------------------------------------------------------


def _fork_server() -> multiprocessing.context.ForkServerContext:
    """Its preload takes effect when the server starts, once a process; the call is harmless afterwards."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "farstep.launch.local"])
    return context


# -- what travels over a worker's pipe -------------------------------------------------------------------


class _ToParent:
    """A worker's end of its pipe. Plain pickle: what a worker returns must not point into its memory.

    Only the worker itself has it. A child that it forks closes its copy: else that would keep the pipe open when the worker is gone.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self.is_forked = False

    def close_in_child(self) -> None:
        self.is_forked = True
        self._pipe.close()

    def send(self, kind: str, body: Any) -> None:
        data = pickle.dumps((kind, body))
        with self._lock:
            self._pipe.send_bytes(data)

    def send_error(self, worker: str, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error)).rstrip()
        try:
            raw: bytes | None = pickle.dumps(error) if isinstance(error, Exception) else None
        except Exception:
            raw = None
        self.send("error", (type(error).__qualname__, str(error), text, raw))


_to_parent: _ToParent | None = None
_run_directory: Hold | None = None


def _forget_in_child() -> None:
    global _to_parent
    if _to_parent is not None:
        _to_parent.close_in_child()
        _to_parent = None


os.register_at_fork(after_in_child=_forget_in_child)


def _load(worker: str, data: bytes) -> tuple[str, Any]:
    try:
        kind, body = pickle.loads(data)
    except Exception as exc:
        return "error", RemoteError(
            worker, type(exc).__qualname__, f"what it returned cannot be unpickled here: {exc}"
        )
    if kind == "error":
        body = _rebuild(worker, *body)
    return kind, body


def _rebuild(worker: str, type_name: str, message: str, text: str, raw: bytes | None) -> BaseException:
    """The worker's exception, of its own class where that can be had, with its traceback attached."""
    try:
        found = None if raw is None else pickle.loads(raw)
    except Exception:
        found = None
    error = found if isinstance(found, Exception) else RemoteError(worker, type_name, message)
    try:
        error.remote_worker = worker  # type: ignore[attr-defined]
        error.remote_traceback = text  # type: ignore[attr-defined]
    except Exception:
        pass
    error.__cause__ = RemoteTraceback(worker, text)
    return error


# -- in the worker ---------------------------------------------------------------------------------------


def _work(job: _Job, pipe: Connection) -> None:
    """The life of a worker process."""
    global _to_parent
    _to_parent = report = _ToParent(pipe)
    os.environ.clear()  # the fork server's environment is that of its own start
    os.environ.update(job.env)
    torch.set_num_threads(job.threads)
    threading.Thread(target=_end_with_parent, name="farstep-parent", daemon=True).start()
    try:
        _join_group(job)
        value = job.fn(job.rank, *job.args)
        if report.is_forked:
            end_child(None)
        rpc.shutdown()
    except KeyboardInterrupt:
        os._exit(130)  # the parent has it too, and tells the user
    except BaseException as exc:
        if report.is_forked:
            end_child(exc)
        report.send_error(job.name, exc)
        with contextlib.suppress(Exception):
            rpc.shutdown(graceful=False)  # say goodbye; the others must not wait for this one
        os._exit(1)
    try:
        report.send("value", value)
    except Exception as exc:
        exc.add_note(f"worker {job.name!r} returned a {type(value).__name__} that cannot be pickled")
        report.send_error(job.name, exc)


def _join_group(job: _Job) -> None:
    """The agent's socket goes into the run's own directory, where the parent cleans up even after a SIGKILL.

    The worker holds that directory too: it may outlive the parent for a moment. See [Note: locks, not process ids].
    """
    global _run_directory
    _run_directory = Hold.of(job.directory)
    if _run_directory is None:
        raise NotInitialized(
            f"{job.directory} is gone: the process that started worker {job.name!r} has ended"
        )
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = job.directory
    try:
        rpc.init_rpc(job.name, rank=job.rank, world_size=len(job.names), rpc_backend_options=job.options)
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before


def _end_with_parent() -> None:
    """A worker does not outlive the process that started it, however that ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
