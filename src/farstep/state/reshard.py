"""Which copies lead from one layout to another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from farstep.errors import LayoutError
from farstep.state.box import Box, missing
from farstep.state.columns import ALL
from farstep.state.layout import Layout
from farstep.state.plans import Copy, Plan
from farstep.state.replicas import Replicas, check_overlaps
from farstep.state.sweep import Ints, meet

__all__ = ["Copy", "Plan", "plan"]


def plan(source: Layout, target: Layout, rank: int | None = None) -> Plan:
    """The copies that fill `target` from `source`: all of them, or those in which one rank gives or takes.

    Both layouts have the boxes of all ranks, so every rank plans its own part and they agree. The source may have more tensors. A rank
    takes a box from itself if it holds it, and else from one of its holders, which takers share out among themselves.

    Raises LayoutError, which names the tensor and the box, if the source lacks a tensor or a part of one, if shapes or dtypes differ, or
    if boxes overlap without being the same. Planning one rank's part finds what concerns that rank.
    """
    _check_alike(source, target)
    names = target.names
    here = source if source.names == names else source.only(names)
    if rank is None:
        here.check()
        target.check()
        copies = _Copies(here, here.replicas, target, ALL)
        copies.check_whole()
        return copies.plan(here, target, None)
    s, t = here.columns, target.columns
    takes, gives = np.flatnonzero(t.rank == rank), np.flatnonzero(s.rank == rank)
    check_overlaps(names, t, Replicas(names, t, t.near(t, takes)))
    givers = Replicas(names, s, s.near(t, takes))
    check_overlaps(names, s, givers)
    taken = _Copies(here, givers, target, takes)
    taken.check_whole()
    held = s.near(s, gives)
    held = held[np.isin(s.key(held), s.key(gives))]  # its boxes, wherever they are
    takers = t.near(s, gives)
    given = _Copies(here, Replicas(names, s, held), target, takers[t.rank[takers] != rank])
    return taken.plan(here, target, rank, given.only(s.rank[given.giver] == rank))


def _check_alike(source: Layout, target: Layout) -> None:
    for name, there in target.items():
        here = source.get(name)
        if here is None:
            raise LayoutError(f"the source has no tensor {name!r}")
        if here.shape != there.shape:
            raise LayoutError(
                f"{name!r} has the shape {here.shape} in the source and {there.shape} in the target"
            )
        if here.dtype != there.dtype:
            raise LayoutError(
                f"{name!r} has the dtype {here.dtype} in the source and {there.dtype} in the target"
            )


class _Copies:
    """From boxes of the source, each once, to boxes of the target, ordered by these and then by those: `giver` and `taker` are rows of the columns."""

    def __init__(self, source: Layout, givers: Replicas, target: Layout, takers: Ints | slice) -> None:
        s, t = source.columns, target.columns
        self._names, self._s, self._t, self._takers = target.names, s, t, takers
        i, j = meet(s.boxes(givers.distinct, t, s.lead), t.boxes(takers, s, s.lead))
        order = _order(j, i)
        if order is not None:
            i, j = i[order], j[order]
        self._which = j  # of the takers
        self.taker = j if isinstance(takers, slice) else takers[j]
        self.tensor = t.tensor[self.taker]
        model = givers.row(i)
        self.giver = model if givers.alone else givers.chosen(i, t.rank[self.taker])
        self.start = np.zeros((t.depth, len(i)), dtype=np.int64)
        self.size = np.empty_like(self.start)
        for d in range(t.depth):
            if s.cut[d] or t.cut[d]:
                np.maximum(s.start[d][model], t.start[d][self.taker], out=self.start[d])
                np.minimum(s.stop[d][model], t.stop[d][self.taker], out=self.size[d])
                self.size[d] -= self.start[d]
            else:
                self.size[d] = t.sides[d][self.tensor]

    def only(self, which: npt.NDArray[np.bool_]) -> _Copies:
        self.taker, self.giver, self.tensor = self.taker[which], self.giver[which], self.tensor[which]
        self.start, self.size = self.start[:, which], self.size[:, which]
        return self

    def check_whole(self) -> None:
        """Raise LayoutError if a box of the target is not covered. The copies to one box do not overlap, so it is enough to count."""
        t = self._t
        numel = np.multiply.reduce(self.size, axis=0)
        wanted = t.numel(self._takers)
        got = np.zeros_like(wanted)
        if len(numel):  # they are in the order of their takers
            first = np.concatenate([[0], np.flatnonzero(self._which[1:] != self._which[:-1]) + 1])
            got[self._which[first]] = np.add.reduceat(numel, first)
        short = np.flatnonzero(got != wanted)
        if not len(short):
            return
        row = int(short[0] if isinstance(self._takers, slice) else self._takers[short[0]])
        box, name = t.box(row), self._names[int(t.tensor[row])]
        copies = np.flatnonzero(self.taker == row)
        dims = len(box.sizes)
        given = [
            Box(tuple(o), tuple(n))
            for o, n in zip(
                self.start[:dims, copies].T.tolist(), self.size[:dims, copies].T.tolist(), strict=True
            )
        ]
        raise LayoutError(
            f"no rank of the source has {missing(box, given)[0]} of {name!r}, which is part of {box} of rank {t.rank[row]} of the target"
        )

    def plan(self, source: Layout, target: Layout, rank: int | None, more: _Copies | None = None) -> Plan:
        if more is not None:
            for column in ("giver", "taker", "tensor", "start", "size"):
                setattr(self, column, np.concatenate([getattr(self, column), getattr(more, column)], axis=-1))
        s, t = self._s, self._t
        return Plan(
            source,
            target,
            rank,
            self.tensor,
            s.rank[self.giver],
            s.number(self.giver),
            t.rank[self.taker],
            t.number(self.taker),
            self.start.T,
            self.size.T,
        )


def _order(first: Ints, then: Ints) -> Ints | None:
    """By `first`, then by `then`; None if they are so."""
    same = first[1:] == first[:-1]
    if ((first[1:] > first[:-1]) | (same & (then[1:] > then[:-1]))).all():
        return None
    return np.lexsort((then, first))
