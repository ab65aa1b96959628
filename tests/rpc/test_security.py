"""Strangers at the door, liars inside, and what `trusted` lets through."""

from __future__ import annotations

import builtins
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
from support.workers import Group, bounded, eventually

from farstep import rpc
from farstep.errors import (
    AuthenticationError,
    InsecureTransport,
    RpcError,
    RpcTimeout,
    Untrusted,
    WorkerLost,
)
from farstep.rpc import Agent, RpcOptions, handshake
from farstep.rpc.group import join_group
from farstep.rpc.message import EMPTY, dump_meta
from farstep.rpc.payload import unpack
from farstep.rpc.trust import Trust
from farstep.rpc.wire import HEADER, MAGIC, VERSION, Kind, frame_bytes

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


# -- a member that sends nonsense


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


def inject(sender: Agent, to: str, data: bytes) -> None:
    connection = sender.peer(to).sender
    assert connection is not None
    with contextlib.suppress(OSError):
        connection.sock.sendall(data)


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


# -- trusted


def op_string(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def op_global(module: str, name: str) -> bytes:
    """STACK_GLOBAL: push what find_class finds."""
    return op_string(module) + op_string(name) + b"\x93"


def op_call(function: bytes, *args: bytes) -> bytes:
    """REDUCE: call what is on the stack."""
    return function + b"(" + b"".join(args) + b"tR"


def body(value: bytes) -> bytes:
    """A pickle of (function, args, kwargs) whose argument is `value`."""
    return b"\x80\x05(N(" + value + b"t}t."


def unpack_with(trusted: tuple[str, ...], data: bytes) -> Any:
    return unpack(data, (), [], [], Trust(trusted))


EXECUTE = op_string("__import__('os').environ.__setitem__('FARSTEP_TEST_ESCAPED', '1')")
HERE = __name__
TRUSTED = (HERE,)


def allowed_function(x: Any) -> Any:
    return x


class Allowed:
    """A class of a trusted module."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def method(self) -> int:
        return self.value

    def _private(self) -> int:
        return self.value


os_by_another_name = os
system_by_another_name = os.system

HAND_MADE = {
    "os.system": op_call(op_global("os", "system"), op_string("true")),
    "posix.system": op_call(op_global("posix", "system"), op_string("true")),
    "builtins.eval": op_call(op_global("builtins", "eval"), EXECUTE),
    "builtins.exec": op_call(op_global("builtins", "exec"), EXECUTE),
    "builtins.getattr": op_call(op_global("builtins", "getattr"), op_string("x"), op_string("upper")),
    "builtins.__import__": op_call(op_global("builtins", "__import__"), op_string("os")),
    "builtins.open": op_call(op_global("builtins", "open"), op_string("/dev/null")),
    "builtins.type": op_global("builtins", "type"),
    "a module of the trusted module": op_global(HERE, "os"),
    "a function of a module of the trusted module": op_call(op_global(HERE, "os.system"), op_string("true")),
    "the same by another name": op_call(op_global(HERE, "os_by_another_name.system"), op_string("true")),
    "a function imported by another name": op_call(
        op_global(HERE, "system_by_another_name"), op_string("true")
    ),
    "the built-ins of a trusted module": op_global(HERE, "__builtins__"),
    "eval by a trusted function's globals": op_call(
        op_call(op_global(HERE, "allowed_function.__builtins__.get"), op_string("eval")), EXECUTE
    ),
    "globals of a trusted function": op_call(
        op_global(HERE, "allowed_function.__globals__.get"), op_string("os")
    ),
    "a class's way up": op_global(HERE, "Allowed.__init__.__globals__"),
    "all subclasses of object": op_call(op_global(HERE, "Allowed.__base__.__subclasses__")),
    "a mutable of a trusted module": op_call(op_global(HERE, "TRUSTED.__add__"), b"(t"),
    "eval by farstep's own functions": op_call(
        op_call(op_global("farstep.rpc.payload", "name_of.__builtins__.get"), op_string("eval")), EXECUTE
    ),
    "modules by farstep's own imports": op_call(
        op_global("farstep.rpc.payload", "sys.modules.get"), op_string("os")
    ),
    "pickle by farstep's own imports": op_global("farstep.rpc.payload", "pickle.loads"),
    "torch by farstep's own imports": op_global("farstep.rpc.payload", "torch.load"),
    "partial by farstep's own imports": op_global("farstep.rpc.rref", "partial"),
    "farstep's own unpickling, with a trust of one's own": op_call(
        op_global("farstep.rpc.payload", "unpack"),
        b"B"
        + struct.pack("<I", len(body(op_call(op_global("os", "getpid")))))
        + body(op_call(op_global("os", "getpid"))),
        b"(t]]"
        + op_call(op_global("farstep.errors", "FarstepError"))
        + b"}"
        + op_string("is_open")
        + b"\x88sb",
    ),
    "farstep's own registry": op_call(
        op_global("farstep.rpc.payload", "register_reducer"), op_global("builtins", "int"), b"N"
    ),
    "farstep's own agents": op_global("farstep.rpc.group", "join_group"),
    "a method by farstep's own helper": op_call(
        op_global("farstep.rpc.payload", "_method"), op_string("text"), op_string("upper")
    ),
    "a private method": op_call(
        op_global("farstep.rpc.payload", "_method"),
        op_call(op_global(HERE, "Allowed")),
        op_string("_private"),
    ),
    "a name by farstep's own helper": op_call(
        op_global("farstep.rpc.payload", "_named"), op_string("os"), op_string("system")
    ),
    "torch.load": op_global("torch", "load"),
    "torch.hub.load": op_global("torch.hub", "load"),
    "torch._C": op_global("torch", "_C"),
    "operator.attrgetter": op_global("operator", "attrgetter"),
    "functools.partial": op_global("functools", "partial"),
    "a module whose name begins alike": op_global(HERE + "_not", "anything"),
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_pickles_do_not_get_past_trusted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("FARSTEP_TEST_ESCAPED", raising=False)
    executed: list[str] = []
    monkeypatch.setattr(os, "system", executed.append)
    monkeypatch.setitem(globals(), "system_by_another_name", builtins.print)
    with pytest.raises((Untrusted, ImportError)):
        unpack_with(TRUSTED, body(HAND_MADE[name]))
    assert executed == []
    assert "FARSTEP_TEST_ESCAPED" not in os.environ


def test_trusted_allows_what_it_should() -> None:
    for value in (
        op_global(HERE, "allowed_function"),
        op_global(HERE, "Allowed"),
        op_call(op_global(HERE, "Allowed"), b"K\x05"),
        op_global(HERE, "Allowed.method"),
        op_global("builtins", "ValueError"),
        op_call(op_global("builtins", "set"), b"]"),
        op_call(op_global("collections", "OrderedDict")),
        op_call(op_global("torch", "Size"), b"(K\x05t"),
    ):
        unpack_with(TRUSTED, body(value))


@pytest.fixture(scope="module")
def narrow() -> Iterator[list[Agent]]:
    with rpc.local_agents(3, RpcOptions(trusted=(HERE, "torch.add"))) as agents:
        yield agents


def fail(message: str) -> None:
    raise KeyError(message)


def make_allowed(value: int) -> Allowed:
    return Allowed(value)


def look(rref: Any) -> int:
    return int(rref.to_here().value)


def test_narrowed_agents_do_everything_that_is_allowed(narrow: list[Agent]) -> None:
    agent = narrow[0]
    x = torch.randn(100_000, requires_grad=True)

    def run(function: Any, *args: Any) -> Any:
        return agent.call_sync("worker1", function, args, {}, PATIENCE_S)

    assert torch.equal(run(torch.add, x, 1), x + 1)
    assert run(allowed_function, {"a": [1, (2.0, "x"), {3}, None, torch.float16]}) == {
        "a": [1, (2.0, "x"), {3}, None, torch.float16]
    }
    assert run(Allowed, 4).value == 4
    assert run(allowed_function, 1j) == 1j
    assert run(Allowed(6).method) == 6
    assert torch.equal(run(allowed_function, [x.detach().to_sparse()])[0].to_dense(), x.detach())
    assert type(run(allowed_function, torch.nn.Parameter(x.detach()))) is torch.nn.Parameter
    with pytest.raises(KeyError, match="mine"):
        run(fail, "mine")
    rref = agent.remote("worker1", make_allowed, (8,), {}, PATIENCE_S)
    assert rref.to_here().value == 8
    assert rref.rpc_sync().method() == 8
    assert agent.call_sync("worker2", look, (rref,), {}, PATIENCE_S) == 8
    assert run(allowed_function, agent.info) == agent.info


def test_narrowed_agents_refuse_the_rest_and_say_how_to_allow_it(narrow: list[Agent]) -> None:
    agent = narrow[0]
    for function, args in (
        (os.getpid, ()),
        (len, ([1],)),
        (torch.neg, (torch.ones(1),)),
        (print, ()),
        (eval, ("1",)),
    ):
        with pytest.raises(Untrusted, match=r"RpcOptions\.trusted"):
            agent.call_sync("worker1", function, args, {}, PATIENCE_S)
    with pytest.raises(Untrusted, match="Path"):
        agent.call_sync("worker1", allowed_function, (Path("x"),), {}, PATIENCE_S)
    rref = agent.remote("worker1", make_allowed, (8,), {}, PATIENCE_S)
    with pytest.raises((Untrusted, AttributeError)):
        rref.rpc_sync()._private()
    assert agent.call_sync("worker1", allowed_function, (1,), {}, PATIENCE_S) == 1


@pytest.mark.parametrize(
    "meta_that_names_something",
    [
        frame_bytes(Kind.CALL, 1, pickle.dumps((Path("/"), [], (), (), (), None))),
        frame_bytes(Kind.BUNDLE, 0, pickle.dumps([(int(Kind.CALL), 1, 0, Path("/"), ([], None))])),
    ],
    ids=["a call", "a bundle"],
)
def test_a_narrowed_caller_does_not_unpickle_what_it_does_not_trust(meta_that_names_something: bytes) -> None:
    store = dist.HashStore()
    open_agent = join_group(store, "open", 0, None, RpcOptions())
    narrow_agent = join_group(store, "narrow", 1, None, RpcOptions(trusted=(HERE,)))
    try:
        with pytest.raises(RpcError, match="Path"):
            narrow_agent.call_sync("open", Path, ("x",), {}, PATIENCE_S)
        assert narrow_agent.call_sync("open", allowed_function, (1,), {}, PATIENCE_S) == 1
        inject(open_agent, "narrow", meta_that_names_something)
        eventually(lambda: len(narrow_agent.get_worker_infos()) == 1, "the peer being dropped")
    finally:
        narrow_agent.close()
        open_agent.close()


def test_an_error_that_is_not_trusted_arrives_as_remote_error(narrow: list[Agent]) -> None:
    with pytest.raises(rpc.RemoteError, match="TimeoutExpired") as caught:
        narrow[0].call_sync("worker1", raise_foreign, (), {}, PATIENCE_S)
    assert caught.value.type_name == "TimeoutExpired"


def raise_foreign() -> None:
    raise subprocess.TimeoutExpired("cmd", 3)
