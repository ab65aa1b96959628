"""Who may connect: decided before a single byte of a peer's is parsed.

On one host a unix socket in a directory only its user can enter, and the kernel's word for the peer's uid. Between
hosts TCP, and both sides prove that they hold the shared secret:

    dialler                                   listener
       │ ◄──────────── challenge (32 random bytes) ───│
       │─ challenge, proof, length, identity ───────► │  the proof covers both challenges and the identity
       │ ◄─────────────────── proof, length, identity │  likewise, with the roles swapped

Each proof is an HMAC-SHA256 over the role, both challenges and what is said, under a key that scrypt derives from the
secret; so a recorded handshake is useless, nothing can be reflected, and guessing costs. The dialler proves
first: a stranger that scans ports gets random bytes and nothing to guess against. Comparison takes constant time.

The handshake tells who is there; it does not encrypt what follows. On a network that others share, use TLS as well.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import secrets
import socket
import ssl
import struct
import time
from typing import Any, Final

from farstep.errors import AuthenticationError, ProtocolError
from farstep.rpc.options import RpcOptions

__all__ = ["TIMEOUT_S", "accept", "check_uid", "dial", "group_key", "tls_context"]

TIMEOUT_S: Final = 10.0
"""A peer that has not introduced itself by then is hung up on."""

GREETING: Final = b"farstep\x01"
CHALLENGE_BYTES: Final = 32
PROOF_BYTES: Final = 32
MAX_IDENTITY_BYTES: Final = 16 << 10
_LENGTH: Final = struct.Struct("<I")
REFUSAL: Final = bytes(PROOF_BYTES + _LENGTH.size)
"""What a dialler hears whose proof is wrong; an answer that is right never looks like it."""

Identity = dict[str, Any]


@functools.lru_cache(maxsize=8)
def group_key(secret: str) -> bytes:
    """The key of a group. Slow on purpose, and done once."""
    return hashlib.scrypt(secret.encode(), salt=b"farstep group key", n=1 << 14, r=8, p=1, dklen=32)


def check_uid(sock: socket.socket) -> None:
    """Both ends of a unix connection ask the kernel who the other is."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    if uid != os.getuid():
        raise AuthenticationError(
            f"a process of uid {uid} is at the other end, this one has uid {os.getuid()}"
        )


def dial(sock: socket.socket, key: bytes, identity: Identity, deadline: float) -> Identity:
    """Introduce this worker on a connection that it dialled; say who answered."""
    greeting = _recv_exactly(sock, len(GREETING) + CHALLENGE_BYTES, deadline)
    if not greeting.startswith(GREETING):
        raise ProtocolError("what answers there is not a farstep worker, or one of another version")
    theirs = greeting[len(GREETING) :]
    mine = secrets.token_bytes(CHALLENGE_BYTES)
    said = json.dumps(identity).encode()
    proof = _prove(key, b"dialler", theirs, mine, said)
    _send(sock, mine + proof + _LENGTH.pack(len(said)) + said, deadline)
    answer = _recv_exactly(sock, PROOF_BYTES + _LENGTH.size, deadline)
    if answer == REFUSAL:
        raise AuthenticationError(
            "the peer does not accept this worker's shared secret: is FARSTEP_SECRET the same on both?"
        )
    reply = _recv_exactly(sock, _bounded(answer[PROOF_BYTES:]), deadline)
    if not hmac.compare_digest(answer[:PROOF_BYTES], _prove(key, b"listener", mine, theirs, reply)):
        raise AuthenticationError("the peer does not hold the shared secret")
    identity_of_peer = _parse(reply)
    if "refused" in identity_of_peer:
        raise ConnectionRefusedError(str(identity_of_peer["refused"]))
    return identity_of_peer


class Introduction:
    """The listener's side, in two steps, so that the listener can look at who came before it answers."""

    def __init__(self, sock: socket.socket, key: bytes, deadline: float) -> None:
        self._sock = sock
        self._key = key
        self._deadline = deadline
        self._mine = secrets.token_bytes(CHALLENGE_BYTES)
        _send(sock, GREETING + self._mine, deadline)
        head = _recv_exactly(sock, CHALLENGE_BYTES + PROOF_BYTES + _LENGTH.size, deadline)
        self._theirs = head[:CHALLENGE_BYTES]
        proof = head[CHALLENGE_BYTES : CHALLENGE_BYTES + PROOF_BYTES]
        said = _recv_exactly(sock, _bounded(head[-_LENGTH.size :]), deadline)
        if not hmac.compare_digest(proof, _prove(key, b"dialler", self._mine, self._theirs, said)):
            _send(sock, REFUSAL, deadline)
            raise AuthenticationError("a peer does not hold the shared secret")
        self.identity = _parse(said)

    def answer(self, identity: Identity) -> None:
        said = json.dumps(identity).encode()
        proof = _prove(self._key, b"listener", self._theirs, self._mine, said)
        _send(self._sock, proof + _LENGTH.pack(len(said)) + said, self._deadline)


def accept(sock: socket.socket, key: bytes, deadline: float) -> Introduction:
    """Hear who dialled. AuthenticationError, ProtocolError, EOFError or OSError where that is nobody of ours."""
    return Introduction(sock, key, deadline)


def tls_context(options: RpcOptions, *, listening: bool) -> ssl.SSLContext | None:
    """Mutual TLS where the options name certificates. Names are not checked: the authority vouches for workers."""
    if not (options.tls_cert and options.tls_key and options.tls_ca):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listening else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(options.tls_cert, options.tls_key)
    context.load_verify_locations(options.tls_ca)
    return context


def _prove(key: bytes, role: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(key, role, hashlib.sha256)
    for part in parts:
        mac.update(_LENGTH.pack(len(part)))
        mac.update(part)
    return mac.digest()


def _bounded(raw: bytes) -> int:
    length: int = _LENGTH.unpack(raw)[0]
    if length > MAX_IDENTITY_BYTES:
        raise ProtocolError(f"a peer introduces itself with {length} bytes")
    return length


def _parse(said: bytes) -> Identity:
    identity = json.loads(said)
    if not isinstance(identity, dict):
        raise ProtocolError("a peer's introduction is not an object")
    return identity


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(_left(deadline))
    sock.sendall(data)


def _recv_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    got = bytearray()
    while len(got) < count:
        sock.settimeout(_left(deadline))
        piece = sock.recv(count - len(got))
        if not piece:
            raise EOFError("the peer hung up before it had introduced itself")
        got += piece
    return bytes(got)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the peer did not introduce itself in time")
    return left
