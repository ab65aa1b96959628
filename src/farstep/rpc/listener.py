"""Where peers knock: a unix socket in a private directory, and a TCP port once there is a secret."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlparse

from farstep.errors import RpcError
from farstep.rpc import handshake
from farstep.rpc.directories import PrivateDirectory
from farstep.rpc.options import RpcOptions
from farstep.rpc.rare_log import RareLog
from farstep.rpc.tls import Credentials, TlsReceiver

__all__ = ["Listener", "keep_alive", "local_address"]

BACKLOG: Final = 512
MAX_STRANGERS: Final = 128
"""How many connections may be in the middle of their handshake; for one more, the oldest is hung up on."""

MAX_LOG_CHARS: Final = 500

log = logging.getLogger("farstep.rpc")
Admit = Callable[[socket.socket, handshake.Introduction], None]


class Listener:
    """Accepts connections and puts each through the handshake, on a thread of its own, under a deadline."""

    def __init__(
        self,
        worker: str,
        options: RpcOptions,
        key: bytes,
        credentials: Credentials | None,
        admit: Admit,
        on_notice: Callable[[handshake.Notice], None],
    ) -> None:
        self._worker = worker
        self._key = key
        self._admit = admit
        self._on_notice = on_notice
        self._credentials = credentials
        self._refusals = RareLog(log)
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._directory: PrivateDirectory | None = None
        self._closed = False
        self.sockets: list[socket.socket] = []
        self.unix_path: str | None = None
        self.tcp_address: tuple[str, int] | None = None
        try:
            if options.transport != "tcp":
                self._listen_unix()
            if options.transport == "tcp" or (options.transport == "auto" and options.shared_secret):
                self._listen_tcp(options)
        except BaseException:
            self.close()
            raise

    def _listen_unix(self) -> None:
        base = os.environ.get("XDG_RUNTIME_DIR")
        if not base or not os.access(base, os.W_OK) or len(base) > 60:
            base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 60 else "/tmp"
        self._directory = PrivateDirectory("farstep-rpc-", base)
        self.unix_path = os.path.join(self._directory.path, "s")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sockets.append(sock)
        sock.bind(self.unix_path)
        sock.listen(BACKLOG)
        sock.setblocking(False)

    def _listen_tcp(self, options: RpcOptions) -> None:
        host = local_address(options)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        self.sockets.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, options.port))
        except OSError as exc:
            raise RpcError(
                f"worker {self._worker!r} cannot listen on {host}:{options.port}: {exc}; "
                + (
                    "give another port, or 0 for any free one"
                    if exc.errno in (errno.EADDRINUSE, errno.EACCES)
                    else "set FARSTEP_HOST (or RpcOptions.host) to an address of this machine that the others can reach"
                )
            ) from exc
        sock.listen(BACKLOG)
        sock.setblocking(False)
        address = sock.getsockname()
        self.tcp_address = (address[0], address[1])

    def on_knock(self, listening: socket.socket) -> None:
        """A reactor thread: take everyone who is waiting at this socket."""
        while True:
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, OSError):
                return
            if sock.family != socket.AF_UNIX and self._credentials is not None:
                sock = TlsReceiver(sock, self._credentials)
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                if len(self._strangers) >= MAX_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
                self._strangers[sock] = None
            thread = threading.Thread(
                target=self._meet, args=(sock,), name=f"farstep-{self._worker}-door", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                self._forget(sock)
                sock.close()

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(sock, None)

    def _meet(self, sock: socket.socket) -> None:
        where = "unix socket" if sock.family == socket.AF_UNIX else _name(sock)
        try:
            deadline = time.monotonic() + handshake.TIMEOUT_S
            if sock.family == socket.AF_UNIX:
                handshake.check_uid(sock)
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if isinstance(sock, TlsReceiver):
                    if sock.first_byte(deadline) not in (handshake.TLS_HELLO[:1], b""):
                        raise handshake.read_notice(sock.without_tls(), self._key, deadline)
                    sock.do_handshake(deadline)
            self._admit(sock, handshake.accept(sock, self._key, deadline))
        except handshake.Notice as notice:
            sock.close()
            self._on_notice(notice)
        except Exception as exc:  # a stranger may send anything
            if not self._closed:
                text = _plainly(exc)[:MAX_LOG_CHARS]
                self._refusals.warning(
                    type(exc).__name__,
                    "worker %r refused a connection from %s: %s",
                    self._worker,
                    where,
                    text,
                )
            with contextlib.suppress(OSError):
                sock.close()
        finally:
            self._forget(sock)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            strangers = list(self._strangers)
        self._refusals.flush()
        for sock in [*self.sockets, *strangers]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            if sock in self.sockets:
                sock.close()
        if self._directory is not None:
            self._directory.close()

    def after_fork(self) -> None:
        """In a child process: all of this is the parent's. Close the copies, quietly."""
        for sock in [*self.sockets, *self._strangers]:
            with contextlib.suppress(OSError):
                os.close(sock.detach())


def _plainly(exc: Exception) -> str:
    """What went wrong at the door. OpenSSL has its own words for it."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return (
            f"the peer's certificate is not accepted here ({exc.verify_message}): it must be valid now, and signed by the "
            f"authority in tls_ca"
        )
    if isinstance(exc, ssl.SSLError) and "ALERT" in (exc.reason or ""):
        return (
            f"the peer does not accept this worker's certificate ({exc.reason}): it must be valid now, and signed by the "
            f"authority in the peer's tls_ca"
        )
    return str(exc)


def _name(sock: socket.socket) -> str:
    try:
        return "{}:{}".format(*sock.getpeername()[:2])
    except OSError:
        return "a TCP peer that is gone"


def local_address(options: RpcOptions) -> str:
    """The address that peers can reach: as told, or that by which this host reaches the rendezvous, or its name's."""
    told = options.host or os.environ.get("FARSTEP_HOST")
    if told:
        return told
    master = None
    if options.init_method.startswith("tcp"):
        master = urlparse(options.init_method).hostname
    elif options.init_method.startswith("env"):
        master = os.environ.get("MASTER_ADDR")
    for target in filter(None, (master, socket.gethostname())):
        try:
            family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def keep_alive(sock: socket.socket, heartbeat_s: float, *, is_only_read: bool) -> None:
    """Have the kernel notice a host that vanished, within the heartbeat, however busy Python is.

    That of a connection on which this worker sends is noticed only while nothing is under way: see [Note: noticing].
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, int(heartbeat_s / 4))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, int(heartbeat_s / probe_s) - 1))
    if is_only_read:  # the end of the handshake may be under way there, and nothing else
        patience_ms = int(max(500.0, (heartbeat_s - probe_s) * 1000))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
