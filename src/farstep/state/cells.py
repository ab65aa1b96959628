"""Which boxes meet, where they are cut without any grid: space is halved until few of them are left in each cell.

Along one side such boxes meet many others that are far away along the next, and a sweep would compare them all. Here every cell that has many
is cut in two at the middle one of its edges, along the side that fewest of its boxes reach across, all cells of a size at once. So
boxes that do not overlap, however they lie, take a time that grows little faster than their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farstep.state.arrays import Boxes, Ints, spans

__all__ = ["clash", "meet_in_cells"]

_FEW = 8
"""So many boxes are compared with each other at once."""


def meet_in_cells(a: Boxes, b: Boxes) -> tuple[Ints, Ints]:
    """All pairs i, j such that `a[i]` and `b[j]` are of one group and have elements in common, in no special order."""
    cells, (ours, theirs) = _Cells.around(a, b)
    found = []
    while len(cells):
        m, n = ours.counts(len(cells)), theirs.counts(len(cells))
        side, at = cells.cuts([ours, theirs])
        done = (m * n <= np.maximum(m + n, _FEW * _FEW)) | (side < 0)
        found.append(_common(cells, ours, theirs, m, n, done))
        cells, (ours, theirs) = cells.halved(
            np.flatnonzero(~done & (m > 0) & (n > 0)), side, at, [ours, theirs]
        )
    i, j = (np.concatenate(each) for each in zip(*found, strict=True))
    return i, j


def clash(boxes: Boxes) -> tuple[int, int] | None:
    """Two of the boxes that have elements in common, if there are any. It takes no longer where there are many such pairs."""
    cells, (held,) = _Cells.around(boxes)
    while len(cells):
        full = held.volumes(cells) / cells.volumes()
        fullest = int(np.argmax(full))
        if (
            full[fullest] > 1.5
        ):  # more than there is room for, so some overlap here, and one cell is enough to find them
            cells, (held,) = cells.only(np.array([fullest]), [held])
        count = held.counts(len(cells))
        side, at = cells.cuts([held])
        done = (count <= _FEW) | (side < 0)
        shown = _two_each(held, count, done & (count > _FEW)) if (done & (count > _FEW)).any() else None
        if shown is not None:
            return shown
        i, j = _common(cells, held, held, count, count, done)
        other = np.flatnonzero(i != j)
        if len(other):
            return int(i[other[0]]), int(j[other[0]])
        cells, (held,) = cells.halved(np.flatnonzero(~done), side, at, [held])
    return None


def _two_each(held: _Held, count: Ints, which: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """The first two of a cell that all its boxes fill."""
    first = int((np.cumsum(count) - count)[which][0])
    return int(held.rows[first]), int(held.rows[first + 1])


@dataclass(frozen=True, slots=True)
class _Held:
    """Boxes by the cells in which they lie, in the order of these: `rows[k]` reaches into the cell `cell[k]`."""

    boxes: Boxes
    rows: Ints
    cell: Ints

    def counts(self, cells: int) -> Ints:
        return np.bincount(self.cell, minlength=cells).astype(np.int64, copy=False)

    def volumes(self, cells: _Cells) -> npt.NDArray[np.float64]:
        """How many elements the boxes have within each cell, together. Nearly."""
        within = np.ones(len(self.rows))
        for low, high, start, stop in zip(
            cells.low, cells.high, self.boxes.start, self.boxes.stop, strict=True
        ):
            within *= np.minimum(stop[self.rows], high[self.cell]) - np.maximum(
                start[self.rows], low[self.cell]
            )
        return np.bincount(self.cell, within, len(cells)).astype(np.float64, copy=False)

    def taken(self, which: Ints) -> _Held:
        return _Held(self.boxes, self.rows[which], self.cell[which])


@dataclass(frozen=True, slots=True)
class _Cells:
    """Parts of the groups' spaces: from `low[d][k]` to `high[d][k]`."""

    low: list[Ints]
    high: list[Ints]

    @classmethod
    def around(cls, *sets: Boxes) -> tuple[_Cells, list[_Held]]:
        """One cell for each group that all sets have."""
        groups, cell = np.unique(np.concatenate([each.group for each in sets]), return_inverse=True)
        places = np.split(cell, np.cumsum([len(each.group) for each in sets])[:-1])
        low, high = [], []
        for d in range(len(sets[0].start)):
            low.append(np.full(len(groups), np.iinfo(np.int64).max))
            high.append(np.zeros(len(groups), dtype=np.int64))
            for each, at in zip(sets, places, strict=True):
                np.minimum.at(low[d], at, each.start[d])
                np.maximum.at(high[d], at, each.stop[d])
        held = []
        for each, at in zip(sets, places, strict=True):
            order = np.argsort(at, kind="stable")
            held.append(_Held(each, order, at[order]))
        return cls(low, high), held

    def __len__(self) -> int:
        return len(self.low[0])

    def volumes(self) -> npt.NDArray[np.float64]:
        volumes = np.ones(len(self))
        for low, high in zip(self.low, self.high, strict=True):
            volumes *= high - low
        return volumes

    def cuts(self, sets: list[_Held]) -> tuple[Ints, Ints]:
        """Along which side each cell is best cut, and where; -1 where no box ends within it, so that all fill it."""
        best = np.full(len(self), np.iinfo(np.int64).max)
        side, place = np.full(len(self), -1, dtype=np.int64), np.zeros(len(self), dtype=np.int64)
        for d, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            at, has = _middle_edges(d, low, high, sets)
            across = np.zeros(len(self), dtype=np.int64)
            for each in sets:
                cut = at[each.cell]
                reach = (each.boxes.start[d][each.rows] < cut) & (cut < each.boxes.stop[d][each.rows])
                across += np.bincount(each.cell[reach], minlength=len(self))
            better = has & (across < best)
            best[better], side[better], place[better] = across[better], d, at[better]
        return side, place

    def only(self, which: Ints, sets: list[_Held]) -> tuple[_Cells, list[_Held]]:
        number = np.full(len(self), -1, dtype=np.int64)
        number[which] = np.arange(len(which))
        kept = []
        for each in sets:
            cell = number[each.cell]
            rows = np.flatnonzero(cell >= 0)
            kept.append(_Held(each.boxes, each.rows[rows], cell[rows]))
        return _Cells([low[which] for low in self.low], [high[which] for high in self.high]), kept

    def halved(self, which: Ints, side: Ints, at: Ints, sets: list[_Held]) -> tuple[_Cells, list[_Held]]:
        """Those cells, each cut in two. A box that reaches across the cut is in both."""
        cells, sets = self.only(which, sets)
        side, at = side[which], at[which]
        low, high = [np.repeat(x, 2) for x in cells.low], [np.repeat(y, 2) for y in cells.high]
        for d in range(len(low)):
            here = np.flatnonzero(side == d)
            high[d][2 * here] = at[here]
            low[d][2 * here + 1] = at[here]
        halves = []
        for each in sets:
            start, stop = (_along(side[each.cell], x, each.rows) for x in (each.boxes.start, each.boxes.stop))
            cut = at[each.cell]
            left, right = np.flatnonzero(start < cut), np.flatnonzero(stop > cut)
            cell = np.concatenate([2 * each.cell[left], 2 * each.cell[right] + 1])
            order = np.argsort(cell, kind="stable")
            halves.append(_Held(each.boxes, each.rows[np.concatenate([left, right])][order], cell[order]))
        return _Cells(low, high), halves


def _along(side: Ints, columns: Sequence[Ints], rows: Ints) -> Ints:
    found = columns[0][rows]
    for d in range(1, len(columns)):
        found = np.where(side == d, columns[d][rows], found)
    return found


def _middle_edges(d: int, low: Ints, high: Ints, sets: list[_Held]) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """For each cell the middle one of the edges that lie in it along a side, and whether there is one."""
    edges, cells = [], []
    for each in sets:
        for column in (each.boxes.start[d], each.boxes.stop[d]):
            edge = column[each.rows]
            inside = (edge > low[each.cell]) & (edge < high[each.cell])
            edges.append(edge[inside])
            cells.append(each.cell[inside])
    edge, cell = np.concatenate(edges), np.concatenate(cells)
    count = np.bincount(cell, minlength=len(low))
    has = count > 0
    middle = np.zeros(len(low), dtype=np.int64)
    order = np.lexsort((edge, cell))
    middle[has] = edge[order[(np.cumsum(count) - count + count // 2)[has]]]
    return middle, has


def _common(
    cells: _Cells, a: _Held, b: _Held, m: Ints, n: Ints, which: npt.NDArray[np.bool_]
) -> tuple[Ints, Ints]:
    """The pairs that begin to have something in common in one of these cells; elsewhere the same two are not counted again."""
    number = np.flatnonzero(which & (m > 0) & (n > 0))
    first_a, first_b = (np.cumsum(m) - m)[number], (np.cumsum(n) - n)[number]
    m, n = m[number], n[number]
    within, width = spans(np.zeros_like(m), m * n), np.repeat(n, m * n)
    i = a.rows[np.repeat(first_a, m * n) + within // width]
    j = b.rows[np.repeat(first_b, m * n) + within % width]
    cell = np.repeat(number, m * n)
    for d, (low, high) in enumerate(zip(cells.low, cells.high, strict=True)):
        begin = np.maximum(a.boxes.start[d][i], b.boxes.start[d][j])
        end = np.minimum(a.boxes.stop[d][i], b.boxes.stop[d][j])
        both = (begin < end) & (begin >= low[cell]) & (begin < high[cell])
        i, j, cell = i[both], j[both], cell[both]
    return i, j
