"""Values that have no place where they stand, and bytes that were whole."""

from __future__ import annotations

import random
import struct
from typing import Any

from hypothesis import strategies as st

__all__ = ["DEEP", "check_brief", "mutated", "odd_value", "odd_values", "replaced"]

_NUMBERS = (0, 1, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def _deep(levels: int, kind: type) -> Any:
    made: Any = kind()
    for _ in range(levels):
        made = kind((made,))
    return made


def _doubled(levels: int) -> Any:
    made: Any = ()
    for _ in range(levels):
        made = (made, made)
    return made


DEEP = _deep(100, tuple)
_HAND_MADE: tuple[Any, ...] = (
    *(None, True, False, -1, 1.5, float("nan"), float("inf"), -(2**70), 2**2000),
    *("", "x", "x" * 5000, "\udc80", b"", b"x", [], {}, (), ((),), [[]], {"a": []}),
    *(DEEP, _deep(100, list), _doubled(60), [_doubled(60)], {"k": _doubled(60)}),
    *((1, 2), (0, 0), [(1, 2), (3, 4)], (1, 2, 3), ("a", "b"), ("add", []), ([], [])),
    *([0] * 3000, (0,) * 3000, ["x"] * 100),
    *_NUMBERS,
)

_atoms = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.binary(max_size=20)
)
odd_values = st.recursive(
    _atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)
"""What hypothesis thinks of."""


def odd_value(rng: random.Random, *more: Any) -> Any:
    """One of those made by hand, or of `more`."""
    return rng.choice(_HAND_MADE) if not more or rng.random() < 0.5 else rng.choice(more)


def replaced(value: Any, rng: random.Random, odd: Any) -> Any:
    """The same value with `odd` in one place of it, or in the place of it all."""
    if type(value) in (tuple, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        parts = [*value[:at], replaced(value[at], rng, odd), *value[at + 1 :]]
        if rng.random() < 0.1:
            parts = parts[:at] if rng.random() < 0.5 else [*parts, odd]
        return type(value)(parts)
    return odd


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, left out, put in, or repeated; now and then a number of some width is put over them."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(changed) + 1)
        how = rng.randrange(6)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif how == 1 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif how == 2:
            del changed[at : at + rng.choice((1, 1, 2, 8, 100))]
        elif how == 3:
            changed[at:at] = rng.randbytes(rng.choice((1, 1, 2, 8)))
        elif how == 4:
            changed[at:at] = changed[at : at + rng.choice((1, 4, 30))] * rng.choice((1, 2, 50))
        else:
            number = struct.pack("<Q", rng.choice(_NUMBERS))[: rng.choice((1, 2, 4, 8))]
            changed[at : at + len(number)] = number
    return bytes(changed)


def check_brief(error: BaseException) -> None:
    """An error does not say at length what a message has brought."""
    assert len(str(error)) < 5000
