"""A peer with the secret that lends memory which is not there, is pulled away, or is too much."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.workers import eventually

from farstep import rpc
from farstep.errors import PayloadError, WorkerLost
from farstep.rpc import Agent, RpcOptions
from farstep.rpc.message import EMPTY, dump_meta
from farstep.rpc.payload import pack
from farstep.rpc.wire import Kind, frame_bytes

MB = 1 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PATIENCE_S = 60.0


def increment(x: int) -> int:
    return x + 1


def call(agent: Agent, to: str) -> Any:
    return agent.call_sync(to, increment, (1,), {}, PATIENCE_S)


@pytest.fixture
def trio() -> Iterator[list[Agent]]:
    with rpc.local_agents(3, RpcOptions(shared_memory_bytes=64 * MB)) as agents:
        for agent in agents:
            for other in agents:
                call(agent, other.info.name)
        yield agents


def memory_file(size: int, *, filled: int = 0, seals: int = SEALS) -> int:
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    for at in range(0, filled, MB):
        os.pwrite(fd, bytes(min(MB, filled - at)), at)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def lend(agent: Agent, files: list[int], segments: list[tuple[int, int, int]], announced: int) -> None:
    """A call of worker0 whose tensors lie in segments (id, size, used), with file descriptors beside it."""
    descriptions = [("uint8", 0, (used,), None, None, used, (id, size)) for id, size, used in segments]
    packed = pack((tuple(torch.zeros(1) for _ in segments),)) if segments else EMPTY
    meta = dump_meta(("builtins", "len"), packed, descriptions, (), None)
    frame = frame_bytes(Kind.CALL, 1 << 40, meta, depth=1, fds=announced)
    connection = agent.peer("worker0").sender
    assert connection is not None
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    with contextlib.suppress(OSError):
        connection.sock.sendmsg([frame], rights)
    for fd in files:
        os.close(fd)


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def mappings() -> list[int]:
    """The sizes of what is mapped of a liar's memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "/memfd:hostile" in line]
    return [int(end, 16) - int(start, 16) for start, end in spans]


def memory_files_open() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += "memfd:hostile" in os.readlink(f"/proc/self/fd/{fd}")
    return count


def is_dropped(agents: list[Agent]) -> None:
    eventually(lambda: len(agents[0].get_worker_infos()) == 2, "the liar being dropped")
    with pytest.raises(WorkerLost, match="worker2"):
        call(agents[0], "worker2")


def the_others_go_on(agents: list[Agent]) -> None:
    assert call(agents[0], "worker1") == 2
    assert call(agents[1], "worker0") == 2
    # A mapping of Python's keeps its file open.
    eventually(lambda: memory_files_open() == len(mappings()), "every other descriptor being closed")


def test_an_empty_file_of_3_gb_is_not_filled(trio: list[Agent]) -> None:
    before = resident_bytes()
    size = 3 << 30
    lend(trio[2], [memory_file(size)], [(1, size, size)], 1)
    the_others_go_on(trio)
    assert call(trio[2], "worker0") == 2  # too much: an error to its sender
    assert resident_bytes() - before < 200 * MB
    assert mappings() == []


WRONG = {
    "holes": lambda: (memory_file(8 * MB), (1, 8 * MB, 8 * MB)),
    "a hole at the end": lambda: (memory_file(8 * MB, filled=7 * MB), (1, 8 * MB, 8 * MB)),
    "no seals": lambda: (memory_file(MB, filled=MB, seals=0), (1, MB, MB)),
    "may shrink": lambda: (memory_file(MB, filled=MB, seals=fcntl.F_SEAL_GROW), (1, MB, MB)),
    "may lose its seals": lambda: (memory_file(MB, filled=MB, seals=fcntl.F_SEAL_SHRINK), (1, MB, MB)),
    "no memory file": lambda: (os.open("/dev/zero", os.O_RDWR), (1, MB, MB)),
    "a pipe": lambda: (os.pipe()[0], (1, MB, MB)),
    "shorter than announced": lambda: (memory_file(MB, filled=MB), (1, 2 * MB, MB)),
    "longer than announced": lambda: (memory_file(2 * MB, filled=MB), (1, MB, MB)),
    "uses more than it has": lambda: (memory_file(MB, filled=MB), (1, MB, 2 * MB)),
    "uses nothing": lambda: (memory_file(MB, filled=MB), (1, MB, 0)),
    "a negative size": lambda: (memory_file(MB, filled=MB), (1, -MB, MB)),
    "an id that is none": lambda: (memory_file(MB, filled=MB), ("1", MB, MB)),
    "an id that cannot be looked up": lambda: (memory_file(MB, filled=MB), ([], MB, MB)),
    "a size that is none": lambda: (memory_file(MB, filled=MB), (1, 1.5, MB)),
}


@pytest.mark.parametrize("name", WRONG)
def test_memory_that_is_not_as_it_should_be(trio: list[Agent], name: str) -> None:
    file, segment = WRONG[name]()
    before = resident_bytes()
    lend(trio[2], [file], [segment], 1)  # type: ignore[list-item]
    is_dropped(trio)
    the_others_go_on(trio)
    assert resident_bytes() - before < 100 * MB


def test_a_segment_is_lent_under_one_number_once(trio: list[Agent]) -> None:
    lend(trio[2], [memory_file(MB, filled=MB)], [(7, MB, MB)], 1)
    assert call(trio[2], "worker0") == 2
    lend(trio[2], [memory_file(MB, filled=MB)], [(7, MB, MB)], 1)
    is_dropped(trio)
    the_others_go_on(trio)


def test_more_than_the_receiver_allows_is_an_error_to_its_sender(trio: list[Agent]) -> None:
    for i in range(1, 11):
        lend(trio[2], [memory_file(16 * MB, filled=MB)], [(i, 16 * MB, MB)], 1)
    assert call(trio[2], "worker0") == 2
    assert mappings() == 4 * [16 * MB]
    the_others_go_on(trio)


@pytest.mark.parametrize("announced", [0, 1, 5])
def test_descriptors_that_do_not_agree_with_what_is_announced(trio: list[Agent], announced: int) -> None:
    files = [memory_file(MB, filled=MB) for _ in range(3)]
    segments = [(i + 1, MB, MB) for i in range(announced)]
    lend(trio[2], files, segments, announced)
    if announced == 5:
        is_dropped(trio)
    else:  # they wait for a frame that wants them; there are never more than one frame's
        for _ in range(200):
            lend(trio[2], [memory_file(MB) for _ in range(3)], [], 0)
        is_dropped(trio)
    the_others_go_on(trio)


def test_descriptors_of_a_message_that_makes_no_sense_are_closed(trio: list[Agent]) -> None:
    frame = frame_bytes(Kind.CALL, 5, dump_meta(("a", "b"), EMPTY, ((), ()), (), None), depth=1, fds=2)
    connection = trio[2].peer("worker0").sender
    assert connection is not None
    files = [memory_file(MB, filled=MB) for _ in range(2)]
    connection.sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    for fd in files:
        os.close(fd)
    is_dropped(trio)
    the_others_go_on(trio)


def test_workers_that_lend_more_than_the_other_maps_get_an_error_and_go_on() -> None:
    """The option is to be the same on all workers. Where it is not, nobody is lost."""
    with rpc.local_agents(2, RpcOptions(shared_memory_bytes=64 * MB)) as agents:
        call(agents[0], "worker1")
        agents[1].peer("worker0").borrower._limit_bytes = MB
        with pytest.raises(PayloadError, match="shared_memory_bytes"):
            agents[0].call_sync("worker1", torch.neg, (torch.ones(MB),), {}, PATIENCE_S)
        assert call(agents[0], "worker1") == 2
        assert agents[0].call_sync("worker1", len, (torch.ones(200_000),), {}, PATIENCE_S) == 200_000


def test_segments_of_many_sizes_stay_within_the_bound() -> None:
    """What the lender drops is unmapped before it lends others, so that an honest one is never refused."""
    with rpc.local_agents(2, RpcOptions(shared_memory_bytes=8 * MB)) as agents:
        for numel in list(range(40_000, 1_500_000, 90_000)) * 3:
            got = agents[0].call_sync("worker1", torch.neg, (torch.ones(numel),), {}, PATIENCE_S)
            assert torch.equal(got, -torch.ones(numel))
