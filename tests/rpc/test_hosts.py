"""Two hosts, as two network namespaces with a cable between them: calls over TCP, and a cable that is pulled."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.workers import PATIENCE_S, Group, eventually, init_rpc

from farstep import rpc
from farstep.errors import InsecureTransport, WorkerLost

pytestmark = pytest.mark.slow
SECRET = "two hosts and one secret"
ADDRESSES = ("10.231.17.1", "10.231.17.2")


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=20)


class Hosts:
    """Two namespaces, joined by a veth pair. Removing the namespaces removes the cable."""

    def __init__(self) -> None:
        mark = uuid.uuid4().hex[:6]
        self.names = [f"farstep-{mark}-{i}" for i in range(2)]
        self.ends = [f"fs{mark}{i}" for i in range(2)]

    def build(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            self.ends[0],
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            self.ends[1],
            "netns",
            self.names[1],
        )
        for name, end, address in zip(self.names, self.ends, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def pull_the_cable(self) -> None:
        ip("-n", self.names[1], "link", "set", self.ends[1], "down")

    def remove(self) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.SubprocessError, OSError):
                ip("netns", "del", name)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    try:
        try:
            hosts.build()
        except FileNotFoundError:
            pytest.skip("no `ip` command (iproute2) to make network namespaces with")
        except subprocess.CalledProcessError as exc:
            pytest.skip(f"this machine forbids network namespaces: {exc.stderr.decode().strip()}")
        yield hosts
    finally:
        hosts.remove()


# -- run in worker processes

state: dict[str, Any] = {}


def move_to(namespace: str) -> None:
    """From now on this thread, and those that it starts, are on that host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")


def enter(name: str, rank: int, world_size: int, url: str, options: dict[str, Any]) -> None:
    init_rpc(name, rank, world_size, url, **options)
    state["lost"] = []
    rpc.on_worker_lost(lambda info, reason: state["lost"].append((info.name, reason)))


def negate(to: str, numel: int) -> bool:
    x = torch.arange(float(numel))
    return torch.equal(rpc.rpc_sync(to, torch.neg, args=(x,), timeout=20), -x)


def sleep_long() -> None:
    time.sleep(60)


def wait_for(to: str) -> str:
    try:
        rpc.rpc_sync(to, sleep_long, timeout=60)
    except WorkerLost as exc:
        return exc.worker
    raise AssertionError("it returned")


def lost() -> list[tuple[str, str]]:
    return list(state["lost"])


def members() -> list[str]:
    return [info.name for info in rpc.get_worker_infos()]


def in_use(to: str) -> str:
    sender = rpc.api.current_agent().peer(to).sender
    return "none" if sender is None else sender.sock.family.name


@pytest.fixture
def on_hosts(hosts: Hosts, start_workers: Callable[..., Group], tmp_path: Path) -> Callable[..., Group]:
    """`on_hosts([0, 1, 0], **options)`: a group with a worker on each of these hosts.

    The rendezvous is a file, which both hosts see; the calls take the cable.
    """

    def start(places: list[int], **options: Any) -> Group:
        group = Group(
            [start_workers(1, setup=functools.partial(move_to, hosts.names[place]))[0] for place in places]
        )
        pending = [
            group[rank].start(
                enter,
                f"worker{rank}",
                rank,
                len(places),
                f"file://{tmp_path}/store",
                {"host": ADDRESSES[place], **options},
            )
            for rank, place in enumerate(places)
        ]
        group.finish(pending)
        return group

    return start


def test_calls_between_hosts(on_hosts: Callable[..., Group]) -> None:
    group = on_hosts([0, 1, 0], secret=SECRET)
    for worker in group:
        for other in group:
            for numel in (0, 1, 1000, 1_000_000):
                assert worker.run(negate, other.name, numel)
    assert group[0].run(in_use, "worker1") == "AF_INET"
    assert group[0].run(in_use, "worker2") == "AF_UNIX"
    group.finish(group.start_all(rpc.shutdown))


def test_hosts_without_a_secret_are_told_to_set_one(on_hosts: Callable[..., Group]) -> None:
    with pytest.raises(InsecureTransport, match="FARSTEP_SECRET"):
        on_hosts([0, 1], init_timeout_s=5)


@pytest.mark.parametrize("busy", [True, False], ids=["a call pending", "idle"])
def test_a_pulled_cable_is_noticed_by_the_heartbeat(
    hosts: Hosts, on_hosts: Callable[..., Group], busy: bool
) -> None:
    group = on_hosts([0, 1, 0], secret=SECRET, heartbeat_s=3.0)
    assert group[0].run(negate, "worker1", 10)
    assert group[1].run(negate, "worker0", 10)
    pending = group[0].start(wait_for, "worker1") if busy else None
    hosts.pull_the_cable()
    for worker in (group[0], group[2]):
        eventually(lambda worker=worker: worker.run(lost), "the loss being noticed", PATIENCE_S)
        assert worker.run(lost)[0][0] == "worker1"
    if pending is not None:
        assert pending.result() == "worker1"
    assert group[0].run(members) == group[2].run(members) == ["worker0", "worker2"]
    assert group[0].run(negate, "worker2", 1000)
    assert group[2].run(negate, "worker0", 1000)
    group.finish([group[rank].start(rpc.shutdown, timeout=10) for rank in (0, 2)])


def test_a_busy_peer_is_not_taken_for_a_lost_one(on_hosts: Callable[..., Group]) -> None:
    """Its kernel answers the heartbeat, however long its Python does not."""
    group = on_hosts([0, 1], secret=SECRET, heartbeat_s=1.0)
    assert group[0].run(negate, "worker1", 10)
    group[1].stop()
    time.sleep(2.5)  # two heartbeats and a half
    group[1].cont()
    assert group[0].run(negate, "worker1", 10)
    assert group[0].run(lost) == []


def negate_much(to: str, numel: int, timeout: float) -> bool:
    x = torch.arange(float(numel))
    return torch.equal(rpc.rpc_sync(to, torch.neg, args=(x,), timeout=timeout), -x)


@pytest.mark.parametrize("unencrypted", [False, True], ids=["tls", "mac"])
@pytest.mark.parametrize("back_and_forth", [True, False], ids=["both have called", "first call"])
def test_a_peer_that_does_not_read_is_not_taken_for_a_lost_one(
    on_hosts: Callable[..., Group], unencrypted: bool, back_and_forth: bool
) -> None:
    """64 MB for a process that is stopped fill its window; its kernel goes on answering for it."""
    heartbeat_s = 1.0
    group = on_hosts(
        [0, 1, 0], secret=SECRET, heartbeat_s=heartbeat_s, dangerously_unencrypted_tcp=unencrypted
    )
    if back_and_forth:
        assert group[0].run(negate, "worker1", 10)
        assert group[1].run(negate, "worker0", 10)
    group[1].stop()
    pending = group[0].start(negate_much, "worker1", 16_000_000, 60.0)
    time.sleep(4 * heartbeat_s)  # what must not happen would happen in this time
    assert group[0].run(lost) == group[2].run(lost) == []
    group[1].cont()
    assert pending.result()
    assert group[2].run(negate, "worker1", 10)
    assert [worker.run(lost) for worker in group] == [[], [], []]


def test_a_cable_that_is_pulled_while_much_is_sent_is_noticed_by_the_heartbeat(
    hosts: Hosts, on_hosts: Callable[..., Group]
) -> None:
    group = on_hosts([0, 1], secret=SECRET, heartbeat_s=3.0)
    assert group[0].run(negate, "worker1", 10)
    group[1].stop()  # so that it is still being sent when the cable is pulled
    pending = group[0].start(wait_for_negation, "worker1")
    time.sleep(1.0)
    hosts.pull_the_cable()
    assert pending.result() == "worker1"


def wait_for_negation(to: str) -> str:
    try:
        negate_much(to, 16_000_000, 60.0)
    except WorkerLost as exc:
        return exc.worker
    raise AssertionError("it returned")
