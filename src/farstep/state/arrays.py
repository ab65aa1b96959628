"""Boxes as arrays, millions of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Boxes", "Ints", "grouped", "spans", "total"]

Ints = npt.NDArray[np.int64]
_HALF = 32


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes as columns: the group of each, and for every dimension where it starts and stops. None is without elements."""

    group: Ints
    start: Sequence[Ints]
    stop: Sequence[Ints]

    def take(self, rows: Ints) -> Boxes:
        return Boxes(self.group[rows], [x[rows] for x in self.start], [y[rows] for y in self.stop])


def spans(first: Ints, count: Ints) -> Ints:
    """`first[0], first[0] + 1, ...`, `count[0]` of them, then those of `first[1]`, and so on."""
    before = np.cumsum(count) - count
    places = np.repeat(first - before, count)
    places += np.arange(len(places), dtype=np.int64)
    return places


def total(values: Ints) -> int:
    """Their sum, which may be more than the largest int64. None is negative."""
    return (int((values >> _HALF).sum()) << _HALF) + int((values & ((1 << _HALF) - 1)).sum())


def grouped(keys: Ints, values: Ints) -> dict[int, int]:
    """key -> sum of the values that have it."""
    found, which = np.unique(keys, return_inverse=True)
    halves = np.zeros((2, len(found)), dtype=np.int64)
    np.add.at(halves[0], which, values >> _HALF)
    np.add.at(halves[1], which, values & ((1 << _HALF) - 1))
    return {k: (a << _HALF) + b for k, a, b in zip(found.tolist(), *halves.tolist(), strict=True)}
