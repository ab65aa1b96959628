"""What is said about references, checked before it is used or passed on. That it has the right types, schema.py has checked.

[Note: checked before passed on] A worker that sends a reference on tells third workers what it was told itself. So it checks
everything first: owner, maker and sender. What is wrong costs the peer that said it, and nobody behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farstep.errors import ProtocolError
from farstep.rpc.rref import GlobalId

if TYPE_CHECKING:
    from farstep.rpc.membership import WorkerInfo
    from farstep.rpc.message import Message
    from farstep.rpc.peer import Peer

__all__ = ["ForkNote", "check_control", "check_note"]

ForkNote = tuple[int, str, GlobalId, GlobalId | None, int, bool]
"""How a reference travels: owner's rank and name, its id, the receiver's fork (None: the receiver is the owner),
the sender's rank, whether the owner knows of the fork already."""


def check_note(note: ForkNote, peer: Peer, me: WorkerInfo) -> ForkNote:
    """A reference that came from `peer`: in its own name, and with nothing that only the owner can know."""
    owner_id, owner_name, _, fork, parent, known = note
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
    verb, items = message.head
    if verb == "add":
        fits = len(items) == 1 and items[0][1][0] == message.peer.id
    elif verb == "confirm":
        fits = len(items) == 1 and items[0][1][0] == items[0][2] and message.call_id > 0
    else:
        fits = verb != "check" or message.call_id > 0
    if not fits:
        raise ProtocolError(
            f"worker {message.peer.name!r} sent {verb!r} about references in the name of another worker"
        )
    return str(verb), items
