"""What each kind of message must look like. A message that does not is refused before anything in it is used.

[Note: checked before use] A tuple that is nested a million deep ends the process when it is hashed, and one that refers to
itself twice on each of a hundred levels is never done being compared or printed. So the fields of a message are looked at by
exact type, level by level, and by these functions first: nothing here hashes, compares or prints a value whose type it has
not checked. What they let through is flat: numbers, short strings, and lists of small tuples of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from farstep.errors import ProtocolError
from farstep.rpc.departure import Leaving
from farstep.rpc.wire import Kind

__all__ = [
    "ATOMS",
    "MAX_CALL_DEPTH",
    "MAX_ERROR_CHARS",
    "MAX_REASON_CHARS",
    "brief",
    "check_message",
    "check_rider",
    "cut",
    "is_flag",
    "is_fork_list",
    "is_id",
    "is_list_of",
    "is_number",
    "is_text",
]

ATOMS: Final = frozenset({int, float, bool, str, bytes, type(None)})
"""What a pickle names nothing for, and what nothing is inside of."""

MAX_CALL_DEPTH: Final = 60_000
MAX_DIMENSIONS: Final = 64
MAX_NAME_CHARS: Final = 4096
MAX_REASON_CHARS: Final = 4096
MAX_LABEL_CHARS: Final = 1 << 24
MAX_ERROR_CHARS: Final = 1 << 20
"""An exception's text, and its traceback. A callee sends no more of either; see `cut`."""
MAX_BRIEF_CHARS: Final = 500
_LEAVING: Final = frozenset(map(int, Leaving))
MAX_TIMEOUT_S: Final = 1e12

_SEQUENCES: Final = frozenset({tuple, list})
_TOP: Final = 1 << 63


# -- values -------------------------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """A count, a rank, or a number that some worker has given to something."""
    return type(value) is int and 0 <= value < _TOP


def is_flag(value: Any) -> bool:
    return type(value) is bool


def is_text(value: Any, most_chars: int = MAX_NAME_CHARS) -> bool:
    return type(value) is str and len(value) <= most_chars


def is_id(value: Any) -> bool:
    """(a worker's rank, a number of that worker's): the id of a reference or of a fork."""
    return type(value) is tuple and len(value) == 2 and is_number(value[0]) and is_number(value[1])


def is_list_of(check: Callable[[Any], bool], value: Any) -> bool:
    return type(value) is list and all(map(check, value))


def is_tuple_of(value: Any, *checks: Callable[[Any], bool]) -> bool:
    if type(value) is not tuple or len(value) != len(checks):
        return False
    return all(check(part) for check, part in zip(checks, value, strict=True))


def is_fork_list(value: Any) -> bool:
    """[(id of a reference, id of a fork of it)]"""
    return is_list_of(lambda item: is_tuple_of(item, is_id, is_id), value)


def cut(text: str) -> str:
    """Shorten what an exception says to what its receiver takes. The end is kept: there a traceback says what happened."""
    if len(text) <= MAX_ERROR_CHARS:
        return text
    return f"(the first {len(text) - MAX_ERROR_CHARS // 2} characters are left out) ...{text[-MAX_ERROR_CHARS // 2 :]}"


def brief(exc: BaseException) -> str:
    """An exception's class and text, for a log line. Without the text where it would print what a message has brought."""
    name = type(exc).__name__
    try:
        if not ATOMS.issuperset(map(type, exc.args)):
            return name
        text = str(exc)
    except Exception:
        return name
    return f"{name}: {text if len(text) <= MAX_BRIEF_CHARS else text[:MAX_BRIEF_CHARS] + '...'}"


# -- heads --------------------------------------------------------------------------------------------------


def _is_function(head: Any) -> bool:
    """(module, qualified name), or None where the body brings the function."""
    if head is None:
        return True
    if type(head) is not tuple or len(head) != 2:
        return False
    module, name = head
    return (
        type(module) is str
        and type(name) is str
        and len(module) <= MAX_NAME_CHARS
        and len(name) <= MAX_NAME_CHARS
    )


def _is_nothing(head: Any) -> bool:
    return head is None


def _is_remote(head: Any) -> bool:
    return is_tuple_of(head, _is_function, is_id, is_id)


def _is_error(head: Any) -> bool:
    if type(head) is not tuple or len(head) != 4:
        return False
    type_name, text, worker, trace = head
    return (
        is_text(type_name)
        and is_text(text, MAX_ERROR_CHARS)
        and is_text(worker)
        and is_text(trace, MAX_ERROR_CHARS)
    )


def _is_rref(head: Any) -> bool:
    if type(head) is not tuple or len(head) != 2 or type(head[0]) is not str:
        return False
    verb, items = head
    if verb == "add" or verb == "confirm":
        return is_list_of(lambda item: is_tuple_of(item, is_id, is_id, is_number), items)
    if verb == "delete":
        return is_fork_list(items)
    return verb == "check" and is_tuple_of(items, is_number, is_fork_list)


def _is_release(head: Any) -> bool:
    return is_tuple_of(head, _is_number_list, _is_number_list)


def _is_number_list(value: Any) -> bool:
    return is_list_of(is_number, value)


def _is_gather(head: Any) -> bool:
    if type(head) is not tuple or len(head) != 5:
        return False
    label, number, name, names, timeout_s = head
    return (
        is_text(label, MAX_LABEL_CHARS)
        and is_number(number)
        and is_text(name)
        and (names is None or is_list_of(is_text, names))
        and type(timeout_s) in (float, int)
        and 0 <= timeout_s <= MAX_TIMEOUT_S
    )


def _is_lost(head: Any) -> bool:
    return is_tuple_of(head, is_text, is_text, _is_reason)


def _is_goodbye(head: Any) -> bool:
    """None, or (why it leaves, how: see `Leaving`)."""
    return head is None or is_tuple_of(head, _is_reason, lambda how: type(how) is int and how in _LEAVING)


def _is_reason(value: Any) -> bool:
    return is_text(value, MAX_REASON_CHARS)


_HEADS: Final[dict[int, Callable[[Any], bool]]] = {
    int(Kind.CALL): _is_function,
    int(Kind.REMOTE): _is_remote,
    int(Kind.REPLY): _is_nothing,
    int(Kind.ERROR): _is_error,
    int(Kind.FETCH): is_id,
    int(Kind.RREF): _is_rref,
    int(Kind.RELEASE): _is_release,
    int(Kind.GATHER): _is_gather,
    int(Kind.LOST): _is_lost,
    int(Kind.GOODBYE): _is_goodbye,
}
"""All but EXTENSION, whose heads the layer above knows."""

_CALL: Final = int(Kind.CALL)
_REPLY: Final = int(Kind.REPLY)
_REMOTE: Final = int(Kind.REMOTE)
_FROM_USERS: Final = frozenset({_CALL, _REMOTE, int(Kind.FETCH)})
_WITH_EXTRA: Final = _FROM_USERS | {int(Kind.REPLY)}


# -- what goes beside the head ------------------------------------------------------------------------------


def _is_plain(body: Any) -> bool:
    """([values], {name: value} or None), each value an atom. A body that is not plain is the bytes of a pickle."""
    if type(body) is not tuple or len(body) != 2:
        return False
    args, kwargs = body
    if type(args) is not list or (args and not ATOMS.issuperset(map(type, args))):
        return False
    return kwargs is None or (
        type(kwargs) is dict
        and _STRINGS.issuperset(map(type, kwargs))
        and ATOMS.issuperset(map(type, kwargs.values()))
    )


_STRINGS: Final = frozenset({str})


def _are_slots(slots: Sequence[Any], body: Any, tensors: int) -> bool:
    """Where in a plain body its tensors belong: a position, or a name."""
    if type(body) is bytes:
        return not slots
    args, kwargs = body
    if len(slots) != tensors:
        return False
    for slot in slots:
        if type(slot) is int:
            if not 0 <= slot < len(args):
                return False
        elif type(slot) is not str or kwargs is None or slot not in kwargs:
            return False
    return True


def _is_description(value: Any) -> bool:
    """See tensors.py. That the sizes agree with the bytes is checked where the tensor is built."""
    if type(value) is not tuple or len(value) != 7:
        return False
    dtype, flags, shape, strides, device, nbytes, place = value
    return (
        is_text(dtype, 32)
        and type(flags) is int
        and 0 <= flags <= 3
        and _are_dimensions(shape)
        and (strides is None or (_are_dimensions(strides) and len(strides) == len(shape)))
        and (device is None or is_text(device, 64))
        and is_number(nbytes)
        and (place is None or is_id(place))
    )


def _are_dimensions(value: Any) -> bool:
    return type(value) is tuple and len(value) <= MAX_DIMENSIONS and all(map(is_number, value))


def _is_fork_note(value: Any) -> bool:
    """See rref_table.py."""
    return is_tuple_of(value, is_number, is_text, is_id, _is_id_or_none, is_number, is_flag)


def _is_id_or_none(value: Any) -> bool:
    return value is None or is_id(value)


def _are_bare(value: Any, tensors: int) -> bool:
    """The numbers of the tensors whose gradient the layer above sees to."""
    return (
        type(value) is tuple
        and len(value) <= tensors
        and all(type(number) is int and 0 <= number < tensors for number in value)
    )


# -- messages -----------------------------------------------------------------------------------------------


def check_message(kind: int, depth: int, meta: Any, buffers: int, layer_above: Callable[[], Any]) -> None:
    """ProtocolError unless a message of that kind may have such a meta, and so many buffers. See [Note: checked before use]."""
    if type(meta) is not tuple or len(meta) != 6:
        raise ProtocolError("a frame whose meta is not that of a message")
    head, body, slots, descriptions, refs, extra = meta
    if kind != _REPLY or head is not None:
        is_head = _HEADS.get(kind)
        if not (is_head(head) if is_head is not None else layer_above().is_head(head)):
            raise ProtocolError(f"a message of kind {kind} whose head is not that of one")
    if type(body) is not bytes:
        if not _is_plain(body):
            raise ProtocolError(f"a message of kind {kind} whose body is neither bytes nor plain values")
        if (kind == _CALL and head is None) or (kind == _REMOTE and head[0] is None):
            raise ProtocolError("a call that says nowhere what is to be called")
    if kind in _FROM_USERS and not 1 <= depth <= MAX_CALL_DEPTH + 1:
        raise ProtocolError(f"a call that says it is nested {depth} deep; 1 to {MAX_CALL_DEPTH} are sent")
    if type(slots) not in _SEQUENCES or type(descriptions) not in _SEQUENCES or type(refs) not in _SEQUENCES:
        raise ProtocolError("a message whose slots, tensors or references are no list")
    if slots or descriptions or buffers:
        _check_tensors(body, slots, descriptions, buffers)
    if refs and (type(body) is not bytes or not all(map(_is_fork_note, refs))):
        raise ProtocolError("a message with references that are none, or that have no place in it")
    if extra is not None and not (
        kind in _WITH_EXTRA
        and type(extra) is tuple
        and len(extra) == 2
        and _are_bare(extra[0], len(descriptions))
        and layer_above().is_extra(extra[1])
    ):
        raise ProtocolError(f"a message of kind {kind} with something for autograd that makes no sense")


def _check_tensors(body: Any, slots: Sequence[Any], descriptions: Sequence[Any], buffers: int) -> None:
    if not all(map(_is_description, descriptions)):
        raise ProtocolError("a message with a tensor's description that is none")
    streamed = sum(description[6] is None for description in descriptions)
    if streamed != buffers:
        raise ProtocolError(f"a message with {buffers} buffers for {streamed} tensors")
    if not _are_slots(slots, body, len(descriptions)):
        raise ProtocolError("a message with tensors that have no place in it")


def check_rider(kind: int, depth: int, head: Any, body: Any) -> None:
    """The same, for a message of a bundle, which has a head and a body and nothing else."""
    is_head = _HEADS.get(kind)
    if is_head is None or not is_head(head) or not (type(body) is bytes or _is_plain(body)):
        raise ProtocolError(f"a bundle with a message of kind {kind} that is none")
    if kind == _CALL and (not 1 <= depth <= MAX_CALL_DEPTH + 1 or (head is None and type(body) is not bytes)):
        raise ProtocolError("a bundle with a call that is none")
