"""Which boxes of one set meet which of another: a sorted sweep over millions of them at once.

All groups (tensors) lie on one line, one after the other, so that one search finds the neighbours of every box. Along the first dimension
boxes of one group with the same extent form a band. Bands are matched on the line; each pair of bands is then a group of its own
in the remaining dimensions, and all of these are again matched at once. So a grid costs what its answer costs, not one comparison for
every two boxes.

Boxes that are cut without a grid have few bands in common. If the first dimension leaves too many pairs, they are looked for in cells instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from farstep.state.arrays import Boxes, Ints, spans, total
from farstep.state.cells import clash, meet_in_cells

__all__ = ["Boxes", "Ints", "meet", "overlap", "spans"]

_MOST_PAIRS = 8
"""For each box, so many pairs may have to be looked at in the next dimension; else they are looked for in cells."""


def meet(a: Boxes, b: Boxes) -> tuple[Ints, Ints]:
    """All pairs i, j such that `a[i]` and `b[j]` are of one group and have elements in common, in no special order."""
    if not len(a.group) or not len(b.group):
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing
    if not a.start:
        a, b = _undivided(a), _undivided(b)
    return _meet(a, b, 0, _most(a, b)) or meet_in_cells(a, b)


def overlap(boxes: Boxes) -> tuple[int, int] | None:
    """Two boxes of one group that have elements in common, if there are any. It takes no longer where many do."""
    if len(boxes.group) < 2 or not boxes.start:
        return None
    met = _meet(
        boxes, boxes, 0, _most(boxes, boxes), answers_bounded=True
    )  # each with itself, if all is well
    if met is None:
        return clash(boxes)
    i, j = met
    other = np.flatnonzero(i != j)
    return (int(i[other[0]]), int(j[other[0]])) if len(other) else None


def _undivided(boxes: Boxes) -> Boxes:
    """Without dimensions all boxes of a group meet."""
    return Boxes(boxes.group, [np.zeros_like(boxes.group)], [np.ones_like(boxes.group)])


def _most(a: Boxes, b: Boxes) -> int:
    return _MOST_PAIRS * (len(a.group) + len(b.group))


def _meet(a: Boxes, b: Boxes, dim: int, most: int, answers_bounded: bool = False) -> tuple[Ints, Ints] | None:
    """None if more than `most` pairs, or boxes, would have to be looked at, beyond those that are the answer; with `answers_bounded`, if these are too many."""
    last = dim == len(a.start) - 1
    a, b, length = _bounded(a, b, dim)
    ours, theirs = _bands(a, dim, length), _bands(b, dim, length)
    met = _on_line(ours.x, ours.y, theirs.x, theirs.y, most if answers_bounded or not last else None)
    if met is None:
        return None
    p, q = met
    if last or (ours.bounds is None and theirs.bounds is None):
        if answers_bounded and total(ours.count(p) * theirs.count(q)) > most:
            return None
        return _filtered(a, b, *_crossed(ours, theirs, p, q), dim + 1)
    m, n = ours.count(p), theirs.count(q)
    few = m * n <= m + n  # comparing them all costs no more than going on
    i, j = _filtered(a, b, *_crossed(ours, theirs, p[few], q[few]), dim + 1)
    if few.all():
        return i, j
    p, q, m, n = p[~few], q[~few], m[~few], n[~few]
    if total(m) + total(n) > most:
        return None
    rows_a, rows_b = ours.rows(spans(ours.first(p), m)), theirs.rows(spans(theirs.first(q), n))
    pairs = np.arange(len(p), dtype=np.int64)
    met = _meet(
        _regrouped(a, rows_a, np.repeat(pairs, m)),
        _regrouped(b, rows_b, np.repeat(pairs, n)),
        dim + 1,
        most,
        answers_bounded,
    )
    if met is None:
        return None
    return np.concatenate([i, rows_a[met[0]]]), np.concatenate([j, rows_b[met[1]]])


def _bounded(a: Boxes, b: Boxes, dim: int) -> tuple[Boxes, Boxes, int]:
    """The same boxes, and how long the line of a group is. Edges are numbered where all groups would not fit on one line of int64."""
    length = int(max(a.stop[dim].max(), b.stop[dim].max()))
    groups = int(max(a.group.max(), b.group.max())) + 1
    if groups * length < 1 << 63:
        return a, b, length
    columns = [a.start[dim], a.stop[dim], b.start[dim], b.stop[dim]]
    edges, number = np.unique(np.concatenate(columns), return_inverse=True)
    numbered = np.split(number, np.cumsum([len(column) for column in columns])[:-1])
    (start, stop), (other_start, other_stop) = numbered[:2], numbered[2:]
    return _with(a, dim, start, stop), _with(b, dim, other_start, other_stop), len(edges)


def _with(boxes: Boxes, dim: int, start: Ints, stop: Ints) -> Boxes:
    starts, stops = list(boxes.start), list(boxes.stop)
    starts[dim], stops[dim] = start, stop
    return Boxes(boxes.group, starts, stops)


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


def _on_line(xa: Ints, ya: Ints, xb: Ints, yb: Ints, most: int | None) -> tuple[Ints, Ints] | None:
    """Which intervals of a and b meet; None if these are more than `most` pairs. Both are sorted by where they start."""
    if (ya[1:] >= ya[:-1]).all():
        ranges = [_by_range(xa, ya, xb, yb)]
        turned = [False]
    elif (yb[1:] >= yb[:-1]).all():
        ranges = [_by_range(xb, yb, xa, ya)]
        turned = [True]
    else:
        # Intervals within intervals. Of two that meet, one starts within the other, or both start together.
        ranges = [
            _starting_within(xb, xa, ya, at_start=True),
            _starting_within(xa, xb, yb, at_start=False),
        ]
        turned = [True, False]
    if most is not None and sum(int(count.sum()) for _, count in ranges) > most:
        return None
    pairs = [
        (spans(first, count), np.repeat(np.arange(len(count), dtype=np.int64), count))
        for first, count in ranges
    ]
    ours = [pair[turn] for pair, turn in zip(pairs, turned, strict=True)]
    theirs = [pair[not turn] for pair, turn in zip(pairs, turned, strict=True)]
    return (ours[0], theirs[0]) if len(pairs) == 1 else (np.concatenate(ours), np.concatenate(theirs))


def _by_range(xa: Ints, ya: Ints, xb: Ints, yb: Ints) -> tuple[Ints, Ints]:
    """For each of b, the first of a that it meets, and how many. Those of a stop in order too, so these are next to each other."""
    first = np.searchsorted(ya, xb, side="right")
    return first, np.maximum(np.searchsorted(xa, yb, side="left") - first, 0)


def _starting_within(starts: Ints, x: Ints, y: Ints, at_start: bool) -> tuple[Ints, Ints]:
    """For each interval, the first of `starts` that lies in it, and how many. Whether one at its very start does is for the caller to say."""
    first = np.searchsorted(starts, x, side="left" if at_start else "right")
    return first, np.maximum(np.searchsorted(starts, y, side="left") - first, 0)


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
