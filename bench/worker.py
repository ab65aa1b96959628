"""A worker process: joins its group, then does what its pipe tells it until told to stop.

Commands are tuples, answers are `("ok", value)` or `("error", text)`:

    ("run", case, warmup, iterations, budget_s)             -> seconds of each repetition
    ("pair", (case, case), warmup, iterations, budget_s)    -> the same of two that alternate
    ("together", case, start_ns, iterations)                -> (began_ns, ended_ns), on the machine's one clock
    ("stop",)                                               -> None, once the worker has left its group
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, TypeVar

import torch

from bench import cases, gradients, planning, remote, training
from bench.cases import paired, timed

T = TypeVar("T")

CASES = {**cases.CASES, **gradients.CASES, **training.CASES, **planning.CASES}
RPC_TIMEOUT_S = 600.0
"""Longer than any pause, so that a group that was stopped for others' turns loses no call."""


@dataclass(frozen=True)
class Seat:
    """One worker's place in a group."""

    module: str
    rank: int
    world_size: int
    init_method: str
    log: str
    options: dict[str, Any]

    def name_of(self, rank: int) -> str:
        return f"w{rank}"


def serve(pipe: Connection, seat: Seat) -> None:
    """The worker's main function."""
    quiet(seat.log)
    torch.set_num_threads(1)
    obey(
        pipe,
        enter=lambda: join(seat),
        answer=lambda rpc, command: answer(rpc, seat, command),
        leave=lambda rpc: rpc.shutdown(),
    )


def obey(
    pipe: Connection,
    enter: Callable[[], T],
    answer: Callable[[T, tuple[Any, ...]], Any],
    leave: Callable[[T], object],
) -> None:
    """Enter, answer every command, leave. An error of one command is an answer, not the end."""
    try:
        place = enter()
        pipe.send(("ok", None))
        while (command := pipe.recv())[0] != "stop":
            try:
                pipe.send(("ok", answer(place, command)))
            except Exception as exc:
                pipe.send(("error", describe(exc)))
        leave(place)
        pipe.send(("ok", None))
    except (EOFError, BrokenPipeError):
        os._exit(1)  # the controller is gone
    except Exception as exc:
        pipe.send(("error", describe(exc)))
        os._exit(1)


def quiet(log: str) -> None:
    """Leave Ctrl-C to the controller, and the terminal too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def join(seat: Seat) -> ModuleType:
    rpc = importlib.import_module(seat.module)
    remote.use(rpc)
    make = rpc.RpcOptions if "transport" in seat.options else rpc.TensorPipeRpcBackendOptions
    options = make(init_method=seat.init_method, rpc_timeout=RPC_TIMEOUT_S, **seat.options)
    name = seat.name_of(seat.rank)
    rpc.init_rpc(name, rank=seat.rank, world_size=seat.world_size, rpc_backend_options=options)
    return rpc


def answer(rpc: ModuleType, seat: Seat, command: tuple[Any, ...]) -> Any:
    """Do one command of the list at the top."""
    verb, case, *rest = command
    me = seat.name_of(seat.rank)
    peers = [seat.name_of(rank) for rank in range(seat.world_size) if rank != seat.rank]
    if verb == "pair":
        first, second = case
        with CASES[first](rpc, me, peers) as act, CASES[second](rpc, me, peers) as other:
            return paired(act, other, *rest)
    with CASES[case](rpc, me, peers) as act:
        if verb == "run":
            return timed(act, *rest)
        start_ns, iterations = rest
        time.sleep(max(0.0, (start_ns - time.perf_counter_ns()) / 1e9))
        began_ns = time.perf_counter_ns()
        for _ in range(iterations):
            act()
        return began_ns, time.perf_counter_ns()


def describe(exc: BaseException) -> str:
    line = (str(exc).strip().splitlines() or [""])[0].partition(" (this error originated at")[0]
    return f"{type(exc).__name__}: {line}".rstrip(": ")
