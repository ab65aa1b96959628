"""Which boxes of one set meet which of another: a sorted sweep over millions of them at once.

All groups (tensors) lie on one line, one after the other, so that one search finds the neighbours of every box. Along the first dimension
boxes of one group with the same extent form a band. Bands are matched on the line; each pair of bands is then a group of its own
in the remaining dimensions, and all of these are again matched at once. So a grid costs what its answer costs, not one comparison for
every two boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Boxes", "Ints", "meet", "spans"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes as columns: the group of each, and for every dimension where it starts and stops. None is without elements."""

    group: Ints
    start: Sequence[Ints]
    stop: Sequence[Ints]

    def take(self, rows: Ints) -> Boxes:
        return Boxes(self.group[rows], [x[rows] for x in self.start], [y[rows] for y in self.stop])


def meet(a: Boxes, b: Boxes) -> tuple[Ints, Ints]:
    """All pairs i, j such that `a[i]` and `b[j]` are of one group and have elements in common, in no special order."""
    if not len(a.group) or not len(b.group):
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing
    if not a.start:
        return _meet(_undivided(a), _undivided(b), 0)
    return _meet(a, b, 0)


def spans(first: Ints, count: Ints) -> Ints:
    """`first[0], first[0] + 1, ...`, `count[0]` of them, then those of `first[1]`, and so on."""
    before = np.cumsum(count) - count
    places = np.repeat(first - before, count)
    places += np.arange(len(places), dtype=np.int64)
    return places


def _undivided(boxes: Boxes) -> Boxes:
    """Without dimensions all boxes of a group meet."""
    return Boxes(boxes.group, [np.zeros_like(boxes.group)], [np.ones_like(boxes.group)])


def _meet(a: Boxes, b: Boxes, dim: int) -> tuple[Ints, Ints]:
    length = int(max(a.stop[dim].max(), b.stop[dim].max()))
    ours, theirs = _bands(a, dim, length), _bands(b, dim, length)
    p, q = _on_line(ours.x, ours.y, theirs.x, theirs.y)
    if dim == len(a.start) - 1 or (ours.bounds is None and theirs.bounds is None):
        return _filtered(a, b, *_crossed(ours, theirs, p, q), dim + 1)
    m, n = ours.count(p), theirs.count(q)
    few = m * n <= m + n  # comparing them all costs no more than going on
    i, j = _filtered(a, b, *_crossed(ours, theirs, p[few], q[few]), dim + 1)
    if few.all():
        return i, j
    p, q, m, n = p[~few], q[~few], m[~few], n[~few]
    rows_a, rows_b = ours.rows(spans(ours.first(p), m)), theirs.rows(spans(theirs.first(q), n))
    pairs = np.arange(len(p), dtype=np.int64)
    k, m = _meet(
        _regrouped(a, rows_a, np.repeat(pairs, m)), _regrouped(b, rows_b, np.repeat(pairs, n)), dim + 1
    )
    return np.concatenate([i, rows_a[k]]), np.concatenate([j, rows_b[m]])


@dataclass(frozen=True, slots=True)
class _Bands:
    """Boxes by their extent along one dimension: band k has the line from `x[k]` to `y[k]`."""

    order: Ints | None  # of the boxes, band by band; None: as they come
    bounds: (
        Ints | None
    )  # band k has the places from bounds[k] to bounds[k + 1] of it; None: each box is a band
    x: Ints
    y: Ints

    def first(self, bands: Ints) -> Ints:
        return bands if self.bounds is None else self.bounds[bands]

    def count(self, bands: Ints) -> Ints:
        if self.bounds is None:
            return np.ones_like(bands)
        return self.bounds[bands + 1] - self.bounds[bands]

    def rows(self, places: Ints) -> Ints:
        return places if self.order is None else self.order[places]


def _bands(boxes: Boxes, dim: int, length: int) -> _Bands:
    x = boxes.group * length
    y = x + boxes.stop[dim]
    x += boxes.start[dim]
    order = None
    if (x[1:] < x[:-1]).any() or ((x[1:] == x[:-1]) & (y[1:] < y[:-1])).any():
        order = np.lexsort((y, x))
        x, y = x[order], y[order]
    new = (x[1:] != x[:-1]) | (y[1:] != y[:-1])
    if new.all():
        return _Bands(order, None, x, y)
    bounds = np.concatenate([[0], np.flatnonzero(new) + 1, [len(x)]])
    return _Bands(order, bounds, x[bounds[:-1]], y[bounds[:-1]])


def _on_line(xa: Ints, ya: Ints, xb: Ints, yb: Ints) -> tuple[Ints, Ints]:
    """Which intervals of a and b meet. Both are sorted by where they start."""
    if (ya[1:] >= ya[:-1]).all():
        return _by_range(xa, ya, xb, yb)
    if (yb[1:] >= yb[:-1]).all():
        j, i = _by_range(xb, yb, xa, ya)
        return i, j
    # Intervals within intervals. Of two that meet, one starts within the other, or both start together.
    j, i = _starting_within(xb, xa, ya, at_start=True)
    more_i, more_j = _starting_within(xa, xb, yb, at_start=False)
    return np.concatenate([i, more_i]), np.concatenate([j, more_j])


def _by_range(xa: Ints, ya: Ints, xb: Ints, yb: Ints) -> tuple[Ints, Ints]:
    """As `_on_line`, where those of a stop in order too: then those that one of b meets are next to each other."""
    first = np.searchsorted(ya, xb, side="right")
    count = np.maximum(np.searchsorted(xa, yb, side="left") - first, 0)
    return spans(first, count), np.repeat(np.arange(len(xb), dtype=np.int64), count)


def _starting_within(starts: Ints, x: Ints, y: Ints, at_start: bool) -> tuple[Ints, Ints]:
    """Pairs: which of `starts` lies in which interval. Whether one that lies at its very start does is for the caller to say."""
    first = np.searchsorted(starts, x, side="left" if at_start else "right")
    count = np.maximum(np.searchsorted(starts, y, side="left") - first, 0)
    return spans(first, count), np.repeat(np.arange(len(x), dtype=np.int64), count)


def _crossed(ours: _Bands, theirs: _Bands, p: Ints, q: Ints) -> tuple[Ints, Ints]:
    """Every box of band p with every box of band q."""
    if ours.bounds is None and theirs.bounds is None:
        return ours.rows(p), theirs.rows(q)
    m, n = ours.count(p), theirs.count(q)
    within = spans(np.zeros_like(m), m * n)
    each = np.repeat(n, m * n)
    i = np.repeat(ours.first(p), m * n) + within // each
    j = np.repeat(theirs.first(q), m * n) + within % each
    return ours.rows(i), theirs.rows(j)


def _filtered(a: Boxes, b: Boxes, i: Ints, j: Ints, dim: int) -> tuple[Ints, Ints]:
    """Those pairs that meet in the dimensions from `dim` on too."""
    for d in range(dim, len(a.start)):
        both = (a.start[d][i] < b.stop[d][j]) & (b.start[d][j] < a.stop[d][i])
        if not both.all():
            i, j = i[both], j[both]
    return i, j


def _regrouped(boxes: Boxes, rows: Ints, group: Ints) -> Boxes:
    taken = boxes.take(rows)
    return Boxes(group, taken.start, taken.stop)
