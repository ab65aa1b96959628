"""A stranger: reaches a worker's port or socket, and holds no secret. It gets nothing parsed, nobody kept out, and little logged."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import re
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.workers import bounded, eventually

from farstep import rpc
from farstep.errors import AuthenticationError, InsecureTransport, RpcError
from farstep.rpc import RpcOptions, handshake
from farstep.rpc.group import join_group
from farstep.rpc.listener import MAX_STRANGERS
from farstep.rpc.wire import Kind, frame_bytes
from security.attackers import (
    PATIENCE_S,
    SECRET,
    Grow,
    call,
    card,
    certified_options,
    closing,
    greeting,
    increment,
    introduce,
    introduction,
    is_hung_up_on,
    knock,
    tcp_options,
)
from security.test_store_writer import come_together


@pytest.fixture(params=["unix", "tcp", "mac"])
def group(request: pytest.FixtureRequest) -> Iterator[Grow]:
    yield from closing(Grow(request.param))


@pytest.fixture
def tcp() -> Iterator[Grow]:
    yield from closing(Grow("tcp"))


def thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_strangers_that_say_nothing_do_not_keep_others_out(group: Grow) -> None:
    with contextlib.ExitStack() as strangers:
        for _ in range(50):
            strangers.enter_context(knock(group.agents[0], "unix" if group.how == "unix" else "raw"))
        group.works_and_grows()


@pytest.mark.slow
@pytest.mark.parametrize("silent", ["before TLS", "after TLS"])
def test_a_crowd_of_silent_strangers_takes_few_threads(group: Grow, silent: str) -> None:
    how = group.how if group.how != "tcp" or silent == "after TLS" else "raw"
    before = thread_count()
    with contextlib.ExitStack() as strangers:
        for _ in range(1500 if how != "tcp" else 300):
            with contextlib.suppress(OSError):  # hung up on: as it should be
                strangers.enter_context(knock(group.agents[0], how))
            assert thread_count() <= before + MAX_STRANGERS + 30
        group.works_and_grows()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00" * 200,
        b"\xff" * 5000,
        b"\x80\x05cos\nsystem\n.",
        frame_bytes(Kind.CALL, 1, pickle.dumps(("os", "system"))) * 5,
        secrets.token_bytes(68),
    ],
    ids=["http", "zeros", "ones", "a pickle", "frames", "random"],
)
@pytest.mark.parametrize("where", ["outside TLS", "inside TLS"])
def test_garbage_at_the_door(group: Grow, said: bytes, where: str) -> None:
    how = "raw" if group.how == "tcp" and where == "outside TLS" else group.how
    with knock(group.agents[0], how) as sock:
        with contextlib.suppress(OSError):  # it may hang up before all is said
            sock.sendall(said)
            socket.socket.shutdown(sock, socket.SHUT_WR)
        assert is_hung_up_on(sock)
    group.works_and_grows()


@pytest.mark.parametrize("count", [0, 1, 31, 32, 63, 64, 67])
def test_a_handshake_that_stops_in_the_middle(group: Grow, count: int) -> None:
    with knock(group.agents[0], group.how) as sock:
        greeting(sock)
        sock.sendall(b"x" * count)
    with knock(group.agents[0], group.how) as sock:
        greeting(sock)
        sock.sendall(b"x" * count)
        socket.socket.shutdown(sock, socket.SHUT_WR)
        assert is_hung_up_on(sock)
    group.works_and_grows()


@pytest.mark.parametrize("length", [16 * 1024 + 1, 2**31, 2**32 - 1])
def test_an_oversized_introduction_is_hung_up_on_at_once(group: Grow, length: int) -> None:
    with knock(group.agents[0], group.how) as sock:
        greeting(sock)
        sock.sendall(b"x" * 64 + struct.pack("<I", length))
        assert is_hung_up_on(sock)  # without having sent what was announced
    group.works_and_grows()


def test_challenges_differ_each_time(tcp: Grow) -> None:
    challenges = set()
    for _ in range(10):
        with knock(tcp.agents[0], "tcp") as sock:
            challenges.add(greeting(sock))
    assert len(challenges) == 10


@pytest.mark.parametrize(
    "key", [handshake.group_key("another secret altogether"), b""], ids=["other", "none"]
)
def test_a_wrong_secret_is_refused(tcp: Grow, key: bytes) -> None:
    with knock(tcp.agents[0], "tcp") as sock:
        introduce(sock, key, introduction(tcp.agents[0], sock))
        assert is_hung_up_on(sock)
    tcp.works_and_grows()
    assert tcp.names() == ["worker0", "worker1", "worker2"]


def test_a_worker_with_a_wrong_secret_does_not_get_in_and_is_told_why(tcp: Grow) -> None:
    with pytest.raises(AuthenticationError, match="FARSTEP_SECRET"):
        join_group(tcp.store, "mallory", 9, None, tcp_options(secret="some other secret", init_timeout_s=5))
    assert "mallory" not in tcp.names()
    tcp.works_and_grows()


@pytest.mark.parametrize("how", ["raw", "tcp"])
def test_a_storm_of_strangers_writes_few_warnings(
    tcp: Grow, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    with caplog.at_level(logging.WARNING, "farstep.rpc"):
        for _ in range(200):
            with contextlib.suppress(OSError), knock(tcp.agents[0], how) as sock:
                sock.sendall(b"\x16\x03\x01garbage" * 20)
                is_hung_up_on(sock)
        tcp.works_and_grows()
        tcp.agents[0].close()
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert 1 <= len(warnings) < 20
    assert sum(map(len, warnings)) < 10_000
    assert any("refused a connection" in text for text in warnings)
    assert any("more warnings" in text for text in warnings)


# -- what is needed, and what is shown


def test_tcp_without_a_secret_is_refused_and_says_how_to_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARSTEP_SECRET", raising=False)
    with pytest.raises(InsecureTransport, match="FARSTEP_SECRET") as caught:
        RpcOptions(transport="tcp")
    assert "RpcOptions.secret" in str(caught.value)
    assert "token_hex" in str(caught.value)
    monkeypatch.setenv("FARSTEP_SECRET", SECRET)
    assert RpcOptions(transport="tcp").shared_secret == SECRET


def test_without_a_secret_nobody_listens_on_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARSTEP_SECRET", raising=False)
    with rpc.local_agents(1) as (agent,):
        assert agent.links.me.card.tcp is None


def test_a_secret_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16") as caught:
        RpcOptions(secret="short")
    assert "token_hex" in str(caught.value)
    assert "short" not in str(caught.value).replace("shorter", "")


def test_secrets_are_not_shown() -> None:
    options = RpcOptions(secret=SECRET, tls_cert="c", tls_key="k.pem", tls_ca="a")
    assert SECRET not in repr(options)
    assert "k.pem" not in repr(options)


def test_certificates_and_no_encryption_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="contradict"):
        tcp_options(tls_cert="c", tls_key="k", tls_ca="a", dangerously_unencrypted_tcp=True)


def test_tls_needs_all_three_files() -> None:
    with pytest.raises(ValueError, match="tls_cert, tls_key and tls_ca"):
        RpcOptions(secret=SECRET, tls_cert="cert.pem")


def test_certificate_files_that_cannot_be_read_are_named() -> None:
    options = tcp_options(tls_cert="no-such.pem", tls_key="no-key.pem", tls_ca="no-ca.pem")
    with pytest.raises(ValueError, match=r"no-such\.pem"):
        join_group(dist.HashStore(), "worker0", 0, None, options)


@pytest.mark.parametrize("how", ["self-signed", "certified", "mac"])
def test_calls_over_tcp(certificates: Path, how: str) -> None:
    options = (
        certified_options(certificates)
        if how == "certified"
        else tcp_options(dangerously_unencrypted_tcp=how == "mac")
    )
    with rpc.local_agents(3, options) as agents:
        for agent in agents:
            for other in agents:
                assert call(agent, other.info.name) == 2
        for numel in (20_000, 2_000_000, 30_000_001):
            big = torch.arange(float(numel))
            assert torch.equal(agents[0].call_sync("worker1", torch.neg, (big,), {}, PATIENCE_S), -big)
        futures = [
            agents[0].call_async("worker2", torch.neg, (torch.ones(i * 100),), {}, PATIENCE_S)
            for i in range(300)
        ]
        for i, future in enumerate(futures):
            assert torch.equal(bounded(future.wait), -torch.ones(i * 100))
        assert call(agents[2], "worker0") == 2


def test_every_worker_has_a_certificate_of_its_own(tcp: Grow) -> None:
    tcp.join()
    assert len({agent.links.me.card.certificate for agent in tcp.agents}) == 3


@pytest.mark.parametrize(
    ("cert", "ca"),
    [("other-cert", "other-ca"), ("other-cert", "ca"), ("cert", "other-ca"), ("old-cert", "ca")],
)
def test_a_worker_without_the_right_certificate_does_not_get_in(
    certificates: Path, cert: str, ca: str
) -> None:
    store = dist.HashStore()
    agent = join_group(store, "worker0", 0, None, certified_options(certificates))
    try:
        with pytest.raises(RpcError, match=r"certificate|cannot be reached"):
            join_and_call(store, certified_options(certificates, cert, ca, init_timeout_s=3))
        assert [i.name for i in agent.get_worker_infos()] == ["worker0"]
        good = join_group(store, "worker2", 2, None, certified_options(certificates, "cert2"))
        assert call(good, "worker0") == 2
        good.close()
    finally:
        agent.close()


def join_and_call(store: Any, options: RpcOptions) -> None:
    stranger = join_group(store, "worker1", 1, None, options)
    try:
        stranger.call_sync("worker0", increment, (1,), {}, 5.0)
    finally:
        stranger.close()


KINDS = {
    "TLS and none": (
        "self-signed",
        "plain",
        r"'worker\d' has TLS, and 'worker\d' has not \(dangerously_unencrypted_tcp",
    ),
    "certificates and none": ("certified", "plain", r"'worker\d' has TLS, and 'worker\d' has not"),
    "certificates and self-signed": (
        "certified",
        "self-signed",
        r"'worker\d' has certificates.*'worker\d' has not",
    ),
    "two authorities": ("certified", "of another", r"does not accept the certificate of 'worker\d'.*tls_ca"),
}


def options_of(kind: str, certificates: Path) -> RpcOptions:
    if kind == "certified":
        return certified_options(certificates, init_timeout_s=PATIENCE_S)
    if kind == "of another":
        return certified_options(certificates, "other-cert", "other-ca", init_timeout_s=PATIENCE_S)
    return tcp_options(dangerously_unencrypted_tcp=kind == "plain", init_timeout_s=PATIENCE_S)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("case", KINDS)
def test_workers_that_protect_tcp_in_other_ways_are_both_told(
    certificates: Path, case: str, first: int
) -> None:
    *kinds, told = KINDS[case]
    kinds = kinds if first == 0 else kinds[::-1]
    agents, errors = come_together(dist.HashStore(), 2, lambda rank: options_of(kinds[rank], certificates))
    for agent in agents:
        agent.close()
    assert not agents
    assert len(errors) == 2
    assert all(re.search(told, str(error)) for error in errors), errors


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("case", KINDS)
def test_so_is_one_who_is_there_when_the_other_wants_to_join(
    certificates: Path, case: str, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    *kinds, told = KINDS[case]
    kinds = kinds if first == 0 else kinds[::-1]
    store = dist.HashStore()
    agent = join_group(store, "worker0", 0, None, options_of(kinds[0], certificates))
    try:
        with pytest.raises(RpcError, match=told):
            join_group(store, "worker1", 1, None, options_of(kinds[1], certificates))
        eventually(lambda: re.search(f"'worker1' could not join.*{told}", caplog.text), "a warning")
        with pytest.raises(InsecureTransport, match=told):
            call(agent, "worker1")
        assert [info.name for info in agent.get_worker_infos()] == ["worker0"]
        good = join_group(store, "worker1", 1, None, options_of(kinds[0], certificates))
        assert call(agent, "worker1") == 2
        good.close()
    finally:
        agent.close()


@pytest.mark.parametrize("how", ["tcp", "mac"])
@pytest.mark.parametrize("wrong", ["secret", "for another", "no card", "cut"])
def test_a_notice_that_is_none_changes_nothing(
    how: str, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    for group in closing(Grow(how)):
        me = group.agents[0].links.me.card.to_json()
        to = {**me, "incarnation": "another"} if wrong == "for another" else me
        key = b"" if wrong == "secret" else group.key
        own = {} if wrong == "no card" else card(name="worker3", id=3)
        with socket.create_connection(me["tcp"], 5) as sock:
            if wrong == "cut":
                sock.sendall(handshake.NOTICE[:20])
            else:
                handshake.send_notice(sock, key, own, to, "lies", time.monotonic() + 5)
            sock.shutdown(socket.SHUT_WR)
            assert is_hung_up_on(sock)
        assert "could not join" not in caplog.text
        group.works_and_grows()


# -- one who knows the secret, and says nonsense at the door


CARDS = [
    card(name="bad name!"),
    card(name="x" * 1000),
    card(id="seven"),
    card(id=-1),
    card(id=7.5),
    card(id=True),
    card(id=10**30),
    card(tcp=[1]),
    card(tcp=["127.0.0.1", "port"]),
    card(host=["a"]),
    card(incarnation=None),
    card(more="than that"),
    card(name="worker1", id=1),
    card(name="worker0", id=0),
    card(name="worker1"),
    {},
    [],
    5,
    None,
]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("wrong", CARDS, ids=lambda wrong: str(wrong)[:40])
def test_a_card_that_is_none_or_anothers(group: Grow, wrong: Any) -> None:
    with knock(group.agents[0], group.how) as sock:
        introduce(sock, group.key, introduction(group.agents[0], sock, card=wrong))
        assert is_hung_up_on(sock)
    group.works_and_grows()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "said",
    [b"", b"not json", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 16_000, b'{"a":' * 3000]
    + [json.dumps({"card": card()}).replace("77", n).encode() for n in ("1e999", "9" * 5000)],
    ids=lambda said: said[:24].decode("latin1"),
)
def test_an_introduction_that_is_none(group: Grow, said: bytes) -> None:
    with knock(group.agents[0], group.how) as sock:
        introduce(sock, group.key, said)
        assert is_hung_up_on(sock)
    group.works_and_grows()


# -- what a user gets wrong


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"dangerously_unencrypted_tcp": "no"}, TypeError),
        ({"secret": b"bytes of a secret, not a text"}, TypeError),
        ({"port": 99_999}, ValueError),
        ({"max_frame_bytes": 10}, ValueError),
        ({"shared_memory_bytes": -1}, ValueError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_cannot_be_are_refused_by_name(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(wrong))):
        tcp_options(**wrong)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (tcp_options(host="203.0.113.7", init_timeout_s=15), "FARSTEP_HOST"),
        (tcp_options(tls_cert="no-such.pem", tls_key="k", tls_ca="c", init_timeout_s=15), r"no-such\.pem"),
        (tcp_options(transport="unix", init_timeout_s=15), "transport='unix'"),
        (tcp_options(secret="another secret altogether", init_timeout_s=15), "secret"),
    ],
    ids=["an address of another machine", "a missing certificate", "another transport", "another secret"],
)
def test_a_worker_that_cannot_start_tells_the_others_why(options: RpcOptions, cause: str) -> None:
    """The first cause is the one that they get, not their own timeout."""
    agents, errors = come_together(
        dist.HashStore(), 2, lambda rank: options if rank else tcp_options(init_timeout_s=15)
    )
    for agent in agents:
        agent.close()
    assert not agents
    assert len(errors) == 2
    assert all(re.search(cause, str(error)) for error in errors), errors
