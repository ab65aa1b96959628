"""A message between two workers: what is said (`head`), and the objects it carries.

On the wire its meta is one pickle of plain values, `(head, body, slots, descriptions, refs, extra)`; the users'
own objects are bytes inside `body`, and `extra` belongs to the layer above (extension.py). So a reader can take references over in the order they were sent without
running anybody's code, and the rest is unpacked by the thread that runs the call.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from farstep.errors import PayloadError, ProtocolError, RpcError
from farstep.rpc.memory import Bytes
from farstep.rpc.payload import NOTHING, PROTOCOL, Packed, unpack
from farstep.rpc.plain import read_plain
from farstep.rpc.schema import brief, check_message
from farstep.rpc.tensors import Description, build
from farstep.rpc.trust import Trust
from farstep.rpc.wire import Frame

if TYPE_CHECKING:
    from farstep.rpc.peer import Peer

__all__ = ["EMPTY", "Message", "dump_meta", "load_meta", "no_memory", "read_message"]

EMPTY: Final = NOTHING


def dump_meta(
    head: Any, packed: Packed, descriptions: Sequence[Description], refs: Sequence[Any], extra: Any
) -> bytes:
    return pickle.dumps((head, packed.body, packed.slots, descriptions, refs, extra), PROTOCOL)


def load_meta(meta: bytes | memoryview, open_trust: bool) -> Any:
    """The plain values of a frame. ProtocolError where they cannot be read."""
    try:
        return pickle.loads(meta) if open_trust else read_plain(meta)
    except Exception as exc:
        raise ProtocolError(f"a frame whose meta cannot be read: {brief(exc)}") from exc


def read_message(frame: Frame, peer: Peer, open_trust: bool) -> Message:
    """The message in a frame of any kind but BUNDLE. ProtocolError where it is none."""
    meta: tuple[Any, Any, Any, Any, Any, Any] = load_meta(frame.meta, open_trust)
    check_message(frame.kind, frame.depth, meta, len(frame.buffers), peer.layer_above)
    message = Message(frame.kind, frame.call_id, frame.depth, peer, *meta, frame.buffers)
    if frame.missing_bytes:
        message.refuse(_no_memory(peer, frame.missing_bytes))
    return message


def no_memory(peer: Peer, nbytes: int) -> PayloadError:
    return PayloadError(_no_memory(peer, nbytes))


def _no_memory(peer: Peer, nbytes: int) -> str:
    return (
        f"worker {peer.agent.info.name!r} has no memory for a message of {nbytes} bytes from {peer.name!r}: send it in "
        f"smaller parts, or see what else takes memory there"
    )


class Message:
    """A received message. Made by the reader; `open` is called by the thread that needs what it carries."""

    __slots__ = (
        "_body",
        "_buffers",
        "_descriptions",
        "_refusal",
        "_slots",
        "call_id",
        "charge",
        "depth",
        "extra",
        "head",
        "is_kept",
        "kind",
        "peer",
        "refs",
    )

    def __init__(
        self,
        kind: int,
        call_id: int,
        depth: int,
        peer: Peer,
        head: Any,
        body: Any,
        slots: Sequence[int | str] = (),
        descriptions: Sequence[Description] = (),
        refs: Sequence[Any] = (),
        extra: Any = None,
        buffers: Sequence[Bytes | torch.Tensor] = (),
    ) -> None:
        self.kind = kind
        self.call_id = call_id
        self.depth = depth
        self.peer = peer
        self.head = head
        self._body = body
        self._slots = slots
        self._descriptions = descriptions
        self.refs = refs
        self.extra = extra
        self._buffers = buffers
        self._refusal: str | None = None
        self.charge = 0
        """What it counts for while it is not answered. See pressure.py."""
        self.is_kept = False
        """It is answered when something else has happened."""

    def admit_segments(self, fds: list[int]) -> None:
        """Map the shared memory that came with this message. Called in the order of arrival. Closes the descriptors."""
        try:
            new = [(d[6], d[5]) for d in self._descriptions if d[6] is not None and d[6][1]]
            if len(new) != len(fds):
                raise ProtocolError(f"a message with {len(fds)} file descriptors for {len(new)} new segments")
            for ((id, size), used), fd in zip(new, fds, strict=True):
                try:
                    self.peer.borrower.admit(id, size, used, fd)
                except PayloadError as exc:
                    self.refuse(str(exc))
        finally:
            for fd in fds:
                os.close(fd)

    def refuse(self, why: str) -> None:
        """It cannot be opened: whoever does gets a PayloadError that says why."""
        self._refusal = why

    @property
    def is_plain(self) -> bool:
        """Whether opening it runs no code of the user's."""
        return not isinstance(self._body, bytes)

    def open(self, trust: Trust) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The function (where it is not named in the head), the arguments and keyword arguments. Once."""
        if self._refusal is not None:
            self._give_back()
            raise PayloadError(self._refusal)
        bare = () if self.extra is None else frozenset(self.extra[0])
        tensors = self._build_tensors(bare) if self._descriptions else ()
        body, self._body = self._body, None
        try:
            if self.extra is None:
                return unpack(body, self._slots, tensors, self.refs, trust)
            odd: list[torch.Tensor] = []
            opened = unpack(body, self._slots, tensors, self.refs, trust, odd)
            self.peer.agent.extension.opened(self, [tensors[i] for i in self.extra[0]] + odd)
            return opened
        except (RpcError, AttributeError, ImportError):
            raise
        except Exception as exc:
            raise PayloadError(f"cannot be unpickled here: {brief(exc)}") from exc

    def value(self, trust: Trust) -> Any:
        """The one object of a reply."""
        _, args, _ = self.open(trust)
        return args[0] if args else None

    def _give_back(self) -> None:
        """Return the shared memory of a message that is not opened."""
        for description in self._descriptions:
            if description[6] is not None:
                try:
                    self.peer.borrower.borrow(description[6][0], description[5])
                except ProtocolError:
                    pass  # it was refused itself
        self._descriptions = ()

    def _build_tensors(self, bare: Collection[int]) -> list[torch.Tensor]:
        tensors = []
        buffers = iter(self._buffers)
        self._buffers = ()
        for number, description in enumerate(self._descriptions):
            place = description[6]
            source: Bytes | torch.Tensor | None
            if place is None:
                source = next(buffers, None)
                if source is None:
                    raise PayloadError("a message with fewer buffers than tensors")
            else:
                source = self.peer.borrower.borrow(place[0], description[5])
            tensors.append(build(description, source, bare=number in bare))
        return tensors
