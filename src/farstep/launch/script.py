"""`farstep run`: local copies of a script, each with its rank in the environment, as torchrun does it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Final

__all__ = ["run_script"]

STOP_S: Final = 5.0
POLL_S: Final = 0.05
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
        codes = _run_once(script, args, world_size, show, compat, keep_going, restart)
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if not failed:
            return 0
        if restart < max_restarts:
            told = "; ".join(f"rank {rank} {_how(code)}" for rank, code in failed.items())
            say(f"{told}. All {world_size} ranks are started again (restart {restart + 1} of {max_restarts})")
    if keep_going:
        say(_summary(codes))
    elif max_restarts:
        say(f"failed again after {max_restarts} restart{'s' if max_restarts > 1 else ''}: giving up")
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
            reader = threading.Thread(target=_read, args=(rank, worker.stdout, show), daemon=True)
            reader.start()
            readers.append(reader)
        return _awaited(workers, show, keep_going)
    finally:
        _stop(workers)
        for reader in readers:
            reader.join(STOP_S)


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **os.environ}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _read(rank: int, stream: IO[str] | None, show: Print) -> None:
    for line in stream or ():
        show(rank, line.rstrip("\n"))


def _awaited(workers: list[subprocess.Popen[str]], show: Print, keep_going: bool) -> list[int | None]:
    """When all have ended; or, unless `keep_going`, when one has failed."""
    told: set[int] = set()
    while True:
        codes = [worker.poll() for worker in workers]
        left = [str(rank) for rank, code in enumerate(codes) if code is None]
        for rank, code in enumerate(codes):
            if code and rank not in told:
                told.add(rank)
                goes = "goes" if len(left) == 1 else "go"
                names = f"rank {', '.join(left)}"
                others = f"; {names} {goes} on" if keep_going else f"; stopping {names}"
                show(rank, f"[{_how(code)}{others if left else ''}]")
        if not left or (told and not keep_going):
            return codes
        time.sleep(POLL_S)


def _how(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


def _summary(codes: Sequence[int | None]) -> str:
    failed = [f"rank {rank} {_how(code)}" for rank, code in enumerate(codes) if code]
    return f"{len(failed)} of {len(codes)} ranks failed: {'; '.join(failed)}"


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
