"""Workers that die, stop, or never come: every call ends, the others are told and go on, shutdown ends."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.workers import Group, Worker, eventually

from farstep import rpc
from farstep.errors import RpcTimeout, ShutdownTimeout, WorkerLost

pytestmark = pytest.mark.slow
Workers = Callable[..., Group]


def increment(x: int) -> int:
    return x + 1


def block_for_ever() -> None:
    threading.Event().wait()


# -- run in worker processes

state: dict[str, Any] = {}


def watch_losses() -> None:
    state["lost"] = []
    state["told"] = threading.Event()

    def note(info: rpc.WorkerInfo, reason: str) -> None:
        state["lost"].append(info.name)
        state["told"].set()

    rpc.on_worker_lost(note)


def losses_seen(timeout_s: float = 10.0) -> list[str]:
    assert state["told"].wait(timeout_s), "nobody told this worker of a loss"
    return list(state["lost"])


def losses_now() -> list[str]:
    return list(state["lost"])


def call_one(to: str, x: int) -> int:
    return rpc.rpc_sync(to, increment, args=(x,), timeout=10)  # type: ignore[no-any-return]


def start_blocked_calls(to: str, count: int) -> None:
    state["futures"] = [rpc.rpc_async(to, block_for_ever, timeout=60) for _ in range(count)]
    state["callbacks"] = []
    for future in state["futures"]:
        future.add_done_callback(state["callbacks"].append)


def outcomes_of_blocked_calls() -> list[str]:
    eventually(lambda: len(state["callbacks"]) == len(state["futures"]), "the end of every call")
    outcomes = []
    for future in state["futures"]:
        with pytest.raises(WorkerLost) as caught:
            future.wait()
        outcomes.append(caught.value.worker)
    return outcomes


def call_that_never_returns(to: str) -> tuple[str, str, float]:
    try:
        rpc.rpc_sync(to, block_for_ever, timeout=60)
    except WorkerLost as exc:
        return exc.worker, str(exc), time.monotonic()
    raise AssertionError("it returned")


def being_served() -> int:
    return rpc.api.current_agent().tally.serving  # type: ignore[no-any-return]


def members() -> list[str]:
    return [info.name for info in rpc.get_worker_infos()]


def shut_down(timeout: float = 0.0) -> None:
    rpc.shutdown(timeout=timeout)


def shut_down_in_vain(timeout: float) -> tuple[str, float]:
    started = time.monotonic()
    with pytest.raises(ShutdownTimeout) as caught:
        rpc.shutdown(timeout=timeout)
    assert not rpc.is_initialized()
    return str(caught.value), time.monotonic() - started


def blocked_on(worker: Worker, count: int) -> None:
    eventually(lambda: worker.run(being_served) >= count, "calls being served")


# -- a worker dies


def test_pending_calls_on_a_killed_worker_fail_with_its_name(workers: Workers) -> None:
    group = workers(3)
    group[0].run(start_blocked_calls, "worker2", 5)
    sync = [group[0].start(call_that_never_returns, "worker2") for _ in range(2)]
    sync.append(group[1].start(call_that_never_returns, "worker2"))
    blocked_on(group[2], 8)
    killed_at = time.monotonic()
    group[2].kill()
    for pending in sync:
        worker, message, noticed_at = pending.result()
        assert worker == "worker2"
        assert "worker2" in message
        assert noticed_at - killed_at < 1.0  # promised for the same host
    assert group[0].run(outcomes_of_blocked_calls) == ["worker2"] * 5
    assert group[0].run(call_one, "worker1", 1) == 2
    assert group[1].run(call_one, "worker0", 1) == 2


def test_calls_to_a_dead_worker_fail_at_once_and_it_is_no_member(workers: Workers) -> None:
    group = workers(3)
    group.run_all(watch_losses)
    group[1].kill()
    assert group[0].run(losses_seen) == ["worker1"]
    with pytest.raises(WorkerLost, match="worker1"):
        group[0].run(call_one, "worker1", 1)
    with pytest.raises(WorkerLost, match="worker1"):
        group[0].run(start_and_wait, "worker1")
    assert group[0].run(members) == ["worker0", "worker2"]


def start_and_wait(to: str) -> Any:
    return rpc.rpc_async(to, increment, args=(1,), timeout=10).wait()


@pytest.mark.parametrize("victim", [0, 3, 5])
def test_everybody_is_told_also_those_without_a_connection_to_it(workers: Workers, victim: int) -> None:
    group = workers(6)
    group.run_all(watch_losses)  # nobody has called anybody yet
    group[victim].kill()
    survivors = [w for w in group if w is not group[victim]]
    for worker in survivors:
        assert worker.run(losses_seen) == [f"worker{victim}"]
    for worker in survivors:
        assert worker.run(call_one, survivors[0].name, 1) == 2


def test_losses_one_after_the_other_are_all_told(workers: Workers) -> None:
    group = workers(5)
    group.run_all(watch_losses)
    for victim in (2, 3, 1):
        group[victim].kill()
    for rank in (0, 4):
        eventually(
            lambda rank=rank: sorted(group[rank].run(losses_seen)) == ["worker1", "worker2", "worker3"],
            "all losses",
        )
    assert group[0].run(call_one, "worker4", 1) == 2
    assert group[4].run(call_one, "worker0", 1) == 2


def test_a_worker_that_shuts_down_is_not_lost(workers: Workers) -> None:
    group = workers(3)
    group.run_all(watch_losses)
    group[0].run(call_one, "worker1", 1)
    group.finish(group.start_all(shut_down))
    assert group.run_all(losses_now) == [[], [], []]


# -- references of the dead


def make_value(numel: int = 10) -> torch.Tensor:
    return torch.ones(numel)


def hold_reference(owner: str) -> None:
    state["rref"] = rpc.remote(owner, make_value)
    state["rref"].to_here()


def share_reference(to: str) -> None:
    rpc.rpc_sync(to, keep_reference, args=(state["rref"],))


def keep_reference(rref: Any) -> None:
    state["rref"] = rref


def drop_reference() -> None:
    state.pop("rref", None)


def owned() -> int:
    return int(rpc.api.current_agent().rrefs.counts()["num_owner_rrefs"])


def reference_value() -> float:
    return float(state["rref"].to_here().sum())


def test_references_held_by_a_dead_worker_are_released(workers: Workers) -> None:
    group = workers(3)
    group[1].run(hold_reference, "worker0")
    group[1].run(share_reference, "worker2")
    assert group[0].run(owned) == 1
    group[1].kill()
    eventually(lambda: group[0].run(members) == ["worker0", "worker2"], "the loss being noticed")
    assert group[2].run(reference_value) == 10.0  # its fork lives on, though its parent is dead
    assert group[0].run(owned) == 1
    group[2].kill()
    eventually(lambda: group[0].run(owned) == 0, "the value being forgotten")


def test_a_reference_to_a_dead_owner_says_so(workers: Workers) -> None:
    group = workers(2)
    group[1].run(hold_reference, "worker0")
    group[0].kill()
    with pytest.raises(WorkerLost, match="worker0"):
        group[1].run(reference_value)
    group[1].run(shut_down, 10.0)


# -- shutdown


def test_shutdown_after_a_loss_does_not_wait_for_the_dead(workers: Workers) -> None:
    group = workers(4)
    group[1].kill()
    group.finish(group.start_all(shut_down), 15)


def test_a_worker_dies_while_the_others_wait_in_shutdown(workers: Workers) -> None:
    group = workers(4)
    pending = [group[rank].start(shut_down) for rank in (0, 1, 2)]
    eventually(lambda: group[0].run(in_shutdown), "the leader being in shutdown")
    assert not any(p.done for p in pending)
    group[3].kill()
    group.finish(pending, 15)


def in_shutdown() -> bool:
    return bool(rpc.api.current_agent().links.gatherings._led)


def test_the_leader_dies_while_the_others_wait_in_shutdown(workers: Workers) -> None:
    group = workers(4)
    pending = [group[rank].start(shut_down) for rank in (1, 2, 3)]
    eventually(lambda: group[0].run(in_shutdown), "the leader being told")
    group[0].kill()
    group.finish(pending, 15)


@pytest.mark.parametrize("absent", [0, 2])
def test_shutdown_ends_in_time_and_names_who_is_missing(workers: Workers, absent: int) -> None:
    group = workers(3)
    pending = [w.start(shut_down_in_vain, 1.0) for w in group if w is not group[absent]]
    for p in pending:
        message, seconds = p.result(15)
        assert f"worker{absent}" in message.split("Missing")[-1]
        assert seconds < 4.0


def test_shutdown_ends_in_time_when_one_is_stopped(workers: Workers) -> None:
    group = workers(3)
    group[0].stop()
    pending = [group[rank].start(shut_down_in_vain, 1.0) for rank in (1, 2)]
    for p in pending:
        message, seconds = p.result(20)
        assert "worker0" in message
        assert seconds < 5.0


def shut_down_somehow(timeout: float) -> tuple[str, float]:
    started = time.monotonic()
    message = ""
    try:
        rpc.shutdown(timeout=timeout)
    except ShutdownTimeout as exc:
        message = str(exc)
    assert not rpc.is_initialized()
    return message, time.monotonic() - started


def test_shutdown_ends_in_time_while_a_function_runs_on(workers: Workers) -> None:
    """The first to give up says why; the other may then find itself alone, with nothing under way."""
    group = workers(2)
    group[0].run(start_blocked_calls, "worker1", 1)
    blocked_on(group[1], 1)
    outcomes = group.finish([w.start(shut_down_somehow, 1.0) for w in group], 20)
    assert any("under way" in message or "Missing" in message for message, _ in outcomes)
    assert all(seconds < 8.0 for _, seconds in outcomes)


def test_shutdown_not_graceful_waits_for_nobody(workers: Workers) -> None:
    group = workers(3)
    group[0].run(start_blocked_calls, "worker1", 1)
    group[0].run(rpc.shutdown, graceful=False)
    with pytest.raises(WorkerLost, match="worker0"):
        group[1].run(call_one, "worker0", 1)
    assert group[1].run(call_one, "worker2", 1) == 2


# -- a peer that does not answer


def timed_call(to: str, timeout: float, numel: int = 0) -> str:
    try:
        rpc.rpc_sync(to, torch.neg, args=(torch.ones(numel),), timeout=timeout)
        return "done"
    except RpcTimeout as exc:
        return str(exc)


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "not yet dialled"])
def test_a_call_to_a_stopped_peer_ends_by_its_timeout(workers: Workers, connected: bool) -> None:
    group = workers(3)
    target = group[1 if connected else 2]
    if connected:
        group[0].run(call_one, target.name, 1)
    target.stop()
    assert "timeout" in group[0].start(timed_call, target.name, 0.3).result(10)
    assert group[0].run(call_one, group[2 if connected else 1].name, 1) == 2
    target.cont()
    assert group[0].run(call_one, target.name, 1) == 2


def test_large_calls_to_a_stopped_peer_end_by_their_timeout_and_later_calls_work(workers: Workers) -> None:
    """The socket fills up; a frame that was begun must not be torn apart."""
    group = workers(2, shared_memory_bytes=0)
    group[0].run(call_one, "worker1", 1)
    group[1].stop()
    for _ in range(4):
        assert "timeout" in group[0].start(timed_call, "worker1", 0.2, 3_000_000).result(20)
    group[1].cont()
    assert group[0].run(call_one, "worker1", 1) == 2
    assert group[0].run(timed_call, "worker1", 20.0, 3_000_000) == "done"


# -- at random moments


def call_like_mad(peers: list[str], seconds: float, seed: int) -> dict[str, int]:
    """Calls of every kind to everyone, until the time is up. Each must end, with a result or with WorkerLost."""
    random_ = random.Random(seed)
    ends = time.monotonic() + seconds
    counts = {"done": 0, "lost": 0}
    pending: list[Any] = []

    def settle(future: Any) -> None:
        try:
            future.wait()
            counts["done"] += 1
        except WorkerLost:
            counts["lost"] += 1

    while time.monotonic() < ends:
        to = random_.choice(peers)
        x: Any = torch.ones(random_.choice([1, 1000, 100_000]))
        try:
            kind = random_.randrange(4)
            if kind == 0:
                assert torch.equal(rpc.rpc_sync(to, torch.neg, args=(x,), timeout=20), -x)
                counts["done"] += 1
            elif kind == 1:
                pending.append(rpc.rpc_async(to, torch.neg, args=(x,), timeout=20))
            elif kind == 2:
                rref = rpc.remote(to, torch.neg, args=(x,), timeout=20)
                assert torch.equal(rref.to_here(20), -x)
                counts["done"] += 1
            else:
                rpc.rpc_sync(to, call_through, args=(random_.choice(peers), 1), timeout=20)
                counts["done"] += 1
        except WorkerLost:
            counts["lost"] += 1
        if len(pending) > 50:
            settle(pending.pop(0))
    for future in pending:
        settle(future)
    return counts


def call_through(to: str, x: int) -> int:
    return rpc.rpc_sync(to, increment, args=(x,), timeout=20)  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(4))
def test_kill_at_a_random_moment_under_load(workers: Workers, seed: int) -> None:
    random_ = random.Random(seed)
    group = workers(4)
    group.run_all(watch_losses)
    names = [w.name for w in group]
    victim = group[random_.randrange(4)]
    load = {
        w: w.start(call_like_mad, [n for n in names if n != w.name], 1.0, seed * 10 + i)
        for i, w in enumerate(group)
    }
    time.sleep(random_.uniform(0.05, 0.7))  # the random moment
    victim.kill()
    survivors = [w for w in group if w is not victim]
    for worker in survivors:
        counts = load[worker].result(40)
        assert counts["done"] > 0
        assert worker.run(losses_seen) == [victim.name]
    for worker in survivors:
        for other in survivors:
            assert worker.run(call_one, other.name, 1) == 2
    for worker in survivors:
        worker.run(drop_reference)
    eventually(lambda: [w.run(owned) for w in survivors] == [0, 0, 0], "every value being forgotten")
    group.finish([w.start(shut_down) for w in survivors], 15)
