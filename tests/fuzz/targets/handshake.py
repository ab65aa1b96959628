"""Strangers and holders of the secret at the door: any bytes, cut anywhere, and introductions with every field replaced."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import time
from typing import Any

from hypothesis import strategies as st

from farstep.errors import AuthenticationError, ProtocolError
from farstep.rpc import handshake
from farstep.rpc.dialling import check_introduction
from farstep.rpc.membership import Card

NAME = "handshake"
KEY = b"k" * 32
ME = Card("worker0", 0, "incarnation", "host", None, ("127.0.0.1", 9), "f" * 64, False)
PEER = Card("worker1", 1, "other", "host", None, ("127.0.0.1", 10), "e" * 64, False)
PROMISED = (AuthenticationError, ProtocolError, EOFError, OSError, handshake.Notice)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from(["worker0", "f" * 64, "x" * 5000, 10**400, -1]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
cards = st.builds(
    lambda card, field, value: {**card.to_json(), field: value},
    st.sampled_from([ME, PEER]),
    st.sampled_from([*ME.to_json(), "more"]),
    values,
)
introductions = st.fixed_dictionaries(
    {},
    optional={
        "card": cards | values,
        "to": st.just(ME.to_json()) | cards | values,
        "seen": st.just(ME.certificate) | values,
        "refused": values,
        "tampered": values,
    },
)
said = introductions.map(lambda what: json.dumps(what).encode()) | st.binary(max_size=300)

strategy = st.one_of(
    st.tuples(st.just("stranger"), st.binary(max_size=400)),
    st.tuples(st.just("member"), said),
    st.tuples(st.just("listener"), st.binary(max_size=400)),
    st.tuples(st.just("answer"), said),
    st.tuples(st.just("store"), said | st.integers(1, 20_000).map(lambda n: b"[" * n)),
)


class Line:
    """A socket that says what it was given, and listens. `then` makes the rest of what is said of what it heard so far."""

    def __init__(self, data: bytes, then: Any = None) -> None:
        self._data = data
        self._then = then
        self.heard = b""

    def settimeout(self, _: float) -> None:
        pass

    def sendall(self, data: bytes) -> None:
        self.heard += data

    def recv(self, count: int) -> bytes:
        if not self._data and self._then is not None:
            self._data, self._then = self._then(self.heard), None
        piece, self._data = self._data[:count], self._data[count:]
        return piece


def prove(role: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(KEY, role, hashlib.sha256)
    for part in parts:
        mac.update(struct.pack("<I", len(part)) + part)
    return mac.digest()


def as_member(what: bytes) -> Line:
    def introduce(heard: bytes) -> bytes:
        theirs, mine = heard[len(handshake.GREETING) :], b"m" * 32
        return mine + prove(b"dialler", theirs, mine, what) + struct.pack("<I", len(what)) + what

    return Line(b"", introduce)


def as_listener(what: bytes) -> Line:
    challenge = b"c" * 32

    def answer(heard: bytes) -> bytes:
        mine, introduction = heard[:32], heard[68:]
        return prove(b"listener", mine, challenge, introduction, what) + struct.pack("<I", len(what)) + what

    return Line(handshake.GREETING + challenge, answer)


def check(case: tuple[str, bytes]) -> None:
    who, data = case
    deadline = time.monotonic() + 60
    try:
        if who == "stranger":
            handshake.accept(Line(data), KEY, deadline)  # type: ignore[arg-type]
            raise AssertionError("a stranger got in")
        if who == "member":
            line = as_member(data)
            introduction = handshake.accept(line, KEY, deadline)  # type: ignore[arg-type]
            card = check_introduction(introduction, ME, line)  # type: ignore[arg-type]
            assert Card.from_json(card.to_json()) == card
        elif who == "listener":
            handshake.dial(Line(data), KEY, ME.to_json(), PEER.to_json(), deadline)  # type: ignore[arg-type]
            raise AssertionError("a stranger was believed")
        elif who == "answer":
            met = handshake.dial(as_listener(data), KEY, ME.to_json(), PEER.to_json(), deadline)  # type: ignore[arg-type]
            Card.from_json(met.card)
        else:
            card = Card.parse(data)
            assert Card.from_json(card.to_json()) == card
    except PROMISED:
        pass
