"""Strangers at the door, liars inside, and what `trusted` lets through."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import pickle
import secrets
import shutil
import socket
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.workers import Group, bounded

from farstep import rpc
from farstep.errors import (
    AuthenticationError,
    InsecureTransport,
    RpcError,
    RpcTimeout,
)
from farstep.rpc import Agent, RpcOptions, handshake
from farstep.rpc.group import join_group
from farstep.rpc.wire import Kind, frame_bytes

SECRET = "correct horse battery staple"
PATIENCE_S = 20.0


def increment(x: int) -> int:
    return x + 1


def call(agent: Agent, to: str, x: int = 1) -> Any:
    return agent.call_sync(to, increment, (x,), {}, PATIENCE_S)


# -- the door


def door(agent: Agent, how: str) -> socket.socket:
    """A connection to where an agent listens, by somebody who is not of the group."""
    card = agent.links.me.card
    if how == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(PATIENCE_S)
        sock.connect(card.unix)  # type: ignore[arg-type]
    else:
        sock = socket.create_connection(card.tcp, PATIENCE_S)  # type: ignore[arg-type]
    return sock


def read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def is_hung_up_on(sock: socket.socket) -> bool:
    """Whether the agent closes the connection. What it has sent before is read and thrown away."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def greeting(sock: socket.socket) -> bytes:
    return read_exactly(sock, len(handshake.GREETING) + handshake.CHALLENGE_BYTES)[len(handshake.GREETING) :]


def proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(key, role, hashlib.sha256)
    for part in parts:
        mac.update(struct.pack("<I", len(part)) + part)
    return mac.digest()


class Grow:
    """A group that a new worker can be brought into: that is how a test sees that the door still works."""

    def __init__(self, how: str) -> None:
        self.options = (
            RpcOptions(transport="tcp", secret=SECRET, host="127.0.0.1")
            if how == "tcp"
            else RpcOptions(transport="unix")
        )
        self.how = how
        self.key = handshake.group_key(SECRET) if how == "tcp" else b""
        self.store = dist.HashStore()
        self.agents: list[Agent] = []
        self.join()
        self.join()

    def join(self) -> Agent:
        rank = len(self.agents)
        self.agents.append(join_group(self.store, f"worker{rank}", rank, None, self.options))
        return self.agents[-1]

    def works_and_grows(self) -> None:
        newcomer = self.join()
        for other in self.agents[:-1]:
            assert call(newcomer, other.info.name) == 2
            assert call(other, newcomer.info.name) == 2
        assert call(self.agents[0], "worker1") == 2

    def close(self) -> None:
        for agent in self.agents:
            agent.close()


@pytest.fixture(params=["unix", "tcp"])
def group(request: pytest.FixtureRequest) -> Iterator[Grow]:
    group = Grow(request.param)
    yield group
    group.close()


def test_strangers_that_say_nothing_do_not_keep_others_out(group: Grow) -> None:
    with contextlib.ExitStack() as strangers:
        for _ in range(50):
            strangers.enter_context(door(group.agents[0], group.how))
        group.works_and_grows()


@pytest.mark.slow
def test_more_strangers_than_the_door_holds_do_not_keep_others_out(group: Grow) -> None:
    with contextlib.ExitStack() as strangers:
        for _ in range(300):
            strangers.enter_context(door(group.agents[0], group.how))
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
def test_garbage_at_the_door(group: Grow, said: bytes) -> None:
    with door(group.agents[0], group.how) as sock:
        with contextlib.suppress(OSError):  # it may hang up before all is said
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
        assert is_hung_up_on(sock)
    group.works_and_grows()


@pytest.mark.parametrize("count", [0, 1, 31, 32, 63, 64, 67])
def test_a_handshake_that_stops_in_the_middle(group: Grow, count: int) -> None:
    with door(group.agents[0], group.how) as sock:
        greeting(sock)
        sock.sendall(b"x" * count)
    with door(group.agents[0], group.how) as sock:
        greeting(sock)
        sock.sendall(b"x" * count)
        sock.shutdown(socket.SHUT_WR)
        assert is_hung_up_on(sock)
    group.works_and_grows()


@pytest.mark.parametrize("length", [16 * 1024 + 1, 2**31, 2**32 - 1])
def test_an_oversized_identity_is_hung_up_on_at_once(group: Grow, length: int) -> None:
    with door(group.agents[0], group.how) as sock:
        greeting(sock)
        sock.sendall(b"x" * 64 + struct.pack("<I", length))
        assert is_hung_up_on(sock)  # without having sent what was announced
    group.works_and_grows()


def introduce(group: Grow, key: bytes, said: bytes) -> socket.socket:
    sock = door(group.agents[0], group.how)
    theirs = greeting(sock)
    mine = secrets.token_bytes(32)
    sock.sendall(mine + proof(key, b"dialler", theirs, mine, said) + struct.pack("<I", len(said)) + said)
    return sock


def identity(**changes: Any) -> dict[str, Any]:
    card = {
        "name": "mallory",
        "id": 77,
        "incarnation": "feed",
        "host": "there",
        "unix": None,
        "tcp": ["127.0.0.1", 9],
    }
    return {**card, **changes}


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe",
        b"[" * 16_000,
        b'{"a":' * 3000,
        json.dumps(identity(name="bad name!")).encode(),
        json.dumps(identity(name="x" * 1000)).encode(),
        json.dumps(identity(id="seven")).encode(),
        json.dumps(identity(tcp=[1])).encode(),
        json.dumps(identity(tcp=["127.0.0.1", "port"])).encode(),
        json.dumps(identity()).replace("77", "1e999").encode(),
        json.dumps(identity()).replace("77", "9" * 5000).encode(),
        json.dumps(identity(name="worker1", id=1)).encode(),
        json.dumps(identity(name="worker0", id=0)).encode(),
        json.dumps(identity(name="worker1")).encode(),
    ],
    ids=lambda said: said[:24].decode("latin1"),
)
def test_one_who_knows_the_secret_and_says_nonsense(group: Grow, said: bytes) -> None:
    with introduce(group, group.key, said) as sock:
        assert is_hung_up_on(sock)
    group.works_and_grows()


# -- the secret (TCP)


@pytest.fixture
def tcp() -> Iterator[Grow]:
    group = Grow("tcp")
    yield group
    group.close()


def test_a_wrong_secret_is_refused(tcp: Grow) -> None:
    with introduce(
        tcp, handshake.group_key("another secret altogether"), json.dumps(identity()).encode()
    ) as sock:
        assert is_hung_up_on(sock)
    with introduce(tcp, b"", json.dumps(identity()).encode()) as sock:
        assert is_hung_up_on(sock)
    tcp.works_and_grows()
    assert [i.name for i in tcp.agents[0].get_worker_infos()] == ["worker0", "worker1", "worker2"]


def test_a_worker_with_a_wrong_secret_does_not_get_in_and_is_told_why(tcp: Grow) -> None:
    other = RpcOptions(transport="tcp", secret="some other secret", host="127.0.0.1", init_timeout_s=5)
    with pytest.raises(AuthenticationError, match="secret"):
        join_group(tcp.store, "mallory", 9, None, other)
    assert "mallory" not in [i.name for i in tcp.agents[0].get_worker_infos()]
    tcp.works_and_grows()


class Relay:
    """Passes bytes between two sockets and remembers those that the dialler sent."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = self._listening.getsockname()
        self.recorded = b""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        dialler, _ = self._listening.accept()
        listener = socket.create_connection(self._target, PATIENCE_S)
        threading.Thread(target=self._pass, args=(listener, dialler, False), daemon=True).start()
        self._pass(dialler, listener, True)

    def _pass(self, source: socket.socket, target: socket.socket, record: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if record:
                    self.recorded += data
                target.sendall(data)

    def close(self) -> None:
        self._listening.close()


def test_a_recorded_handshake_is_useless(tcp: Grow) -> None:
    relay = Relay(tcp.agents[0].links.me.card.tcp)  # type: ignore[arg-type]
    with socket.create_connection(relay.address, PATIENCE_S) as sock:
        handshake.dial(sock, tcp.key, identity(), deadline=time.monotonic() + PATIENCE_S)
        recorded = relay.recorded
    relay.close()
    assert len(recorded) > 64
    with door(tcp.agents[0], "tcp") as sock:
        greeting(sock)
        sock.sendall(recorded)
        assert is_hung_up_on(sock)
    tcp.works_and_grows()


def test_challenges_differ_each_time(tcp: Grow) -> None:
    challenges = set()
    for _ in range(10):
        with door(tcp.agents[0], "tcp") as sock:
            challenges.add(greeting(sock))
    assert len(challenges) == 10


def test_a_reflected_challenge_proves_nothing(tcp: Grow) -> None:
    """Have a real worker prove itself to us, over the challenge of another connection, and hand its proof on."""
    listening = socket.create_server(("127.0.0.1", 0))
    victim = door(tcp.agents[0], "tcp")
    challenge = greeting(victim)
    said = json.dumps(identity()).encode()
    reflected: list[bytes] = []

    def act_as_listener() -> None:
        with listening.accept()[0] as sock:
            sock.sendall(handshake.GREETING + challenge)
            reflected.append(sock.recv(65536))

    thread = threading.Thread(target=act_as_listener, daemon=True)
    thread.start()
    with (
        socket.create_connection(listening.getsockname(), PATIENCE_S) as sock,
        contextlib.suppress(Exception),
    ):
        handshake.dial(
            sock, handshake.group_key("the victim's other secret"), identity(), time.monotonic() + 5
        )
    thread.join(PATIENCE_S)
    listening.close()
    with victim:
        victim.sendall(reflected[0])  # proves another secret
        assert is_hung_up_on(victim)
    with door(tcp.agents[0], "tcp") as sock:
        theirs = greeting(sock)
        # the same challenge back, and as proof what a listener would say over it
        sock.sendall(
            theirs + proof(b"", b"listener", theirs, theirs, said) + struct.pack("<I", len(said)) + said
        )
        assert is_hung_up_on(sock)
    tcp.works_and_grows()


def test_a_dialler_does_not_believe_a_listener_without_the_secret() -> None:
    listening = socket.create_server(("127.0.0.1", 0))

    def act_as_listener() -> None:
        with listening.accept()[0] as sock:
            theirs = secrets.token_bytes(32)
            sock.sendall(handshake.GREETING + theirs)
            heard = sock.recv(65536)
            said = json.dumps(identity()).encode()
            sock.sendall(
                heard[32:64] + struct.pack("<I", len(said)) + said
            )  # the dialler's own proof, reflected
            sock.recv(1)

    thread = threading.Thread(target=act_as_listener, daemon=True)
    thread.start()
    with (
        socket.create_connection(listening.getsockname(), PATIENCE_S) as sock,
        pytest.raises(AuthenticationError, match="secret"),
    ):
        handshake.dial(sock, handshake.group_key(SECRET), identity(), time.monotonic() + 5)
    thread.join(PATIENCE_S)
    listening.close()


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


def test_the_unix_socket_is_in_a_directory_for_its_user_only() -> None:
    with rpc.local_agents(1) as (agent,):
        path = Path(str(agent.links.me.card.unix))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert path.parent.stat().st_uid == os.getuid()
    assert not path.parent.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_is_refused_even_if_it_can_open_the_socket() -> None:
    with rpc.local_agents(2) as agents:
        path = Path(str(agents[0].links.me.card.unix))
        path.parent.chmod(0o755)
        path.chmod(0o777)
        script = (
            "import os, socket, sys\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "sock = socket.socket(socket.AF_UNIX); sock.settimeout(20); sock.connect(sys.argv[1])\n"
            "sys.exit(0 if sock.recv(100) == b'' else 1)\n"
        )
        result = subprocess.run(["python3", "-c", script, str(path)], timeout=PATIENCE_S, check=False)
        assert result.returncode == 0  # hung up on, without a word
        assert call(agents[0], "worker1") == 2


# -- TLS


def openssl(*args: str, cwd: Path) -> None:
    subprocess.run(["openssl", *args], cwd=cwd, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, each with a worker's certificate: ca.pem, cert.pem, key.pem and other-*.pem."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    path = tmp_path_factory.mktemp("tls")
    for p in ("", "other-"):
        ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        openssl(
            "req",
            "-x509",
            *ec,
            "-subj",
            "/CN=ca",
            "-days",
            "2",
            "-keyout",
            p + "ca-key.pem",
            "-out",
            p + "ca.pem",
            cwd=path,
        )
        openssl("req", *ec, "-subj", "/CN=worker", "-keyout", p + "key.pem", "-out", p + "req.pem", cwd=path)
        ca = ("-CA", p + "ca.pem", "-CAkey", p + "ca-key.pem", "-CAcreateserial")
        openssl("x509", "-req", "-in", p + "req.pem", *ca, "-days", "2", "-out", p + "cert.pem", cwd=path)
    return path


def tls_options(path: Path, prefix: str = "", **more: Any) -> RpcOptions:
    files = {
        name: str(path / f"{prefix}{file}.pem")
        for name, file in (("tls_cert", "cert"), ("tls_key", "key"), ("tls_ca", "ca"))
    }
    return RpcOptions(transport="tcp", secret=SECRET, host="127.0.0.1", **files, **more)


def test_calls_over_tls(certificates: Path) -> None:
    with rpc.local_agents(3, tls_options(certificates)) as agents:
        for agent in agents:
            for other in agents:
                assert call(agent, other.info.name) == 2
        big = torch.arange(2_000_000.0)
        assert torch.equal(agents[0].call_sync("worker1", torch.neg, (big,), {}, PATIENCE_S), -big)
        futures = [
            agents[0].call_async("worker2", torch.neg, (torch.ones(i * 100),), {}, PATIENCE_S)
            for i in range(300)
        ]
        for i, future in enumerate(futures):
            assert torch.equal(bounded(future.wait), -torch.ones(i * 100))
        assert call(agents[2], "worker0") == 2


def test_what_crosses_over_tls_cannot_be_read(certificates: Path) -> None:
    relay_seen = b""
    with rpc.local_agents(1, tls_options(certificates)) as (agent,):
        with door(agent, "tcp") as sock:
            sock.sendall(b"x" * 100)
            with contextlib.suppress(ConnectionError):
                while data := sock.recv(4096):
                    relay_seen += data
        assert handshake.GREETING not in relay_seen


@pytest.mark.parametrize("who", ["another authority", "no TLS"])
def test_a_worker_without_the_right_certificate_does_not_get_in(certificates: Path, who: str) -> None:
    store = dist.HashStore()
    agent = join_group(store, "worker0", 0, None, tls_options(certificates))
    try:
        if who == "no TLS":
            options = RpcOptions(transport="tcp", secret=SECRET, host="127.0.0.1", init_timeout_s=3)
        else:
            options = tls_options(certificates, "other-", init_timeout_s=3)
        with contextlib.suppress(RpcError, OSError):
            stranger = join_group(store, "worker1", 1, None, options)
            stranger.close()
        assert [i.name for i in agent.get_worker_infos()] == ["worker0"]
        good = join_group(store, "worker2", 2, None, tls_options(certificates))
        assert call(good, "worker0") == 2
        good.close()
    finally:
        agent.close()


def test_tls_needs_all_three_files() -> None:
    with pytest.raises(ValueError, match="tls_cert, tls_key and tls_ca"):
        RpcOptions(secret=SECRET, tls_cert="cert.pem")


def negate(to: str, numel: int, timeout: float) -> str:
    try:
        x = torch.ones(numel)
        assert torch.equal(rpc.rpc_sync(to, torch.neg, args=(x,), timeout=timeout), -x)
        return "done"
    except RpcTimeout:
        return "timeout"


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
def test_a_stopped_peer_over_tcp_gets_whole_frames_afterwards(
    workers: Callable[..., Group], certificates: Path, tls: bool
) -> None:
    options: dict[str, Any] = {"transport": "tcp", "secret": SECRET, "host": "127.0.0.1"}
    if tls:
        options |= {f"tls_{name}": str(certificates / f"{name}.pem") for name in ("cert", "key", "ca")}
    group = workers(2, **options)
    assert group[0].run(negate, "worker1", 10, 20.0) == "done"
    group[1].stop()
    for numel in (3_000_000, 3_000_000, 10, 100_000, 10):
        assert group[0].run(negate, "worker1", numel, 0.2) == "timeout"
    group[1].cont()
    for numel in (10, 3_000_000, 10):
        assert group[0].run(negate, "worker1", numel, 20.0) == "done"
