"""Getting through to a peer: which transport, TLS, the introduction, and what each side compares. See [Note: nobody in between]."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final

from farstep.errors import AuthenticationError, InsecureTransport, ProtocolError, RpcError, RpcTimeout
from farstep.rpc import handshake, tls
from farstep.rpc.listener import keep_alive
from farstep.rpc.membership import Card
from farstep.rpc.options import HOW_TO_SET_A_SECRET
from farstep.rpc.records import MacSocket
from farstep.rpc.tls import Credentials

__all__ = ["Dialler", "Unreachable", "check_introduction"]

RETRY_S: Final = 0.05
NOTICE_S: Final = 1.0
ATTEMPTS: Final = 2
"""At least so many: this process may itself have been stopped in the middle of the first."""


class Unreachable(Exception):
    """Nobody answers there, or another worker than the one that is meant: it is gone."""


class _NoAnswer(Exception):
    """The peer's host has accepted the connection, and the peer does not introduce itself. That does not make it lost."""


class Dialler:
    """Connects one worker to others. Any thread."""

    def __init__(
        self,
        me: Card,
        key: bytes,
        credentials: Credentials | None,
        heartbeat_s: float,
        is_closed: Callable[[], bool],
    ) -> None:
        self._me = me
        self._key = key
        self._credentials = credentials
        self._heartbeat_s = heartbeat_s
        self._is_closed = is_closed

    def check_reachable(self, peer: Card) -> None:
        """InsecureTransport where there is no safe way to that worker."""
        if self._shares_host(peer):
            return
        if self._me.host == peer.host and not self._key:
            raise InsecureTransport(
                f"worker {peer.name!r} listens on TCP only (transport='tcp'), and {self._me.name!r} has no shared secret "
                f"for that: {HOW_TO_SET_A_SECRET}"
            )
        if not peer.tcp or not self._key:
            raise InsecureTransport(
                f"worker {peer.name!r} is on another host than {self._me.name!r} (or belongs to another user), and "
                f"calls between hosts need a shared secret: {HOW_TO_SET_A_SECRET}"
            )
        if not self._me.tcp:
            raise InsecureTransport(
                f"worker {self._me.name!r} has unix sockets only (transport='unix'), and {peer.name!r} listens on TCP only "
                f"(transport='tcp'): give both the same transport, or neither one"
            )
        if (peer.certificate is None) != (self._credentials is None):
            plain, other = (peer, self._me) if peer.certificate is None else (self._me, peer)
            raise InsecureTransport(
                f"worker {other.name!r} has TLS, and {plain.name!r} has not (dangerously_unencrypted_tcp): "
                f"{handshake.ENCRYPT_ALIKE}"
            )
        if peer.has_authority != self._me.has_authority:
            given, other = (peer, self._me) if peer.has_authority else (self._me, peer)
            raise InsecureTransport(
                f"worker {given.name!r} has certificates of an authority (tls_cert, tls_key, tls_ca), and {other.name!r} "
                f"has not: give them to every worker, or to none"
            )

    def tell(self, peer: Card, why: str) -> None:
        """Tell a worker why this one can't talk to it, if that can be told. See [Note: no common way]."""
        if peer.tcp is None or not self._key or self._shares_host(peer):
            return
        deadline = time.monotonic() + NOTICE_S
        with contextlib.suppress(OSError), socket.create_connection(peer.tcp, NOTICE_S) as sock:
            handshake.send_notice(sock, self._key, self._me.to_json(), peer.to_json(), why, deadline)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(NOTICE_S)
            while sock.recv(4096):  # until it has hung up, or what it has not read would be lost
                pass

    def answers(self, peer: Card) -> bool:
        """Ask whether a worker is still there. False only where nobody answers at its address, or another worker does."""
        try:
            self.check_reachable(peer)
            self.connect(peer, is_question=True).close()
        except Unreachable:
            return False
        except RpcError:
            pass  # somebody is there
        return True

    def connect(self, peer: Card, *, is_question: bool = False) -> socket.socket:
        """A connection on which both have introduced themselves. A door that is too full is tried again.

        Unreachable where the peer is gone. AuthenticationError, ProtocolError or RpcTimeout where somebody is there and the
        handshake fails.
        """
        patience_until = time.monotonic() + handshake.TIMEOUT_S
        for attempt in itertools.count(1):
            try:
                return self._try(peer, is_question)
            except (EOFError, ssl.SSLEOFError, ConnectionResetError, BlockingIOError) as exc:
                error: Exception = exc.with_traceback(None)
                if attempt >= ATTEMPTS and time.monotonic() + RETRY_S > patience_until:
                    raise Unreachable(f"it cannot be reached: {error}") from error
            except AuthenticationError as exc:
                where = f"its unix socket {peer.unix}" if self._shares_host(peer) else f"{peer.tcp}"
                raise AuthenticationError(
                    f"worker {self._me.name!r} dialled {peer.name!r} at {where}: {exc}"
                ) from exc.__cause__
            except ssl.SSLError as exc:
                raise AuthenticationError(self._tls_failure(peer, exc)) from exc
            except _NoAnswer as exc:
                error = exc.with_traceback(None)
                if attempt >= ATTEMPTS:
                    raise RpcTimeout(f"worker {peer.name!r} is there and does not answer: {exc}") from exc
            except TimeoutError as exc:
                error = exc.with_traceback(None)
                if attempt >= ATTEMPTS:
                    raise Unreachable(f"it cannot be reached: {error}") from error
            except OSError as exc:
                raise Unreachable(f"it cannot be reached: {exc}") from exc
            if self._is_closed():
                raise Unreachable(f"it cannot be reached: {error}") from error
            time.sleep(RETRY_S)
        raise Unreachable("it cannot be reached")  # pragma: no cover

    def _tls_failure(self, peer: Card, exc: ssl.SSLError) -> str:
        me = self._me.name
        if isinstance(exc, ssl.SSLCertVerificationError):
            what = f"worker {me!r} does not accept the certificate of {peer.name!r} ({exc.verify_message})"
        elif "ALERT" in (exc.reason or ""):
            what = f"worker {peer.name!r} does not accept the certificate of {me!r} ({exc.reason})"
        elif exc.reason == "WRONG_VERSION_NUMBER":
            return f"worker {me!r} has TLS, and what answers for {peer.name!r} has not; {handshake.ENCRYPT_ALIKE}"
        else:
            what = f"TLS between {me!r} and {peer.name!r} failed ({exc})"
        return (
            f"{what}. Each needs a certificate (tls_cert) that is valid now and that the authority in the other's tls_ca has "
            f"signed"
        )

    def _shares_host(self, peer: Card) -> bool:
        return self._me.host == peer.host and peer.unix is not None

    def _try(self, peer: Card, is_question: bool) -> socket.socket:
        sock: socket.socket
        if self._shares_host(peer):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(handshake.TIMEOUT_S)
        else:
            sock = socket.socket(socket.AF_INET6 if ":" in (peer.tcp or ("",))[0] else socket.AF_INET)
            sock.settimeout(min(handshake.TIMEOUT_S, self._heartbeat_s))
        try:
            sock.connect(peer.unix if sock.family == socket.AF_UNIX else peer.tcp)  # type: ignore[arg-type]
            try:
                return self._introduce(sock, peer, is_question)
            except TimeoutError as exc:
                raise _NoAnswer(str(exc)) from exc
        except BaseException:
            with contextlib.suppress(OSError):
                sock.close()
            raise

    def _introduce(self, sock: socket.socket, peer: Card, is_question: bool) -> socket.socket:
        """On a connection that its host has accepted."""
        deadline = time.monotonic() + handshake.TIMEOUT_S
        if sock.family == socket.AF_UNIX:
            handshake.check_uid(sock)
        else:
            keep_alive(sock, self._heartbeat_s, is_only_read=False)
            if self._credentials is not None:
                sock = tls.dial(sock, self._credentials, deadline)
        try:
            seen = tls.fingerprint_met(sock)
            me, to = self._me.to_json(), peer.to_json()
            met = handshake.dial(sock, self._key, me, to, deadline, seen=seen, is_question=is_question)
            self._compare(peer, met, seen)
        except BaseException:
            with contextlib.suppress(OSError):
                sock.close()
            raise
        if sock.family != socket.AF_UNIX and self._credentials is None:
            return MacSocket(sock, met.frame_key)
        return sock

    def _compare(self, peer: Card, met: handshake.Met, seen: str | None) -> None:
        answered = Card.from_json(met.card)
        if answered.incarnation != peer.incarnation:
            raise ConnectionRefusedError("another worker has taken its place")
        if answered != peer or (seen is not None and seen != answered.certificate):
            raise AuthenticationError(_tampered(peer, self._me))
        if met.seen is not None and (self._credentials is None or met.seen != self._credentials.fingerprint):
            raise AuthenticationError(_tampered(peer, self._me))


def check_introduction(introduction: handshake.Introduction, me: Card, sock: socket.socket) -> Card:
    """The card of a dialler, if it means this worker and nobody is in between. Answers it otherwise, and raises."""
    try:
        card, to = Card.from_json(introduction.card), Card.from_json(introduction.to)
    except ProtocolError as exc:
        introduction.refuse(str(exc))
        raise
    if to.incarnation != me.incarnation:
        introduction.refuse("another worker has taken its place")
        raise ProtocolError(f"worker {card.name!r} looks for {to.name!r}, which is not here any more")
    met = tls.fingerprint_met(sock)
    if (
        to != me
        or (isinstance(sock, tls.TlsReceiver) and introduction.seen != me.certificate)
        or (met is not None and met != card.certificate)
    ):
        introduction.refuse(_tampered(me, card), tampered=True)
        raise AuthenticationError(_tampered(me, card))
    return card


def _tampered(listener: Card, dialler: Card) -> str:
    return (
        f"worker {dialler.name!r} dialled {listener.name!r} and met another certificate or card than {listener.name!r} has: somebody "
        f"is in between, or has changed the rendezvous store. Nothing was sent. See who else can reach the store and the network"
    )
