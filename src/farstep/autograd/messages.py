"""What workers say to one another about contexts and passes, checked before it is used or passed on.

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

from typing import TYPE_CHECKING, Any, Final

from farstep.autograd.context import COUNTER_BITS
from farstep.autograd.passes import Key, Settings
from farstep.autograd.tracker import Report
from farstep.errors import ProtocolError

if TYPE_CHECKING:
    from farstep.rpc.message import Message

__all__ = ["MODES", "check_extra", "checked_id", "opened"]

MODES: Final = ("smart", "fast")
MAX_NUMBER: Final = 1 << 63
_FIELDS: Final = {"grad": 3, "wave": 2, "settle": 2, "report": 2, "abort": 0}


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_NUMBER


def _wrong(message: Message, what: str) -> ProtocolError:
    return ProtocolError(f"worker {message.peer.name!r} sent {what}")


def check_extra(message: Message) -> None:
    """What rides on a call or its result: the numbers of tensors, and (context, send, whether gradients are wanted)."""
    extra = message.extra
    if (
        type(extra) is not tuple
        or len(extra) != 2
        or type(extra[0]) is not tuple
        or not all(_is_number(number) for number in extra[0])
        or type(extra[1]) is not tuple
        or len(extra[1]) != 3
    ):
        raise _wrong(message, "a context that is none")
    id, send_id, wants_gradient = extra[1]
    if not _is_number(id) or not _is_number(send_id) or type(wants_gradient) is not bool:
        raise _wrong(message, "a context that is none")
    if send_id and send_id >> COUNTER_BITS != message.peer.id:
        raise _wrong(message, "tensors in the name of another worker")


def checked_id(message: Message) -> int:
    """The context that a message with nothing else is about."""
    head = message.head
    if len(head) != 2 or not _is_number(head[1]):
        raise _wrong(message, "word of a context that is none")
    return head[1]  # type: ignore[no-any-return]


def opened(message: Message, me: int) -> tuple[str, Settings, tuple[Any, ...]]:
    """The verb, the pass and the rest of a message about a pass."""
    head = message.head
    verb = head[0]
    if verb not in _FIELDS or len(head) != 7 + _FIELDS[verb]:
        raise _wrong(message, "something about a pass that nobody understands")
    _, id, context_id, retain_graph, create_graph, mode, oldest, *rest = head
    if (
        type(id) is not tuple
        or len(id) != 2
        or not all(map(_is_number, (*id, context_id, oldest)))
        or type(retain_graph) is not bool
        or type(create_graph) is not bool
        or type(mode) is not str
        or mode not in MODES
    ):
        raise _wrong(message, "something about a pass that is none")
    settings = Settings(id, context_id, retain_graph, create_graph, mode, oldest)
    if verb == "grad":
        rest = _grad(message, settings, me, *rest)
    elif verb == "wave" or verb == "settle":
        _check_command(message, settings, me, verb, *rest)
    elif verb == "report":
        rest = [_report(message, settings, me, rest[0]), _failure(message, rest[1])]
    return verb, settings, tuple(rest)


def _grad(message: Message, settings: Settings, me: int, ids: Any, is_settled: Any, report: Any) -> list[Any]:
    if (
        type(ids) is not list
        or type(is_settled) is not bool
        or not all(
            type(item) is tuple
            and len(item) == 2
            and _is_number(item[0])
            and type(item[1]) is list
            and all(type(is_there) is bool for is_there in item[1])
            for item in ids
        )
    ):
        raise _wrong(message, "gradients for nothing")
    return [ids, is_settled, None if report is None else _report(message, settings, me, report)]


def _check_command(message: Message, settings: Settings, me: int, verb: str, key: Any, sends: Any) -> None:
    teller = message.peer.id
    if type(key) is not tuple:
        raise _wrong(message, "a command without a key")
    if teller == settings.root and sends is None and key == (verb, me):
        return
    is_passed_on = verb == "wave" and len(key) == 3 and key[:2] == ("mark", teller) and _is_number(key[2])
    if not is_passed_on or type(sends) is not list or not all(map(_is_number, sends)):
        raise _wrong(message, f"the command {verb!r} in the name of another worker")


def _report(message: Message, settings: Settings, me: int, report: Any) -> Report:
    """A worker tells the root of its own steps, and of nobody else's."""
    teller = message.peer.id
    if type(report) is not tuple or len(report) != 5:
        raise _wrong(message, "a report that is none")
    worker, done, passed_on, is_blocked, number = report
    if (
        type(worker) is not int
        or type(done) is not list
        or type(passed_on) is not list
        or not (is_blocked is None or type(is_blocked) is bool)
        or not _is_number(number)
    ):
        raise _wrong(message, "a report that is none")
    if worker != teller or settings.root != me:
        raise _wrong(message, f"a report in the name of rank {worker}, or to one who has not asked")
    if not all(_was_given(key, teller) for key in done):
        raise _wrong(message, "a report of what it was not told to do")
    if not all(type(item) is tuple and len(item) == 2 and _gives(*item, teller) for item in passed_on):
        raise _wrong(message, "a report of what it cannot have passed on")
    return Report(worker, done, passed_on, is_blocked, number)


def _was_given(key: Any, worker: int) -> bool:
    """Whether that is something which this worker can be told to do."""
    if type(key) is int:
        return _is_number(key) and key >> COUNTER_BITS == worker
    if type(key) is not tuple:
        return False
    if len(key) == 2:
        return key in (("wave", worker), ("settle", worker)) if _is_named(key) else False
    return len(key) == 3 and _is_named(key) and key[0] == "mark" and _is_number(key[2])


def _gives(key: Key, to: Any, worker: int) -> bool:
    """Whether this worker can tell another one to do that."""
    if not _is_number(to):
        return False
    if type(key) is int:
        return _is_number(key) and key >> COUNTER_BITS == to
    return (
        type(key) is tuple
        and len(key) == 3
        and _is_named(key)
        and key[:2] == ("mark", worker)
        and _is_number(key[2])
    )


def _is_named(key: tuple[Any, ...]) -> bool:
    return type(key[0]) is str and _is_number(key[1])


def _failure(message: Message, failure: Any) -> Any:
    """(the kind, what it is made of), or None."""
    if failure is None:
        return None
    if type(failure) is tuple and len(failure) == 2:
        kind, what = failure
        if kind == "AutogradError" and type(what) is str:
            return failure
        if kind == "UnknownContext" and _is_number(what):
            return failure
        if kind == "WorkerLost" and _is_text(what, 2):
            return failure
        if kind == "BackwardError" and type(what) is tuple and len(what) == 4:
            name, rank, text, trace = what
            if name == message.peer.name and rank == message.peer.id and _is_text((text, trace), 2):
                return failure
    raise _wrong(message, "a failure that is none, or in the name of another worker")


def _is_text(value: Any, count: int) -> bool:
    return type(value) is tuple and len(value) == count and all(type(each) is str for each in value)
