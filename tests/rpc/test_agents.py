"""Many agents, many calls, calls inside calls: no deadlock, no thread for each, no call held up by another."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.workers import bounded, eventually, multiprocess, results, speaking_for

from farstep import rpc
from farstep.errors import NotInitialized, RpcTimeout, UnknownWorker
from farstep.rpc import Agent, RpcOptions, functions

TIMEOUT_S = 30.0


@pytest.fixture
def pair() -> Iterator[list[Agent]]:
    with rpc.local_agents(2) as agents:
        yield agents


def call(agent: Agent, to: Any, function: Any, *args: Any, timeout: float = TIMEOUT_S) -> Any:
    return agent.call_sync(to, function, args, {}, timeout)


def call_async(
    agent: Agent, to: Any, function: Any, *args: Any, timeout: float = TIMEOUT_S
) -> torch.futures.Future[Any]:
    return agent.call_async(to, function, args, {}, timeout)


def threads_of(agents: list[Agent]) -> int:
    names = tuple(f"farstep-{a.info.name}" for a in agents)
    return sum(t.name.startswith(names) for t in threading.enumerate())


def increment(x: int) -> int:
    return x + 1


def where_am_i() -> str:
    return rpc.get_worker_info().name


class Gate:
    """Lets a test hold functions that run on workers of this process."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self._lock = threading.Lock()
        self.inside = 0
        self.name = ""

    def enter(self) -> None:
        with self._lock:
            self.inside += 1
        assert self.open.wait(TIMEOUT_S)


gates: dict[str, Gate] = {}


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Iterator[Gate]:
    name = request.node.name
    gates[name] = gate = Gate()
    gate.name = name
    yield gate
    gate.open.set()
    del gates[name]


def pass_gate(name: str) -> str:
    gates[name].enter()
    return "through"


# -- many agents


@pytest.mark.slow
def test_64_agents_in_one_process_call_each_other() -> None:
    with rpc.local_agents(64) as agents:
        assert [len(a.get_worker_infos()) for a in agents] == [64] * 64
        for step in (1, 7, 32):
            futures = [call_async(a, (i + step) % 64, where_am_i) for i, a in enumerate(agents)]
            assert results(futures) == [f"worker{(i + step) % 64}" for i in range(64)]
        everyone = [call_async(agents[0], a.info.name, increment, i) for i, a in enumerate(agents)]
        assert bounded(torch.futures.wait_all, everyone) == list(range(1, 65))
        all_to_one = [call_async(a, "worker5", increment, i) for i, a in enumerate(agents)]
        assert bounded(torch.futures.wait_all, all_to_one) == list(range(1, 65))


def test_a_function_finds_the_agent_that_runs_it() -> None:
    with rpc.local_agents(3, names=["ann", "bob", "cid"]) as agents:
        assert call(agents[0], "bob", where_am_i) == "bob"
        assert call(agents[1], 2, where_am_i) == "cid"
        assert call(agents[2], agents[0].info, where_am_i) == "ann"
        assert call(agents[2], agents[2].info, where_am_i) == "cid"


def test_agents_outside_of_their_functions_are_not_this_process_own(pair: list[Agent]) -> None:
    assert not rpc.is_initialized()
    with pytest.raises(NotInitialized, match="init_rpc"):
        rpc.rpc_sync("worker0", increment, args=(1,))


@multiprocess(4)
def test_every_process_calls_every_other(rank: int) -> None:
    names = [info.name for info in rpc.get_worker_infos()]
    assert names == [f"worker{i}" for i in range(4)]
    for to in names:
        assert rpc.rpc_sync(to, where_am_i) == to
    futures = [
        rpc.rpc_async(to, torch.add, args=(torch.full((50_000,), float(rank)), 1))
        for to in names
        for _ in range(10)
    ]
    assert all(torch.equal(f.wait(), torch.full((50_000,), rank + 1.0)) for f in futures)
    rpc.shutdown()


# -- calls inside calls


def ping_pong(depth: int) -> list[str]:
    name = rpc.get_worker_info().name
    peer = "worker1" if name == "worker0" else "worker0"
    return [name] if depth == 0 else [name, *rpc.rpc_sync(peer, ping_pong, args=(depth - 1,))]


@pytest.mark.parametrize("threads", [1, 16])
def test_calls_nested_ten_deep_between_two_workers(threads: int) -> None:
    with rpc.local_agents(2, RpcOptions(num_worker_threads=threads)) as agents:
        assert call(agents[0], "worker1", ping_pong, 10) == ["worker1", "worker0"] * 5 + ["worker1"]
        futures = [call_async(agents[i % 2], f"worker{(i + 1) % 2}", ping_pong, 10) for i in range(40)]
        assert all(len(r) == 11 for r in results(futures))


@multiprocess(2, num_worker_threads=2)
def test_calls_nested_ten_deep_between_two_processes_that_both_begin(rank: int) -> None:
    futures = [rpc.rpc_async(f"worker{1 - rank}", ping_pong, args=(10,)) for _ in range(20)]
    assert all(len(r) == 11 for r in results(futures))
    rpc.shutdown()


def call_myself(depth: int) -> int:
    return 0 if depth == 0 else 1 + rpc.rpc_sync(rpc.get_worker_info(), call_myself, args=(depth - 1,))


def test_a_worker_that_calls_itself(pair: list[Agent]) -> None:
    assert call(pair[0], "worker0", increment, 1) == 2
    assert call(pair[0], "worker0", call_myself, 10) == 10
    got = call(pair[0], "worker0", torch.neg, torch.ones(2))
    assert torch.equal(got, -torch.ones(2))


def fan_out(depth: int) -> int:
    """A tree of calls: two calls in each, to both workers."""
    if depth == 0:
        return 1
    futures = [rpc.rpc_async(to, fan_out, args=(depth - 1,)) for to in ("worker0", "worker1")]
    return sum(f.wait() for f in futures)


def test_a_tree_of_calls_with_few_threads() -> None:
    with rpc.local_agents(2, RpcOptions(num_worker_threads=2)) as agents:
        assert call(agents[0], "worker1", fan_out, 8) == 256


# -- many calls


@pytest.mark.slow
def test_ten_thousand_calls_in_flight(pair: list[Agent], gate: Gate) -> None:
    """All are under way at once: the callee's functions wait until the last one has been made."""
    first = [call_async(pair[0], "worker1", pass_gate, gate.name) for _ in range(16)]
    eventually(lambda: gate.inside == 16, "16 functions running")
    rest = [call_async(pair[0], "worker1", increment, i) for i in range(10_000)]
    assert pair[0].pending_calls == 10_016
    assert threads_of(pair) < 100
    gate.open.set()
    assert results(rest) == list(range(1, 10_001))
    assert results(first) == ["through"] * 16
    assert threads_of(pair) < 100
    assert pair[0].pending_calls == 0


def test_threads_stay_few_while_many_calls_block(pair: list[Agent], gate: Gate) -> None:
    futures = [call_async(pair[0], "worker1", pass_gate, gate.name) for _ in range(500)]
    eventually(lambda: gate.inside == 16, "as many functions running as num_worker_threads says")
    assert threads_of(pair) < 60
    assert gate.inside == 16
    gate.open.set()
    assert results(futures) == ["through"] * 500


def test_a_function_that_blocks_does_not_hold_up_others(pair: list[Agent], gate: Gate) -> None:
    blocked = call_async(pair[0], "worker1", pass_gate, gate.name)
    eventually(lambda: gate.inside == 1, "the function running")
    assert call(pair[0], "worker1", increment, 1) == 2
    assert call(pair[1], "worker0", increment, 1) == 2
    assert results([call_async(pair[0], "worker1", increment, i) for i in range(100)]) == list(range(1, 101))
    assert not blocked.done()
    gate.open.set()
    assert bounded(blocked.wait) == "through"


def test_calls_sent_in_one_burst_with_one_that_blocks(pair: list[Agent], gate: Gate) -> None:
    futures = []
    blocked = []
    for i in range(200):
        if i % 40 == 5:
            blocked.append(call_async(pair[0], "worker1", pass_gate, gate.name))
        futures.append(call_async(pair[0], "worker1", increment, i))
    assert results(futures) == list(range(1, 201))
    assert not any(f.done() for f in blocked)
    gate.open.set()
    assert results(blocked) == ["through"] * 5


def test_many_threads_call_at_once(pair: list[Agent]) -> None:
    results: list[Any] = []

    def work(n: int) -> None:
        mine = pair[n % 2]
        results.append([call(mine, f"worker{1 - n % 2}", increment, i) for i in range(50)])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert results == [list(range(1, 51))] * 16


# -- futures


def test_callbacks_that_call(pair: list[Agent]) -> None:
    """Callbacks may block on further calls, from one worker to the other and back."""

    def again(done: torch.futures.Future[int]) -> int:
        return int(call(pair[0], "worker1", increment, done.value()))

    chains = [call_async(pair[0], "worker1", increment, i).then(again).then(again) for i in range(100)]
    assert results(chains) == [i + 3 for i in range(100)]


def test_callbacks_run_when_nobody_waits(pair: list[Agent]) -> None:
    ran = threading.Event()
    call_async(pair[0], "worker1", increment, 1).add_done_callback(lambda f: ran.set())
    assert ran.wait(TIMEOUT_S)


def test_a_callback_that_raises_harms_nobody(pair: list[Agent]) -> None:
    def bad(done: torch.futures.Future[int]) -> int:
        raise KeyError("in a callback")

    chained = call_async(pair[0], "worker1", increment, 1).then(bad)
    with pytest.raises(Exception, match="in a callback"):
        bounded(chained.wait)
    assert call(pair[0], "worker1", increment, 1) == 2


def test_torch_futures_work_together(pair: list[Agent]) -> None:
    futures = [call_async(pair[0], "worker1", increment, i) for i in range(5)]
    assert [f.value() for f in torch.futures.collect_all(futures).wait()] == [1, 2, 3, 4, 5]
    assert torch.futures.wait_all([call_async(pair[0], "worker1", increment, 1)]) == [2]


def test_an_error_reaches_every_waiter(pair: list[Agent]) -> None:
    future = call_async(pair[0], "worker1", torch.add, torch.zeros(2), torch.zeros(3))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size"):
            bounded(future.wait)
    with pytest.raises(RuntimeError, match="size"):
        torch.futures.wait_all([future])


@functions.async_execution
def on_the_other(x: int) -> torch.futures.Future[int]:
    me = rpc.get_worker_info().name
    return rpc.rpc_async("worker0" if me == "worker1" else "worker1", increment, args=(x,)).then(
        lambda f: f.value() + 100
    )


@functions.async_execution
def no_future() -> int:
    return 3


def test_async_execution(pair: list[Agent]) -> None:
    futures = [call_async(pair[0], "worker1", on_the_other, i) for i in range(200)]
    assert results(futures) == [i + 101 for i in range(200)]
    assert call(pair[0], "worker1", on_the_other, 1) == 102
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future"):
        call(pair[0], "worker1", no_future)


parked: list[torch.futures.Future[int]] = []


@functions.async_execution
def park() -> torch.futures.Future[int]:
    parked.append(torch.futures.Future())
    return parked[-1]


def test_async_execution_holds_no_thread(pair: list[Agent]) -> None:
    try:
        futures = [call_async(pair[0], "worker1", park) for _ in range(300)]
        eventually(lambda: len(parked) == 300, "all functions having run")
        assert threads_of(pair) < 60
        for i, future in enumerate(parked):
            future.set_result(i)
        assert sorted(results(futures)) == list(range(300))
    finally:
        parked.clear()


# -- time


def test_a_call_times_out(pair: list[Agent], gate: Gate) -> None:
    name = gate.name
    with pytest.raises(RpcTimeout, match=r"pass_gate.*'worker0' to 'worker1'"):
        call(pair[0], "worker1", pass_gate, name, timeout=0.05)
    future = call_async(pair[0], "worker1", pass_gate, name, timeout=0.05)
    with pytest.raises(RpcTimeout, match="pass_gate"):
        bounded(future.wait)
    with pytest.raises(TimeoutError):
        call(pair[0], "worker0", pass_gate, name, timeout=0.05)
    assert pair[0].pending_calls == 0
    gate.open.set()
    assert call(pair[0], "worker1", increment, 1) == 2


def test_calls_time_out_each_in_its_turn(pair: list[Agent], gate: Gate) -> None:
    order: list[float] = []
    timeouts = [0.3, 0.05, 0.2, 0.1]
    for timeout in timeouts:
        future = call_async(pair[0], "worker1", pass_gate, gate.name, timeout=timeout)
        future.add_done_callback(lambda f, timeout=timeout: order.append(timeout))  # type: ignore[misc]
    eventually(lambda: len(order) == 4, "all timeouts")
    assert order == sorted(timeouts)


def test_the_default_timeout_and_none() -> None:
    gates["default"] = gate = Gate()
    with rpc.local_agents(2, RpcOptions(rpc_timeout=0.05, init_timeout_s=20)) as agents:
        with pytest.raises(RpcTimeout):
            call(agents[0], "worker1", pass_gate, "default", timeout=-1)
        unbounded = call_async(agents[0], "worker1", pass_gate, "default", timeout=0)
        limited = call_async(agents[0], "worker1", pass_gate, "default", timeout=-1)
        with pytest.raises(RpcTimeout):
            bounded(limited.wait)
        assert not unbounded.done()
        gate.open.set()
        assert bounded(unbounded.wait) == "through"
        assert call(agents[0], "worker1", pass_gate, "default", timeout=0) == "through"
    del gates["default"]


def test_a_late_answer_is_dropped_quietly(pair: list[Agent], gate: Gate) -> None:
    for _ in range(5):
        with pytest.raises(RpcTimeout):
            call(pair[0], "worker1", pass_gate, gate.name, timeout=0.02)
    gate.open.set()
    for i in range(20):
        assert call(pair[0], "worker1", increment, i) == i + 1


def test_a_timeout_is_kept_while_other_calls_come_and_go(pair: list[Agent], gate: Gate) -> None:
    """Another thread may be reading the connection for its own reply."""
    outcome: list[BaseException] = []

    def wait_in_vain() -> None:
        try:
            call(pair[0], "worker1", pass_gate, gate.name, timeout=0.2)
        except RpcTimeout as exc:
            outcome.append(exc)

    thread = threading.Thread(target=wait_in_vain)
    thread.start()
    deadline = time.monotonic() + TIMEOUT_S
    while thread.is_alive() and time.monotonic() < deadline:
        assert call(pair[0], "worker1", increment, 1) == 2
    assert len(outcome) == 1


# -- mistakes


def test_an_unknown_worker_is_named_with_those_that_there_are(pair: list[Agent]) -> None:
    for target in ("worker7", 7, -1, rpc.WorkerInfo("worker1", 0)):
        with pytest.raises(UnknownWorker, match="worker0, worker1"):
            call(pair[0], target, increment, 1)
        with pytest.raises(ValueError, match="worker"):
            call_async(pair[0], target, increment, 1)
    assert call(pair[0], "worker1", increment, 1) == 2


@multiprocess(2)
def test_mistakes_of_the_module_api(rank: int) -> None:
    peer = f"worker{1 - rank}"
    with pytest.raises(UnknownWorker):
        rpc.rpc_sync("nobody", increment, args=(1,))
    with pytest.raises(UnknownWorker):
        rpc.rpc_sync(None, increment, args=(1,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="callable"):
        rpc.rpc_sync(peer, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        rpc.set_rpc_timeout(-2)
    rpc.set_rpc_timeout(12.5)
    assert rpc.get_rpc_timeout() == 12.5
    with pytest.raises(rpc.RpcError, match="already"):
        rpc.init_rpc("again", rank=rank, world_size=2)
    rpc.barrier()
    rpc.shutdown()
    with pytest.raises(NotInitialized, match="init"):
        rpc.rpc_sync(peer, increment, args=(1,))


def test_a_closed_agent_says_so_and_its_pending_calls_fail(gate: Gate) -> None:
    with rpc.local_agents(2) as agents:
        future = call_async(agents[0], "worker1", pass_gate, gate.name)
        eventually(lambda: gate.inside == 1, "the function running")
        agents[0].close()
        with pytest.raises(rpc.RpcError):
            bounded(future.wait)
        gate.open.set()
        with pytest.raises(rpc.RpcError):
            call(agents[0], "worker1", increment, 1)
        agents[0].close()  # once more does nothing


def test_a_peer_that_left_is_lost_to_calls_and_not_waited_for() -> None:
    with rpc.local_agents(3) as agents:
        assert call(agents[0], "worker1", increment, 1) == 2
        agents[1].close()
        with pytest.raises(rpc.WorkerLost, match="worker1"):
            call(agents[0], "worker1", increment, 1)
        with pytest.raises(rpc.WorkerLost, match="worker1"):
            bounded(call_async(agents[2], "worker1", increment, 1).wait)
        assert call(agents[0], "worker2", increment, 1) == 2


@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
@pytest.mark.parametrize("args", [torch.tensor([3.0]), torch.ones(2), "no"])
def test_args_that_are_one_argument_are_refused(pair: list[Agent], call: Any, args: Any) -> None:
    """A tensor or a string would be taken apart, element by element."""
    with speaking_for(pair[0]), pytest.raises(TypeError, match=r"args=\(x,\)"):
        call("worker1", torch.neg, args=args)
