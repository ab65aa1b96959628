"""The controller's side of a group of worker processes. Every wait here has a deadline."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from bench.worker import Seat, serve

START_S = 45.0
ANSWER_S = 30.0
STOP_S = 10.0

_TICKS = os.sysconf("SC_CLK_TCK")
_numbers = itertools.count()


Job = tuple[Callable[..., None], tuple[Any, ...]]
"""A process's main function, which takes its end of the pipe first, and its other arguments."""


class GroupFailed(Exception):
    """Why a group did not start or answer. It is of no more use then."""


class Group:
    """Processes, each with a pipe to here."""

    def __init__(self, context: ForkServerContext, jobs: Sequence[Job], answer_s: float = ANSWER_S) -> None:
        """Start one process for each job and wait until all say that they are ready; raises GroupFailed."""
        self._answer_s = answer_s
        self.world_size = len(jobs)
        self._pipes: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        try:
            for main, args in jobs:
                here, there = context.Pipe()
                process = context.Process(target=main, args=(there, *args), daemon=True)
                process.start()
                there.close()
                self._pipes.append(here)
                self._processes.append(process)
            self._collect(range(self.world_size), "joined the group", START_S)
        except BaseException:
            self.kill()
            raise

    def ask(self, rank: int, *command: Any) -> Any:
        """One worker's answer to one command."""
        return self.ask_all([rank], [command])[0]

    def ask_all(self, ranks: Sequence[int], commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Several workers' answers, each to its own command, all at work at once."""
        for rank, command in zip(ranks, commands, strict=True):
            try:
                self._pipes[rank].send(command)
            except OSError as exc:
                raise GroupFailed(f"worker w{rank} died") from exc
        return self._collect(ranks, "answered", self._answer_s)

    def pause(self) -> None:
        """Stop every process, so that a group that polls while idle takes nothing from the other."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """CPU time that all workers together have used so far, in user and kernel mode."""
        total = 0
        for process in self._processes:
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            user, system = stat.rpartition(")")[2].split()[11:13]
            total += int(user) + int(system)
        return total / _TICKS

    def close(self) -> None:
        """Let the workers leave their group in peace, and kill those that don't."""
        self.resume()
        try:
            for pipe in self._pipes:
                pipe.send(("stop",))
            self._collect(range(self.world_size), "left the group", STOP_S)
            for process in self._processes:
                process.join(1.0)
        except (GroupFailed, OSError):
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        self.resume()
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.join(STOP_S)
        for pipe in self._pipes:
            pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):  # it ended just now
                    os.kill(process.pid, number)

    def _collect(self, ranks: Iterable[int], deed: str, seconds: float) -> list[Any]:
        """The answers of these workers, in their order. The first failure ends the wait for the others."""
        order = list(ranks)
        waiting = {self._pipes[rank]: rank for rank in order}
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise GroupFailed(
                    f"only {len(answers)} of {len(order)} workers {deed} within {seconds:.0f} s"
                )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    verdict, answers[rank] = pipe.recv()
                except (EOFError, OSError) as exc:
                    raise GroupFailed(f"worker w{rank} died") from exc
                if verdict == "error":
                    raise GroupFailed(f"w{rank}: {answers[rank]}")
        return [answers[rank] for rank in order]


def rpc_group(
    context: ForkServerContext, scratch: Path, module: str, world_size: int, options: dict[str, Any]
) -> Group:
    """Workers of one implementation of RPC."""
    number = next(_numbers)
    rendezvous = (scratch / f"rendezvous{number}").as_uri()

    def seat(rank: int) -> Seat:
        log = str(scratch / f"group{number}-w{rank}.log")
        return Seat(module, rank, world_size, rendezvous, log, options)

    return Group(context, [(serve, (seat(rank),)) for rank in range(world_size)])
