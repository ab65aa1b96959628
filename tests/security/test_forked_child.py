"""A child that a worker forks is not the worker: it neither reports nor answers for it, and does not keep its end from being noticed."""

import contextlib
import os
import signal
import socket
import sys
import time

import pytest
from support.workers import eventually

from farstep import rpc
from farstep.errors import NotInitialized, WorkerLost
from farstep.launch import run_local
from farstep.launch.local import LocalWorkers, tell

PATIENCE_S = 20.0


def ended(child: int) -> int:
    """The exit code of a child, which must end by itself."""
    found: list[int] = []

    def has_ended() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            found.append(os.waitstatus_to_exitcode(status))
        return bool(pid)

    try:
        eventually(has_ended, "the child's end", PATIENCE_S)
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    return found[0]


def _leave(how: str) -> None:
    if how == "exit":
        sys.exit(0)
    if how == "code":
        sys.exit(7)
    if how == "error":
        raise ValueError("of the child")


CODES = {"exit": 0, "code": 7, "error": 1, "return": 0}


def _fork_in_the_worker(rank: int, how: str):
    if rank == 1:
        child = os.fork()
        if child == 0:
            return _leave(how)
        code = ended(child)
        return code, rpc.rpc_sync("worker0", max, (1, 2))  # it goes on calling
    return "zero"


@pytest.mark.parametrize("how", CODES)
def test_a_child_does_not_report_for_the_worker(how):
    assert run_local(_fork_in_the_worker, 2, how, timeout_s=PATIENCE_S) == ["zero", (CODES[how], 2)]


def _forking(how: str) -> int:
    child = os.fork()
    if child == 0:
        return _leave(how)
    return ended(child)


def _call_one_that_forks(rank: int, how: str):
    if rank == 0:
        codes = [rpc.rpc_sync("worker1", _forking, (how,)) for _ in range(2)]
        return codes, [rpc.rpc_sync("worker1", max, (n, 2)) for n in range(3)]
    return None


@pytest.mark.parametrize("how", CODES)
def test_a_child_does_not_answer_for_the_worker(how):
    """Nor does it wait on the worker's sockets, where it would take what is sent to the worker."""
    found = run_local(_call_one_that_forks, 2, how, timeout_s=PATIENCE_S)
    assert found == [([CODES[how]] * 2, [2, 2, 2]), None]


def _tell_from_a_child(rank: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            tell("from the child")
        except NotInitialized:
            os._exit(3)
        os._exit(0)
    return ended(child)


def test_a_child_cannot_tell():
    heard = []
    found = run_local(
        _tell_from_a_child, 1, timeout_s=PATIENCE_S, on_message=lambda *each: heard.append(each)
    )
    assert (found, heard) == ([3], [])


def _leave_a_child(rank: int, path: str) -> None:
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(PATIENCE_S)  # it is killed before
            os._exit(0)
        with open(f"{path}.new", "w") as file:
            file.write(str(child))
        os.replace(f"{path}.new", path)
    rpc.rpc_sync("worker1", time.sleep, (PATIENCE_S,))


def test_the_end_of_a_worker_whose_child_lives_is_noticed(tmp_path):
    path = tmp_path / "child"
    child = 0
    try:
        with LocalWorkers(_leave_a_child, 2, str(path), timeout_s=PATIENCE_S) as workers:
            eventually(path.exists, "the child", PATIENCE_S)
            child = int(path.read_text())
            os.kill(workers.pid("worker1"), signal.SIGKILL)
            with pytest.raises(WorkerLost, match="worker1"):
                workers.wait()
        os.kill(child, 0)  # it lives
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_holds_nothing_of_its_parents_agent() -> None:
    """Neither connections nor the door nor the lock of its directory: what the parent leaves behind is swept by others."""
    with rpc.local_agents(2, rpc.RpcOptions(secret="a secret among friends")) as agents:
        assert agents[0].call_sync("worker1", max, (1, 2), {}, 20.0) == 2
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(agents[0].links.me.card.unix))
            eventually(lambda: agents[0].links._listener._strangers, "the stranger at the door")
            ours = {os.readlink(f"/proc/self/fd/{fd}") for agent in agents for fd in descriptors(agent)}
            assert len(ours) >= 8
            pid = os.fork()
            if pid == 0:
                held = 0
                for fd in os.listdir("/proc/self/fd"):
                    with contextlib.suppress(OSError):
                        held += os.readlink(f"/proc/self/fd/{fd}") in ours
                os._exit(min(held, 100))
            assert ended(pid) == 0
        assert agents[1].call_sync("worker0", max, (1, 2), {}, 20.0) == 2


def descriptors(agent: rpc.Agent) -> list[int]:
    listener = agent.links._listener
    ends = [end.sock for peer in agent.links.peers() for end in (peer.sender, peer.receiver) if end]
    assert listener._directory is not None
    hold = listener._directory._hold._fd
    return [hold, *(sock.fileno() for sock in (*listener.sockets, *listener._strangers, *ends))]
