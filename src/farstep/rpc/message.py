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

__all__ = ["EMPTY", "Message", "dump_meta", "load_meta", "read_message"]

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
    return Message(frame.kind, frame.call_id, frame.depth, peer, *meta, frame.buffers)


class Message:
    """A received message. Made by the reader; `open` is called by the thread that needs what it carries."""

    __slots__ = (
        "_body",
        "_buffers",
        "_descriptions",
        "_slots",
        "call_id",
        "depth",
        "extra",
        "head",
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

    def admit_segments(self, fds: list[int]) -> None:
        """Map the shared memory that came with this message. Called in the order of arrival."""
        places = [d[6] for d in self._descriptions if d[6] is not None and d[6][1]]
        if len(places) != len(fds):
            for fd in fds:
                os.close(fd)
            raise ProtocolError(f"a message with {len(fds)} file descriptors for {len(places)} new segments")
        waiting = iter(fds)
        try:
            for id, size in places:
                self.peer.borrower.admit(id, size, next(waiting))
        finally:
            for fd in waiting:  # those behind one that could not be mapped
                os.close(fd)

    @property
    def is_plain(self) -> bool:
        """Whether opening it runs no code of the user's."""
        return not isinstance(self._body, bytes)

    def open(self, trust: Trust) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The function (where it is not named in the head), the arguments and keyword arguments. Once."""
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
