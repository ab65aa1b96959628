"""A curve as text: dots of Braille, two to a column and four to a row, with the axes' ends written beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

__all__ = ["plot"]

BLANK: Final = 0x2800
DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of a dot in a Braille letter, by its column and row."""
NARROWEST: Final = 8


def plot(
    values: Sequence[float], *, width: int = 60, height: int = 8, count: int = 0, unit: str = "step"
) -> list[str]:
    """Lines of text, each at most `width` long if that is not too narrow for anything, that show the values from left to right.

    `count` is how many values the width stands for, if more are still to come. Each column of dots shows the mean of the values that
    fall into it; values that are not finite are left out.
    """
    count = max(count, len(values))
    shown = [value for value in values if math.isfinite(value)]
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    rows = {0: high, height - 1: low}
    if height > 2:
        rows[height // 2] = high - (high - low) * (height // 2) / (height - 1)
    margin = max(len(f"{value:.2f}") for value in rows.values())
    columns = max(NARROWEST, width - margin - 2)
    grid = [[BLANK] * columns for _ in range(height)]
    before: int | None = None
    for x, y in _curve(_dots(values, count, columns * 2, height * 4, low, high)):
        top, bottom = sorted((y, y if before is None else before))
        for at in range(top, bottom + 1):
            grid[at // 4][x // 2] |= DOTS[x % 2][at % 4]
        before = y
    lines = []
    for number, row in enumerate(grid):
        label = f"{rows[number]:.2f} ┤" if shown and number in rows else "│"
        lines.append(f"{label:>{margin + 2}}{''.join(map(chr, row))}")
    end = f"{unit} {count}" if count else ""
    lines.append(f"{'':>{margin}} └{'─' * columns}")
    lines.append(f"{'':>{margin}}  0{end:>{columns - 1}}")
    return lines


def _dots(
    values: Sequence[float], count: int, width: int, height: int, low: float, high: float
) -> list[tuple[int, int]]:
    """Column and row of each dot, the row counted from the top."""
    columns: dict[int, list[float]] = {}
    for number, value in enumerate(values):
        if math.isfinite(value):
            columns.setdefault(round(number * (width - 1) / max(1, count - 1)), []).append(value)
    return [
        (x, round((high - sum(found) / len(found)) / (high - low) * (height - 1)))
        for x, found in sorted(columns.items())
    ]


def _curve(dots: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The dots, and straight lines between those that have empty columns between them."""
    yield from dots[:1]
    for (x0, y0), (x1, y1) in pairwise(dots):
        for x in range(x0 + 1, x1 + 1):
            yield x, round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
