"""A peer with the secret, under the default trust: a message that makes no sense costs its sender and nobody else."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from support.workers import bounded, eventually

from farstep import rpc
from farstep.errors import WorkerLost
from farstep.rpc import Agent
from farstep.rpc.message import EMPTY, dump_meta
from farstep.rpc.wire import HEADER, MAGIC, VERSION, Kind, frame_bytes
from security.members import PATIENCE_S, call, inject

MALFORMED = {
    "not a frame": b"\x00" * 64,
    "text": b"GET / HTTP/1.1\r\n\r\n" + b" " * 64,
    "another version": HEADER.pack(MAGIC, VERSION + 1, Kind.CALL, 0, 0, 0, 0, 1),
    "an unknown kind": HEADER.pack(MAGIC, VERSION, 200, 0, 0, 0, 0, 1),
    "a terabyte": frame_bytes(Kind.CALL, 1, b"", [1 << 40]),
    "a meta of 4 GB and a terabyte": HEADER.pack(MAGIC, VERSION, Kind.CALL, 0, 0, 2**32 - 1, 1, 1)
    + struct.pack("<Q", 1 << 40),
    "too many buffers": HEADER.pack(MAGIC, VERSION, Kind.CALL, 0, 0, 0, 2**32 - 1, 1),
    "a meta that is no pickle": frame_bytes(Kind.CALL, 1, b"garbage"),
    "a meta that is no tuple": frame_bytes(Kind.CALL, 1, pickle.dumps(5)),
    "an empty meta": frame_bytes(Kind.CALL, 1, b""),
    "descriptors that did not come": frame_bytes(
        Kind.CALL, 1, dump_meta(("a", "b"), EMPTY, (), (), None), fds=3
    ),
    "a REMOTE without ids": frame_bytes(Kind.REMOTE, 1, dump_meta(None, EMPTY, (), (), None)),
    "a FETCH of nothing": frame_bytes(Kind.FETCH, 1, dump_meta(5, EMPTY, (), (), None)),
    "an RREF of an unknown verb": frame_bytes(Kind.RREF, 0, dump_meta(("explode", []), EMPTY, (), (), None)),
    "an RREF of the wrong shape": frame_bytes(Kind.RREF, 0, dump_meta(("add", [1, 2]), EMPTY, (), (), None)),
    "a RELEASE of the wrong shape": frame_bytes(Kind.RELEASE, 0, dump_meta("x", EMPTY, (), (), None)),
    "a RELEASE of what was never lent": frame_bytes(
        Kind.RELEASE, 0, dump_meta(([[], {}], [[]]), EMPTY, (), (), None)
    ),
    "a LOST of the wrong shape": frame_bytes(Kind.LOST, 0, dump_meta(7, EMPTY, (), (), None)),
    "references of the wrong shape": frame_bytes(
        Kind.CALL, 1, dump_meta(("a", "b"), EMPTY, (), [(1, 2)], None)
    ),
    "a reference without a fork": frame_bytes(
        Kind.CALL, 1, dump_meta(("a", "b"), EMPTY, (), [(1, "x", (0, 1), None, 0, True)], None)
    ),
    "descriptions of the wrong shape": frame_bytes(
        Kind.CALL, 1, dump_meta(("a", "b"), EMPTY, ("x",), (), None), fds=1
    ),
    "a bundle that is no pickle": frame_bytes(Kind.BUNDLE, 0, b"garbage"),
    "a bundle that is no list": frame_bytes(Kind.BUNDLE, 0, dump_meta(None, EMPTY, (), (), None)),
    "a bundle in a bundle": frame_bytes(
        Kind.BUNDLE, 0, pickle.dumps([(int(Kind.BUNDLE), 0, 0, None, [(1, 1, 0, ("builtins", "len"), b"")])])
    ),
    "a GOODBYE in a bundle": frame_bytes(
        Kind.BUNDLE, 0, pickle.dumps([(int(Kind.GOODBYE), 0, 0, None, ([], None))])
    ),
    "a call in a bundle that cannot be answered": frame_bytes(
        Kind.BUNDLE, 0, pickle.dumps([(int(Kind.CALL), 1 << 64, 0, ("builtins", "int"), ([], None))])
    ),
    "a bundle with buffers": frame_bytes(Kind.BUNDLE, 0, pickle.dumps([]), [3]) + b"abc",
    "a bundle with descriptors": frame_bytes(Kind.BUNDLE, 0, pickle.dumps([]), fds=1),
}
"""What a member may send that is not a message. It is dropped, and the others go on."""

WRONG_CALLS = {
    "a CALL without a name": dump_meta(None, EMPTY, (), (), None),
    "a CALL of a number": dump_meta(5, EMPTY, (), (), None),
    "a CALL with a wrong body": pickle.dumps((("builtins", "len"), 5, (), (), (), None), 5),
    "a tensor without its buffer": dump_meta(
        ("builtins", "len"), EMPTY, (("float32", 0, (2,), None, None, 8, None),), (), None
    ),
    "a tensor in a segment that was not lent": dump_meta(
        ("builtins", "len"), EMPTY, (("float32", 0, (2,), None, None, 8, (99, 0)),), (), None
    ),
    "a tensor beyond its bytes": dump_meta(
        ("builtins", "len"), EMPTY, (("float32", 0, (1 << 40,), None, None, 8, None),), (), None
    ),
    "a tensor of a strange dtype": dump_meta(
        ("builtins", "len"), EMPTY, (("float3", 0, (2,), None, None, 8, None),), (), None
    ),
    "a description that is none": dump_meta(("builtins", "len"), EMPTY, (5,), (), None),
}
"""A whole frame whose content is wrong: the sender gets an error for its call, or is dropped."""


@pytest.fixture
def trio() -> Iterator[list[Agent]]:
    with rpc.local_agents(3) as agents:
        for agent in agents:
            for other in agents:
                call(agent, other.info.name)
        yield agents


@pytest.mark.parametrize("name", MALFORMED)
def test_a_member_that_sends_what_is_no_message_is_dropped_and_the_rest_goes_on(
    trio: list[Agent], name: str
) -> None:
    pending = trio[0].call_async("worker2", block, (), {}, PATIENCE_S)
    inject(trio[2], "worker0", MALFORMED[name])
    eventually(lambda: len(trio[0].get_worker_infos()) == 2, "the liar being dropped")
    with pytest.raises(WorkerLost, match="worker2"):
        bounded(pending.wait)
    with pytest.raises(WorkerLost, match="worker2"):
        call(trio[0], "worker2")
    assert call(trio[0], "worker1") == 2
    assert call(trio[1], "worker0") == 2


def block() -> None:
    blocking.wait(1.0)


blocking = threading.Event()


def test_a_member_that_stops_in_the_middle_of_a_frame_is_dropped_when_it_goes(trio: list[Agent]) -> None:
    whole = frame_bytes(Kind.CALL, 5, dump_meta(("builtins", "len"), EMPTY, (), (), None), [1 << 20])
    inject(trio[2], "worker0", whole + b"x" * 1000)
    connection = trio[2].peer("worker0").sender
    assert connection is not None
    connection.sock.shutdown(socket.SHUT_WR)
    eventually(lambda: len(trio[0].get_worker_infos()) == 2, "the liar being dropped")
    assert call(trio[0], "worker1") == 2


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_call_whose_content_is_wrong_harms_nobody_else(trio: list[Agent], name: str) -> None:
    inject(trio[2], "worker0", frame_bytes(Kind.CALL, 12345, WRONG_CALLS[name]))
    assert call(trio[0], "worker1") == 2
    assert call(trio[1], "worker0") == 2
    try:
        assert call(trio[2], "worker0") == 2  # either it is still a member, or it has been dropped
    except WorkerLost:
        pass
    assert call(trio[0], "worker1") == 2
