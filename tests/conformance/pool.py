"""Several hosts at once: most tests wait more than they work."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_LIMIT_S = 40.0


@dataclass(frozen=True)
class Outcome:
    test: str
    outcome: str  # passed, failed, skipped or timeout
    seconds: float
    detail: str


class Host:
    """The near end of one ``host`` process."""

    def __init__(self, impl: str) -> None:
        package = __package__ or ""
        root = Path(__file__).parents[package.count(".") + 1]
        path = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {
            "FARSTEP_CONFORMANCE_IMPL": impl,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{package}.host"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._errors.seek(0)
            text = self._errors.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"the conformance host ended early:\n{text}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        # At the end of its input a host leaves by itself, after the test it is in.
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


class Pool:
    """Runs tests in order of submission, ``lanes`` of them at a time."""

    def __init__(
        self, impl: str = "farstep.compat", lanes: int = 2, limit_s: float = DEFAULT_LIMIT_S
    ) -> None:
        self._limit_s = limit_s
        self._impl = impl
        self._idle: queue.SimpleQueue[Host] = queue.SimpleQueue()
        self._hosts: list[Host] = []
        self._broken: RuntimeError | None = None
        self._threads = ThreadPoolExecutor(lanes, thread_name_prefix="conformance")

    def _ask(self, **order: Any) -> dict[str, Any]:
        if self._broken:  # the next host would end as the last one did, only seconds later
            raise self._broken
        try:
            host = self._idle.get_nowait()
        except queue.Empty:
            host = Host(self._impl)
            self._hosts.append(host)
        try:
            answer = host.ask(**order)
        except RuntimeError as error:
            self._broken = error
            raise
        self._idle.put(host)
        return answer

    def _run(self, test: str) -> Outcome:
        return Outcome(test, **self._ask(test=test, limit_s=self._limit_s))

    def submit(self, tests: Iterable[str]) -> dict[str, Future[Outcome]]:
        return {test: self._threads.submit(self._run, test) for test in tests}

    def loaded_tests(self) -> list[str]:
        """The tests that unittest finds in the loaded classes."""
        names: list[str] = self._threads.submit(self._ask, test="?").result()["tests"]
        return names

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for host in self._hosts:
            host.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
