"""`farstep run`: local copies of a script, each with its rank in the environment, as torchrun does it."""

from __future__ import annotations

import os
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
    script: str, args: Sequence[str], world_size: int, show: Print, *, compat: bool = False
) -> int:
    """Run `world_size` copies of a script to their end; return 0, or the code of the first that failed.

    Each has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, so that `init_rpc` with its default
    `env://` finds the others. When one fails the others are stopped. `show(rank, line)` gets each line of output.
    With `compat` the script is one for torch.distributed.rpc, and runs on farstep unedited.
    """
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
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
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
        return _first_failure(workers, show)
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


def _first_failure(workers: list[subprocess.Popen[str]], show: Print) -> int:
    while True:
        codes = [worker.poll() for worker in workers]
        for rank, code in enumerate(codes):
            if code:
                how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
                left = [str(other) for other, c in enumerate(codes) if c is None]
                show(rank, f"[{how}{'; stopping rank ' + ', '.join(left) if left else ''}]")
                return 128 - code if code < 0 else code
        if None not in codes:
            return 0
        time.sleep(POLL_S)


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
