"""What the messages of this layer must look like. See [Note: checked before use] in rpc/schema.py.

    ("release", context)   ("joined", context)
    ("grad", *settings, [(message, [whether there is a gradient])], is it settled, report or None)
    ("wave", *settings, key, [message] or None)   ("settle", *settings, key, None)
    ("report", *settings, report, failure or None)   ("abort", *settings)

with the settings of a pass: its id, its context, retain_graph, create_graph, its mode, and the oldest pass under way.
"""

from __future__ import annotations

from typing import Any, Final

from farstep.rpc.schema import MAX_ERROR_CHARS, is_flag, is_id, is_list_of, is_number, is_text

__all__ = ["MODES", "is_extra", "is_head"]

MAX_GRADIENTS: Final = 1 << 20
"""In one message, and of all in it: as many as a frame has buffers."""
MODES: Final = ("smart", "fast")


def is_extra(extra: Any) -> bool:
    """(context, message, whether a gradient is wanted): beside a call or its result."""
    return (
        type(extra) is tuple
        and len(extra) == 3
        and is_number(extra[0])
        and is_number(extra[1])
        and is_flag(extra[2])
    )


def is_head(head: Any) -> bool:
    if type(head) is not tuple or not head or type(head[0]) is not str:
        return False
    verb = head[0]
    if verb == "release" or verb == "joined":
        return len(head) == 2 and is_number(head[1])
    if not _are_settings(head[1:7]):
        return False
    rest = head[7:]
    if verb == "grad":
        return (
            len(rest) == 3
            and _are_gradients(rest[0])
            and is_flag(rest[1])
            and (rest[2] is None or _is_report(rest[2]))
        )
    if verb == "wave":
        return len(rest) == 2 and _is_key(rest[0]) and (rest[1] is None or is_list_of(is_number, rest[1]))
    if verb == "settle":
        return len(rest) == 2 and _is_key(rest[0]) and rest[1] is None
    if verb == "report":
        return len(rest) == 2 and _is_report(rest[0]) and (rest[1] is None or _is_failure(rest[1]))
    return verb == "abort" and not rest


def _are_settings(values: tuple[Any, ...]) -> bool:
    if len(values) != 6:
        return False
    id, context_id, retain_graph, create_graph, mode, oldest = values
    return (
        is_id(id)
        and is_number(context_id)
        and is_flag(retain_graph)
        and is_flag(create_graph)
        and type(mode) is str
        and mode in MODES
        and is_number(oldest)
    )


def _is_key(value: Any) -> bool:
    """The number of a message, "roots", (verb, worker) or ("mark", worker, number)."""
    if type(value) is not tuple:
        return is_number(value) or is_text(value)
    return len(value) in (2, 3) and is_text(value[0]) and all(map(is_number, value[1:]))


def _are_gradients(value: Any) -> bool:
    left = MAX_GRADIENTS
    if type(value) is not list:
        return False
    for item in value:
        if type(item) is not tuple or len(item) != 2 or not is_number(item[0]) or type(item[1]) is not list:
            return False
        left -= 1 + len(item[1])  # before they are looked at: one list may stand here many times
        if left < 0 or not all(map(is_flag, item[1])):
            return False
    return True


def _is_report(value: Any) -> bool:
    if type(value) is not tuple or len(value) != 5:
        return False
    worker, done, passed_on, is_blocked, number = value
    return (
        is_number(worker)
        and is_list_of(_is_key, done)
        and is_list_of(_is_passed_on, passed_on)
        and (is_blocked is None or is_flag(is_blocked))
        and is_number(number)
    )


def _is_passed_on(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and _is_key(value[0]) and is_number(value[1])


def _is_failure(value: Any) -> bool:
    if type(value) is not tuple or len(value) != 2 or type(value[0]) is not str:
        return False
    error_class, what = value
    if error_class == "AutogradError":
        return _is_long_text(what)
    if error_class == "UnknownContext":
        return is_number(what)
    if type(what) is not tuple:
        return False
    if error_class == "WorkerLost":
        return len(what) == 2 and is_text(what[0]) and _is_long_text(what[1])
    return (
        error_class == "BackwardError"
        and len(what) == 4
        and is_text(what[0])
        and is_number(what[1])
        and _is_long_text(what[2])
        and _is_long_text(what[3])
    )


def _is_long_text(value: Any) -> bool:
    return is_text(value, MAX_ERROR_CHARS)
