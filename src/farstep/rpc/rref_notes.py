"""What is said about references, checked before it is used or passed on.

[Note: checked before passed on] A worker that sends a reference on tells third workers what it was told itself. So it checks
everything first: types, owner, maker and sender. What is wrong costs the peer that said it, and nobody behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from farstep.errors import ProtocolError
from farstep.rpc.rref import GlobalId

if TYPE_CHECKING:
    from farstep.rpc.membership import WorkerInfo
    from farstep.rpc.message import Message
    from farstep.rpc.peer import Peer

__all__ = ["ForkNote", "are_pairs", "check_control", "check_id", "check_note"]

ForkNote = tuple[int, str, GlobalId, GlobalId | None, int, bool]
"""How a reference travels: owner's rank and name, its id, the receiver's fork (None: the receiver is the owner),
the sender's rank, whether the owner knows of the fork already."""
MAX_NUMBER: Final = 1 << 63


def _is_id(value: Any) -> bool:
    if type(value) is not tuple or len(value) != 2:
        return False
    maker, number = value
    return type(maker) is int and type(number) is int and 0 <= maker < MAX_NUMBER and 0 <= number < MAX_NUMBER


def check_id(value: Any, peer: Peer) -> GlobalId:
    """An id, as any worker may name it."""
    if not _is_id(value):
        raise ProtocolError(f"worker {peer.name!r} named a reference by something that is no id")
    return value  # type: ignore[no-any-return]


def check_note(note: Any, peer: Peer, me: WorkerInfo) -> ForkNote:
    """A reference that came from `peer`: in its own name, and with nothing that only the owner can know."""
    if type(note) is not tuple or len(note) != 6:
        raise ProtocolError("a reference that is not described as one")
    owner_id, owner_name, id, fork, parent, known = note
    if (
        type(owner_id) is not int
        or type(owner_name) is not str
        or not _is_id(id)
        or not (fork is None or _is_id(fork))
        or type(parent) is not int
        or type(known) is not bool
    ):
        raise ProtocolError("a reference that is not described as one")
    if parent != peer.id or (fork is not None and fork[0] != peer.id):
        raise ProtocolError(f"a reference that {peer.name!r} sends in the name of another worker")
    if owner_id == me.id:
        fits = owner_name == me.name and known and (fork is not None) == peer.is_self
    elif owner_id == peer.id:
        fits = owner_name == peer.name and known and fork is not None
    else:
        fits = not known and fork is not None
    if not fits:
        raise ProtocolError(f"a reference of rank {owner_id} that {peer.name!r} cannot have sent like this")
    return note


def check_control(message: Message) -> tuple[str, Any]:
    """The verb and the items of an RREF message. See rref_table.py for what they mean."""
    head, peer = message.head, message.peer
    if type(head) is not tuple or len(head) != 2 or type(head[0]) is not str:
        raise ProtocolError("a message about references that says nothing")
    verb, items = head
    if verb == "add":
        fits = type(items) is list and all(_is_triple(i) and i[1][0] == peer.id for i in items)
    elif verb == "confirm":
        fits = type(items) is list and len(items) == 1 and message.call_id > 0
        fits = fits and _is_triple(items[0]) and items[0][1][0] == items[0][2]
    elif verb == "delete":
        fits = are_pairs(items)
    elif verb == "check":
        fits = type(items) is tuple and len(items) == 2 and type(items[0]) is int and are_pairs(items[1])
        fits = fits and message.call_id > 0
    else:
        fits = False
    if not fits:
        raise ProtocolError(
            f"worker {peer.name!r} sent a message about references that cannot be: {verb[:20]!r}"
        )
    return verb, items


def _is_triple(item: Any) -> bool:
    """(id, fork, rank)"""
    return (
        type(item) is tuple
        and len(item) == 3
        and _is_id(item[0])
        and _is_id(item[1])
        and type(item[2]) is int
    )


def are_pairs(items: Any) -> bool:
    """[(id, fork), ...]"""
    return type(items) is list and all(
        type(i) is tuple and len(i) == 2 and _is_id(i[0]) and _is_id(i[1]) for i in items
    )
