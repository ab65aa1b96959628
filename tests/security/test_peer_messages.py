"""A peer with the secret, under the default trust: a message that makes no sense costs its sender and nobody else."""

from __future__ import annotations

import contextlib
import io
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.memory import begin_of_peak, peak_bytes
from support.workers import bounded, eventually

from farstep import rpc
from farstep.errors import ProtocolError, RpcError, WorkerLost
from farstep.rpc import Agent, RpcOptions
from farstep.rpc.gather import all_gather, join
from farstep.rpc.message import EMPTY, dump_meta, read_message
from farstep.rpc.wire import HEADER, MAGIC, VERSION, Frame, Kind, frame_bytes
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


DEEP = b")" + b"\x85" * 300_000
"""The opcodes of a tuple nested so deep that the process ends when it is hashed."""
DOUBLED = b")" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(60))
"""Of a tuple of itself twice, and so on, 60 times: it is never done being hashed, compared or printed."""


def opcodes(value: Any) -> bytes:
    """Those that make a value, without the frame around them and without the memo."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, 2)
    pickler.fast = True
    pickler.dump(value)
    return out.getvalue()[2:-1]


def meta_of(
    head: Any,
    *,
    body: bytes | None = None,
    slots: Any = (),
    tensors: Any = (),
    refs: Any = (),
    extra: Any = None,
) -> bytes:
    """A message's meta, each part a value or, as bytes, the opcodes of one."""
    parts = (head, body or ([], None), slots, tensors, refs, extra)
    made = b"".join(part if type(part) is bytes else opcodes(part) for part in parts)
    return b"\x80\x05(" + made + b"t."


def pair(first: bytes, second: bytes) -> bytes:
    return first + second + b"\x86"


def listed(*values: bytes) -> bytes:
    return b"](" + b"".join(values) + b"e"


def several(*values: bytes) -> bytes:
    return b"(" + b"".join(values) + b"t"


def hostile_metas(bad: bytes) -> dict[str, tuple[Kind, bytes]]:
    """Every field of every message that is looked up, compared or counted, with `bad` in its place."""
    id, text = opcodes((1, 2)), opcodes("x")
    settings = [opcodes(part) for part in ((2, 1), 5, False, False, "smart", 1)]
    report = several(*[opcodes(part) for part in (2, [], [], None, 1)])
    return {
        "the id of a FETCH": (Kind.FETCH, meta_of(bad)),
        "half the id of a FETCH": (Kind.FETCH, meta_of(pair(b"K\x01", bad))),
        "the name of a CALL": (Kind.CALL, meta_of(bad)),
        "half the name of a CALL": (Kind.CALL, meta_of(pair(text, bad))),
        "the id of a REMOTE": (Kind.REMOTE, meta_of(several(b"N", bad, id))),
        "the fork of a REMOTE": (Kind.REMOTE, meta_of(several(opcodes(("a", "b")), id, bad))),
        "the verb of an RREF": (Kind.RREF, meta_of(pair(bad, b"]"))),
        "an id that is added": (Kind.RREF, meta_of(pair(opcodes("add"), listed(several(bad, id, b"K\x00"))))),
        "a fork that is added": (Kind.RREF, meta_of(pair(opcodes("add"), listed(several(id, bad, b"K\x00"))))),
        "a holder that is added": (Kind.RREF, meta_of(pair(opcodes("add"), listed(several(id, id, bad))))),
        "a fork that is confirmed": (Kind.RREF, meta_of(pair(opcodes("confirm"), listed(several(id, bad, b"K\x00"))))),
        "a fork that is deleted": (Kind.RREF, meta_of(pair(opcodes("delete"), listed(pair(id, bad))))),
        "a worker that is asked about": (Kind.RREF, meta_of(pair(opcodes("check"), pair(bad, b"]")))),
        "a fork that is asked about": (Kind.RREF, meta_of(pair(opcodes("check"), pair(b"K\x01", listed(pair(id, bad)))))),
        "a segment that is released": (Kind.RELEASE, meta_of(pair(listed(bad), b"]"))),
        "a segment that is dropped": (Kind.RELEASE, meta_of(pair(b"]", listed(bad)))),
        "the label of a GATHER": (Kind.GATHER, meta_of(several(bad, b"K\x00", text, b"N", b"K\x05"))),
        "the number of a GATHER": (Kind.GATHER, meta_of(several(text, bad, text, b"N", b"K\x05"))),
        "a name in a GATHER": (Kind.GATHER, meta_of(several(text, b"K\x00", text, listed(bad), b"K\x05"))),
        "the time of a GATHER": (Kind.GATHER, meta_of(several(text, b"K\x00", text, b"N", bad))),
        "the name of a LOST": (Kind.LOST, meta_of(several(bad, text, text))),
        "the reason of a LOST": (Kind.LOST, meta_of(several(text, text, bad))),
        "the text of an ERROR": (Kind.ERROR, meta_of(several(text, bad, text, text))),
        "the head of a REPLY": (Kind.REPLY, meta_of(bad)),
        "the head of a GOODBYE": (Kind.GOODBYE, meta_of(bad)),
        "an argument": (Kind.CALL, meta_of(opcodes(("builtins", "hash")), body=pair(listed(bad), b"N"))),
        "a slot": (Kind.CALL, meta_of(opcodes(("a", "b")), slots=listed(bad))),
        "a description": (Kind.CALL, meta_of(opcodes(("a", "b")), tensors=listed(bad))),
        "a dtype": (Kind.CALL, meta_of(opcodes(("a", "b")), tensors=listed(several(bad, *[opcodes(x) for x in (0, (1,), None, None, 4, None)])))),
        "a shape": (Kind.CALL, meta_of(opcodes(("a", "b")), tensors=listed(several(*[opcodes(x) for x in ("float32", 0)], bad, *[opcodes(x) for x in (None, None, 4, None)])))),
        "a segment": (Kind.CALL, meta_of(opcodes(("a", "b")), tensors=listed(several(*[opcodes(x) for x in ("float32", 0, (1,), None, None, 4)], pair(bad, b"K\x00"))))),
        "a fork note": (Kind.CALL, meta_of(opcodes(("a", "b")), body=opcodes(b"x"), refs=listed(bad))),
        "the id in a fork note": (Kind.CALL, meta_of(opcodes(("a", "b")), body=opcodes(b"x"), refs=listed(several(b"K\x00", text, bad, id, b"K\x00", b"\x88")))),
        "the fork in a fork note": (Kind.CALL, meta_of(opcodes(("a", "b")), body=opcodes(b"x"), refs=listed(several(b"K\x00", text, id, bad, b"K\x00", b"\x88")))),
        "an extra": (Kind.CALL, meta_of(opcodes(("a", "b")), extra=bad)),
        "the tensors of an extra": (Kind.CALL, meta_of(opcodes(("a", "b")), extra=pair(b"(" + bad + b"t", opcodes((1, 2, True))))),
        "the context of an extra": (Kind.CALL, meta_of(opcodes(("a", "b")), extra=pair(b")", several(bad, b"K\x01", b"\x88")))),
        "the context of a reply's extra": (Kind.REPLY, meta_of(None, extra=pair(b")", several(bad, b"K\x01", b"\x88")))),
        "the verb of an EXTENSION": (Kind.EXTENSION, meta_of(several(bad, b"K\x01"))),
        "the context of a release": (Kind.EXTENSION, meta_of(pair(opcodes("release"), bad))),
        "the context of a joined": (Kind.EXTENSION, meta_of(pair(opcodes("joined"), bad))),
        "the pass of a grad": (Kind.EXTENSION, meta_of(several(opcodes("grad"), bad, *settings[1:], b"]", b"\x89", b"N"))),
        "the context of a grad": (Kind.EXTENSION, meta_of(several(opcodes("grad"), settings[0], bad, *settings[2:], b"]", b"\x89", b"N"))),
        "the mode of a grad": (Kind.EXTENSION, meta_of(several(opcodes("grad"), *settings[:4], bad, settings[5], b"]", b"\x89", b"N"))),
        "a message of a grad": (Kind.EXTENSION, meta_of(several(opcodes("grad"), *settings, listed(pair(bad, b"]")), b"\x89", b"N"))),
        "the key of a settle": (Kind.EXTENSION, meta_of(several(opcodes("settle"), *settings, bad, b"N"))),
        "a send in a wave": (Kind.EXTENSION, meta_of(several(opcodes("wave"), *settings, b"K\x01", listed(bad)))),
        "a report": (Kind.EXTENSION, meta_of(several(opcodes("report"), *settings, bad, b"N"))),
        "a key that is done": (Kind.EXTENSION, meta_of(several(opcodes("report"), *settings, several(b"K\x02", listed(bad), b"]", b"N", b"K\x01"), b"N"))),
        "a failure": (Kind.EXTENSION, meta_of(several(opcodes("report"), *settings, report, bad))),
        "the pass of an abort": (Kind.EXTENSION, meta_of(several(opcodes("abort"), bad, *settings[1:]))),
    }  # fmt: skip


BAD = {
    "deep": DEEP,
    "doubled": DOUBLED,
    "a list": b"]",
    "a dict": b"}",
    "a negative number": b"J\xff\xff\xff\xff",
}
BUNDLES = {
    "a deep id": pair(DEEP, b"K\x01"),
    "a deep name": several(b"K\x01K\x01K\x00", DEEP, pair(b"]", b"N")),
    "a doubled name": several(b"K\x01K\x01K\x00", DOUBLED, pair(b"]", b"N")),
    "a deep argument": several(b"K\x01K\x01K\x00", opcodes(("builtins", "hash")), pair(listed(DEEP), b"N")),
    "a deep error": several(b"K\x04K\x01K\x00", several(DEEP, *[opcodes("x")] * 3), pair(b"]", b"N")),
    "a deep kind": several(DEEP, b"K\x01K\x00", b"N", pair(b"]", b"N")),
    "a deep call id": several(b"K\x03", DEEP, b"K\x00", b"N", pair(b"]", b"N")),
}


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


NARROW = ("security.members",)
BOTH_TRUSTS = pytest.mark.parametrize("trusted", [None, NARROW], ids=["open", "narrow"])


def tell(trusted: tuple[str, ...] | None, messages: dict[str, bytes]) -> None:
    """Members say one of these each to worker0, and are dropped for it. It and worker1 go on calling each other."""
    with rpc.local_agents(2 + len(messages), RpcOptions(trusted=trusted)) as (victim, witness, *liars):
        for liar, (what, data) in zip(liars, messages.items(), strict=True):
            assert call(liar, "worker0") == 2
            inject(liar, "worker0", data)
            eventually(
                lambda liar=liar: liar.info not in victim.get_worker_infos(),
                f"{what}: its sender being dropped",
            )
            assert call(victim, "worker1") == call(witness, "worker0") == 2


@BOTH_TRUSTS
@pytest.mark.parametrize("bad", [name for name in BAD if name != "deep"])
def test_no_field_of_a_message_is_used_before_its_type_is_known(
    trusted: tuple[str, ...] | None, bad: str
) -> None:
    with rpc.local_agents(1, RpcOptions(trusted=trusted)) as (agent,):
        for name, (kind, meta) in hostile_metas(BAD[bad]).items():
            if (bad, name) in MAY_BE:
                continue
            frame = Frame(kind, 77, 1, 0)
            frame.meta = meta
            with pytest.raises(ProtocolError) as caught:
                read_message(frame, agent.links.me, agent.trust.is_open)
            assert len(str(caught.value)) < 500, name


MAY_BE = {
    ("a list", "a report"): "",
    ("a negative number", "an argument"): "a number is an argument like any other",
}


@pytest.mark.slow
@pytest.mark.timeout(180)
@BOTH_TRUSTS
@pytest.mark.parametrize("bad", ["deep", "doubled"])
def test_a_message_that_would_end_the_process_costs_its_sender(
    trusted: tuple[str, ...] | None, bad: str
) -> None:
    frames = [(name, frame_bytes(kind, 77, meta)) for name, (kind, meta) in hostile_metas(BAD[bad]).items()]
    for start in range(0, len(frames), 10):
        tell(trusted, dict(frames[start : start + 10]))


@pytest.mark.slow
@BOTH_TRUSTS
def test_a_bundle_that_would_end_the_process_costs_its_sender(trusted: tuple[str, ...] | None) -> None:
    metas = {name: b"\x80\x05" + listed(rider) + b"." for name, rider in BUNDLES.items()}
    tell(trusted, {name: frame_bytes(Kind.BUNDLE, 0, meta) for name, meta in metas.items()})


HUGE_MEMO = b"\x80\x05Nr" + struct.pack("<I", 2**31) + b"0"
NARROW_ONLY = {
    "a place in the memo that takes gigabytes": HUGE_MEMO + meta_of(("a", "b"))[2:],
    "a deep key": meta_of(("a", "b"), body=pair(b"]", b"}" + DEEP + b"Ns")),
    "a set": meta_of(("a", "b"), body=pair(listed(b"\x8f"), b"N")),
    "a frozenset of something deep": meta_of(("a", "b"), body=pair(listed(b"(" + DEEP + b"\x91"), b"N")),
    "a name": meta_of(("a", "b"), body=pair(listed(b"cos\nsystem\n"), b"N")),
    "a number for a key": meta_of(("a", "b"), body=pair(b"]", b"}K\x01Ns")),
}


def test_where_trust_is_narrow_a_meta_has_plain_values_only() -> None:
    tell(NARROW, {name: frame_bytes(Kind.CALL, 77, meta) for name, meta in NARROW_ONLY.items()})


FLOAT = ("float32", 0, (2,), None, None, 8, None)
ONE_TENSOR = ([None], None)
WRONG_TENSORS: dict[str, tuple[Any, list[bytes]]] = {
    "a shape without bytes": (("float32", 0, (1024,), None, None, 0, None), [b""]),
    "a larger shape": (("float32", 0, (1024,), None, None, 8, None), [b"x" * 8]),
    "a smaller shape": (("float32", 0, (1,), None, None, 8, None), [b"x" * 8]),
    "strides beyond the bytes": (("float32", 0, (2,), (100,), None, 8, None), [b"x" * 8]),
    "strides that leave bytes over": (("float32", 0, (2,), (1,), None, 16, None), [b"x" * 16]),
    "no strides and no bytes": (("float32", 0, (5,), (1,), None, 0, None), [b""]),
    "fewer bytes than announced": (("float32", 0, (2,), None, None, 8, None), [b"x" * 4]),
    "an empty tensor with bytes": (("float32", 0, (0,), None, None, 8, None), [b"x" * 8]),
    "an overflowing shape": (("float32", 0, (1 << 63, 2, 1 << 63), None, None, 0, None), [b""]),
    "an overflowing shape of one element": (("float32", 0, (1 << 62, 8), (0, 0), None, 4, None), [b"x" * 4]),
    "half an element": (("float32", 0, (1,), None, None, 3, None), [b"x" * 3]),
    "a parameter of whole numbers": (("int64", 3, (1,), None, None, 8, None), [b"x" * 8]),
    "a strange device": (("float32", 0, (2,), None, "nowhere:77", 8, None), [b"x" * 8]),
    "a strange dtype": (("float3", 0, (2,), None, None, 8, None), [b"x" * 8]),
    "too many dimensions": (("float32", 0, (1,) * 1000, None, None, 4, None), [b"x" * 4]),
    "a negative size": (("float32", 0, (-1, -2), None, None, 8, None), [b"x" * 8]),
    "a true size": (("float32", 0, (True, 2), None, None, 8, None), [b"x" * 8]),
    "one buffer too many": (FLOAT, [b"x" * 8, b"x" * 8]),
    "one buffer too few": (FLOAT, []),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_a_tensor_is_exactly_the_bytes_that_were_sent(trio: list[Agent], name: str) -> None:
    """Or else memory of this worker's would be sent back, with what others had in it."""
    description, buffers = WRONG_TENSORS[name]
    seen.clear()
    meta = pickle.dumps(((__name__, "see"), ONE_TENSOR, [0], [description], (), None), 5)
    frame = frame_bytes(Kind.CALL, 12345, meta, [len(b) for b in buffers])
    inject(trio[2], "worker0", frame + b"".join(buffers))
    # What follows on the same connection is read after it: the liar is dropped, or the call has failed by then.
    with contextlib.suppress(WorkerLost):
        call(trio[2], "worker0")
    assert call(trio[0], "worker1") == call(trio[1], "worker0") == 2
    assert not seen


seen: list[torch.Tensor] = []


def see(tensor: torch.Tensor) -> None:
    seen.append(tensor)


def test_tensors_that_are_in_order_arrive(trio: list[Agent]) -> None:
    for tensor in (
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.empty(0, 3).t(),
        torch.tensor(5.0),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(3.0).expand(1000, 3),
        torch.arange(10)[::2],
        torch.nn.Parameter(torch.ones(2)),
    ):
        arrived = trio[0].call_sync("worker1", torch.clone, (tensor,), {}, PATIENCE_S)
        assert torch.equal(arrived, tensor)
        assert arrived.shape == tensor.shape


def test_a_part_of_a_gathering_in_another_s_name_costs_its_sender(trio: list[Agent]) -> None:
    head = ("user/*", 0, "worker1", None, 5.0)
    inject(trio[2], "worker0", frame_bytes(Kind.GATHER, 5, dump_meta(head, EMPTY, (), (), None)))
    eventually(lambda: len(trio[0].get_worker_infos()) == 2, "the liar being dropped")
    assert call(trio[0], "worker1") == 2


def test_memory_that_is_only_announced_is_not_taken(trio: list[Agent]) -> None:
    before = begin_of_peak()
    inject(trio[2], "worker0", HEADER.pack(MAGIC, VERSION, Kind.CALL, 0, 0, 2**31, 0, 1) + b"x" * 300_000)
    receiver = trio[0].peer("worker2").receiver
    assert receiver is not None
    eventually(lambda: receiver._reader._large is not None, "the frame being begun")
    assert peak_bytes() - before < 500 << 20
    assert call(trio[0], "worker1") == 2


def test_a_reply_to_no_call_harms_nobody(trio: list[Agent]) -> None:
    for kind, head in ((Kind.REPLY, None), (Kind.ERROR, ("E", "text", "worker2", "trace"))):
        for body in (([5], None), b"no pickle", ([], None)):
            meta = pickle.dumps((head, body, (), (), (), None), 5)
            inject(trio[2], "worker0", frame_bytes(kind, 1 << 63, meta))
    assert call(trio[2], "worker0") == call(trio[0], "worker2") == call(trio[0], "worker1") == 2


@pytest.mark.parametrize("depth", [60_002, 65_535])
def test_a_call_that_is_nested_deeper_than_any_costs_its_sender(trio: list[Agent], depth: int) -> None:
    meta = dump_meta(("builtins", "int"), EMPTY, (), (), None)
    inject(trio[2], "worker0", frame_bytes(Kind.CALL, 5, meta, depth=depth))
    eventually(lambda: len(trio[0].get_worker_infos()) == 2, "the liar being dropped")
    assert call(trio[0], "worker1") == 2


@pytest.mark.slow
def test_a_liar_s_part_does_not_break_the_others_shutdown() -> None:
    with rpc.local_agents(3) as agents:
        leaving = [
            threading.Thread(target=join, args=(agent, PATIENCE_S, PATIENCE_S)) for agent in agents[:2]
        ]
        lies = threading.Thread(target=tell_lies, args=(agents[2],))
        failed: list[BaseException] = []
        before, threading.excepthook = threading.excepthook, lambda args: failed.append(args.exc_value)  # type: ignore[arg-type,return-value]
        try:
            for thread in (*leaving, lies):
                thread.start()
            for thread in (*leaving, lies):
                thread.join(PATIENCE_S)
                assert not thread.is_alive()
        finally:
            threading.excepthook = before
        assert not failed


def tell_lies(agent: Agent) -> None:
    for lie in (None, ("a", "b"), 5, (1, 2, 3), (1.5, "x")):
        with contextlib.suppress(RpcError):
            all_gather(agent, lie, None, 2.0, "join")


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
