"""`farstep run`: local copies of a script, each with its rank in the environment, as torchrun does it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

__all__ = ["run_script"]

STOP_S: Final = 5.0
POLL_S: Final = 0.05
LAST_LINES_S: Final = 0.5
"""So long the last lines of a copy that failed are waited for, to be shown before its failure."""
Print = Callable[[int, str], None]


def run_script(
    script: str,
    args: Sequence[str],
    world_size: int,
    show: Print,
    *,
    compat: bool = False,
    max_restarts: int = 0,
    keep_going: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Run `world_size` copies of a script to their end; return 0, or the code of the first that failed.

    Each has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, so that `init_rpc` with its default
    `env://` finds the others. `show(rank, line)` gets each line of output, `say(line)` what is said
    of the whole group. With `compat` the script is one for torch.distributed.rpc, and runs on farstep unedited.

    When one fails the others are stopped, and all are started again, up to `max_restarts` times, with
    the number of the restart in FARSTEP_RESTART. With `keep_going` the others are not stopped; what
    failed is said when all have ended.
    """
    for restart in range(max_restarts + 1):
        with _stopped_by_signals():
            codes = _run_once(script, args, world_size, show, compat, keep_going, restart)
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if not failed:
            return 0
        told = "; ".join(f"rank {rank} {_how(code)}" for rank, code in failed.items())
        if restart < max_restarts:
            say(f"{told}. All {world_size} ranks are started again (restart {restart + 1} of {max_restarts})")
    if keep_going:
        say(f"{len(failed)} of {world_size} ranks failed: {told}")
    elif max_restarts:
        say(f"{told}. Giving up after {max_restarts} restart{'s' if max_restarts > 1 else ''}")
    code = next(code for code in codes if code)
    return 128 - code if code < 0 else code


def _run_once(
    script: str,
    args: Sequence[str],
    world_size: int,
    show: Print,
    compat: bool,
    keep_going: bool,
    restart: int,
) -> list[int | None]:
    """The codes with which the copies have ended; None for those that were stopped because of
    others."""
    port = _free_port()
    workers: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    ended = threading.Event()
    try:
        for rank in range(world_size):
            worker = subprocess.Popen(
                [sys.executable, "-u", *(("-m", "farstep.compat") if compat else ()), script, *args],
                env={
                    **_environment(),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                }
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FARSTEP_RESTART": str(restart)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            workers.append(worker)
            reader = threading.Thread(target=_read, args=(rank, worker, show, ended), daemon=True)
            reader.start()
            readers.append(reader)
        return _awaited(workers, readers, ended, show, keep_going)
    finally:
        _stop(workers)
        for reader in readers:
            reader.join(STOP_S)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the copies too, as Ctrl-C does; else they would go on without this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **os.environ}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _read(rank: int, worker: subprocess.Popen[str], show: Print, ended: threading.Event) -> None:
    for line in worker.stdout or ():
        show(rank, line.rstrip("\n"))
    worker.wait()
    ended.set()


def _awaited(
    workers: list[subprocess.Popen[str]],
    readers: list[threading.Thread],
    ended: threading.Event,
    show: Print,
    keep_going: bool,
) -> list[int | None]:
    """When all have ended; or, unless `keep_going`, when one has failed.

    `ended` is set when a copy ends, so that its failure is told before the others go on for long. One that leaves its
    output to a process of its own is seen at the next poll.
    """
    told: set[int] = set()
    while True:
        ended.clear()
        codes = [worker.poll() for worker in workers]
        left = [rank for rank, code in enumerate(codes) if code is None]
        for rank, code in enumerate(codes):
            if code and rank not in told:
                told.add(rank)
                goes = "goes" if len(left) == 1 else "go"
                others = ""
                if left:
                    others = f"; {_named(left)} {goes} on" if keep_going else f"; stopping {_named(left)}"
                readers[rank].join(LAST_LINES_S)
                show(rank, f"[{_how(code)}{others}]")
        if not left or (told and not keep_going):
            return codes
        ended.wait(POLL_S)


def _how(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


def _named(ranks: Sequence[int]) -> str:
    """Return "rank 2", or "ranks 0, 1 and 2"."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _stop(workers: list[subprocess.Popen[str]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    deadline = time.monotonic() + STOP_S
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
