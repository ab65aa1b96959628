"""Which copies lead from one layout to another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from farstep.errors import LayoutError
from farstep.state.box import Box, missing
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
        copies = _Copies(here, here.replicas, target, None)
        copies.check_whole()
        return copies.plan(source, target, None)
    s, t = here.columns, target.columns
    takes, gives = np.flatnonzero(t.rank == rank), np.flatnonzero(s.rank == rank)
    check_overlaps(names, t, Replicas(names, t, t.near(t, takes)))
    givers = Replicas(names, s, s.near(t, takes))
    check_overlaps(names, s, givers)
    taken = _Copies(here, givers, target, takes)
    taken.check_whole()
    held = s.near(s, gives)
    held = held[
        np.isin(s.key[held], s.key[gives])
    ]  # what this rank gives, with all others that hold the same
    takers = t.near(s, gives)
    given = _Copies(here, Replicas(names, s, held), target, takers[t.rank[takers] != rank])
    return taken.plan(source, target, rank, given.only(s.rank[given.giver] == rank))


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
    """From boxes of the source, each once, to boxes of the target, ordered by these: `giver` and `taker` are rows of the columns."""

    def __init__(self, source: Layout, givers: Replicas, target: Layout, takers: Ints | None) -> None:
        s, t = source.columns, target.columns
        self._names, self._s, self._t, self._takers = target.names, s, t, takers
        i, j = meet(s.boxes(givers.distinct, t, s.lead), t.boxes(takers, s, s.lead))
        taker = j if takers is None else takers[j]
        model = givers.distinct[i]
        tensor = t.tensor[taker]
        cut = [a or b for a, b in zip(s.cut, t.cut, strict=True)]
        start = np.empty((t.depth, len(i)), dtype=np.int64)
        size = np.empty_like(start)
        for d in range(t.depth):
            if cut[d]:
                np.maximum(s.start[d][model], t.start[d][taker], out=start[d])
                np.minimum(s.stop[d][model], t.stop[d][taker], out=size[d])
                size[d] -= start[d]
            else:
                start[d] = 0
                size[d] = t.sides[d][tensor]
        order = _order(taker, t.place(tensor, start, cut))
        if order is not None:
            i, taker, start, size = i[order], taker[order], start[:, order], size[:, order]
        self.taker, self.start, self.size = taker, start, size
        self.giver = givers.chosen(i, t.rank[taker])

    def only(self, which: npt.NDArray[np.bool_]) -> _Copies:
        self.taker, self.giver = self.taker[which], self.giver[which]
        self.start, self.size = self.start[:, which], self.size[:, which]
        return self

    def check_whole(self) -> None:
        """Raise LayoutError if a box of the target is not covered. The copies to one box do not overlap, so it is enough to count."""
        t = self._t
        numel = np.ones(len(self.taker), dtype=np.int64)
        for d in range(t.depth):
            numel *= self.size[d]
        found = np.bincount(self.taker, numel, len(t))
        short = found != t.numel if self._takers is None else found[self._takers] != t.numel[self._takers]
        if not short.any():
            return
        at = int(np.flatnonzero(short)[0])
        row = at if self._takers is None else int(self._takers[at])
        box, name = t.box(row), self._names[int(t.tensor[row])]
        got = np.flatnonzero(self.taker == row)
        dims = len(box.sizes)
        given = [
            Box(tuple(o), tuple(n))
            for o, n in zip(self.start[:dims, got].T.tolist(), self.size[:dims, got].T.tolist(), strict=True)
        ]
        raise LayoutError(
            f"no rank of the source has {missing(box, given)[0]} of {name!r}, which is part of {box} of rank {t.rank[row]} of the target"
        )

    def plan(self, source: Layout, target: Layout, rank: int | None, more: _Copies | None = None) -> Plan:
        s, t = self._s, self._t
        giver, taker, start, size = self.giver, self.taker, self.start, self.size
        if more is not None:
            giver, taker = np.concatenate([giver, more.giver]), np.concatenate([taker, more.taker])
            start, size = (
                np.concatenate([start, more.start], axis=1),
                np.concatenate([size, more.size], axis=1),
            )
        return Plan(
            source,
            target,
            rank,
            t.tensor[taker],
            s.rank[giver],
            s.number[giver],
            t.rank[taker],
            t.number[taker],
            start.T,
            size.T,
        )


def _order(taker: Ints, place: Ints) -> Ints | None:
    """By taker, then by place; None if they are so."""
    step = np.diff(taker)
    if (step >= 0).all() and (np.diff(place)[step == 0] > 0).all():
        return None
    return np.lexsort((place, taker))
