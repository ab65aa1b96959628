"""Small messages that travel together: in order, each with its own outcome, and none waits for another's callback."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.workers import Group, bounded, eventually, multiprocess, results

from farstep import rpc
from farstep.errors import WorkerLost
from farstep.rpc import Agent, RpcOptions
from farstep.rpc.bundle import MAX_RIDERS, unbundle
from farstep.rpc.sender import Sender, Stalled
from farstep.rpc.wire import FrameReader, Kind, frame_bytes

TIMEOUT_S = 60.0  # longer than a test's patience: a call that ends by it is a failure
MANY = 500
Futures = list[torch.futures.Future[Any]]


def increment(x: int) -> int:
    return x + 1


def refuse_odd(x: int) -> int:
    if x % 2:
        raise KeyError(f"odd: {x}")
    return x


def length(*texts: str, **more: str) -> int:
    return sum(len(t) for t in (*texts, *more.values()))


gates: dict[str, threading.Event] = {}


def pass_gate(name: str) -> None:
    assert gates[name].wait(TIMEOUT_S)


class Burst:
    """Calls that are all answered together, once `answer` is called: until then the callee's only threads are held."""

    def __init__(self, agents: list[Agent], name: str, threads: int) -> None:
        self.agent = agents[0]
        self.gate = gates[name] = threading.Event()
        self.held = [self.call(pass_gate, name) for _ in range(threads)]
        eventually(lambda: agents[1].tally.serving == threads, "the callee being held")
        self.futures: Futures = [self.call(increment, i) for i in range(MANY)]

    def call(self, function: Callable[..., Any], *args: Any) -> torch.futures.Future[Any]:
        return self.agent.call_async("worker1", function, args, {}, TIMEOUT_S)

    def call_sync(self, x: int) -> int:
        return self.agent.call_sync("worker1", increment, (x,), {}, TIMEOUT_S)  # type: ignore[no-any-return]

    def answer(self) -> None:
        self.gate.set()


@pytest.fixture
def pair() -> Iterator[list[Agent]]:
    with rpc.local_agents(2) as agents:
        yield agents


@pytest.fixture
def burst(request: pytest.FixtureRequest) -> Iterator[Burst]:
    with rpc.local_agents(2, RpcOptions(num_worker_threads=3)) as agents:
        burst = Burst(agents, request.node.name, threads=3)
        yield burst
        burst.answer()


EXPECTED = [i + 1 for i in range(MANY)]


# -- every way to wait


def by_wait(futures: Futures) -> list[Any]:
    return [f.wait() for f in futures]


def by_wait_from_the_end(futures: Futures) -> list[Any]:
    return [f.wait() for f in reversed(futures)][::-1]


def by_wait_all(futures: Futures) -> list[Any]:
    return torch.futures.wait_all(futures)  # type: ignore[no-any-return]


def by_collect_all(futures: Futures) -> list[Any]:
    return [f.value() for f in torch.futures.collect_all(futures).wait()]


def by_looking(futures: Futures) -> list[Any]:
    eventually(lambda: all(f.done() for f in futures), "every future being done")
    return [f.value() for f in futures]


def by_callbacks(futures: Futures) -> list[Any]:
    return [f.wait() for f in [f.then(lambda done: done.value()) for f in futures]]


def by_threads(futures: Futures) -> list[Any]:
    outcomes: list[list[Any]] = [[] for _ in range(8)]
    threads = [
        threading.Thread(target=lambda i=i: outcomes[i].extend(by_wait(futures)), daemon=True)
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(o == outcomes[0] for o in outcomes)
    return outcomes[0]


WAYS = [by_wait, by_wait_from_the_end, by_wait_all, by_collect_all, by_looking, by_callbacks, by_threads]
ways = pytest.mark.parametrize("wait", WAYS, ids=lambda f: f.__name__)


@ways
def test_many_calls_and_one_way_to_wait(pair: list[Agent], wait: Callable[[Futures], list[Any]]) -> None:
    for _ in range(3):
        futures: Futures = [
            pair[0].call_async("worker1", increment, (i,), {}, TIMEOUT_S) for i in range(MANY)
        ]
        assert bounded(wait, futures) == EXPECTED
    assert eventually(lambda: all(a.tally.is_idle for a in pair), "every call being counted")


@ways
def test_replies_that_come_together_and_one_way_to_wait(
    burst: Burst, wait: Callable[[Futures], list[Any]]
) -> None:
    burst.answer()
    assert bounded(wait, burst.futures) == EXPECTED


@multiprocess(2)
def test_many_calls_both_ways_between_processes(rank: int) -> None:
    other = f"worker{1 - rank}"
    for wait in WAYS:
        assert wait([rpc.rpc_async(other, increment, args=(i,)) for i in range(MANY)]) == EXPECTED


def calls_inside(depth: int) -> int:
    me = rpc.get_worker_info().name
    other = "worker0" if me == "worker1" else "worker1"
    if depth == 0:
        return 1
    return sum(
        torch.futures.wait_all([rpc.rpc_async(other, calls_inside, args=(depth - 1,)) for _ in range(20)])
    )


def test_many_calls_inside_of_calls_with_few_threads() -> None:
    with rpc.local_agents(2, RpcOptions(num_worker_threads=2)) as agents:
        assert bounded(agents[0].call_sync, "worker1", calls_inside, (3,), {}, TIMEOUT_S) == 20**3


# -- callbacks that cannot be seen: those of torch.futures.collect_all


def waits_for_the_last(burst: Burst) -> Any:
    return burst.futures[-1].wait()


def waits_for_the_last_in_torch(burst: Burst) -> Any:
    return torch.futures.wait_all([burst.futures[-1]])[0]


def calls(burst: Burst) -> Any:
    return burst.call_sync(MANY - 1)


def calls_asynchronously(burst: Burst) -> Any:
    return burst.call(increment, MANY - 1).wait()


@ways
@pytest.mark.parametrize(
    "callback",
    [waits_for_the_last, waits_for_the_last_in_torch, calls, calls_asynchronously],
    ids=lambda f: f.__name__,
)
def test_a_callback_that_waits(
    burst: Burst, callback: Callable[[Burst], Any], wait: Callable[[Futures], list[Any]]
) -> None:
    chained = [
        torch.futures.collect_all([burst.futures[i]]).then(lambda _: callback(burst)) for i in (0, MANY // 2)
    ]
    burst.answer()
    assert bounded(wait, burst.futures) == EXPECTED
    assert bounded(by_wait_all, chained) == [MANY, MANY]


def test_a_waiter_does_not_run_the_callbacks_of_other_futures(burst: Burst) -> None:
    """It may hold a lock that they need."""
    lock = threading.Lock()

    def needs_the_lock(_: Any) -> int:
        with lock:
            return 1

    chained = [torch.futures.collect_all([f]).then(needs_the_lock) for f in burst.futures[1:]]

    def hold_the_lock_and_wait() -> int:
        with lock:
            burst.answer()
            return burst.futures[0].wait()  # type: ignore[no-any-return]

    assert bounded(hold_the_lock_and_wait) == 1
    assert bounded(by_wait_all, chained) == [1] * (MANY - 1)


def test_a_call_returns_although_a_reply_that_came_with_its_own_has_a_callback_that_blocks(
    burst: Burst,
) -> None:
    release = threading.Event()
    chained = torch.futures.collect_all(burst.futures[-1:]).then(lambda _: release.wait(TIMEOUT_S))
    threading.Timer(0.0, burst.answer).start()
    assert bounded(burst.call_sync, 1) == 2
    assert bounded(burst.futures[0].wait) == 1
    release.set()
    assert bounded(chained.wait) is True


# -- each message for itself


def test_errors_among_results(pair: list[Agent]) -> None:
    futures = [pair[0].call_async("worker1", refuse_odd, (i,), {}, TIMEOUT_S) for i in range(MANY)]
    for i, future in enumerate(futures):
        if i % 2:
            with pytest.raises(KeyError, match=f"odd: {i}") as caught:
                bounded(future.wait)
            assert caught.value.remote_worker == "worker1"  # type: ignore[attr-defined]
            assert "refuse_odd" in caught.value.remote_traceback  # type: ignore[attr-defined]
        else:
            assert bounded(future.wait) == i


def test_messages_of_all_sizes(pair: list[Agent]) -> None:
    texts = ["", "a", "ä" * 50, "x" * 4000, "x" * 5000, "\N{SNOWMAN}" * 1000, "x" * 100_000]
    futures = [
        pair[0].call_async("worker1", length, (texts[i % 7],), {"more": texts[(i // 7) % 7]}, TIMEOUT_S)
        for i in range(MANY)
    ]
    assert results(futures) == [len(texts[i % 7]) + len(texts[(i // 7) % 7]) for i in range(MANY)]


@pytest.mark.parametrize("limit", [400, 1000, 5000])
def test_a_bundle_is_never_over_the_limit(limit: int) -> None:
    """A peer would drop this worker for it."""
    with rpc.local_agents(2, RpcOptions(max_frame_bytes=limit)) as agents:
        futures = [
            agents[0].call_async("worker1", length, ("x" * (i % 200),), {}, TIMEOUT_S) for i in range(MANY)
        ]
        assert results(futures) == [i % 200 for i in range(MANY)]


def test_other_messages_do_not_overtake_riders(pair: list[Agent]) -> None:
    order: list[int] = []
    seen[pair[1].info.name] = order
    futures = []
    for i in range(300):
        args = (i, torch.zeros(3)) if i % 5 == 0 else (i,)
        futures.append(pair[0].call_async("worker1", note, args, {}, TIMEOUT_S))
    results(futures)
    assert sorted(order) == list(range(300))


seen: dict[str, list[int]] = {}


def note(i: int, *more: Any) -> None:
    seen[rpc.get_worker_info().name].append(i)


def test_riders_that_a_peer_does_not_read_keep_their_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = Sender(ours, 1 << 20)
        filler = frame_bytes(Kind.LOST, 0, b"x" * 60_000)
        with contextlib.suppress(Stalled):
            while True:
                sender.send([filler], time.monotonic())
        for i in range(3 * MAX_RIDERS):
            assert sender.ride((int(Kind.CALL), i, 1, ("m", "f"), ([], None))) == i + 1
            with pytest.raises(Stalled):
                sender.flush(time.monotonic())
        assert sender.riders == 3 * MAX_RIDERS
        theirs.setblocking(False)

        def recv_into(view: memoryview) -> int | None:
            try:
                return theirs.recv_into(view)
            except BlockingIOError:
                return None

        reader = FrameReader(recv_into, 1 << 20)
        frames = []
        while sender.riders or not frames or frames[-1].kind != Kind.BUNDLE:
            frames += reader.read()
            with contextlib.suppress(Stalled):
                sender.flush(time.monotonic())
        while more := reader.read():
            frames += more
        bundles = [f for f in frames if f.kind == Kind.BUNDLE]
        assert frames[-len(bundles) :] == bundles  # they came last
        assert [rider[1] for f in bundles for rider in unbundle(f, True)] == list(range(3 * MAX_RIDERS))


# -- a worker dies


def received() -> int:
    return rpc.api.current_agent().tally.received


def call_until_lost(to: str) -> tuple[int, int]:
    """Bursts of calls until the callee is gone. How many ended well, and how many did not."""
    done = lost = 0
    while not lost:
        for future in [rpc.rpc_async(to, increment, args=(i,), timeout=TIMEOUT_S) for i in range(MANY)]:
            try:
                future.wait()
                done += 1
            except WorkerLost:
                lost += 1
    return done, lost


def call_all_until_lost(to: str) -> bool:
    """The same, with torch's own way to wait."""
    while True:
        try:
            torch.futures.wait_all(
                [rpc.rpc_async(to, increment, args=(i,), timeout=TIMEOUT_S) for i in range(MANY)]
            )
        except WorkerLost:
            return True


def test_a_worker_is_killed_while_bundles_are_under_way(workers: Callable[..., Group]) -> None:
    group = workers(3)
    counting = [group[0].start(call_until_lost, "worker2") for _ in range(2)]
    counting += [group[1].start(call_until_lost, "worker2")]
    waiting = group[1].start(call_all_until_lost, "worker2")
    eventually(lambda: group[2].run(received) > 4 * MANY, "calls being under way")
    group[2].kill()
    for pending in counting:
        done, lost = pending.result()
        assert lost > 0
        assert (done + lost) % MANY == 0
    assert waiting.result()


def test_an_agent_that_closes_leaves_no_future_behind() -> None:
    for _ in range(5):
        with rpc.local_agents(2) as agents:
            futures = [agents[0].call_async("worker1", increment, (i,), {}, TIMEOUT_S) for i in range(MANY)]
        for i, future in enumerate(futures):
            try:
                assert bounded(future.wait) == i + 1
            except WorkerLost:
                pass
