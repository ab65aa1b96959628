"""A store in which others have met before: restarted jobs, with the same and other sizes, and what is left of earlier attempts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.workers import Group, eventually, init_rpc

from farstep.errors import DuplicateName, InitTimeout, RpcError, RRefError, UnknownWorker
from farstep.rpc import Agent, RpcOptions
from farstep.rpc.group import join_group
from rpc.test_group import call_one, free_port, in_parallel, increment, leave, members

pytestmark = pytest.mark.slow
Workers = Callable[..., Group]
PATIENCE_S = 10.0


def meet(store: Any, size: int, **options: Any) -> list[Any]:
    """The agents of a group of known size, or what kept each from joining."""
    given = RpcOptions(**{"init_timeout_s": 30, **options})
    return in_parallel(*[lambda r=r: join_group(store, f"w{r}", r, size, given) for r in range(size)])  # type: ignore[misc]


def close(agents: list[Agent]) -> None:
    for agent in agents:
        agent.close()


def check_that_all_call_each_other(agents: list[Any]) -> None:
    for agent in agents:
        assert isinstance(agent, Agent), agents
        for other in agents:
            assert agent.call_sync(other.info.name, increment, (1,), {}, PATIENCE_S) == 2


@pytest.mark.parametrize("sizes", [[2, 2, 2], [3, 1, 2], [1, 3]], ids=str)
def test_a_job_starts_again_in_the_same_store(sizes: list[int]) -> None:
    store = dist.HashStore()
    for size in sizes:
        agents = meet(store, size)
        check_that_all_call_each_other(agents)
        close(agents)


def test_a_rank_whose_holder_answers_is_not_taken_over() -> None:
    store = dist.HashStore()
    agents = meet(store, 2)
    try:
        for _ in range(2):
            with pytest.raises(DuplicateName, match=r"'w1' has it already, and is still there"):
                join_group(store, "newcomer", 1, 2, RpcOptions(init_timeout_s=30))
        with pytest.raises(RpcError, match=r"world_size 3, and 'w0' \(rank 0\) is there with world_size 2"):
            join_group(store, "newcomer", 2, 3, RpcOptions(init_timeout_s=30))
        check_that_all_call_each_other(agents)
    finally:
        close(agents)


def test_those_who_died_while_they_waited_are_replaced(start_workers: Workers, tmp_path: Path) -> None:
    """The rank that was missing comes first, and finds all others there; then they come again."""
    url = f"file://{tmp_path}/store"
    first = start_workers(2)
    for rank, worker in zip((0, 2), first, strict=True):
        worker.start(init_rpc, f"w{rank}", rank, 3, url)
    store = dist.PrefixStore("farstep_rpc_0", dist.FileStore(f"{tmp_path}/store"))
    eventually(lambda: store.check(["worker/0", "worker/2"]), "the first two waiting")
    for worker in first:
        worker.kill()
    again = start_workers(3)
    pending = [again[0].start(init_rpc, "w1", 1, 3, url)]
    eventually(lambda: store.check(["round/1/worker/1"]), "the next round")
    pending += [w.start(init_rpc, f"w{r}", r, 3, url) for r, w in zip((0, 2), list(again)[1:], strict=True)]
    again.finish(pending)
    assert [worker.run(call_one, f"w{rank}") for worker in again for rank in range(3)] == [2] * 9


def test_who_has_died_is_named_when_nobody_comes_in_its_place() -> None:
    store = dist.HashStore()
    close(meet(store, 2))
    with pytest.raises(InitTimeout, match=r"missing: rank 1.*without an answer since: 'w0' \(rank 0\)"):
        join_group(store, "w0", 0, 2, RpcOptions(init_timeout_s=1))


def test_a_failure_of_an_earlier_attempt_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(ValueError, match="cannot be read"):
        join_group(
            store, "w1", 1, 2, RpcOptions(secret="s" * 20, tls_cert="none", tls_key="none", tls_ca="none")
        )
    with pytest.raises(RpcError, match="'w1' gave up"):
        join_group(store, "w0", 0, 2, RpcOptions(init_timeout_s=30))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    agents = meet(store, 2)
    check_that_all_call_each_other(agents)
    close(agents)


def test_a_store_that_counts_rounds_without_end_is_an_error_in_time() -> None:
    store = dist.HashStore()
    store.set("round", "99999999999999999999")
    with pytest.raises(RpcError, match="round"):
        join_group(store, "w0", 0, 2, RpcOptions(init_timeout_s=2))
    store.set("round", "7")
    store.set("round/7/size", json.dumps([2]))
    with pytest.raises(RpcError, match="size"):
        join_group(store, "w0", 0, 2, RpcOptions(init_timeout_s=2))


# -- groups that workers join and leave


def test_an_open_group_of_which_nobody_is_left_starts_again(start_workers: Workers, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    for _ in range(2):
        group = start_workers(2)
        for rank, worker in enumerate(group):
            worker.run(init_rpc, f"w{rank}", rank, None, url)
        assert group[1].run(call_one, "w0") == group[0].run(call_one, "w1") == 2
        assert group[0].run(members) == ["w0", "w1"]
        for worker in group:
            worker.kill()


def test_a_process_may_join_an_open_group_again(start_workers: Workers, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    one, other = start_workers(2)
    one.run(init_rpc, "one", 0, None, url)
    for _ in range(2):
        other.run(init_rpc, "other", 1, None, url)
        assert one.run(call_one, "other") == other.run(call_one, "one") == 2
        other.run(leave)


def test_a_reference_of_an_earlier_incarnation_says_so() -> None:
    store = dist.HashStore()
    user, owner = (join_group(store, name, rank, None) for rank, name in enumerate(("user", "owner")))
    rref = user.remote("owner", list, ((1,),), {}, PATIENCE_S)
    assert rref.to_here() == [1]
    owner.close()
    eventually(lambda: not user.links.has("owner"), "the owner leaving")
    again = join_group(store, "owner", 1, None)
    try:
        assert user.remote("owner", list, ((2,),), {}, PATIENCE_S).to_here() == [2]
        with pytest.raises(RRefError, match="earlier incarnation of worker 'owner'"):
            rref.to_here()
        with pytest.raises(RRefError, match="earlier incarnation of worker 'owner'"):
            rref.rpc_sync().append(3)
    finally:
        again.close()
        user.close()


def test_a_worker_that_was_replaced_and_comes_back_is_refused() -> None:
    store = dist.HashStore()
    stays, former = (join_group(store, name, rank, None) for rank, name in enumerate(("stays", "goes")))
    stays.links.lose(stays.peer("goes"), "it was given up")
    with pytest.raises(DuplicateName, match=r"'goes' .* still there"):
        join_group(store, "goes", 1, None)
    store.set(f"gone/{former.links.me.card.incarnation}", "1")  # whoever restarts workers has given it up
    again = join_group(store, "goes", 1, None)
    try:
        assert again.call_sync("stays", increment, (1,), {}, PATIENCE_S) == 2
        with pytest.raises(UnknownWorker, match="earlier incarnation"):
            stays.links.learn(former.links.me.card)
        with pytest.raises(RpcError):
            former.call_sync("stays", increment, (1,), {}, PATIENCE_S)
        assert again.call_sync("stays", increment, (1,), {}, PATIENCE_S) == 2
    finally:
        for agent in (former, again, stays):
            agent.close()


# -- torchrun itself


JOB = """
import os, signal, sys
from farstep import rpc
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt, own_port, victim = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[1], int(sys.argv[2])
for place in ("env://", f"tcp://127.0.0.1:{own_port}"):
    options = rpc.RpcOptions(init_method=place, init_timeout_s=50)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    got = rpc.rpc_sync(f"w{(rank + 1) % size}", pow, (2, attempt))
    print(f"attempt {attempt}, {place[:3]}, rank {rank}: {got}", flush=True)
    rpc.barrier()
    if attempt == 0 and rank == victim and place != "env://":
        os.kill(os.getpid(), signal.SIGKILL)
    rpc.shutdown()
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("rendezvous", "victim"), [("static", 0), ("c10d", 1)])
def test_torchrun_restarts_a_job(tmp_path: Path, rendezvous: str, victim: int) -> None:
    """Each attempt has a group at torchrun's own store, and then one on a port of its own, in which a rank is killed."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    place = f"127.0.0.1:{free_port()}"
    how = (
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", place]
        if rendezvous == "c10d"
        else ["--master-addr", "127.0.0.1", "--master-port", place.rpartition(":")[2]]
    )
    options = ["--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1", *how]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, script, str(free_port()), str(victim)],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        for line in (
            "attempt 0, env, rank {}: 1",
            "attempt 1, env, rank {}: 2",
            "attempt 1, tcp, rank {}: 2",
        ):
            assert line.format(rank) in done.stdout, done.stdout
    assert "DuplicateName" not in done.stderr


def test_the_own_port_of_a_group_is_not_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 serves it, and a name of the same place is the same place."""
    from farstep.rpc.rendezvous import _is_served_by_torchrun

    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert _is_served_by_torchrun("localhost", 29500)
    assert _is_served_by_torchrun("127.0.0.1", 29500)
    assert not _is_served_by_torchrun("127.0.0.1", 29501)
    assert not _is_served_by_torchrun("203.0.113.7", 29500)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert not _is_served_by_torchrun("localhost", 29500)
