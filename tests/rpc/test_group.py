"""How workers meet, gather, leave, and come again."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.workers import Group, Worker, eventually, init_rpc, multiprocess

from farstep import rpc
from farstep.errors import DuplicateName, InitTimeout, RpcError, RpcTimeout, WorkerLost
from farstep.rpc import Agent, RpcOptions
from farstep.rpc.gather import all_gather
from farstep.rpc.group import join_group, leave_group

pytestmark = pytest.mark.slow
Workers = Callable[..., Group]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def increment(x: int) -> int:
    return x + 1


def call_one(to: Any, x: int = 1) -> Any:
    return rpc.rpc_sync(to, increment, args=(x,), timeout=10)


def members() -> list[str]:
    return [info.name for info in rpc.get_worker_infos()]


def leave() -> None:
    rpc.shutdown(graceful=False)


def in_parallel(*functions: Callable[[], Any]) -> list[Any]:
    """Run them at once; what each returned or raised."""
    outcomes: list[Any] = [None] * len(functions)

    def run(i: int) -> None:
        try:
            outcomes[i] = functions[i]()
        except Exception as exc:
            outcomes[i] = exc

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "it does not return"
    return outcomes


# -- init methods


@pytest.mark.parametrize("method", ["file", "tcp", "env"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["known size", "dynamic"])
def test_every_init_method(start_workers: Workers, tmp_path: Path, method: str, dynamic: bool) -> None:
    port = free_port()
    url = {"file": f"file://{tmp_path}/store", "tcp": f"tcp://127.0.0.1:{port}", "env": "env://"}[method]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    group = start_workers(3, env=env)
    group.finish([w.start(init_rpc, w.name, i, None if dynamic else 3, url) for i, w in enumerate(group)])
    for worker in group:
        eventually(
            lambda worker=worker: worker.run(members) == ["worker0", "worker1", "worker2"], "all being known"
        )
        for other in group:
            assert worker.run(call_one, other.name) == 2
    group.finish(group.start_all(rpc.shutdown))


def init_by_environment(name: str) -> int:
    rpc.init_rpc(name, world_size=2)
    return rpc.get_worker_info().id


def test_rank_and_place_from_the_environment(start_workers: Workers) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    workers = [start_workers(1, env={**env, "RANK": str(rank)})[0] for rank in (1, 0)]
    assert Group.finish([w.start(init_by_environment, f"by-env-{i}") for i, w in enumerate(workers)]) == [
        1,
        0,
    ]
    assert workers[0].run(call_one, 0) == 2


def test_wrong_arguments_are_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK"):
        rpc.init_rpc("a", world_size=2)
    with pytest.raises(ValueError, match="rank"):
        rpc.init_rpc("a", rank=2, world_size=2)
    with pytest.raises(ValueError, match="init_method"):
        rpc.init_rpc("a", rank=0, rpc_backend_options=RpcOptions(init_method="nonsense"))
    for name in ("", "white space", "ünicode", "a/b", "x" * 200):
        with pytest.raises(RpcError, match="name"):
            join_group(dist.HashStore(), name, 0, 1)
    assert not rpc.is_initialized()


# -- arriving


def test_an_init_that_times_out_lists_who_has_arrived_and_who_has_not(
    start_workers: Workers, tmp_path: Path
) -> None:
    group = start_workers(2, names=["early", "bird"])
    url = f"file://{tmp_path}/store"
    pending = [
        w.start(init_rpc, w.name, rank, 4, url, init_timeout_s=1.5)
        for rank, w in zip((0, 2), group, strict=True)
    ]
    for p in pending:
        with pytest.raises(InitTimeout) as caught:
            p.result()
        message = str(caught.value)
        assert "early" in message
        assert "bird" in message
        assert "2 of 4" in message
        assert "rank 1, 3" in message
    assert group.run_all(rpc.is_initialized) == [False, False]


def test_a_rendezvous_that_nobody_serves(start_workers: Workers) -> None:
    (worker,) = start_workers(1)
    with pytest.raises(InitTimeout, match=r"rank 0.*serves"):
        worker.run(init_rpc, "lonely", 1, 2, f"tcp://127.0.0.1:{free_port()}", init_timeout_s=1.5)


def test_two_workers_with_one_name_are_both_told() -> None:
    store = dist.HashStore()
    options = RpcOptions(init_timeout_s=10)
    outcomes = in_parallel(
        *[lambda rank=rank: join_group(store, "same", rank, 2, options) for rank in range(2)]
    )  # type: ignore[misc]
    assert [type(o) for o in outcomes] == [DuplicateName, DuplicateName]
    assert "'same'" in str(outcomes[0])


def test_two_workers_with_one_rank() -> None:
    store = dist.HashStore()
    options = RpcOptions(init_timeout_s=2)
    outcomes = in_parallel(
        *[lambda name=name: join_group(store, name, 0, 2, options) for name in ("ann", "bob")]
    )  # type: ignore[misc]
    assert sorted(type(o).__name__ for o in outcomes) == ["DuplicateName", "InitTimeout"]


def test_a_duplicate_in_a_dynamic_group_is_refused_and_the_group_goes_on() -> None:
    store = dist.HashStore()
    ann = join_group(store, "ann", 0, None)
    bob = join_group(store, "bob", 1, None)
    try:
        with pytest.raises(DuplicateName, match="'bob'"):
            join_group(store, "bob", 2, None)
        with pytest.raises(DuplicateName, match="rank 1"):
            join_group(store, "cid", 1, None)
        assert ann.call_sync("bob", increment, (1,), {}, 10.0) == 2
        cid = join_group(store, "cid", 2, None)
        assert cid.call_sync("ann", increment, (1,), {}, 10.0) == 2
        assert bob.call_sync("cid", increment, (1,), {}, 10.0) == 2
        cid.close()
    finally:
        ann.close()
        bob.close()


# -- joining and leaving


@pytest.mark.parametrize("method", ["file", "tcp"])
def test_workers_join_leave_and_join_again(start_workers: Workers, tmp_path: Path, method: str) -> None:
    url = f"file://{tmp_path}/store" if method == "file" else f"tcp://127.0.0.1:{free_port()}"
    first, second, third = start_workers(3)

    def join(worker: Worker, rank: int) -> None:
        worker.run(init_rpc, worker.name, rank, None, url)

    join(first, 0)
    assert first.run(members) == ["worker0"]
    join(second, 1)
    assert second.run(call_one, "worker0") == 2
    assert first.run(call_one, "worker1") == 2
    join(third, 2)
    assert first.run(call_one, "worker2") == 2
    assert second.run(call_one, 2) == 2
    second.run(leave)
    eventually(
        lambda: first.run(members) == third.run(members) == ["worker0", "worker2"], "the leave being noticed"
    )
    with pytest.raises(WorkerLost, match="worker1"):
        first.run(call_one, "worker1")
    assert third.run(call_one, "worker0") == 2


def test_a_name_and_rank_can_be_taken_again_after_leaving_or_dying(
    start_workers: Workers, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store"
    stays, dies = start_workers(2)
    stays.run(init_rpc, "stays", 0, None, url)
    dies.run(init_rpc, "comes-and-goes", 1, None, url)
    assert stays.run(call_one, "comes-and-goes") == 2
    dies.kill()
    eventually(lambda: stays.run(members) == ["stays"], "the loss being noticed")
    for _ in range(3):
        (again,) = start_workers(1)
        eventually(lambda again=again: joined(again, url), "joining under the old name")
        assert stays.run(call_one, "comes-and-goes") == 2
        assert again.run(call_one, "stays") == 2
        again.run(leave)
        eventually(lambda: stays.run(members) == ["stays"], "the leave being noticed")


def joined(worker: Worker, url: str) -> bool:
    """The one who noticed tells the store a moment later that the name is free."""
    try:
        worker.run(init_rpc, "comes-and-goes", 1, None, url)
        return True
    except DuplicateName:
        return False


def test_many_join_at_once() -> None:
    store = dist.HashStore()
    agents = in_parallel(*[lambda rank=rank: join_group(store, f"w{rank}", rank, None) for rank in range(12)])  # type: ignore[misc]
    try:
        assert all(isinstance(a, Agent) for a in agents), agents
        for agent in agents:
            for other in range(12):
                assert agent.call_sync(f"w{other}", increment, (other,), {}, 10.0) == other + 1
    finally:
        for agent in agents:
            if isinstance(agent, Agent):
                agent.close()


def test_a_dynamic_group_shuts_down_together(start_workers: Workers, tmp_path: Path) -> None:
    group = start_workers(3)
    for rank, worker in enumerate(group):
        worker.run(init_rpc, worker.name, rank, None, f"file://{tmp_path}/store")
    assert group[0].run(call_one, "worker2") == 2
    group.finish(group.start_all(rpc.shutdown))


def test_a_dynamic_group_shuts_down_together_after_a_worker_was_replaced() -> None:
    """The calls that the first bob took are counted by nobody who is still there."""
    store = dist.HashStore()
    ann = join_group(store, "ann", 0, None)
    bob = join_group(store, "bob", 1, None)
    assert ann.call_sync("bob", increment, (1,), {}, 10.0) == 2
    leave_group(bob, graceful=False)
    eventually(lambda: ann.get_worker_infos() == [ann.info], "the leave being noticed")
    bob = join_group(store, "bob", 1, None)
    cid = join_group(store, "cid", 2, None)  # knows nothing of the first bob
    assert ann.call_sync("bob", increment, (1,), {}, 10.0) == 2
    assert in_parallel(*[partial(leave_group, a, timeout_s=10.0) for a in (ann, bob, cid)]) == [None] * 3


@multiprocess(3)
def test_init_again_after_shutdown(rank: int) -> None:
    url = rpc.api.current_agent().options.init_method
    for _ in range(3):
        assert rpc.rpc_sync(f"worker{(rank + 1) % 3}", increment, args=(1,)) == 2
        rpc.shutdown()
        assert not rpc.is_initialized()
        init_rpc(f"worker{rank}", rank, 3, url)
    rpc.shutdown()


@multiprocess(3)
def test_shutdown_waits_for_calls_that_are_under_way(rank: int) -> None:
    """A call made just before shutdown, which makes further calls in turn, is answered all the same."""
    futures = [rpc.rpc_async(f"worker{(rank + 1) % 3}", pass_on, args=(6,)) for _ in range(20)]
    rpc.shutdown()
    assert [f.wait() for f in futures] == [6] * 20


def pass_on(hops: int) -> int:
    if hops == 0:
        return 0
    me = rpc.get_worker_info().id
    return 1 + int(rpc.rpc_sync((me + 1) % 3, pass_on, args=(hops - 1,)))


def test_one_worker_alone(tmp_path: Path) -> None:
    rpc.init_rpc(
        "alone", rank=0, world_size=1, rpc_backend_options=RpcOptions(init_method=f"file://{tmp_path}/store")
    )
    try:
        assert rpc.rpc_sync("alone", increment, args=(1,)) == 2
        assert rpc.all_gather(5) == {"alone": 5}
        rpc.barrier()
    finally:
        rpc.shutdown()
    assert not rpc.is_initialized()
    assert os.environ.get("RANK") is None


# -- gathering


@multiprocess(4)
def test_all_gather_and_barrier(rank: int) -> None:
    for i in range(20):
        got = rpc.all_gather((rank, torch.full((3,), float(i))))
        assert {name: value[0] for name, value in got.items()} == {f"worker{r}": r for r in range(4)}
        assert all(torch.equal(value[1], torch.full((3,), float(i))) for value in got.values())
        rpc.barrier()
    big = rpc.all_gather(torch.full((200_000,), float(rank)))
    assert [float(big[f"worker{r}"][-1]) for r in range(4)] == [0.0, 1.0, 2.0, 3.0]
    rpc.shutdown()


@multiprocess(4)
def test_gatherings_of_some(rank: int) -> None:
    for names in (["worker1", "worker3"], ["worker0", "worker2", "worker3"], ["worker3"]):
        if f"worker{rank}" in names:
            assert rpc.all_gather(rank, worker_names=names) == {n: int(n[-1]) for n in names}
            rpc.barrier(worker_names=names)
        elif rank != 3:
            with pytest.raises(ValueError, match="not among"):
                rpc.all_gather(rank, worker_names=names)
    with pytest.raises(ValueError, match="nobody"):
        rpc.all_gather(rank, worker_names=[f"worker{rank}", "nobody"])
    rpc.shutdown()


arrived: dict[str, int] = {}


def arrive() -> None:
    arrived["count"] = arrived.get("count", 0) + 1


@multiprocess(3)
def test_nobody_passes_a_barrier_before_all_have_come(rank: int) -> None:
    for i in range(1, 11):
        rpc.rpc_sync("worker0", arrive)
        rpc.barrier()
        assert rpc.rpc_sync("worker0", arrivals) == 3 * i
        rpc.barrier()
    rpc.shutdown()


def arrivals() -> int:
    return arrived["count"]


def gather(value: Any, names: list[str] | None = None, timeout: float = 20.0) -> dict[str, Any]:
    return rpc.all_gather(value, worker_names=names, timeout=timeout)


@pytest.mark.parametrize("absent", [0, 2])
def test_a_gathering_that_times_out_names_who_is_missing(workers: Workers, absent: int) -> None:
    group = workers(3)
    pending = [w.start(gather, 1, None, 1.0) for w in group if w is not group[absent]]
    for p in pending:
        with pytest.raises(RpcTimeout, match=f"Missing: worker{absent}"):
            p.result()
    assert group[1].run(call_one, "worker0") == 2


@pytest.mark.parametrize("victim", [0, 2], ids=["the leader", "another"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "all"])
def test_a_participant_of_a_gathering_dies(workers: Workers, victim: int, named: bool) -> None:
    group = workers(4)
    names = [w.name for w in group] if named else None
    survivors = [w for w in group if w is not group[victim]]
    pending = [w.start(gather, w.name, names) for w in survivors]
    assert not any(p.done for p in pending)
    group[victim].kill()
    for p in pending:
        if named:
            with pytest.raises(WorkerLost, match=f"worker{victim}"):
                p.result()
        else:
            assert p.result() == {w.name: w.name for w in survivors}
    again = [w.start(gather, 7, [w.name for w in survivors]) for w in survivors]
    assert group.finish(again) == [{w.name: 7 for w in survivors}] * 3


def test_something_that_cannot_be_gathered_is_an_error_and_no_hang() -> None:
    with rpc.local_agents(2) as agents, pytest.raises(rpc.PayloadError):
        all_gather(agents[0], threading.Lock(), None, 5.0)


def test_leaving_twice_or_without_init() -> None:
    with pytest.raises(rpc.NotInitialized):
        rpc.shutdown()
    agent = join_group(dist.HashStore(), "alone", 0, 1)
    leave_group(agent, timeout_s=10)
    agent.close()
