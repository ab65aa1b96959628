"""Many small messages in one frame.

A *rider* is a small message that may wait for others: a plain tuple, `(kind, call id, depth, head, body)`. Its meaning is that of
a message without tensors and references. Riders leave as a bundle, which is a frame whose meta is one pickle of
a list of them: so names and the like are written once, and neither side handles a frame for each.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, Final

from farstep.errors import ProtocolError
from farstep.rpc.message import load_meta
from farstep.rpc.payload import PROTOCOL
from farstep.rpc.schema import check_rider
from farstep.rpc.wire import Frame, Kind, frame_bytes

__all__ = ["MAX_RIDERS", "RIDER_BYTES", "Rider", "bundle", "unbundle", "weight"]

Rider = tuple[int, int, int, Any, Any]
MAX_RIDERS: Final = 64
"""So many go in one bundle. A bundle that holds more is refused."""

RIDER_BYTES: Final = 4096
"""A rider weighs at most this."""

BESIDE_BYTES: Final = 64
"""A rider's numbers, and the opcodes around it."""

TOO_MUCH: Final = 1 << 62
MAY_RIDE: Final = frozenset({int(Kind.CALL), int(Kind.REPLY), int(Kind.ERROR)})
MAX_CALL_ID: Final = (1 << 64) - 1
MAX_DEPTH: Final = (1 << 16) - 1


def weight(head: Any, body: Any) -> int:
    """No fewer bytes than such a rider takes in a bundle; found without pickling it. Enormous where it is not all plain."""
    if type(body) is bytes:
        nbytes = len(body)
    else:
        args, kwargs = body
        nbytes = 0
        if args:
            nbytes = _weight_of_all(args)
        if kwargs:
            nbytes += _weight_of_all(kwargs) + _weight_of_all(kwargs.values())
    return BESIDE_BYTES + nbytes + (_weight_of_all(head) if head is not None else 0)


def _weight_of_all(values: Iterable[Any]) -> int:
    total = 0
    for value in values:
        kind = type(value)
        total += 12
        if kind is str:
            total += len(value) if value.isascii() else 4 * len(value)
        elif kind is int:
            total += value.bit_length() >> 3
        elif kind is bytes:
            total += len(value)
        elif value is not None and kind is not float and kind is not bool:
            return TOO_MUCH
    return total


def bundle(riders: Sequence[Rider], max_bytes: int) -> list[bytes]:
    """The frames that carry these riders, in their order. None is over the limit unless it is a single rider's."""
    frames = []
    for start in range(0, len(riders), MAX_RIDERS):
        some = riders[start : start + MAX_RIDERS]
        meta = pickle.dumps(list(some), PROTOCOL)
        if len(meta) <= max_bytes or len(some) == 1:
            frames.append(frame_bytes(Kind.BUNDLE, 0, meta))
        else:
            half = len(some) // 2
            frames += bundle(some[:half], max_bytes) + bundle(some[half:], max_bytes)
    return frames


def unbundle(frame: Frame, open_trust: bool) -> list[Rider]:
    """The riders in a bundle. ProtocolError unless all of it is in order."""
    riders: list[Rider] = load_meta(frame.meta, open_trust)
    if type(riders) is not list or len(riders) > MAX_RIDERS or frame.fds or frame.buffers:
        raise ProtocolError("a bundle that is no list of messages, or a list too long")
    for rider in riders:
        if type(rider) is not tuple or len(rider) != 5:
            raise ProtocolError("a bundle with something in it that is no message")
        kind, call_id, depth, head, body = rider
        if type(kind) is not int or kind not in MAY_RIDE:
            shown = kind if type(kind) is int and 0 <= kind < 256 else "unknown"
            raise ProtocolError(f"a bundle with a message of kind {shown} in it")
        if (
            type(call_id) is not int
            or type(depth) is not int
            or not 0 <= call_id <= MAX_CALL_ID
            or not 0 <= depth <= MAX_DEPTH
        ):
            raise ProtocolError("a bundle with a message whose numbers cannot be")
        check_rider(kind, depth, head, body)
    return riders
