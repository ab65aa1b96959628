"""TLS 1.3 for every TCP connection: the certificates, and the sockets of both ends.

With the user's certificates (`tls_cert`, `tls_key`, `tls_ca`) both sides check that the other's was signed by the authority. Without them each
worker makes a self-signed one when it starts. Such a certificate proves nothing by itself: the challenge of handshake.py, which runs inside
TLS and covers the fingerprints, says whose it is.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from farstep.errors import ProtocolError
from farstep.rpc.options import RpcOptions
from farstep.rpc.records import RecordSocket

__all__ = ["Credentials", "TlsReceiver", "dial", "fingerprint_met", "make_credentials"]

RECEIVE_BYTES: Final = 256 << 10
_recv_into: Final = socket.socket.recv_into
_CLOCK_SKEW: Final = timedelta(days=1)
_LIFETIME: Final = timedelta(days=3650)
_PEM_END: Final = "-----END CERTIFICATE-----"


@dataclass(frozen=True)
class Credentials:
    """A worker's certificate, as it listens and as it dials."""

    fingerprint: str
    """SHA-256 of the certificate, in hexadecimal."""

    listening: ssl.SSLContext
    dialling: ssl.SSLContext


def make_credentials(options: RpcOptions, worker: str) -> Credentials:
    """Load the user's certificate, or make one. ValueError where the user's files can't be used."""
    if options.tls_cert and options.tls_key and options.tls_ca:
        return _load(options.tls_cert, options.tls_key, options.tls_ca)
    return _make(worker)


def _load(cert: str, key: str, ca: str) -> Credentials:
    for name, path in (("tls_cert", cert), ("tls_key", key), ("tls_ca", ca)):
        try:
            Path(path).read_bytes()
        except OSError as exc:
            raise ValueError(f"{name}={path!r} cannot be read: {exc.strerror}") from exc
    contexts = []
    for listening in (True, False):
        context = _context(listening)
        try:
            context.load_cert_chain(cert, key)
            context.load_verify_locations(ca)
        except (OSError, ssl.SSLError) as exc:
            raise ValueError(
                f"the certificate files cannot be used: {exc}. tls_cert={cert!r} and tls_key={key!r} must belong together, and "
                f"tls_ca={ca!r} must be a certificate"
            ) from exc
        context.verify_mode = ssl.CERT_REQUIRED
        contexts.append(context)
    first = Path(cert).read_text().partition(_PEM_END)[0]
    pem = first[first.index("-----BEGIN CERTIFICATE-----") :] + _PEM_END
    return Credentials(_fingerprint(ssl.PEM_cert_to_DER_cert(pem)), *contexts)


def _make(worker: str) -> Credentials:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"farstep {worker}"[:64])])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _LIFETIME)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    contexts = []
    fd = os.memfd_create("farstep-certificate", os.MFD_CLOEXEC)  # the key never touches a disk
    try:
        os.write(fd, pem)
        for listening in (True, False):
            context = _context(listening)
            context.verify_mode = ssl.CERT_NONE  # who it is, the challenge inside tells
            context.load_cert_chain(f"/proc/self/fd/{fd}")
            contexts.append(context)
    finally:
        os.close(fd)
    return Credentials(_fingerprint(certificate.public_bytes(serialization.Encoding.DER)), *contexts)


def _context(listening: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listening else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # names and addresses are covered by the challenge
    if listening:
        context.num_tickets = 0  # nothing is ever sent to a dialler after the handshake
    return context


def _fingerprint(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()


def dial(plain: socket.socket, credentials: Credentials, deadline: float) -> ssl.SSLSocket:
    """TLS on a connection that this worker dialled, and on which it only sends. It takes the socket over.

    ssl.SSLError or OSError where it fails, TimeoutError where it takes too long.
    """
    sock = credentials.dialling.wrap_socket(plain, do_handshake_on_connect=False)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.do_handshake()
    except BaseException:
        sock.close()
        raise
    return sock


def fingerprint_met(sock: socket.socket) -> str | None:
    """The fingerprint of the certificate at the other end. None without TLS, and where it showed none, as diallers with a self-signed one do."""
    der = sock.getpeercert(binary_form=True) if isinstance(sock, ssl.SSLSocket | TlsReceiver) else None
    return None if der is None else _fingerprint(der)


class TlsReceiver(RecordSocket):
    """TLS on a connection that a peer dialled: after the handshake it is only read.

    The decryption is OpenSSL's, through memory, and the socket's own system calls stay as they are on a plain socket: large ones, and one
    that waits. Ending it is cutting it: whoever reads a stream of frames knows where one ends.
    """

    def __init__(self, plain: socket.socket, credentials: Credentials) -> None:
        super().__init__(plain)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = credentials.listening.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._buffer = memoryview(b"")
        self._is_plain = False

    def first_byte(self, deadline: float) -> bytes:
        """The first byte that the peer sent, before TLS; it stays to be read."""
        self._wait_at_most(deadline)
        return super().recv(1, socket.MSG_PEEK)

    def without_tls(self) -> TlsReceiver:
        """Read what a peer says that does not begin TLS."""
        self._is_plain = True
        return self

    def do_handshake(self, deadline: float) -> None:
        """Agree on keys. ssl.SSLError, EOFError or OSError where that fails, TimeoutError where it takes too long."""
        while True:
            try:
                self._tls.do_handshake()
                self._flush(deadline)
                return
            except ssl.SSLWantReadError:
                self._flush(deadline)
            except ssl.SSLError:
                self._flush(deadline)  # the alert, which tells the peer why
                raise
            self._wait_at_most(deadline)
            data = super().recv(65536)
            if not data:
                raise EOFError("the peer hung up before it had introduced itself")
            self._incoming.write(data)

    def _flush(self, deadline: float) -> None:
        if self._outgoing.pending:
            self._wait_at_most(deadline)
            super().sendall(self._outgoing.read())

    def _wait_at_most(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer did not finish the TLS handshake in time")
        self.settimeout(left)

    def getpeercert(self, binary_form: bool) -> bytes | None:
        """As SSLSocket's."""
        return self._tls.getpeercert(binary_form=True)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As many whole records as have come and fit. It waits only where there is nothing left of what came before."""
        read, incoming, length = self._tls.read, self._incoming, len(buffer)
        if not self.has_more:
            if not self._buffer:
                self._buffer = memoryview(bytearray(RECEIVE_BYTES))
            count = _recv_into(self, self._buffer, 0, flags)
            if count == 0:
                return 0
            incoming.write(self._buffer[:count])
        done: int = 0
        try:
            done = read(length, buffer)  # type: ignore[assignment]
            if incoming.pending and done < length:
                rest = memoryview(buffer)
                while incoming.pending and done < length:
                    done += read(length - done, rest[done:])  # type: ignore[operator]
            # Where there was room for more than a record had, OpenSSL holds nothing back.
            self.has_more = incoming.pending > 0 or done == length
        except ssl.SSLWantReadError:
            self.has_more = False
        except ssl.SSLZeroReturnError:
            self.has_more = False
            return done
        if self._outgoing.pending:
            raise ProtocolError("a TLS record that wants an answer, on a connection that is only read")
        if not done:
            raise BlockingIOError("no whole record has come")
        return done

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """For the handshake, which takes a little at a time."""
        if self._is_plain:
            return super().recv(bufsize, flags)
        data = bytearray(bufsize)
        while True:
            try:
                return bytes(data[: self.recv_into(memoryview(data), 0, flags)])
            except BlockingIOError:
                continue  # the socket has a timeout here: a part of a record came

    def sendall(self, data: Any, flags: int = 0) -> None:
        """For the handshake, whose messages always have room."""
        self._tls.write(data)
        super().sendall(self._outgoing.read())
