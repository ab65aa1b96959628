"""After 10,000 calls and 1,000 references nothing is left: no reference, future, thread, descriptor or file."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.workers import Group, bounded, eventually, results

from farstep import rpc
from farstep.errors import RpcTimeout, WorkerLost
from farstep.rpc import Agent, RpcOptions, RRef
from farstep.rpc.calls import Call, CallFuture
from farstep.rpc.message import Message

pytestmark = pytest.mark.slow
TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def runtime_directory(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where this test's agents make their sockets, and nobody else does."""
    caplog.set_level("CRITICAL", "farstep.rpc")  # a captured record holds what it tells of
    there_before.clear()
    there_before.update(calls_left())
    with tempfile.TemporaryDirectory(prefix="fs-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield directory


there_before: dict[str, int] = {}
"""What another test has left behind is not this one's fault."""


def increment(x: int) -> int:
    return x + 1


def fail() -> None:
    raise KeyError("on purpose")


def keep_waiting() -> None:
    waiting.wait(TIMEOUT_S)


waiting = threading.Event()


def descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def farstep_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("farstep")]


def maps_of_shared_memory() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:farstep")


def living(*kinds: type) -> dict[str, int]:
    """How many objects of these classes there are."""
    gc.collect()
    counts = dict.fromkeys((k.__name__ for k in kinds), 0)
    for thing in gc.get_objects():
        kind = type(thing)
        if kind in kinds:
            counts[kind.__name__] += 1
    return {name: count for name, count in counts.items() if count}


def calls_left() -> dict[str, int]:
    left = living(CallFuture, Message, RRef, *Call.__subclasses__())
    return {name: count for name, count in left.items() if count > there_before.get(name, 0)}


def nothing_left() -> None:
    try:
        eventually(lambda: not calls_left(), timeout_s=5.0)
    except AssertionError:
        raise AssertionError(f"still alive: {calls_left()}") from None


def socket_directories() -> list[str]:
    return os.listdir(os.environ["XDG_RUNTIME_DIR"])


@contextlib.contextmanager
def leaves_nothing() -> Iterator[None]:
    """Whatever happens inside, the process is afterwards as it was."""
    gc.collect()
    before = descriptors()
    threads, maps = len(farstep_threads()), maps_of_shared_memory()
    yield
    eventually(lambda: len(farstep_threads()) <= threads, "the end of every thread")
    try:
        eventually(lambda: gc.collect() >= 0 and set(descriptors()) <= set(before), timeout_s=5.0)
    except AssertionError:
        raise AssertionError(
            f"still open: {[d for fd, d in descriptors().items() if fd not in before]}"
        ) from None
    assert maps_of_shared_memory() <= maps
    assert socket_directories() == []
    nothing_left()


def call(agent: Agent, to: str, function: Any, *args: Any, timeout: float = TIMEOUT_S) -> Any:
    return agent.call_sync(to, function, args, {}, timeout)


def all_kinds_of_calls(agents: list[Agent], rounds: int) -> None:
    """60 calls a round, of every kind, with every kind of end."""
    first, second = agents[:2]
    small, large = torch.ones(10), torch.ones(100_000)
    for _ in range(rounds):
        futures = [first.call_async("worker1", increment, (i,), {}, TIMEOUT_S) for i in range(20)]
        futures += [second.call_async("worker0", torch.neg, (small,), {}, TIMEOUT_S) for _ in range(10)]
        futures += [
            first.call_async("worker1", increment, (i,), {}, TIMEOUT_S).then(lambda f: f.value())
            for i in range(5)
        ]
        results(futures)
        for _ in range(10):
            assert call(first, "worker1", increment, 1) == 2
        for _ in range(3):
            call(second, "worker0", torch.neg, large)
            call(first, "worker0", increment, 1)
        for agent, to in ((first, "worker1"), (second, "worker0"), (first, "worker0")):
            with pytest.raises(KeyError):
                call(agent, to, fail)
        future = first.call_async("worker1", fail, (), {}, TIMEOUT_S)
        with pytest.raises(KeyError):
            bounded(future.wait)
        del future, futures


def settled(agents: list[Agent]) -> None:
    """Nothing is under way, though the agents are there."""
    for agent in agents:
        eventually(
            lambda agent=agent: agent.pending_calls == 0 and agent.tally.is_idle, "the end of all calls"
        )
        eventually(lambda agent=agent: not any(agent.rrefs.counts().values()), "the end of all references")
    nothing_left()


@pytest.mark.timeout(240)
def test_ten_thousand_calls_leave_nothing() -> None:
    with leaves_nothing(), rpc.local_agents(2) as agents:
        all_kinds_of_calls(agents, 5)
        settled(agents)
        before, threads = descriptors(), len(farstep_threads())
        all_kinds_of_calls(agents, 170)
        settled(agents)
        assert len(descriptors()) <= len(before) + 2
        assert len(farstep_threads()) <= threads + 20


def make_list() -> list[int]:
    return [1, 2, 3]


def look(rref: RRef[Any]) -> Any:
    return rref.to_here()


@pytest.mark.timeout(240)
def test_a_thousand_references_leave_nothing() -> None:
    with leaves_nothing(), rpc.local_agents(3) as agents:
        call(agents[0], "worker1", increment, 1)
        for _ in range(10):
            rrefs = [agents[0].remote(f"worker{i % 3}", make_list, (), {}, TIMEOUT_S) for i in range(100)]
            for i, rref in enumerate(rrefs):
                assert rref.to_here() == [1, 2, 3]
                if i % 4 == 0:
                    assert call(agents[0], "worker2", look, rref) == [1, 2, 3]
            del rrefs, rref
        settled(agents)


def test_references_still_held_at_the_end_leave_nothing() -> None:
    with leaves_nothing():
        with rpc.local_agents(2) as agents:
            rrefs = [agents[0].remote("worker1", make_list, (), {}, TIMEOUT_S) for _ in range(50)]
            assert rrefs[0].to_here() == [1, 2, 3]
        del rrefs, agents


def test_calls_that_time_out_or_lose_their_worker_leave_nothing() -> None:
    waiting.clear()
    with leaves_nothing():
        with rpc.local_agents(3) as agents:
            for _ in range(10):
                with pytest.raises(RpcTimeout):
                    call(agents[0], "worker1", keep_waiting, timeout=0.01)
            future = agents[0].call_async("worker2", keep_waiting, (), {}, TIMEOUT_S)
            waiting.set()
            agents[2].close()
            with contextlib.suppress(WorkerLost):
                bounded(future.wait)
            with pytest.raises(WorkerLost):
                call(agents[0], "worker2", increment, 1)
            del future
            settled(agents[:2])
        del agents


def test_agents_that_come_and_go_leave_nothing() -> None:
    with leaves_nothing():
        for options in (
            RpcOptions(),
            RpcOptions(transport="tcp", secret="a secret for the test", host="127.0.0.1"),
        ):
            for _ in range(4):
                with rpc.local_agents(4, options) as agents:
                    for agent in agents:
                        for other in agents:
                            call(agent, other.info.name, increment, 1)
                gone = [weakref.ref(agent) for agent in agents]
                del agents, agent, other
                eventually(
                    lambda gone=gone: gc.collect() >= 0 and not any(g() for g in gone),
                    "the end of every agent",
                )


def test_tensors_and_their_memory_are_let_go() -> None:
    with leaves_nothing(), rpc.local_agents(2) as agents:
        tensor = torch.ones(500_000)
        ended = weakref.ref(tensor)
        got = call(agents[0], "worker1", torch.neg, tensor)
        copy = weakref.ref(got)
        del tensor, got
        eventually(lambda: gc.collect() >= 0 and ended() is None and copy() is None, "the tensors' end")
        maps = maps_of_shared_memory()
        for _ in range(50):
            call(agents[0], "worker1", torch.neg, torch.ones(500_000))
        assert maps_of_shared_memory() <= maps + 4  # segments are lent again, not made anew


def test_a_failed_init_leaves_nothing() -> None:
    with leaves_nothing():
        store = torch.distributed.HashStore()
        for _ in range(3):
            with pytest.raises(rpc.InitTimeout):
                rpc.join_group(store, "alone", 0, 2, RpcOptions(init_timeout_s=0.05))
            store = torch.distributed.HashStore()


# -- processes


def work_and_count(peer: str, rounds: int) -> tuple[int, int, dict[str, int], int]:
    """Calls and references; then what this process has."""
    for _ in range(rounds):
        futures = [rpc.rpc_async(peer, increment, args=(i,)) for i in range(50)]
        assert [f.wait() for f in futures] == list(range(1, 51))
        rpc.rpc_sync(peer, torch.neg, args=(torch.ones(100_000),))
        rref = rpc.remote(peer, make_list)
        assert rref.to_here() == [1, 2, 3]
        del rref, futures
    agent = rpc.api.current_agent()
    nothing_left()
    return len(descriptors()), len(farstep_threads()), agent.rrefs.counts(), agent.pending_calls


def shut_down_and_count() -> tuple[list[str], list[str]]:
    rpc.shutdown()
    eventually(lambda: not farstep_threads(), "the end of every thread")
    gc.collect()
    sockets = [target for target in descriptors().values() if "eventpoll" in target or "eventfd" in target]
    return farstep_threads(), sockets


def test_processes_leave_nothing(workers: Callable[..., Group], runtime_directory: str) -> None:
    group = workers(2, env={"XDG_RUNTIME_DIR": runtime_directory})
    first = group.finish([w.start(work_and_count, f"worker{1 - i}", 3) for i, w in enumerate(group)])
    later = group.finish([w.start(work_and_count, f"worker{1 - i}", 100) for i, w in enumerate(group)])
    for (fds, threads, _, _), (fds_later, threads_later, counts, pending) in zip(first, later, strict=True):
        assert fds_later <= fds + 2
        assert threads_later <= threads + 8
        assert pending == 0
        assert counts["num_pending_users"] == counts["num_pending_futures"] == 0
    for threads_left, sockets_left in group.finish(group.start_all(shut_down_and_count)):
        assert threads_left == []
        assert sockets_left == []
    assert socket_directories() == []
