"""A member of the group that holds the secret and says what it likes, over its own real connections."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from support.workers import eventually

from farstep.rpc import Agent
from farstep.rpc.calls import SyncCall
from farstep.rpc.message import EMPTY, dump_meta
from farstep.rpc.payload import Packed
from farstep.rpc.wire import Kind, frame_bytes

__all__ = ["ask", "heard", "is_lost", "names", "say", "tell"]

PATIENCE_S = 10.0


def say(
    hostile: Agent,
    to: str,
    kind: Kind,
    head: Any,
    packed: Packed = EMPTY,
    *,
    refs: Sequence[Any] = (),
    extra: Any = None,
    call_id: int = 0,
) -> None:
    """Send one message as it is, without the checks that a worker makes of what it sends."""
    peer = hostile.peer(to)
    frame = frame_bytes(kind, call_id, dump_meta(head, packed, (), refs, extra), depth=1)
    with contextlib.suppress(OSError):  # it may have been hung up on
        (peer.sender or hostile.dial(peer, None)).send([frame], None)


def tell(hostile: Agent, to: str, kind: Kind, head: Any, packed: Packed = EMPTY, **more: Any) -> SyncCall:
    """The same, and keep the call to which an answer may come."""
    peer = hostile.peer(to)
    call = SyncCall(next(hostile._call_ids), peer, kind.name, 0, PATIENCE_S)
    peer.calls[call.id] = call
    hostile.tally.send()
    say(hostile, to, kind, head, packed, call_id=call.id, **more)
    return call


def ask(hostile: Agent, to: str, kind: Kind, head: Any, packed: Packed = EMPTY, **more: Any) -> Any:
    """The same, and return what is answered, or raise it."""
    return hostile.answer_to(tell(hostile, to, kind, head, packed, **more))


def heard(hostile: Agent, to: str) -> None:
    """Wait until all that was said before has been read: calls and answers keep to the order."""
    hostile.call_sync(to, len, ([],), {}, PATIENCE_S)


def names(agent: Agent) -> list[str]:
    return [info.name for info in agent.get_worker_infos()]


def is_lost(agent: Agent, name: str) -> None:
    """`agent` drops the worker of that name, and nobody else."""
    before = set(names(agent))
    eventually(lambda: name not in names(agent), f"{agent.info.name} dropping {name}")
    assert set(names(agent)) == before - {name}
