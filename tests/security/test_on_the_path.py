"""Somebody on the path: sees, delays, changes and injects bytes, and holds no secret. They get a connection cut, and nothing else."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.workers import eventually

from farstep.errors import AuthenticationError, RpcError, WorkerLost
from farstep.rpc import Agent, RpcOptions, handshake
from farstep.rpc.group import join_group
from farstep.rpc.wire import Kind, frame_bytes
from security.attackers import (
    PATIENCE_S,
    SECRET,
    Grow,
    InBetween,
    call,
    card,
    certified_options,
    closing,
    greeting,
    introduce,
    introduction,
    is_hung_up_on,
    knock,
    proof,
    rerouted,
    tcp_options,
    tls_ends,
)


@pytest.fixture
def tcp() -> Iterator[Grow]:
    yield from closing(Grow("tcp"))


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def evil_call(path: Path) -> bytes:
    """A frame with a call that would run `os.mkdir` while it is opened."""
    body = pickle.dumps((None, (Evil(path),), None))
    return frame_bytes(
        Kind.CALL, 1 << 40, pickle.dumps((("builtins", "len"), body, (), (), (), None)), depth=1
    )


def mac_record(data: bytes) -> bytes:
    return struct.pack("<I16s", len(data), secrets.token_bytes(16)) + data


def two(options: list[RpcOptions]) -> tuple[list[Agent], list[BaseException]]:
    """worker0 and worker1 come together, or fail to."""
    store = dist.HashStore()
    agents: list[Agent] = []
    errors: list[BaseException] = []

    def start(rank: int) -> None:
        try:
            agents.append(join_group(store, f"worker{rank}", rank, 2, options[rank]))
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=start, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return agents, errors


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def both_ways(
    make: Callable[[tuple[str, int]], InBetween], **options: Any
) -> tuple[list[RpcOptions], dict[tuple[str, int], InBetween]]:
    """Options of two workers, and somebody in between on every connection that they make."""
    ports = [free_port(), free_port()]
    routes = {("127.0.0.1", port): make(("127.0.0.1", port)) for port in ports}
    return [tcp_options(port=port, init_timeout_s=8, **options) for port in ports], routes


# -- relays


@pytest.mark.parametrize(
    "certified", [False, True], ids=["self-signed", "a certificate of the group's authority"]
)
def test_a_relay_that_ends_tls_does_not_pass(certificates: Path, tmp_path: Path, certified: bool) -> None:
    """It relays the challenge between the honest ones unchanged, and would then say what it likes in their names."""
    listens, dials = tls_ends(certificates / "cert2.pem", certificates / "key2.pem")
    target = tmp_path / "proof of execution"
    relays: list[InBetween] = []

    def make(address: tuple[str, int]) -> InBetween:
        relays.append(InBetween(address, wrap_dialler=listens, wrap_target=dials))
        return relays[-1]

    files = {}
    if certified:
        honest = certified_options(certificates)
        files = {"tls_cert": honest.tls_cert, "tls_key": honest.tls_key, "tls_ca": honest.tls_ca}
    options, routes = both_ways(make, **files)
    with rerouted(routes):
        agents, errors = two(options)
        for relay in relays:
            for sock in relay.to_target:
                with contextlib.suppress(OSError):
                    sock.sendall(evil_call(target))
        for agent in agents:
            agent.close()
    assert not target.exists()
    assert not agents
    assert any(isinstance(e, AuthenticationError) and "somebody is in between" in str(e) for e in errors), (
        errors
    )
    assert any(relay.seen[True] for relay in relays)  # it was tried


def test_without_tls_a_relay_sees_everything_and_can_say_nothing(tmp_path: Path) -> None:
    """With dangerously_unencrypted_tcp."""
    target = tmp_path / "proof of execution"
    marker = "a word that nobody else writes"
    options, routes = both_ways(InBetween, dangerously_unencrypted_tcp=True)
    with rerouted(routes):
        agents, errors = two(options)
        assert not errors
        one, other = sorted(agents, key=lambda agent: agent.info.id)
        assert one.call_sync("worker1", len, (marker,), {}, PATIENCE_S) == len(marker)
        relay = routes[other.links.me.card.tcp]  # type: ignore[index]
        assert marker.encode() in relay.seen[True]
        for sock in relay.to_target:
            sock.sendall(evil_call(target) + mac_record(evil_call(target)) * 2)
        eventually(lambda: not other.is_present(0), "the connection being cut")
        assert not target.exists()
        for agent in agents:
            agent.close()


@pytest.mark.parametrize("how", ["changed", "repeated", "left out", "swapped"])
@pytest.mark.parametrize("mac_only", [True, False], ids=["mac", "tls"])
def test_records_that_are_tampered_with_cut_the_connection(how: str, mac_only: bool) -> None:
    armed = threading.Event()
    held: list[bytes] = []

    def change(piece: bytes, to_target: bool) -> bytes:
        if not armed.is_set() or not to_target:
            return piece
        if how == "changed":
            return piece[:-1] + bytes([piece[-1] ^ 1])
        if how == "repeated":
            return piece + piece
        if how == "left out":
            held.append(piece)
            return b"" if len(held) == 1 else piece
        held.append(piece)
        return b"" if len(held) % 2 else held[-1] + held[-2]

    options, routes = both_ways(
        lambda address: InBetween(address, change=change), dangerously_unencrypted_tcp=mac_only
    )
    with rerouted(routes):
        agents, errors = two(options)
        assert not errors
        one, other = sorted(agents, key=lambda agent: agent.info.id)
        log: list[int] = []
        remember.log = log  # type: ignore[attr-defined]
        assert one.call_sync("worker1", remember, (0,), {}, PATIENCE_S) == 0
        armed.set()
        futures = []
        for i in (1, 2, 3):
            with contextlib.suppress(RpcError):
                futures.append(one.call_async("worker1", remember, (i,), {}, PATIENCE_S))
            time.sleep(0.05)  # so that each travels in a piece of its own
        eventually(lambda: not other.is_present(0), "the connection being cut")
        for future in futures:
            with contextlib.suppress(WorkerLost):
                assert future.wait() in (1, 2, 3)
        assert log in ([0], [0, 1])  # nothing twice, nothing out of order, nothing after a gap
        for agent in agents:
            agent.close()


def remember(x: int) -> int:
    remember.log.append(x)  # type: ignore[attr-defined]
    return x


def test_what_crosses_over_tcp_cannot_be_read() -> None:
    marker = "a word that nobody else writes"
    options, routes = both_ways(InBetween)
    with rerouted(routes):
        agents, errors = two(options)
        assert not errors
        one = min(agents, key=lambda agent: agent.info.id)
        assert one.call_sync("worker1", len, (marker,), {}, PATIENCE_S) == len(marker)
        x = torch.full((1000,), 1.2345678)
        assert torch.equal(one.call_sync("worker1", torch.neg, (x,), {}, PATIENCE_S), -x)
        seen = b"".join(relay.seen[way] for relay in routes.values() for way in (True, False))
        assert len(seen) > 9000
        for word in (marker.encode(), handshake.GREETING, b"worker1", struct.pack("<f", 1.2345678) * 3):
            assert word not in seen
        for agent in agents:
            agent.close()


# -- what was said before, or elsewhere


def record(tcp: Grow, said: bytes | None = None) -> bytes:
    """What an honest dialler says inside TLS, recorded by somebody who stood at the other end of it."""
    recorded: list[bytes] = []
    listening = socket.create_server(("127.0.0.1", 0))
    victim = knock(tcp.agents[0], "tcp")
    challenge = greeting(victim)

    def act_as_listener() -> None:
        with listening.accept()[0] as sock:
            sock.sendall(handshake.GREETING + challenge)
            recorded.append(sock.recv(65536))

    thread = threading.Thread(target=act_as_listener, daemon=True)
    thread.start()
    with (
        socket.create_connection(listening.getsockname(), PATIENCE_S) as sock,
        contextlib.suppress(Exception),
    ):
        me = tcp.agents[0].links.me.card.to_json()
        handshake.dial(sock, tcp.key, card(), me, time.monotonic() + 5, seen=None)
    thread.join(PATIENCE_S)
    listening.close()
    with victim:
        victim.sendall(recorded[0])
        assert is_hung_up_on(victim)
    return recorded[0]


def test_a_proof_made_for_another_connection_is_useless(tcp: Grow) -> None:
    """A real holder of the secret is made to prove itself over the challenge of the attacker's own connection to a worker."""
    assert len(record(tcp)) > 64
    tcp.works_and_grows()


def test_a_recorded_handshake_is_useless(tcp: Grow) -> None:
    recorded = record(tcp)
    for _ in range(2):
        with knock(tcp.agents[0], "tcp") as sock:
            greeting(sock)
            sock.sendall(recorded)
            assert is_hung_up_on(sock)
    tcp.works_and_grows()


def test_a_recorded_tls_stream_is_useless() -> None:
    """All that crossed is sent again, to the same worker: a call is not run a second time."""
    options, routes = both_ways(InBetween)
    with rerouted(routes):
        agents, errors = two(options)
        assert not errors
        one, other = sorted(agents, key=lambda agent: agent.info.id)
        remember.log = log = []  # type: ignore[attr-defined,var-annotated]
        assert one.call_sync("worker1", remember, (7,), {}, PATIENCE_S) == 7
        address = other.links.me.card.tcp
        recorded = routes[address].seen[True]  # type: ignore[index]
    with socket.create_connection(address, PATIENCE_S) as sock:  # type: ignore[arg-type]
        sock.sendall(recorded)
        assert is_hung_up_on(sock)
    assert log == [7]
    for agent in agents:
        agent.close()


def test_a_reflected_challenge_proves_nothing(tcp: Grow) -> None:
    """The same challenge back, and as proof what the listener itself would say over it."""
    with knock(tcp.agents[0], "tcp") as sock:
        said = introduction(tcp.agents[0], sock)
        theirs = greeting(sock)
        reflected = proof(b"", b"listener", theirs, theirs, said)
        sock.sendall(theirs + reflected + struct.pack("<I", len(said)) + said)
        assert is_hung_up_on(sock)
    tcp.works_and_grows()


def test_two_workers_cannot_be_made_to_prove_each_other_in_a_circle(tcp: Grow) -> None:
    """The challenge of one worker is passed to another as if from the first, with roles swapped."""
    one, other = tcp.agents
    with knock(one, "tcp") as first, knock(other, "tcp") as second:
        challenge = greeting(first)
        greeting(second)
        said = introduction(other, second)
        second.sendall(challenge + proof(b"", b"dialler", challenge) + struct.pack("<I", len(said)) + said)
        answer = second.recv(65536)  # a refusal, which is no proof
        first.sendall(answer.ljust(68, b"x"))
        assert is_hung_up_on(first)
        assert is_hung_up_on(second)
    tcp.works_and_grows()


@pytest.mark.parametrize("answer", ["the dialler's own proof", "nothing", "refusal", "random"])
def test_a_dialler_does_not_believe_a_listener_without_the_secret(answer: str) -> None:
    listening = socket.create_server(("127.0.0.1", 0))

    def act_as_listener() -> None:
        with listening.accept()[0] as sock:
            sock.sendall(handshake.GREETING + secrets.token_bytes(32))
            heard = sock.recv(65536)
            said = b'{"card": {}, "seen": null}'
            made = {
                "the dialler's own proof": heard[32:64],
                "random": secrets.token_bytes(32),
                "refusal": bytes(32),
            }
            if answer in made:
                length = 0 if answer == "refusal" else len(said)
                sock.sendall(made[answer] + struct.pack("<I", length) + said[:length])
                sock.recv(1)

    thread = threading.Thread(target=act_as_listener, daemon=True)
    thread.start()
    with (
        socket.create_connection(listening.getsockname(), PATIENCE_S) as sock,
        pytest.raises((AuthenticationError, EOFError)),
    ):
        handshake.dial(sock, handshake.group_key(SECRET), card(), card(), time.monotonic() + 5)
    thread.join(PATIENCE_S)
    listening.close()


def test_one_who_holds_the_secret_and_met_another_certificate_is_refused_and_told(tcp: Grow) -> None:
    """As an honest dialler would be, behind a relay that ends TLS."""
    with knock(tcp.agents[0], "tcp") as sock:
        introduce(sock, tcp.key, introduction(tcp.agents[0], sock, seen="0" * 64))
        said = sock.recv(65536)
        assert b"somebody is in between" in said
        assert is_hung_up_on(sock)
    assert "mallory" not in tcp.names()
    tcp.works_and_grows()


def test_a_peer_that_drips_bytes_does_not_hold_a_caller_beyond_its_deadline(tcp: Grow) -> None:
    """One byte of a frame every now and then: whoever waits for a reply on that connection still gets its timeout."""
    one, other = tcp.agents
    assert call(one, "worker1") == 2
    sender = other.peer("worker0").sender
    assert sender is not None
    stop = threading.Event()

    def drip() -> None:
        frame = frame_bytes(Kind.REPLY, 1 << 50, b"x" * 4096)
        for i in range(len(frame)):
            if stop.wait(0.3):
                return
            with contextlib.suppress(OSError):
                sender.sock.send(frame[i : i + 1])

    threading.Thread(target=drip, daemon=True).start()
    try:  # it would take twenty minutes
        with pytest.raises(RpcError, match="timeout"):
            one.call_sync("worker1", time.sleep, (30,), {}, 3.0)
    finally:
        stop.set()
        other.close(timeout_s=0.1)
