"""Sockets whose bytes come in records, each checked as a whole: what an accepted TCP connection is.

`recv_into` of a `RecordSocket` hands out nothing before its record has been checked. It may hold more than it could hand out: `has_more` says so,
because epoll can't. `MacSocket` here authenticates records without hiding them; `TlsReceiver` in tls.py does both.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Final

from farstep.errors import ProtocolError

__all__ = ["MacSocket", "RecordSocket"]

_DONTWAIT: Final = int(socket.MSG_DONTWAIT)


class RecordSocket(socket.socket):
    """Takes over a plain socket. One thread receives at a time; the caller's lock sees to that."""

    def __init__(self, plain: socket.socket) -> None:
        timeout = plain.gettimeout()
        super().__init__(plain.family, plain.type, plain.proto, fileno=plain.detach())
        self.settimeout(timeout)
        self.has_more = False
        """Bytes have left the kernel and were perhaps not handed out: epoll does not tell of these."""

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive what has come, 0 at the end. BlockingIOError where no whole record is there."""
        raise NotImplementedError  # pragma: no cover


MAX_RECORD_BYTES: Final = 256 << 10
_HEAD: Final = struct.Struct("<I16s")
_NONCE: Final = struct.Struct("<QI")


class MacSocket(RecordSocket):
    """Records that can be read by anybody on the path, and neither changed, injected, left out, repeated nor put in another order.

    A record is its length, a tag and the bytes. The tag is AES-256-GCM's over the bytes, which are not encrypted, with
    the record's number as nonce; the key is made for this connection and this direction in the handshake.
    """

    def __init__(self, plain: socket.socket, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        super().__init__(plain)
        self._cipher = AESGCM(key)
        self._sent = 0
        self._unsent = b""
        self._unsent_count = 0
        self._received = 0
        self._head = bytearray(_HEAD.size)
        self._head_got = 0
        self._body_got = 0
        self._own = memoryview(b"")
        self._verified = memoryview(b"")

    def send(self, data: Any, flags: int = 0) -> int:
        """Send one record of the data, and say how much of it that was.

        Where the connection is full the record is kept, and BlockingIOError raised; the next call, with the same bytes, goes on with it.
        """
        if self._unsent:
            self._unsent = self._unsent[super().send(self._unsent) :]
            if self._unsent:
                raise BlockingIOError("the rest of a record waits for room")
            count, self._unsent_count = self._unsent_count, 0
            return count
        # A copy, for a tensor may be changed by another thread between the tag and the write.
        data = bytes(data if len(data) <= MAX_RECORD_BYTES else memoryview(data)[:MAX_RECORD_BYTES])
        count = len(data)
        head = _HEAD.pack(count, self._cipher.encrypt(_NONCE.pack(self._sent, 0), b"", data))
        self._sent += 1
        try:
            sent = self.sendmsg((head, data))
        except BlockingIOError:
            sent = 0
        if sent < _HEAD.size + count:
            self._unsent = b"".join((head, data))[sent:]
            self._unsent_count = count
            raise BlockingIOError("a record waits for room")
        return count

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """A record that fits is received straight into the buffer: until it is whole, come again with the same one."""
        target = memoryview(buffer)
        if not self._verified:
            if self._head_got < _HEAD.size:
                if not self._fill_head(flags):
                    return 0
                flags |= _DONTWAIT  # one wait is enough: a peer that drips bytes must not hold the caller
            length: int
            length, tag = _HEAD.unpack(self._head)
            if not 0 < length <= MAX_RECORD_BYTES:
                raise ProtocolError(f"a record that claims {length} bytes: it was changed on the way")
            body = target[:length] if length <= len(target) else self._room(length)
            while self._body_got < length:
                count = super(RecordSocket, self).recv_into(body[self._body_got :], 0, flags)
                if count == 0:
                    return 0
                self._body_got += count
                flags |= _DONTWAIT
            self._check(body, tag)
            self._head_got = self._body_got = 0
            if length <= len(target):
                return length
            self._verified = body
            self.has_more = True
        count = min(len(target), len(self._verified))
        target[:count] = self._verified[:count]
        self._verified = self._verified[count:]
        self.has_more = len(self._verified) > 0
        return count

    def _fill_head(self, flags: int) -> bool:
        view = memoryview(self._head)
        while self._head_got < _HEAD.size:
            count = super(RecordSocket, self).recv_into(view[self._head_got :], 0, flags)
            if count == 0:
                return False
            self._head_got += count
            flags |= _DONTWAIT
        return True

    def _room(self, length: int) -> memoryview:
        if not self._own:
            self._own = memoryview(bytearray(MAX_RECORD_BYTES))
        return self._own[:length]

    def _check(self, body: memoryview, tag: bytes) -> None:
        from cryptography.exceptions import InvalidTag

        try:
            self._cipher.decrypt(_NONCE.pack(self._received, 0), tag, body)
        except InvalidTag:
            raise ProtocolError(
                "a record that its sender did not send, or not in this place: somebody on the network changed it"
            ) from None
        self._received += 1
