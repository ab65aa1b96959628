"""All boxes of a layout as a few arrays, with an order by which the neighbours of a box are found without looking at the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from farstep.errors import LayoutError
from farstep.state.arrays import Boxes, Ints, spans
from farstep.state.box import Box

__all__ = ["ALL", "Columns", "SpreadColumns"]

ALL = slice(None)
"""All rows, without a copy."""


class SpreadColumns(Protocol):
    """What a `Spread` has."""

    shape: tuple[int, ...]
    ranks: Ints
    offsets: Ints
    sizes: Ints


class Columns:
    """The boxes that have elements: `tensor`, `rank`, and `start[d]` and `stop[d]` for every dimension.

    Tensors of fewer dimensions than the most are as if they had more, of size 1, at the end.
    """

    def __init__(self, spreads: Sequence[SpreadColumns]) -> None:
        self.shapes = [spread.shape for spread in spreads]
        self._numels = [math.prod(shape) for shape in self.shapes]
        if sum(self._numels) >= 1 << 63:
            raise LayoutError(
                f"the {len(self.shapes)} tensors have {sum(self._numels):,} elements together, and a layout at most 2**63 - 1: make several of it"
            )
        self.depth = max((len(shape) for shape in self.shapes), default=0)
        self.sides = np.ones((self.depth, len(spreads)), dtype=np.int64)
        counts = np.array([len(spread.ranks) for spread in spreads], dtype=np.int64)
        self.rank = _joined([spread.ranks for spread in spreads])
        self.tensor = np.repeat(np.arange(len(spreads), dtype=np.int64), counts)
        self.start = np.zeros((self.depth, len(self.rank)), dtype=np.int64)
        self.stop = np.empty_like(self.start)
        depths = np.array([len(shape) for shape in self.shapes], dtype=np.int64)
        for dims in np.unique(depths).tolist():
            # A tensor without elements has empty boxes only, so its sides, which may be of any size, are of no use.
            full = [i for i, shape in enumerate(self.shapes) if len(shape) == dims and self._numels[i]]
            self.sides[:dims, full] = (
                np.array([self.shapes[i] for i in full], dtype=np.int64).reshape(len(full), dims).T
            )
            alike = [spread for spread in spreads if len(spread.shape) == dims]
            rows: Ints | slice = (
                ALL if len(alike) == len(spreads) else np.flatnonzero(depths[self.tensor] == dims)
            )
            offsets, sizes = (
                np.concatenate([getattr(each, what) for each in alike]) for what in ("offsets", "sizes")
            )
            self.start[:dims, rows] = offsets.T
            self.stop[:dims, rows] = (offsets + sizes).T
            self.stop[dims:, rows] = 1
        self._all_ranks, self._all_tensors = self.rank, self.tensor
        self._kept: Ints | None = None
        some = (self.start < self.stop).all(axis=0)
        if not some.all():
            self._kept = np.flatnonzero(some)
            self.rank, self.tensor = self.rank[self._kept], self.tensor[self._kept]
            self.start, self.stop = self.start[:, self._kept], self.stop[:, self._kept]

    def __len__(self) -> int:
        return len(self.rank)

    def number(self, rows: Ints) -> Ints:
        """A box's place among those of its rank, the ones without elements included."""
        return np.zeros(len(rows), dtype=np.int64) if self._numbers is None else self._numbers[rows]

    @cached_property
    def _numbers(self) -> Ints | None:
        """None if no rank has two boxes of a tensor."""
        rank, tensor = self._all_ranks, self._all_tensors
        if ((rank[1:] > rank[:-1]) | (tensor[1:] != tensor[:-1])).all():
            return None
        owner = tensor * (int(rank.max()) + 1) + rank
        order = np.argsort(owner, kind="stable")
        new = np.diff(owner[order], prepend=-1) != 0
        first = np.flatnonzero(new)
        numbers = np.empty_like(owner)
        numbers[order] = np.arange(len(owner), dtype=np.int64) - first[np.cumsum(new) - 1]
        return numbers if self._kept is None else numbers[self._kept]

    def key(self, rows: Ints | slice) -> Ints:
        """Where a box's first element is, with all tensors one after the other. Boxes that do not overlap differ in it."""
        numels = np.array(self._numels, dtype=np.int64)
        tensor = self.tensor[rows]
        key: Ints = (np.cumsum(numels) - numels)[tensor]
        stride = np.ones(len(self.shapes), dtype=np.int64)
        for d in reversed(range(self.depth)):
            if self.cut[d]:
                key += self.start[d][rows] * stride[tensor]
            stride *= self.sides[d]
        return key

    def numel(self, rows: Ints | slice = ALL) -> Ints:
        numel = np.ones(len(self.tensor[rows]), dtype=np.int64)
        for d in range(self.depth):
            numel *= self.stop[d][rows] - self.start[d][rows]
        return numel

    @cached_property
    def cut(self) -> list[bool]:
        """Along which dimensions some tensor is not whole."""
        return [
            bool(self.start[d].any() or (self.stop[d] != self.sides[d][self.tensor]).any())
            for d in range(self.depth)
        ]

    @cached_property
    def lead(self) -> Ints:
        """For each tensor, the dimension along which it is cut most often."""
        if self.depth < 2 or sum(self.cut) < 2:
            return np.full(len(self.shapes), self.cut.index(True) if any(self.cut) else 0, dtype=np.int64)
        cuts = [np.bincount(self.tensor, self.start[d] > 0, len(self.shapes)) for d in range(self.depth)]
        lead: Ints = np.argmax(cuts, axis=0)
        return lead

    def boxes(self, rows: Ints | slice, other: Columns, lead: Ints) -> Boxes:
        """For `meet` with boxes of the other: `lead` comes first, and dimensions that neither cuts are left out."""
        tensor = self.tensor[rows]
        dims = [d for d in range(self.depth) if self.cut[d] or other.cut[d]]
        start, stop = [self.start[d][rows] for d in dims], [self.stop[d][rows] for d in dims]
        for at, d in enumerate(dims[1:], 1):
            swap = (lead == d)[tensor]
            if swap.any():
                for x in (start, stop):
                    x[0], x[at] = np.where(swap, x[at], x[0]), np.where(swap, x[0], x[at])
        return Boxes(tensor, start, stop)

    def near(self, other: Columns, rows: Ints) -> Ints:
        """The boxes here that may meet some of those boxes of the other: all that do, and few that do not."""
        order, x, reach = self._line
        begin, end = self._on_line(other, rows)
        first = np.searchsorted(reach, begin, side="right")
        count = np.maximum(np.searchsorted(x, end, side="left") - first, 0)
        found = np.zeros(len(self), dtype=np.bool_)
        found[spans(first, count)] = True
        places = np.flatnonzero(found)
        return places if order is None else np.sort(order[places])

    def are_apart(self, rows: Ints | slice) -> bool:
        """Whether those boxes come one after the other on the line: then they don't overlap. If not, they still may not."""
        if sum(self.cut) == 1:
            start, stop, tensor = (
                c[rows] for c in (self.start[self.lead[0]], self.stop[self.lead[0]], self.tensor)
            )
            return bool(((start[1:] >= stop[:-1]) | (tensor[1:] != tensor[:-1])).all())
        x, y = self._on_line(self, rows)
        return bool((x[1:] >= y[:-1]).all())

    @cached_property
    def _line(self) -> tuple[Ints | None, Ints, Ints]:
        """All boxes along their tensors' leading dimensions: their order, where each starts, and how far all up to it reach."""
        x, y = self._on_line(self, ALL)
        order = None
        if not (x[1:] >= x[:-1]).all():
            order = np.argsort(x, kind="stable")
            x, y = x[order], y[order]
        return order, x, np.maximum.accumulate(y)

    def _on_line(self, other: Columns, rows: Ints | slice) -> tuple[Ints, Ints]:
        if not self.depth:
            at = other.tensor[rows]
            return at, at + 1
        sides = self.sides[self.lead, np.arange(len(self.shapes))]
        tensor = other.tensor[rows]
        base, lead = (np.cumsum(sides) - sides)[tensor], self.lead
        if len(lead) and (lead == lead[0]).all():
            return base + other.start[lead[0]][rows], base + other.stop[lead[0]][rows]
        at = lead[tensor]
        row = np.arange(len(other), dtype=np.int64)[rows]
        return base + other.start[at, row], base + other.stop[at, row]

    def box(self, row: int) -> Box:
        """For messages."""
        (found,) = self.boxes_at(np.array([row], dtype=np.int64))
        return found

    def boxes_at(self, rows: Ints) -> list[Box]:
        dims = [len(self.shapes[tensor]) for tensor in self.tensor[rows].tolist()]
        start = self.start[:, rows]
        columns = (start.T.tolist(), (self.stop[:, rows] - start).T.tolist(), dims)
        return [Box(tuple(offsets[:n]), tuple(sizes[:n])) for offsets, sizes, n in zip(*columns, strict=True)]


def _joined(columns: Sequence[Ints]) -> Ints:
    return np.concatenate(columns) if columns else np.zeros(0, dtype=np.int64)
