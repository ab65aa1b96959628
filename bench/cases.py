"""What is timed. Each case prepares one act inside a worker; `timed` repeats the act.

A case is a context manager that takes the implementation, this worker's name and its peers' names, and
yields the act. What it does before and after the yield is not timed.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType

import torch

from bench import remote

Act = Callable[[], object]
Case = Callable[[ModuleType, str, list[str]], AbstractContextManager[Act]]

ASYNC_CALLS = 500
NESTED_CALLS = 4


def timed(act: Act, warmup: int, iterations: int, budget_s: float) -> list[float]:
    """Seconds of each repetition. Stops early when the budget is spent, but never before one."""
    for _ in range(warmup):
        act()
    gc.collect()
    clock = time.perf_counter_ns
    samples: list[float] = []
    end = clock() + int(budget_s * 1e9)
    for _ in range(iterations):
        start = clock()
        act()
        stop = clock()
        samples.append((stop - start) / 1e9)
        if stop > end:
            break
    return samples


def paired(
    first: Act, second: Act, warmup: int, iterations: int, budget_s: float
) -> tuple[list[float], list[float]]:
    """Seconds of each repetition of two acts that alternate, as does which of them goes first."""
    for _ in range(warmup):
        first()
        second()
    gc.collect()
    clock = time.perf_counter_ns
    samples: tuple[list[float], list[float]] = ([], [])
    turns = ((first, samples[0]), (second, samples[1]))
    end = clock() + int(budget_s * 1e9)
    for _ in range(iterations):
        for act, into in turns:
            start = clock()
            act()
            into.append((clock() - start) / 1e9)
        turns = turns[::-1]
        if clock() > end:
            break
    return samples


@contextmanager
def empty(rpc: ModuleType, me: str, peers: list[str]) -> Iterator[Act]:
    call, peer = rpc.rpc_sync, peers[0]
    yield lambda: call(peer, remote.nothing)


def echo(nbytes: int) -> Case:
    """A float32 tensor goes there and comes back."""

    @contextmanager
    def case(rpc: ModuleType, me: str, peers: list[str]) -> Iterator[Act]:
        call, peer, x = rpc.rpc_sync, peers[0], torch.rand(nbytes // 4)
        if not torch.equal(call(peer, remote.echo, args=(x,)), x):
            raise ValueError("the echo differs from what was sent")
        yield lambda: call(peer, remote.echo, args=(x,))

    return case


def plus_one(nbytes: int) -> Case:
    """A float32 tensor goes there, is read in full, and a new one comes back."""

    @contextmanager
    def case(rpc: ModuleType, me: str, peers: list[str]) -> Iterator[Act]:
        call, peer, x = rpc.rpc_sync, peers[0], torch.rand(nbytes // 4)
        if not torch.equal(call(peer, remote.plus_one, args=(x,)), x + 1):
            raise ValueError("the answer is wrong")
        yield lambda: call(peer, remote.plus_one, args=(x,))

    return case


@contextmanager
def many_async(rpc: ModuleType, me: str, peers: list[str]) -> Iterator[Act]:
    call, peer = rpc.rpc_async, peers[0]

    def act() -> None:
        for future in [call(peer, remote.nothing) for _ in range(ASYNC_CALLS)]:
            future.wait()

    yield act


@contextmanager
def nested(rpc: ModuleType, me: str, peers: list[str]) -> Iterator[Act]:
    """One call to the peer and three more, back and forth."""
    call, peer, below = rpc.rpc_sync, peers[0], NESTED_CALLS - 1
    if call(peer, remote.nest, args=(below, peer, me)) != below:
        raise ValueError("the calls did not nest")
    yield lambda: call(peer, remote.nest, args=(below, peer, me))


@contextmanager
def beside_blocked(rpc: ModuleType, me: str, peers: list[str]) -> Iterator[Act]:
    """Empty calls to a worker that is running a call which blocks."""
    call, peer = rpc.rpc_sync, peers[0]
    blocked = rpc.rpc_async(peer, remote.hold)
    deadline = time.monotonic() + remote.HOLD_S
    while not call(peer, remote.is_held) and time.monotonic() < deadline:
        time.sleep(0.001)
    try:
        yield lambda: call(peer, remote.nothing)
    finally:
        still_blocked = call(peer, remote.release)
        blocked.wait()
    if not still_blocked:
        raise TimeoutError("short calls had to wait for the blocking one")


@contextmanager
def round_robin(rpc: ModuleType, me: str, peers: list[str]) -> Iterator[Act]:
    """Empty calls to every other worker of the group in turn."""
    call, turn = rpc.rpc_sync, itertools.cycle(peers)
    yield lambda: call(next(turn), remote.nothing)


CASES: dict[str, Case] = {
    "empty": empty,
    "4B": echo(4),
    "4KiB": echo(4 << 10),
    "1MiB": echo(1 << 20),
    "64MiB": echo(64 << 20),
    "64MiB+1": plus_one(64 << 20),
    "async": many_async,
    "nested": nested,
    "blocked": beside_blocked,
    "round_robin": round_robin,
}
