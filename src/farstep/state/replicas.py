"""Which boxes of a layout are the same, on several ranks, and which overlap without being the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from farstep.errors import LayoutError
from farstep.state.arrays import Ints
from farstep.state.columns import ALL, Columns
from farstep.state.sweep import overlap

__all__ = ["Replicas", "check_overlaps"]


class Replicas:
    """Boxes, each once: `distinct` are rows of the columns, one for each box that some of `rows` have."""

    distinct: Ints | slice

    def __init__(self, names: Sequence[str], columns: Columns, rows: Ints | slice = ALL) -> None:
        self.apart = columns.are_apart(rows)
        # Cut along one side and one after the other, no box has a replica, and they are in the order of their keys.
        self.alone = self.apart and sum(columns.cut) == 1
        self.distinct = rows
        if self.alone:
            return
        key = columns.key(rows)
        if (key[1:] > key[:-1]).all():
            self.alone = True
            return
        self._rows = np.arange(len(columns), dtype=np.int64)[rows]
        order = np.lexsort((columns.rank[self._rows], key))
        self._rows, key = self._rows[order], key[order]
        new = np.diff(key, prepend=-1) != 0
        self._first = np.flatnonzero(new)
        self._count = np.diff(self._first, append=len(key))
        distinct = self.distinct = self._rows[self._first]
        model = distinct[np.cumsum(new) - 1]
        for d in range(columns.depth):
            other = columns.stop[d][self._rows] != columns.stop[d][model]
            if other.any():
                at = int(np.flatnonzero(other)[0])
                raise _overlap(names, columns, int(model[at]), int(self._rows[at]))
        self._ranks = int(columns.rank.max()) + 1
        self._owner = (np.cumsum(new) - 1) * self._ranks + columns.rank[self._rows]

    def row(self, which: Ints) -> Ints:
        """`distinct[which]`"""
        if isinstance(self.distinct, slice):
            return which
        return self.distinct[which]

    def chosen(self, which: Ints, rank: Ints) -> Ints:
        """The row from which each of these ranks takes the box `distinct[which]`: its own, or else one of all holders in turn.

        Every rank comes to the same choice, because it knows all holders of a box when it knows one.
        """
        if self.alone:
            return self.row(which)
        first, count = self._first[which], self._count[which]
        row = self._rows[first + rank % count]
        own = which * self._ranks + rank
        at = np.minimum(np.searchsorted(self._owner, own), len(self._owner) - 1)
        has = (self._owner[at] == own) & (rank < self._ranks)
        return np.where(has, self._rows[at], row)


def check_overlaps(names: Sequence[str], columns: Columns, replicas: Replicas) -> None:
    """Raise LayoutError if two of the boxes overlap. Those that are the same have been found to be."""
    if replicas.apart or columns.are_apart(replicas.distinct):
        return
    boxes = columns.boxes(replicas.distinct, columns, columns.lead)
    found = overlap(boxes)
    if found is not None:
        one, other = replicas.row(np.array(found)).tolist()
        raise _overlap(names, columns, one, other)


def _overlap(names: Sequence[str], columns: Columns, one: int, other: int) -> LayoutError:
    one, other = min(one, other), max(one, other)
    return LayoutError(
        f"two boxes of {names[int(columns.tensor[one])]!r} overlap: {columns.box(one)} of rank {columns.rank[one]} and "
        f"{columns.box(other)} of rank {columns.rank[other]}. Boxes are the same (replicas) or have nothing in common"
    )
