"""A peer with the secret that sends more than is dealt with, or does not read: it is slowed, the others are not."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.workers import Group, eventually

from farstep import rpc
from farstep.rpc.current import current_agent
from farstep.rpc.message import EMPTY, dump_meta
from farstep.rpc.payload import pack
from farstep.rpc.wire import Kind, frame_bytes

pytestmark = pytest.mark.slow
Workers = Callable[..., Group]
VICTIM, THIRD, HOSTILE = 0, 1, 2
MAX_BYTES = 4 << 20
MAX_CALLS = 256


def increment(x: int) -> int:
    return x + 1


release = threading.Event()


def block() -> None:
    release.wait(60)


# -- in the hostile worker


def stop_reading() -> None:
    """From now on nothing that the victim sends is read."""
    agent = current_agent()
    assert rpc.rpc_sync("worker0", increment, args=(1,)) == 2
    peer = agent.peer("worker0")
    assert peer.receiver is not None
    assert peer.receiver.read_lock.acquire(timeout=10)
    agent.reactor.disarm(peer.receiver.fd)


def read_on() -> None:
    agent = current_agent()
    receiver = agent.peer("worker0").receiver
    assert receiver is not None
    receiver.read_lock.release()
    agent.reactor.arm(receiver.fd)


def frames_of(what: str) -> Callable[[int], bytes]:
    """The i-th frame of a flood."""
    if what == "large calls":
        numel = 1 << 18
        description = ("float32", 0, (numel,), None, None, 4 * numel, None)
        meta = dump_meta(("torch", "neg"), pack((torch.zeros(numel),)), (description,), (), None)
        return lambda i: frame_bytes(Kind.CALL, (1 << 40) + i, meta, [4 * numel], depth=1) + bytes(4 * numel)
    if what == "small calls":
        meta = dump_meta((__name__, "block"), pack(()), (), (), None)
        return lambda i: frame_bytes(Kind.CALL, (1 << 40) + i, meta, depth=1) * 100
    if what == "depths":
        meta = dump_meta((__name__, "block"), pack(()), (), (), None)
        return lambda i: frame_bytes(Kind.CALL, (1 << 40) + i, meta, depth=i + 1)
    if what == "confirmations":
        meta = dump_meta(("confirm", []), EMPTY, (), (), None)
        return lambda i: frame_bytes(Kind.RREF, i, meta) * 1000
    if what == "large answers":
        meta = dump_meta((__name__, "megabyte"), pack((bytes(100_000),)), (), (), None)
        return lambda i: frame_bytes(Kind.CALL, (1 << 40) + i, meta, depth=1)
    assert what == "unasked answers"
    body = dump_meta(None, pack(("x" * 500_000,)), (), (), None)
    return lambda i: frame_bytes(Kind.REPLY, 1 << 40, body)


def megabyte(_: bytes) -> bytes:
    return bytes(1 << 20)


def flood(what: str, most: int) -> int:
    """Send frames until the victim has not read for a while. How many could be sent."""
    frame = frames_of(what)
    sender = current_agent().peer("worker0").sender
    assert sender is not None
    sock = sender.sock
    sock.setblocking(True)
    sock.settimeout(2.0)
    unsent = memoryview(b"")
    sent = 0
    try:
        for sent in range(1, most + 1):
            unsent = memoryview(frame(sent))
            while len(unsent):
                unsent = unsent[sock.send(unsent) :]
    except TimeoutError:
        pass
    sock.setblocking(False)
    sender._rest = [bytes(unsent)] if len(unsent) else []  # the stream stays whole
    return sent


# -- in the victim


def figures() -> dict[str, int]:
    return current_agent().get_debug_info()


def let_go() -> None:
    release.set()


# -- looked at from outside


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


class Watch:
    """The most memory and threads of a process while a flood goes on, and whether a third worker can call it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.before = resident_bytes(group[VICTIM].pid)
        self.growth = 0
        self.threads = 0
        self.calls = 0

    def until(self, done: Callable[[], Any]) -> Any:
        return eventually(lambda: self._look() and done(), "the flood being over", 50)

    def _look(self) -> bool:
        pid = self.group[VICTIM].pid
        self.growth = max(self.growth, resident_bytes(pid) - self.before)
        self.threads = max(self.threads, threads_of(pid))
        assert self.group[THIRD].run(call_victim) == 2
        self.calls += 1
        return True


def call_victim() -> int:
    return rpc.rpc_sync("worker0", increment, args=(1,), timeout=10)  # type: ignore[no-any-return]


@pytest.fixture
def group(workers: Workers) -> Group:
    group = workers(
        3, shared_memory_bytes=0, max_bytes_per_peer=MAX_BYTES, max_calls_per_peer=MAX_CALLS, rpc_timeout=20
    )
    for worker in group:
        worker.run(call_victim)
    return group


@pytest.mark.parametrize("what", ["large calls", "large answers", "small calls"])
def test_a_peer_that_floods_and_does_not_read_is_slowed(group: Group, what: str) -> None:
    group[HOSTILE].run(stop_reading)
    watch = Watch(group)
    flooding = group[HOSTILE].start(flood, what, 1500)
    watch.until(lambda: flooding.done)
    assert flooding.result() < 1500  # it was slowed, though it wanted to send more
    assert watch.growth < 300 << 20
    assert watch.threads < 120
    assert watch.calls > 3
    now = group[VICTIM].run(figures)
    assert now["agent.paused_peers"] == 1
    assert group[VICTIM].log.read_text().count("does not read from 'worker2'") == 1  # once
    # It reads again, and all is as before.
    group[VICTIM].run(let_go)
    group[HOSTILE].run(read_on)
    eventually(
        lambda: group[VICTIM].run(figures)["agent.server_unfinished_messages"] == 0, "all being answered", 30
    )
    assert group[HOSTILE].run(call_victim) == 2
    assert group[VICTIM].run(figures)["agent.paused_peers"] == 0
    assert group[THIRD].run(call_victim) == 2


def test_forged_depths_do_not_start_hundreds_of_threads(group: Group) -> None:
    watch = Watch(group)
    flooding = group[HOSTILE].start(flood, "depths", 1500)
    watch.until(lambda: flooding.done)
    watch.until(lambda: watch.calls > 20)
    assert watch.threads < 200
    group[VICTIM].run(let_go)
    eventually(lambda: group[VICTIM].run(figures)["agent.queued_jobs"] == 0, "all having run")
    assert group[HOSTILE].run(call_victim) == 2


@pytest.mark.parametrize(("what", "count"), [("unasked answers", 1000), ("confirmations", 60)])
def test_what_is_no_call_does_not_pile_up_either(group: Group, what: str, count: int) -> None:
    if what == "confirmations":
        group[HOSTILE].run(stop_reading)
    watch = Watch(group)
    flooding = group[HOSTILE].start(flood, what, count)
    watch.until(lambda: flooding.done)
    assert watch.growth < 200 << 20
    assert watch.threads < 120
    eventually(lambda: group[VICTIM].run(figures)["agent.queued_jobs"] == 0, "all being dealt with", 30)


def test_a_peer_that_is_paused_and_dies_is_lost(group: Group) -> None:
    group[HOSTILE].run(stop_reading)
    flooding = group[HOSTILE].start(flood, "large calls", 1500)
    Watch(group).until(lambda: flooding.done)
    group[HOSTILE].kill()
    eventually(lambda: group[VICTIM].run(present) == ["worker0", "worker1"], "the loss being noticed")
    assert group[THIRD].run(call_victim) == 2


def present() -> list[str]:
    return [info.name for info in rpc.get_worker_infos()]


def test_an_owner_that_does_not_read_does_not_hold_up_what_others_are_told(group: Group) -> None:
    """References of the hostile worker's die at the victim: it is told, and never reads it."""
    group[VICTIM].run(hold_references, 40)
    group[HOSTILE].run(stop_reading)
    group[VICTIM].run(fill_its_socket)
    group[VICTIM].run(drop_references)
    for _ in range(
        10
    ):  # a reference that is passed on is confirmed by the victim, at the depth at which it tells
        assert group[THIRD].run(pass_on_a_reference) == 3


held: list[Any] = []


def hold_references(count: int) -> None:
    held.extend(rpc.remote("worker2", increment, args=(i,)) for i in range(count))
    for rref in held:
        rref.to_here()


def fill_its_socket() -> None:
    """Calls that time out, until no more goes in."""
    for _ in range(3):
        with contextlib.suppress(rpc.RpcTimeout):
            rpc.rpc_sync("worker2", len, args=(bytes(8 << 20),), timeout=0.3)


def drop_references() -> None:
    while held:
        held.pop()
        time.sleep(0.01)  # each is told of by itself


def value_of(rref: Any) -> int:
    return int(rref.to_here())


def pass_on_a_reference() -> int:
    rref = rpc.remote("worker0", increment, args=(2,), timeout=5)
    return rpc.rpc_sync("worker0", value_of, args=(rref,), timeout=5)  # type: ignore[no-any-return]
