"""Connections over TCP: records of TLS and of MACs, whole whatever the socket does, and peers that stop."""

from __future__ import annotations

import random
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from security.attackers import certified_options, make_certificates, tcp_options
from support.workers import Group, eventually

from farstep import rpc
from farstep.errors import ProtocolError, RpcTimeout
from farstep.rpc import RpcOptions
from farstep.rpc.records import MacSocket, RecordSocket
from farstep.rpc.tls import TlsReceiver, dial, fingerprint_met, make_credentials
from farstep.rpc.wire import Frame, FrameReader, Kind, frame_bytes

KINDS = ["tls", "mac"]


def tcp_pair(buffer_bytes: int) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    for sock, which in ((one, socket.SO_SNDBUF), (other, socket.SO_RCVBUF)):
        sock.setsockopt(socket.SOL_SOCKET, which, buffer_bytes)
    return one, other


def record_pair(kind: str, buffer_bytes: int = 8192) -> tuple[socket.socket, RecordSocket]:
    """Who dialled, and who listened; after the handshake, not blocking."""
    one, other = tcp_pair(buffer_bytes)
    if kind == "mac":
        return MacSocket(one, b"k" * 32), MacSocket(other, b"k" * 32)
    credentials = make_credentials(tcp_options(), "worker")
    listener = TlsReceiver(other, credentials)
    deadline = time.monotonic() + 20
    thread = threading.Thread(target=listener.do_handshake, args=(deadline,), daemon=True)
    thread.start()
    dialler = dial(one, credentials, deadline)
    thread.join(20)
    assert fingerprint_met(dialler) == credentials.fingerprint
    assert fingerprint_met(listener) is None
    return dialler, listener


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, RecordSocket]]:
    pair = record_pair(request.param)
    for sock in pair:
        sock.setblocking(False)
    yield pair
    for sock in pair:
        sock.close()


@pytest.mark.parametrize("seed", range(6))
def test_what_is_sent_arrives_whatever_the_sizes(pair: tuple[socket.socket, RecordSocket], seed: int) -> None:
    """Both ends at random, with small socket buffers: writes that do not fit, reads of a few bytes."""
    sender, receiver = pair
    choose = random.Random(seed)
    sent = choose.randbytes(choose.choice((1, 1000, 70_000, 400_000)))
    rest = memoryview(sent)
    begun = 0
    got = bytearray()
    target = bytearray()  # the same memory until something came: the reader's promise
    while len(got) < len(sent):
        if rest and choose.random() < 0.7:
            if not begun:
                begun = len(rest[: choose.choice((1, 100, 20_000, len(rest)))])
            try:
                rest = rest[sender.send(bytes(rest[:begun])) :]  # a copy: the same bytes, lying elsewhere
                begun = 0
            except (BlockingIOError, ssl.SSLWantWriteError):
                pass  # again with the same bytes
        if not target:
            target = bytearray(choose.choice((1, 3000, 50_000, 300_000)))
        try:
            count = receiver.recv_into(memoryview(target))
        except BlockingIOError:
            if not receiver.has_more:
                select.select([receiver], [sender] if rest else [], [], 0.01)
            continue
        assert count
        got += target[:count]
        target = bytearray()
    assert bytes(got) == sent
    assert not receiver.has_more


def test_the_end_of_the_stream_is_told(pair: tuple[socket.socket, RecordSocket]) -> None:
    sender, receiver = pair
    sender.send(b"last words")
    sender.close()
    select.select([receiver], [], [], 5)
    target = bytearray(100)
    assert receiver.recv_into(memoryview(target)) == 10
    select.select([receiver], [], [], 5)
    assert receiver.recv_into(memoryview(target)) == 0


@pytest.mark.parametrize("length", [0, (256 << 10) + 1, 2**32 - 1])
def test_a_record_of_a_length_that_cannot_be(length: int) -> None:
    one, other = tcp_pair(8192)
    receiver = MacSocket(other, b"k" * 32)
    one.sendall(length.to_bytes(4, "little") + bytes(16))
    with pytest.raises(ProtocolError, match="claims"):
        receiver.recv_into(memoryview(bytearray(100)))
    one.close()
    receiver.close()


# -- peers that stop


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def negate(to: str, numel: int, timeout: float) -> str:
    try:
        x = torch.ones(numel)
        assert torch.equal(rpc.rpc_sync(to, torch.neg, args=(x,), timeout=timeout), -x)
        return "done"
    except RpcTimeout:
        return "timeout"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tls", "certified", "mac"])
def test_a_stopped_peer_over_tcp_gets_whole_frames_afterwards(
    workers: Callable[..., Group], certificates: Path, how: str
) -> None:
    options: dict[str, Any] = {"transport": "tcp", "secret": "a secret among friends", "host": "127.0.0.1"}
    if how == "certified":
        files: RpcOptions = certified_options(certificates)
        options |= {"tls_cert": files.tls_cert, "tls_key": files.tls_key, "tls_ca": files.tls_ca}
    group = workers(2, dangerously_unencrypted_tcp=how == "mac", **options)
    assert group[0].run(negate, "worker1", 10, 20.0) == "done"
    group[1].stop()
    for numel in (3_000_000, 3_000_000, 10, 100_000, 10):
        assert group[0].run(negate, "worker1", numel, 0.2) == "timeout"
    group[1].cont()
    for numel in (10, 3_000_000, 10):
        assert group[0].run(negate, "worker1", numel, 20.0) == "done"


# -- what a review found


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_fill_the_buffer_exactly_are_handed_out_without_another_wait(kind: str) -> None:
    """The reader asks again because there may be more, and must not wait for it with what has come in its hands."""
    sender, receiver = record_pair(kind, 1 << 20)
    receiver.setblocking(True)
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 20, 0))
    frame = frame_bytes(Kind.REPLY, 1, b"", [1 << 16])
    sent = memoryview(frame + bytes(1 << 16))
    while sent:
        sent = sent[sender.send(sent) :]

    def recv(view: memoryview) -> int | None:
        try:
            return receiver.recv_into(view)
        except BlockingIOError:
            return None

    reader = FrameReader(recv, 1 << 30, receiver)
    began = time.monotonic()
    frames: list[Frame] = []
    while not frames:
        frames = reader.read()
    assert len(frames) == 1
    assert time.monotonic() - began < 15  # it would be the socket's limit of 20 s
    sender.close()
    receiver.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_a_group_ends_after_a_call_that_timed_out_while_it_was_sent(
    workers: Callable[..., Group], transport: str
) -> None:
    """The peer gets the call when it reads on, long after its caller has given up: what was sent and received comes out even."""
    group = workers(
        2, transport=transport, secret="a secret among friends", host="127.0.0.1", shared_memory_bytes=0
    )
    assert group[0].run(negate, "worker1", 10, 20.0) == "done"
    group[1].stop()
    assert group[0].run(negate, "worker1", 16_000_000, 1.0) == "timeout"
    group[1].cont()
    assert group[0].run(negate, "worker1", 10, 20.0) == "done"
    group.finish(group.start_all(rpc.shutdown, timeout=20))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_changes_while_it_is_sent_does_not_end_the_connection(kind: str) -> None:
    """As parameters do that another thread updates in place."""
    stop = threading.Event()
    parameter = torch.zeros(4_000_000)
    parameters.append(parameter)

    def update() -> None:
        while not stop.is_set():
            parameter.add_(1)

    threading.Thread(target=update, daemon=True).start()
    try:
        with rpc.local_agents(2, tcp_options(dangerously_unencrypted_tcp=kind == "mac")) as (one, _):
            for _ in range(10):
                assert one.call_sync("worker1", read_parameters, (), {}, 20.0).shape == (4_000_000,)
    finally:
        stop.set()
        parameters.clear()


parameters: list[torch.Tensor] = []


def read_parameters() -> torch.Tensor:
    return parameters[0]


def test_a_peer_that_writes_where_it_has_nothing_to_send_is_dropped() -> None:
    """One byte there would use up the event that says when it reads again."""
    with rpc.local_agents(2, tcp_options(dangerously_unencrypted_tcp=True)) as (one, other):
        assert one.call_sync("worker1", max, (1, 2), {}, 20.0) == 2
        receiver = other.peer("worker0").receiver
        assert receiver is not None
        socket.socket.send(receiver.sock, b"x")
        eventually(lambda: not one.is_present(1), "worker0 dropping it")
