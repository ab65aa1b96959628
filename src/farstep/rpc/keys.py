"""Keys of dicts and members of sets, checked before they are hashed.

What a message brings as a key may be a tuple that is nested without end, or one that refers to itself twice on each level: hashing the
first ends the process, hashing the second does not end. And many keys of one hash are each compared with all the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import torch

from farstep.rpc.plain import Malformed
from farstep.rpc.schema import ATOMS

__all__ = ["Keys"]

MAX_KEY_DEPTH: Final = 16
MAX_KEY_VALUES: Final = 10_000
MAX_ALIKE: Final = 100
"""So many different keys of one dict may have the same hash. Among floats some 30 can; strings are safe, for their hashes are random."""

_LEAVES: Final = (
    *(type, Enum, FunctionType, BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Keys:
    """The keys of one message."""

    def __init__(self, message_bytes: int) -> None:
        self._left = 100_000 + 64 * message_bytes
        """How many values inside keys are looked at in all: keys may share their parts."""
        self._hashes: dict[int, tuple[Any, dict[int, int]]] = {}

    def check(self, keys: Sequence[Any], container: Any) -> None:
        """Malformed unless these may be hashed, and put into `container` (None: into one of their own)."""
        if not ATOMS.issuperset(map(type, keys)):
            for key in keys:
                self._check_key(key)
        if len(keys) + len(container or ()) > MAX_ALIKE:
            self._count_hashes(keys, container)

    def _check_key(self, key: Any) -> None:
        left = MAX_KEY_VALUES
        waiting = [(key, 1)]
        while waiting:
            value, depth = waiting.pop()
            left -= 1
            if type(value) in ATOMS or isinstance(value, _LEAVES):
                continue
            inner = _hashed_with(value)
            left -= len(inner)
            if depth > MAX_KEY_DEPTH or left < 0:
                raise Malformed("it has a key that is nested too deep, or too large")
            waiting += [(part, depth + 1) for part in inner]
        self._left -= MAX_KEY_VALUES - left
        if self._left < 0:
            raise Malformed("it has keys that are far larger than itself")

    def _count_hashes(self, keys: Sequence[Any], container: Any) -> None:
        counts: dict[int, int] = {}
        if container is not None:
            counts = self._hashes.setdefault(id(container), (container, counts))[1]
        for key in keys:
            if type(key) is not str and type(key) is not bytes:
                value = hash(key)
                counts[value] = counts.get(value, 0) + 1
                if counts[value] > MAX_ALIKE:
                    raise Malformed("it has keys that were made to have the same hash")


def _hashed_with(value: Any) -> Sequence[Any]:
    """What is hashed, or may be, when this is."""
    if isinstance(value, tuple | frozenset | list | set):
        return tuple(value)
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    if getattr(type(value), "__hash__", None) is object.__hash__:
        return ()
    parts = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                parts.append(getattr(value, name, None))
    return parts
