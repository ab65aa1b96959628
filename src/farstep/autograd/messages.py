"""What workers say to one another about contexts and passes, checked before it is used or passed on. Its types heads.py has checked.

[Note: in one's own name] A worker tells of its own steps, speaks of keys that are its own or were given to it, and gives orders only in
passes of its own:

    extra     a tensor that arrives was sent by the worker whose rank is in the number of its send
    grad      for sends of the receiver's; to whom they were sent is looked up (conductor.py)
    wave      starts at the root, and comes through from workers that name their own key
    settle    comes from the root
    report    comes to the root, and has keys that the reporter was given, or has given others

Whoever says something else has made it up, and loses its connection. A context's id is drawn at random by its opener, so that workers which
the context has not reached cannot name it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farstep.autograd.context import COUNTER_BITS
from farstep.autograd.passes import Key, Settings
from farstep.autograd.tracker import Report
from farstep.errors import ProtocolError

if TYPE_CHECKING:
    from farstep.rpc.message import Message

__all__ = ["check_extra", "opened"]


def _wrong(message: Message, what: str) -> ProtocolError:
    return ProtocolError(f"worker {message.peer.name!r} sent {what}")


def check_extra(message: Message) -> None:
    """What rides on a call or its result: the numbers of tensors, and (context, send, whether gradients are wanted)."""
    send_id = message.extra[1][1]
    if send_id and send_id >> COUNTER_BITS != message.peer.id:
        raise _wrong(message, "tensors in the name of another worker")


def opened(message: Message, me: int) -> tuple[str, Settings, tuple[Any, ...]]:
    """The verb, the pass and the rest of a message about a pass."""
    verb, id, context_id, retain_graph, create_graph, mode, oldest, *rest = message.head
    settings = Settings(id, context_id, retain_graph, create_graph, mode, oldest)
    if verb == "grad":
        ids, is_settled, report = rest
        rest = [ids, is_settled, None if report is None else _report(message, settings, me, report)]
    elif verb == "wave" or verb == "settle":
        _check_command(message, settings, me, verb, *rest)
    elif verb == "report":
        rest = [_report(message, settings, me, rest[0]), _failure(message, rest[1])]
    return verb, settings, tuple(rest)


def _check_command(message: Message, settings: Settings, me: int, verb: str, key: Any, sends: Any) -> None:
    teller = message.peer.id
    if teller == settings.root and sends is None and key == (verb, me):
        return
    is_passed_on = verb == "wave" and type(key) is tuple and len(key) == 3 and key[:2] == ("mark", teller)
    if not is_passed_on or sends is None:
        raise _wrong(message, f"the command {verb!r} in the name of another worker")


def _report(message: Message, settings: Settings, me: int, report: Any) -> Report:
    """A worker tells the root of its own steps, and of nobody else's."""
    teller = message.peer.id
    worker, done, passed_on, is_blocked, number = report
    if worker != teller or settings.root != me:
        raise _wrong(message, f"a report in the name of rank {worker}, or to one who has not asked")
    if not all(_was_given(key, teller) for key in done):
        raise _wrong(message, "a report of what it was not told to do")
    if not all(_gives(key, to, teller) for key, to in passed_on):
        raise _wrong(message, "a report of what it cannot have passed on")
    return Report(worker, done, passed_on, is_blocked, number)


def _was_given(key: Key, worker: int) -> bool:
    """Whether that is something which this worker can be told to do."""
    if type(key) is int:
        return key >> COUNTER_BITS == worker
    if type(key) is not tuple:
        return False
    return key in (("wave", worker), ("settle", worker)) or (len(key) == 3 and key[0] == "mark")


def _gives(key: Key, to: int, worker: int) -> bool:
    """Whether this worker can tell another one to do that."""
    if type(key) is int:
        return key >> COUNTER_BITS == to
    return type(key) is tuple and len(key) == 3 and key[:2] == ("mark", worker)


def _failure(message: Message, failure: Any) -> Any:
    """(the class of the error, what it is made of), or None."""
    if failure is not None and failure[0] == "BackwardError":
        name, rank, _, _ = failure[1]
        if name != message.peer.name or rank != message.peer.id:
            raise _wrong(message, "a failure in the name of another worker")
    return failure
