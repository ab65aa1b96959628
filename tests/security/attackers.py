"""What attackers do, by means of their own: sockets, Python's ssl, and the published wire format."""

from __future__ import annotations

import _socket
import contextlib
import hashlib
import hmac
import json
import secrets
import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from farstep.rpc import Agent, RpcOptions, handshake
from farstep.rpc.group import join_group

SECRET = "correct horse battery staple"
PATIENCE_S = 60.0


def increment(x: int) -> int:
    return x + 1


def call(agent: Agent, to: str, x: int = 1) -> Any:
    return agent.call_sync(to, increment, (x,), {}, PATIENCE_S)


def tcp_options(**more: Any) -> RpcOptions:
    return RpcOptions(**{"transport": "tcp", "secret": SECRET, "host": "127.0.0.1", **more})


# -- at the door


def knock(agent: Agent, how: str) -> socket.socket:
    """A connection to where an agent listens, by somebody who has said nothing yet. `how`: unix, tcp (inside TLS), raw or mac."""
    card = agent.links.me.card
    if how == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(PATIENCE_S)
        sock.connect(card.unix)  # type: ignore[arg-type]
        return sock
    sock = socket.create_connection(card.tcp, PATIENCE_S)  # type: ignore[arg-type]
    return sock if how in ("raw", "mac") else inside_tls(sock)


def inside_tls(sock: socket.socket) -> ssl.SSLSocket:
    """As a TLS client that believes every certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(sock)


def fingerprint(sock: socket.socket) -> str | None:
    if not isinstance(sock, ssl.SSLSocket):
        return None
    return hashlib.sha256(sock.getpeercert(binary_form=True) or b"").hexdigest()


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
    except (ConnectionError, ssl.SSLError):
        pass
    return True


def greeting(sock: socket.socket) -> bytes:
    return read_exactly(sock, len(handshake.GREETING) + handshake.CHALLENGE_BYTES)[len(handshake.GREETING) :]


def proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(key, role, hashlib.sha256)
    for part in parts:
        mac.update(struct.pack("<I", len(part)) + part)
    return mac.digest()


def introduce(sock: socket.socket, key: bytes, said: bytes) -> None:
    theirs = greeting(sock)
    mine = secrets.token_bytes(32)
    sock.sendall(mine + proof(key, b"dialler", theirs, mine, said) + struct.pack("<I", len(said)) + said)


def card(**changes: Any) -> dict[str, Any]:
    fields = {
        "name": "mallory",
        "id": 77,
        "incarnation": "feed",
        "host": "there",
        "unix": None,
        "tcp": ["127.0.0.1", 9],
        "certificate": None,
        "has_authority": False,
    }
    return {**fields, **changes}


def introduction(to: Agent, sock: socket.socket, **changes: Any) -> bytes:
    """What an honest dialler would say, but for the changes."""
    said = {"card": card(), "to": to.links.me.card.to_json(), "seen": fingerprint(sock)}
    return json.dumps({**said, **changes}).encode()


class Grow:
    """A group that a new worker can be brought into: that is how a test sees that the door still works."""

    def __init__(self, how: str) -> None:
        self.how = how
        if how == "unix":
            self.options = RpcOptions(transport="unix")
        else:
            self.options = tcp_options(dangerously_unencrypted_tcp=how == "mac")
        self.key = b"" if how == "unix" else handshake.group_key(SECRET)
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

    def names(self) -> list[str]:
        return [info.name for info in self.agents[0].get_worker_infos()]

    def close(self) -> None:
        for agent in self.agents:
            agent.close()


# -- in between


class InBetween:
    """Listens, dials the target for each connection, and passes on what `change` makes of each piece.

    `wrap_dialler` and `wrap_target` make TLS of the two connections, or leave them. `change(piece, to_target)` sees what
    passes, and may return something else.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        wrap_dialler: Callable[[socket.socket], socket.socket] = lambda sock: sock,
        wrap_target: Callable[[socket.socket], socket.socket] = lambda sock: sock,
        change: Callable[[bytes, bool], bytes] = lambda piece, to_target: piece,
    ) -> None:
        self.target = target
        self._wrap_dialler = wrap_dialler
        self._wrap_target = wrap_target
        self._change = change
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()
        self.seen = {True: b"", False: b""}
        """What has passed, by whether it went to the target."""
        self.to_target: list[socket.socket] = []
        """The connections to the target, for whoever wants to say something there."""
        self._open: list[socket.socket] = [self._listening]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                dialler, _ = self._listening.accept()
                threading.Thread(target=self._meet, args=(dialler,), daemon=True).start()

    def _meet(self, dialler: socket.socket) -> None:
        self._open.append(dialler)
        with contextlib.suppress(OSError):
            target = socket.socket()
            target.settimeout(PATIENCE_S)
            _socket.socket.connect(target, self.target)  # not rerouted itself
            self._open.append(target)
            dialler.settimeout(PATIENCE_S)
            target, dialler = self._wrap_target(target), self._wrap_dialler(dialler)
            self._open += [dialler, target]
            self.to_target.append(target)
            threading.Thread(target=self._pass, args=(target, dialler, False), daemon=True).start()
            self._pass(dialler, target, True)

    def _pass(self, source: socket.socket, target: socket.socket, to_target: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                self.seen[to_target] += piece
                target.sendall(self._change(piece, to_target))
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.close()


@contextlib.contextmanager
def rerouted(routes: dict[tuple[str, int], InBetween]) -> Iterator[None]:
    """A network whose routes somebody else decides: who dials one of these addresses gets that one in between instead."""
    honest = socket.socket.connect

    def connect(sock: socket.socket, address: Any) -> None:
        taken = routes.get(tuple(address)) if sock.family == socket.AF_INET else None
        honest(sock, address if taken is None else taken.address)

    socket.socket.connect = connect  # type: ignore[method-assign]
    try:
        yield
    finally:
        socket.socket.connect = honest  # type: ignore[method-assign]
        for relay in routes.values():
            relay.close()


# -- certificates, made by openssl


def _openssl(*args: str, cwd: Path) -> None:
    subprocess.run(["openssl", *args], cwd=cwd, check=True, capture_output=True, timeout=60)


def make_certificates(path: Path) -> Path:
    """ca.pem with cert.pem and cert2.pem, other-ca.pem with other-cert.pem, old-cert.pem that has expired; key.pem for each."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for p in ("", "other-"):
        request = ("req", "-x509", *ec, "-subj", "/CN=ca", "-days", "2")
        _openssl(*request, "-keyout", p + "ca-key.pem", "-out", p + "ca.pem", cwd=path)
    for p, name, days in (
        ("", "cert", "2"),
        ("", "cert2", "2"),
        ("other-", "cert", "2"),
        ("", "old-cert", "-1"),
    ):
        key = p + name.replace("cert", "key") + ".pem"
        _openssl("req", *ec, "-subj", "/CN=worker", "-keyout", key, "-out", "request.pem", cwd=path)
        ca = ("-CA", p + "ca.pem", "-CAkey", p + "ca-key.pem", "-CAcreateserial")
        _openssl("x509", "-req", "-in", "request.pem", *ca, "-days", days, "-out", f"{p}{name}.pem", cwd=path)
    return path


def certified_options(path: Path, cert: str = "cert", ca: str = "ca", **more: Any) -> RpcOptions:
    files = {
        "tls_cert": str(path / f"{cert}.pem"),
        "tls_key": str(path / f"{cert.replace('cert', 'key')}.pem"),
        "tls_ca": str(path / f"{ca}.pem"),
    }
    return tcp_options(**files, **more)


def tls_ends(
    cert: Path, key: Path
) -> tuple[Callable[[socket.socket], socket.socket], Callable[[socket.socket], socket.socket]]:
    """How somebody with that certificate listens, and how they dial. They believe every certificate themselves."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    for context in (server, client):
        context.load_cert_chain(cert, key)
    return (lambda sock: server.wrap_socket(sock, server_side=True)), client.wrap_socket


def closing(group: Grow) -> Iterator[Grow]:
    try:
        yield group
    finally:
        group.close()
