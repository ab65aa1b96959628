"""Who may connect: decided before a single byte of a peer's is parsed.

On one host a unix socket in a directory only its user can enter, and the kernel's word for the peer's uid. Between
hosts TCP, inside TLS (tls.py), and both sides prove that they hold the shared secret:

    dialler                                   listener
       │ ◄──────────── challenge (32 random bytes) ───│
       │─ challenge, proof, length, introduction ───► │  the proof covers both challenges and the introduction
       │ ◄───────────────────── proof, length, answer │  likewise, with the roles swapped, and the introduction too

Each proof is an HMAC-SHA256 over the role, both challenges and what is said, under a key that scrypt derives from the
secret; so a recorded handshake is useless, nothing can be reflected, and guessing costs. The dialler proves
first: a stranger that scans ports gets random bytes and nothing to guess against. Comparison takes constant time.

[Note: nobody in between] The introduction has the dialler's card, the card of the worker that it means to reach, and the fingerprint of the
certificate that it met in TLS; the answer has the listener's card and the fingerprint that the listener met. Each side compares all of it with
what it knows. Somebody in between has to show a certificate of its own, so the fingerprints differ; a card in the rendezvous store
that was changed differs from the card of the worker that answers.

[Note: no common way] Workers whose cards say that one has TLS and the other has not never begin a handshake, and neither changes its ways for the
other: there is nothing to be downgraded. The one that came later ends with an error. To the other it sends a notice, unencrypted and
with a proof of its own kind, which can lead to a warning and an error message there and to nothing else.

Without TLS (`dangerously_unencrypted_tcp`) the challenges give the connection a key as well, and every record
after the handshake is authenticated with it (records.py).
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, Final

from farstep.errors import AuthenticationError, ProtocolError

__all__ = [
    "TIMEOUT_S",
    "Introduction",
    "Met",
    "Notice",
    "accept",
    "check_uid",
    "dial",
    "group_key",
    "read_notice",
    "send_notice",
]

TIMEOUT_S: Final = 10.0
"""A peer that has not introduced itself by then is hung up on."""

GREETING: Final = b"farstep\x02"
NOTICE: Final = b"farstep: no way to talk to you".ljust(32, b"\0")
"""Stands in place of a dialler's challenge where it only says why it can't talk to this worker. See [Note: no common way]."""

TLS_HELLO: Final = b"\x16\x03"
"""How every TLS connection begins."""

CHALLENGE_BYTES: Final = 32
PROOF_BYTES: Final = 32
MAX_IDENTITY_BYTES: Final = 16 << 10
MAX_REASON_CHARS: Final = 1000
_LENGTH: Final = struct.Struct("<I")
REFUSAL: Final = bytes(PROOF_BYTES + _LENGTH.size)
"""What a dialler hears whose proof is wrong; an answer that is right never looks like it."""

ENCRYPT_ALIKE: Final = "set dangerously_unencrypted_tcp to the same value on every worker, or on none"
Card = dict[str, Any]


@dataclass(frozen=True)
class Met:
    """What a dialler knows after the handshake."""

    card: Card
    seen: str | None
    """The fingerprint of this worker's certificate, as the listener met it."""

    frame_key: bytes
    """For the records of a connection without TLS: new for each connection, and known to its two ends only."""


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


def dial(
    sock: socket.socket,
    key: bytes,
    me: Card,
    to: Card,
    deadline: float,
    *,
    seen: str | None = None,
    is_question: bool = False,
) -> Met:
    """Introduce this worker on a connection that it dialled; say who answered.

    `to` is the card of the worker that is meant, `seen` the fingerprint of the certificate that was met. `is_question`: it only
    asks whether that worker is there, and hangs up.
    ConnectionRefusedError where the listener is of the group and refuses, AuthenticationError where it is not, or finds
    that somebody is in between.
    """
    greeting = _recv_exactly(sock, len(GREETING) + CHALLENGE_BYTES, deadline)
    if not greeting.startswith(GREETING):
        raise ProtocolError("what answers there is not a farstep worker, or one of another version")
    theirs = greeting[len(GREETING) :]
    mine = secrets.token_bytes(CHALLENGE_BYTES)
    said = json.dumps({"card": me, "to": to, "seen": seen, "question": is_question}).encode()
    proof = _prove(key, b"dialler", theirs, mine, said)
    _send(sock, mine + proof + _LENGTH.pack(len(said)) + said, deadline)
    answer = _recv_exactly(sock, PROOF_BYTES + _LENGTH.size, deadline)
    if answer == REFUSAL:
        raise AuthenticationError(
            "the peer does not accept this worker's shared secret: is FARSTEP_SECRET the same on both?"
        )
    reply = _recv_exactly(sock, _bounded(answer[PROOF_BYTES:]), deadline)
    if not hmac.compare_digest(answer[:PROOF_BYTES], _prove(key, b"listener", mine, theirs, said, reply)):
        raise AuthenticationError("the peer does not hold the shared secret")
    heard = _parse(reply)
    if "tampered" in heard:
        raise AuthenticationError(str(heard["tampered"]))
    if "refused" in heard:
        raise ConnectionRefusedError(str(heard["refused"]))
    return Met(heard.get("card", {}), heard.get("seen"), _prove(key, b"frames", mine, theirs, said, reply))


class Notice(Exception):
    """A member of the group says why it can't talk to this worker. See [Note: no common way]."""

    def __init__(self, card: Any, to: str, why: str) -> None:
        super().__init__(why)
        self.card = card
        self.to = to
        self.why = why


class Introduction:
    """The listener's side, in two steps, so that the listener can look at who came before it answers.

    `card` is the dialler's, `to` the card of the worker that it means, `seen` the certificate that it met.
    """

    def __init__(self, sock: socket.socket, key: bytes, deadline: float) -> None:
        self._sock = sock
        self._key = key
        self._deadline = deadline
        self._mine = secrets.token_bytes(CHALLENGE_BYTES)
        _send(sock, GREETING + self._mine, deadline)
        head = _recv_exactly(sock, CHALLENGE_BYTES + PROOF_BYTES + _LENGTH.size, deadline)
        if head.startswith(TLS_HELLO):
            raise ProtocolError(f"the peer has TLS, and this worker has not; {ENCRYPT_ALIKE}")
        if head.startswith(NOTICE):
            raise _rest_of_notice(sock, key, head, deadline)
        self._theirs = head[:CHALLENGE_BYTES]
        proof = head[CHALLENGE_BYTES : CHALLENGE_BYTES + PROOF_BYTES]
        self._said = _recv_exactly(sock, _bounded(head[-_LENGTH.size :]), deadline)
        if not hmac.compare_digest(proof, _prove(key, b"dialler", self._mine, self._theirs, self._said)):
            _send(sock, REFUSAL, deadline)
            raise AuthenticationError("a peer does not hold the shared secret")
        heard = _parse(self._said)
        self.card: Any = heard.get("card")
        self.to: Any = heard.get("to")
        self.seen: Any = heard.get("seen")
        self.is_question = heard.get("question") is True

    def welcome(self, card: Card, seen: str | None) -> bytes:
        """Let the dialler in; returns the key of the connection's records."""
        reply = self._answer({"card": card, "seen": seen})
        return _prove(self._key, b"frames", self._theirs, self._mine, self._said, reply)

    def refuse(self, why: str, *, tampered: bool = False) -> None:
        """Say why not. `tampered`: somebody changed the store, or is in between."""
        self._answer({"tampered" if tampered else "refused": why[:MAX_REASON_CHARS]})

    def _answer(self, answer: dict[str, Any]) -> bytes:
        reply = json.dumps(answer).encode()
        proof = _prove(self._key, b"listener", self._theirs, self._mine, self._said, reply)
        _send(self._sock, proof + _LENGTH.pack(len(reply)) + reply, self._deadline)
        return reply


def send_notice(sock: socket.socket, key: bytes, me: Card, to: Card, why: str, deadline: float) -> None:
    """Tell a worker why this one can't talk to it. Nothing but that can follow on the connection."""
    said = json.dumps({"card": me, "to": to["incarnation"], "why": why[:MAX_REASON_CHARS]}).encode()
    proof = _prove(key, b"notice", said)
    _send(sock, NOTICE + proof + _LENGTH.pack(len(said)) + said, deadline)


def read_notice(sock: socket.socket, key: bytes, deadline: float) -> Notice:
    """What a peer says that does not begin TLS, to a listener that has it. ProtocolError where it is no notice."""
    head = b""
    while len(head) < len(NOTICE):  # whoever says something else is hung up on at once
        head += _recv_exactly(sock, 1, deadline)
        if not NOTICE.startswith(head):
            raise ProtocolError(f"this worker has TLS, and the peer has not; {ENCRYPT_ALIKE}")
    head += _recv_exactly(sock, PROOF_BYTES + _LENGTH.size, deadline)
    return _rest_of_notice(sock, key, head, deadline)


def _rest_of_notice(sock: socket.socket, key: bytes, head: bytes, deadline: float) -> Notice:
    said = _recv_exactly(sock, _bounded(head[-_LENGTH.size :]), deadline)
    proof = head[CHALLENGE_BYTES : CHALLENGE_BYTES + PROOF_BYTES]
    if not key or not hmac.compare_digest(proof, _prove(key, b"notice", said)):
        raise AuthenticationError("a peer does not hold the shared secret")
    heard = _parse(said)
    if type(heard.get("to")) is not str or type(heard.get("why")) is not str:
        raise ProtocolError("a peer's notice says nothing, or to nobody")
    return Notice(heard.get("card"), heard["to"], heard["why"][:MAX_REASON_CHARS])


def accept(sock: socket.socket, key: bytes, deadline: float) -> Introduction:
    """Hear who dialled. AuthenticationError, ProtocolError, EOFError or OSError where that is nobody of ours.

    Raises a `Notice` where it is a member that can't talk to this worker.
    """
    return Introduction(sock, key, deadline)


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


def _parse(said: bytes) -> dict[str, Any]:
    try:
        heard = json.loads(said)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError("a peer's introduction is not JSON") from exc
    if not isinstance(heard, dict):
        raise ProtocolError("a peer's introduction is not an object")
    return heard


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
