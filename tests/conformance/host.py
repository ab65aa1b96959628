"""A process with torch and the suite loaded, which runs one test after another.

Importing torch takes seconds, a test mostly less than one.  So a host imports once and then, for
each line ``{"test": ..., "limit_s": ...}`` on its standard input, forks as many workers as the
test wants, waits for them and writes a line ``{"outcome": ..., "seconds": ..., "detail": ...}``.

A worker lives in a process of its own from fork to ``_exit``, so no test sees another's state.
The host itself must stay single-threaded: only then is forking it safe.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import unittest
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED = 0, 10, 77
GRACE_S = 2.0  # how long the others may go on once one worker has failed
POLL_S = 0.01


@dataclass
class Forked:
    rank: int
    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def signal(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)


def run_worker(case: unittest.TestCase, method: str) -> int:
    """The test body on one worker; what it prints goes to the worker's log."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
    try:
        getattr(case, method)()
    except unittest.SkipTest as skip:
        print(f"skipped: {skip}")
        return SKIPPED
    except SystemExit as leave:
        print(f"sys.exit({leave.code!r})")
        return leave.code if isinstance(leave.code, int) else FAILED
    except BaseException:
        traceback.print_exc()
        return FAILED
    # A thread that is not a daemon keeps a program alive: then the test hangs here, as it should.
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    return PASSED


def fork_worker(cls: Any, method: str, rank: int, directory: Path) -> Forked:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Forked(rank, pid)
    code = FAILED
    try:
        log = os.open(directory / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        case = cls(method)
        case.rank = rank
        case.file_name = str(directory / "store")
        code = run_worker(case, method)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(workers: list[Forked], limit_s: float) -> bool:
    """Until all have ended or the limit is reached.  True if they ended by themselves."""
    deadline = time.monotonic() + limit_s
    hurried = False
    while True:
        codes = [worker.poll() for worker in workers]
        if None not in codes:
            return True
        if not hurried and any(code not in (None, PASSED, SKIPPED) for code in codes):
            hurried = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            return hurried
        time.sleep(POLL_S)


def end(workers: list[Forked], *, dump: bool) -> None:
    """Kill those still running, with a traceback of all their threads in the log if asked."""
    left = [worker for worker in workers if worker.poll() is None]
    if dump and left:
        for worker in left:
            worker.signal(signal.SIGUSR1)
        time.sleep(0.5)
    for worker in left:
        worker.signal(signal.SIGKILL)
    for worker in left:
        worker.code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])


def tail(path: Path, size: int = 8000) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    return text if len(text) <= size else "[...]\n" + text[-size:]


def judge(workers: list[Forked], in_time: bool) -> str:
    codes = [worker.code for worker in workers]
    if not in_time:
        return "timeout"
    if all(code == SKIPPED for code in codes):
        return "skipped"
    return "passed" if all(code in (PASSED, SKIPPED) for code in codes) else "failed"


def run_test(suites: Any, label: str, limit_s: float) -> dict[str, Any]:
    suite, method = label.split(".")
    cls = getattr(suites, suite)
    directory = Path(tempfile.mkdtemp(prefix="farstep-conformance-"))
    began = time.monotonic()
    workers: list[Forked] = []
    try:
        world_size = cls(method).world_size
        for rank in range(world_size):
            workers.append(fork_worker(cls, method, rank, directory))
        in_time = wait(workers, limit_s)
        end(workers, dump=not in_time)
        outcome = judge(workers, in_time)
        detail = ""
        if outcome != "passed":
            detail = "\n".join(
                f"--- worker{worker.rank}: exit code {worker.code}\n" + tail(directory / f"log{worker.rank}")
                for worker in workers
            )
        return {"outcome": outcome, "seconds": time.monotonic() - began, "detail": detail}
    finally:
        end(workers, dump=False)
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    # Tests print; only answers may go where the answers are read.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    from . import suites
    from .catalogue import SUITES

    for line in sys.stdin:
        order = json.loads(line)
        if order["test"] == "?":
            names = unittest.TestLoader().getTestCaseNames
            answer: dict[str, Any] = {
                "tests": [f"{s}.{m}" for s in SUITES for m in names(getattr(suites, s))]
            }
        else:
            answer = run_test(suites, order["test"], order["limit_s"])
        answers.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
