"""Honest use under small bounds: calls wait for their turn, nothing stops for ever, and nobody is held up by another."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.workers import Group, bounded, eventually, results

from farstep import rpc
from farstep.errors import PayloadError, RpcTimeout, WorkerLost
from farstep.rpc import Agent, RpcOptions, functions
from farstep.rpc.pressure import LARGE_BYTES, Ledger
from farstep.rpc.sender import Sender, Stalled
from farstep.rpc.wire import FrameReader, Kind, frame_bytes

TIMEOUT_S = 50.0
SMALL = RpcOptions(
    max_calls_per_peer=3, max_bytes_per_peer=1 << 20, num_worker_threads=2, shared_memory_bytes=0
)


def increment(x: int) -> int:
    return x + 1


gates: dict[str, threading.Event] = {}


def pass_gate(name: str) -> str:
    assert gates[name].wait(TIMEOUT_S)
    return "through"


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Any:
    name = request.node.name
    gates[name] = threading.Event()
    yield name
    gates.pop(name).set()


def call_async(agent: Agent, to: str, function: Any, *args: Any, timeout: float = TIMEOUT_S) -> Any:
    return agent.call_async(to, function, args, {}, timeout)


def is_quiet(agents: list[Agent]) -> bool:
    unfinished = ("client_active_calls", "client_waiting_calls", "server_unfinished_messages", "paused_peers")
    figures = [agent.get_debug_info() for agent in agents]
    return all(info[f"agent.{name}"] == 0 for info in figures for name in unfinished)


# -- calls inside calls


def there_and_back(depth: int, width: int, load: Any) -> int:
    """Each level makes `width` calls to the other worker at once."""
    if depth == 0:
        return 1
    other = "worker1" if rpc.get_worker_info().name == "worker0" else "worker0"
    futures = [
        rpc.rpc_async(other, there_and_back, args=(depth - 1, width, load), timeout=TIMEOUT_S)
        for _ in range(width)
    ]
    return sum(f.wait() for f in futures)


@functions.async_execution
def there_and_back_async(depth: int, width: int, load: Any) -> torch.futures.Future[int]:
    if depth == 0:
        done: torch.futures.Future[int] = torch.futures.Future()
        done.set_result(1)
        return done
    other = "worker1" if rpc.get_worker_info().name == "worker0" else "worker0"
    futures = [
        rpc.rpc_async(other, there_and_back_async, args=(depth - 1, width, load), timeout=TIMEOUT_S)
        for _ in range(width)
    ]
    return torch.futures.collect_all(futures).then(lambda all: sum(f.value() for f in all.value()))


@pytest.mark.parametrize("load", [None, bytes(300_000)], ids=["empty", "with a load"])
@pytest.mark.parametrize("function", [there_and_back, there_and_back_async], ids=["waiting", "async"])
def test_storms_of_nested_calls_from_both_sides(function: Any, load: Any) -> None:
    with rpc.local_agents(2, SMALL) as agents:
        futures = [call_async(agents[i % 2], f"worker{1 - i % 2}", function, 5, 2, load) for i in range(2)]
        started: list[Any] = []

        def flood(agent: Agent, to: str) -> None:  # these wait for their turns, on threads of their own
            started.extend(call_async(agent, to, function, 3, 2, load) for _ in range(8))

        threads = [
            threading.Thread(target=flood, args=(agents[i], f"worker{1 - i}"), daemon=True) for i in (0, 1)
        ]
        for thread in threads:
            thread.start()
        assert results(futures) == [32, 32]
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert results(started) == [8] * 16
        assert eventually(lambda: is_quiet(agents), "everything being over")


@pytest.mark.slow
def test_calls_nested_three_hundred_deep() -> None:
    with rpc.local_agents(2) as agents:
        assert bounded(agents[0].call_sync, "worker1", there_and_back, (300, 1, None), {}, TIMEOUT_S) == 1
        assert max(agent.get_debug_info()["agent.threads"] for agent in agents) < 200


# -- turns


def test_calls_wait_for_their_turn_and_say_so_when_it_does_not_come(gate: str) -> None:
    with rpc.local_agents(3, SMALL) as agents:
        under_way = [call_async(agents[0], "worker1", pass_gate, gate) for _ in range(3)]
        with pytest.raises(RpcTimeout, match=r"waited for its turn.*3 calls.*max_calls_per_peer"):
            agents[0].call_sync("worker1", increment, (1,), {}, 0.1)
        late = call_async(agents[0], "worker1", increment, 1, timeout=0.1)
        with pytest.raises(RpcTimeout):
            bounded(late.wait)
        assert agents[0].call_sync("worker2", increment, (1,), {}, TIMEOUT_S) == 2  # others are not concerned
        gates[gate].set()
        assert results(under_way) == ["through"] * 3
        assert agents[0].call_sync("worker1", increment, (1,), {}, TIMEOUT_S) == 2
        assert eventually(lambda: is_quiet(agents), "everything being over")


def test_a_call_that_timed_out_keeps_its_place_until_it_is_answered(gate: str) -> None:
    """Otherwise calls with short timeouts would pile up at the callee."""
    with rpc.local_agents(2, SMALL) as agents:
        for _ in range(3):
            with pytest.raises(RpcTimeout, match="no answer"):
                agents[0].call_sync("worker1", pass_gate, (gate,), {}, 0.05)
        with pytest.raises(RpcTimeout, match="3 of them past their timeout"):
            agents[0].call_sync("worker1", increment, (1,), {}, 0.05)
        assert agents[1].get_debug_info()["agent.server_unfinished_messages"] == 3
        gates[gate].set()
        assert agents[0].call_sync("worker1", increment, (1,), {}, TIMEOUT_S) == 2
        assert eventually(lambda: is_quiet(agents), "everything being over")


def test_calls_larger_than_the_bound_go_one_after_the_other(gate: str) -> None:
    with rpc.local_agents(2, SMALL) as agents:
        large = torch.ones(4 << 20, dtype=torch.uint8)
        futures = []
        thread = threading.Thread(
            target=lambda: futures.extend(
                call_async(agents[0], "worker1", torch.neg, large) for _ in range(4)
            ),
            daemon=True,
        )
        thread.start()
        thread.join(TIMEOUT_S)
        assert [int(r.sum()) for r in results(futures)] == [255 * (4 << 20)] * 4
        held = call_async(agents[0], "worker1", pass_gate, gate)
        assert agents[0].call_sync("worker1", len, (large,), {}, TIMEOUT_S) == 4 << 20
        gates[gate].set()
        assert bounded(held.wait) == "through"


def test_who_waits_for_a_turn_is_told_when_the_peer_is_gone(gate: str) -> None:
    with rpc.local_agents(2, SMALL) as agents:
        under_way = [call_async(agents[0], "worker1", pass_gate, gate) for _ in range(3)]
        outcome: list[BaseException] = []

        def wait_in_vain() -> None:
            try:
                agents[0].call_sync("worker1", increment, (1,), {}, 0)
            except WorkerLost as exc:
                outcome.append(exc)

        thread = threading.Thread(target=wait_in_vain, daemon=True)
        thread.start()
        eventually(
            lambda: agents[0].get_debug_info()["agent.client_waiting_calls"] == 1,
            "a call waiting for its turn",
        )
        gates[gate].set()
        agents[1].close()
        thread.join(TIMEOUT_S)
        assert outcome or not thread.is_alive()
        for future in under_way:
            try:
                bounded(future.wait)
            except WorkerLost:
                pass


def test_a_ledger_never_counts_more_for_fewer_messages() -> None:
    """What the callee counts is some of what the caller counts: see [Note: back-pressure]."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ledger, messages = Ledger(), []
        for _ in range(40):
            size, depth = (int(torch.randint(n, (), generator=generator)) for n in (4 * LARGE_BYTES, 12))
            messages.append((depth, size))
            ledger.add(depth, size)
        while messages:
            before = ledger.nbytes - ledger.exempt
            at = int(torch.randint(len(messages), (), generator=generator))
            ledger.remove(*messages.pop(at))
            assert 0 <= ledger.nbytes - ledger.exempt <= before
        assert (ledger.calls, ledger.nbytes, ledger.exempt) == (0, 0, 0)


# -- fairness


def test_a_long_queue_of_one_peer_does_not_hold_up_another(gate: str) -> None:
    """All threads of the callee run calls of one peer, and many more of its calls are queued."""
    with rpc.local_agents(3, RpcOptions(num_worker_threads=3)) as agents:
        flood = [call_async(agents[1], "worker0", pass_gate, gate) for _ in range(200)]
        eventually(lambda: agents[0].tally.serving == 200, "all calls being there")
        for i in range(5):
            assert agents[2].call_sync("worker0", increment, (i,), {}, TIMEOUT_S) == i + 1
        assert not any(f.done() for f in flood)
        gates[gate].set()
        assert results(flood) == ["through"] * 200


def test_one_thread_is_one_thread(gate: str) -> None:
    with rpc.local_agents(3, RpcOptions(num_worker_threads=1)) as agents:
        first = call_async(agents[1], "worker0", pass_gate, gate)
        eventually(lambda: agents[0].tally.serving == 1, "it being there")
        second = call_async(agents[2], "worker0", increment, 1)
        with pytest.raises(RpcTimeout):
            agents[2].call_sync("worker0", increment, (1,), {}, 0.2)
        gates[gate].set()
        assert results([first, second]) == ["through", 2]


# -- what a peer does not read


def test_what_is_kept_for_a_peer_keeps_its_order_and_its_descriptors() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = Sender(ours, 1 << 30, max_backlog_bytes=32 << 20)
        full: list[bool] = []
        sender.on_full = full.append
        with pytest.raises(Stalled) as stalled:
            sender.send([bytes(100)] * 500 + [bytes(64 << 20)], time.monotonic() + 0.05)
        assert stalled.value.began
        assert full == [True]
        expected = 500 * 100 + (64 << 20)
        file = os.memfd_create("kept")
        os.write(file, b"hello")
        first, second = (frame_bytes(Kind.LOST, i, b"x" * 1000) for i in (1, 2))
        sender.send_soon([first], None, [file])
        os.close(file)  # the sender's own stays
        sender.ride((int(Kind.CALL), 7, 0, None, ([], None)))
        sender.send_soon([second], None)
        while expected:
            expected -= len(theirs.recv(min(expected, 1 << 20)))
            sender.flush_now()
        data, fds, _, _ = socket.recv_fds(theirs, 1 << 16, 4)
        sender.flush_now()
        theirs.setblocking(False)
        while True:
            try:
                data += theirs.recv(1 << 16)
            except BlockingIOError:
                break
        assert data.startswith(first)
        assert data.endswith(second)
        assert os.pread(fds[0], 5, 0) == b"hello"
        os.close(fds[0])
        assert full == [True, False]
        assert (sender.has_backlog, sender.backlog_bytes, sender.riders) == (False, 0, 0)
        whole = memoryview(data)
        reader = FrameReader(lambda view: _copy(view, whole), 1 << 20)
        assert [frame.kind for frame in reader.read()] == [Kind.LOST, Kind.BUNDLE, Kind.LOST]


def _copy(view: memoryview, data: memoryview) -> int:
    view[: len(data)] = data
    return len(data)


@pytest.mark.slow
def test_answers_for_a_worker_that_is_stopped_arrive_when_it_goes_on(workers: Callable[..., Group]) -> None:
    """They hold no thread of the callee's meanwhile, and none is lost."""
    group = workers(3, shared_memory_bytes=0, num_worker_threads=2, max_bytes_per_peer=64 << 20)
    pending = group[1].start(gather_answers, 30, 3 << 20)
    eventually(lambda: group[0].run(answers_begun) > 2, "some being answered")
    group[1].stop()
    for i in range(20):
        assert group[2].run(rpc.rpc_sync, "worker0", increment, args=(i,), timeout=10) == i + 1
    group[1].cont()
    assert pending.result() == 30 * (3 << 20)


begun = 0


def answers_begun() -> int:
    return begun


def make_answer(nbytes: int) -> bytes:
    global begun
    begun += 1
    return bytes(nbytes)


def gather_answers(count: int, nbytes: int) -> int:
    futures = [rpc.rpc_async("worker0", make_answer, args=(nbytes,), timeout=40) for _ in range(count)]
    return sum(len(future.wait()) for future in futures)


# -- no memory


def limit_memory() -> None:
    """A little more than there is now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (700 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def ones(numel: int) -> torch.Tensor:
    return torch.ones(numel, dtype=torch.uint8)


def send_large(to: str, how: str, nbytes: int) -> int:
    load: Any = bytes(nbytes) if how == "bytes" else ones(nbytes)
    if how == "remote":
        rref = rpc.remote(to, len, args=(load,), timeout=40)
        return int(rref.to_here(40))
    return int(rpc.rpc_sync(to, len, args=(load,), timeout=40))


def fetch_large(to: str, how: str, nbytes: int) -> int:
    return len(rpc.rpc_sync(to, bytes if how == "bytes" else ones, args=(nbytes,), timeout=40))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tensor", "bytes", "remote"])
def test_a_call_that_there_is_no_memory_for_is_an_error_to_its_caller(
    workers: Callable[..., Group], how: str
) -> None:
    group = workers(3, shared_memory_bytes=0)
    group[1].run(rpc.rpc_sync, "worker0", increment, args=(1,))
    group[1].run(limit_memory)
    with pytest.raises(PayloadError, match=r"'worker1' has no memory for a message of 1\d{9} bytes.*parts"):
        group[0].start(send_large, "worker1", how, 1 << 30).result(50)
    assert group[0].run(send_large, "worker1", how, 1 << 20) == 1 << 20
    assert group[1].run(rpc.rpc_sync, "worker0", increment, args=(1,), timeout=10) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tensor", "bytes"])
def test_so_is_an_answer(workers: Callable[..., Group], how: str) -> None:
    group = workers(2, shared_memory_bytes=0)
    group[1].run(rpc.rpc_sync, "worker0", increment, args=(1,))
    group[1].run(limit_memory)
    with pytest.raises(PayloadError, match="no memory"):
        group[1].start(fetch_large, "worker0", how, 1 << 30).result(50)
    assert group[1].run(fetch_large, "worker0", how, 1 << 20) == 1 << 20
    assert group[0].run(rpc.rpc_sync, "worker1", increment, args=(1,), timeout=10) == 2
