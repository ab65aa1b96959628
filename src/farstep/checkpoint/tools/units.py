"""Numbers for people: bytes, shapes, sets of ranks; and names as a terminal may be given them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

__all__ = ["count", "printable", "ranges", "shape_text", "short", "size"]

_SHOWN = 4


def size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1000:
            return f"{nbytes:,.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.2f} TiB"


def count(number: int, what: str, plural: str = "") -> str:
    """`1 box`, `3 boxes`."""
    return f"{number:,} {what if number == 1 else plural or what + 's'}"


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def ranges(numbers: Iterable[int], shown: int = _SHOWN) -> str:
    """`0-3,8,10-12`; of more than `shown` such runs the first ones, and dots. Numbers at one distance are `0,2..22`."""
    found = sorted(set(numbers))
    steps = {b - a for a, b in pairwise(found)}
    if len(found) > 2 and len(steps) == 1 and steps != {1}:
        return f"{found[0]},{found[1]}..{found[-1]}"
    runs: list[list[int]] = []
    for number in found:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}-{b}" for a, b in runs]
    return ",".join(texts) if len(texts) <= shown else ",".join(texts[: shown - 1]) + f",..{found[-1]}"


def printable(text: str) -> str:
    """A name may come from anybody: what a terminal would obey, and what it cannot show, is written out, as in `\\x1b`."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def short(text: str, most: int) -> str:
    """Printable, with its middle left out if it is longer."""
    text = printable(text)
    if len(text) <= most:
        return text
    head = (most - 1) * 2 // 3
    return f"{text[:head]}…{text[head + 1 - most :]}"
