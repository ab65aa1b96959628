"""How a message may call what any message may name.

Python's pickler writes a `deque` as a call of `deque` with no arguments, and appends to it. A hand-written pickle may call it with
`range(2_000_000_000)`. So each class that any message may name has here the arguments with which the pickler calls it; those that
the pickler never calls, such as `list`, are not called at all. What a user trusts is called with whatever a message brings.
"""

from __future__ import annotations

import datetime
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

import torch

from farstep import errors
from farstep.errors import Untrusted
from farstep.rpc.plain import Malformed
from farstep.rpc.schema import ATOMS, MAX_DIMENSIONS, MAX_NAME_CHARS
from farstep.rpc.trust import CALLABLE_OWN, OWN, PLAIN, PLAIN_BUILTINS

__all__ = ["check_call", "is_own", "is_plain_class"]

Args = tuple[Any, ...]
_MOST_DAYS: Final = 999_999_999


def _types(args: Args) -> tuple[type, ...]:
    return tuple(map(type, args))


def _is_device(args: Args) -> bool:
    return _types(args) in ((str,), (str, int)) and len(args[0]) <= 64


def _is_size(args: Args) -> bool:
    return (
        _types(args) == (tuple,) and len(args[0]) <= MAX_DIMENSIONS and {int}.issuperset(map(type, args[0]))
    )


def _is_deque(args: Args) -> bool:
    return not args or (
        _types(args) in ((tuple, int), (tuple, types.NoneType)) and not args[0] and (args[1] or 0) >= 0
    )


def _is_timedelta(args: Args) -> bool:
    return _types(args) == (int, int, int) and all(abs(part) <= _MOST_DAYS for part in args)


_ARGUMENTS: Final[dict[Any, Callable[[Args], bool]]] = {
    complex: lambda args: _types(args) == (float, float),
    range: lambda args: _types(args) == (int, int, int),
    slice: lambda args: len(args) == 3 and ATOMS.issuperset(map(type, args)),
    OrderedDict: lambda args: not args,
    deque: _is_deque,
    datetime.timedelta: _is_timedelta,
    torch.Size: _is_size,
    torch.device: _is_device,
}
"""`defaultdict` is in `check_call`: its argument is something that is named."""

_GROWING: Final = (bytes, bytearray, list, tuple, set, frozenset, deque)
"""A subclass of these is made as large as a number or a range says."""


def is_plain_class(kind: type) -> bool:
    """Whether any message may name this class, and whoever made it can't have added anything to it."""
    home, name = kind.__module__, kind.__qualname__
    return (
        (home == "builtins" and name in PLAIN_BUILTINS)
        or (home, name) in PLAIN
        or (home == "farstep.errors" and name in errors.__all__)
    )


def is_own(found: Any) -> bool:
    """Whether it is one of this package's, which every message may name."""
    return (getattr(found, "__module__", None), getattr(found, "__qualname__", None)) in OWN


def check_call(function: Any, args: Args, *, new: bool, is_named: Callable[[Any], bool]) -> None:
    """Malformed unless a message may call this with these. `new`: only `__new__` of the class is called."""
    home, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if type(home) is str and type(name) is str and (home, name) in OWN and (home, name) not in CALLABLE_OWN:
        raise Untrusted(f"a message that calls {home}.{name} by itself, which only a caller may")
    if (home, name) == ("farstep.rpc.membership", "WorkerInfo"):
        if _types(args) != (str, int) or len(args[0]) > MAX_NAME_CHARS:
            raise Malformed("it has a worker's name that is none")
    elif isinstance(function, type) and is_plain_class(function):
        if not _is_as_pickled(function, args, new, is_named):
            raise Malformed(f"it calls {name} as no pickler does")
    elif isinstance(function, type) and issubclass(function, _GROWING) and args:
        grows = type(args[0]) is range or (issubclass(function, bytes | bytearray) and type(args[0]) is int)
        if grows and not (issubclass(function, tuple) and function.__new__ is not tuple.__new__):
            raise Malformed(f"it makes a {name} as large as a number says")


def _is_as_pickled(kind: type, args: Args, new: bool, is_named: Callable[[Any], bool]) -> bool:
    if new:
        return kind is object and not args
    if kind.__module__ == "farstep.errors":  # some print their arguments
        return ATOMS.issuperset(map(type, args)) or (
            kind is errors.StepError and _types(args) == (str, dict, list)
        )
    if issubclass(kind, BaseException):
        return issubclass(kind, Exception)
    if kind is defaultdict:
        return not args or (len(args) == 1 and (args[0] is None or is_named(args[0])))
    check = _ARGUMENTS.get(kind)
    return check is not None and check(args)
