"""Which copies lead from one layout to another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from farstep.errors import LayoutError
from farstep.state.box import Box
from farstep.state.layout import Ints, Layout, Spread

__all__ = ["Copy", "Plan", "plan"]


@dataclass(frozen=True, slots=True)
class Copy:
    """`box` of the tensor `name`, from one rank's local tensor to another's. Box numbers are those of `spread.boxes(rank)`."""

    name: str
    source_rank: int
    source_box: int
    target_rank: int
    target_box: int
    box: Box


class Plan:
    """Copies as columns: row i says that `box i` of `names[tensor[i]]` goes from the source to the target."""

    def __init__(
        self,
        source: Layout,
        target: Layout,
        tensor: Ints,
        source_rank: Ints,
        source_box: Ints,
        target_rank: Ints,
        target_box: Ints,
        offsets: Ints,
        sizes: Ints,
        rank: int | None,
    ) -> None:
        self.source, self.target = source, target
        self.names = tuple(target)
        self.tensor = tensor
        self.source_rank, self.source_box = source_rank, source_box
        self.target_rank, self.target_box = target_rank, target_box
        self.offsets, self.sizes = offsets, sizes
        self.rank = rank

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Copy]:
        for i in range(len(self)):
            name = self.names[self.tensor[i]]
            dims = len(self.target[name].shape)
            box = Box(tuple(self.offsets[i, :dims].tolist()), tuple(self.sizes[i, :dims].tolist()))
            yield Copy(
                name,
                int(self.source_rank[i]),
                int(self.source_box[i]),
                int(self.target_rank[i]),
                int(self.target_box[i]),
                box,
            )


def plan(source: Layout, target: Layout, rank: int | None = None) -> Plan:
    """The copies that fill `target` from `source`: all of them, or those that one rank sends, receives or makes within itself."""
    rows = []
    depth = max((len(s.shape) for s in target.values()), default=0)
    for index, (name, there) in enumerate(target.items()):
        if name not in source:
            raise LayoutError(f"the source has no tensor {name!r}")
        here = source[name]
        if here.shape != there.shape:
            raise LayoutError(
                f"{name!r} has the shape {here.shape} in the source and {there.shape} in the target"
            )
        if here.dtype != there.dtype:
            raise LayoutError(
                f"{name!r} has the dtype {here.dtype} in the source and {there.dtype} in the target"
            )
        holders: dict[Box, dict[int, int]] = {}
        for r, number, box in _rows(here):
            if box.numel:
                holders.setdefault(box, {})[r] = number
        for r, number, box in _rows(there):
            found = 0
            for held, ranks in holders.items():
                common = held.intersect(box)
                if common is None:
                    continue
                found += common.numel
                by_rank = sorted(ranks)
                giver = r if r in ranks else by_rank[r % len(by_rank)]
                if rank is None or rank in (giver, r):
                    pad = depth - len(box.sizes)
                    rows.append(
                        (
                            index,
                            giver,
                            ranks[giver],
                            r,
                            number,
                            *common.offsets,
                            *[0] * pad,
                            *common.sizes,
                            *[1] * pad,
                        )
                    )
            if found != box.numel and rank in (None, r):
                raise LayoutError(
                    f"the source has {found} of the {box.numel} elements of {name!r} {box} of rank {r}"
                )
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 5 + 2 * depth)
    return Plan(source, target, *columns[:, :5].T, columns[:, 5 : 5 + depth], columns[:, 5 + depth :], rank)


def _rows(spread: Spread) -> Iterator[tuple[int, int, Box]]:
    for r in np.unique(spread.ranks).tolist():
        for number, box in enumerate(spread.boxes(r)):
            yield r, number, box
