"""A plan: copies between ranks, as columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from farstep.state.arrays import Ints, grouped, total
from farstep.state.box import Box
from farstep.state.layout import Layout

__all__ = ["Copy", "Plan"]

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Copy:
    """`box` of the tensor `name` goes from one rank's local tensor to another's: of its boxes, the one of that number."""

    name: str
    source_rank: int
    source_box: int
    target_rank: int
    target_box: int
    box: Box

    def __str__(self) -> str:
        return f"{self.name} {self.box}: rank {self.source_rank} -> rank {self.target_rank}"


@dataclass(frozen=True, eq=False)
class Plan:
    """Copies that fill `target` from `source`, which has the target's tensors alone. `rank` is whose part this is; None if it is everyone's.

    Copy i takes the box `offsets[i]`, `sizes[i]` of the tensor `names[tensor[i]]` from the local tensor number `source_box[i]` of
    `source_rank[i]` to number `target_box[i]` of `target_rank[i]`. Tensors of fewer dimensions than the most have offsets of 0
    and sizes of 1 at the end. The order is by the target's boxes, and in each by where the source's begin.
    """

    source: Layout
    target: Layout
    rank: int | None
    tensor: Ints
    source_rank: Ints
    source_box: Ints
    target_rank: Ints
    target_box: Ints
    offsets: Ints
    sizes: Ints

    @property
    def names(self) -> tuple[str, ...]:
        return self.target.names

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Copy]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Copy:
        name = self.names[self.tensor[i]]
        dims = len(self.target[name].shape)
        return Copy(
            name,
            int(self.source_rank[i]),
            int(self.source_box[i]),
            int(self.target_rank[i]),
            int(self.target_box[i]),
            Box(tuple(self.offsets[i, :dims].tolist()), tuple(self.sizes[i, :dims].tolist())),
        )

    @cached_property
    def nbytes(self) -> Ints:
        """Of each copy."""
        itemsize = np.array([spread.dtype.itemsize for spread in self.target.values()], dtype=np.int64)
        nbytes = itemsize[self.tensor]
        for d in range(self.sizes.shape[1]):
            nbytes *= self.sizes[:, d]
        return nbytes

    @property
    def bytes_moved(self) -> int:
        """Between ranks."""
        return total(self.nbytes[self.source_rank != self.target_rank])

    @property
    def bytes_kept(self) -> int:
        """Within a rank."""
        return total(self.nbytes[self.source_rank == self.target_rank])

    def bytes_between(self) -> dict[tuple[int, int], int]:
        """(source rank, target rank) -> bytes, for all that have copies."""
        if not len(self):
            return {}
        ranks = int(max(self.source_rank.max(), self.target_rank.max())) + 1
        found = grouped(self.source_rank * ranks + self.target_rank, self.nbytes)
        return {(pair // ranks, pair % ranks): nbytes for pair, nbytes in found.items()}

    def part(self, rank: int) -> Plan:
        """The copies in which this rank gives or takes."""
        if self.rank is not None and self.rank != rank:
            raise ValueError(f"this is the part of rank {self.rank}; it does not tell that of rank {rank}")
        return self.take(np.flatnonzero((self.source_rank == rank) | (self.target_rank == rank)), rank)

    def take(self, rows: Ints, rank: int | None) -> Plan:
        """Some of the copies."""
        return Plan(
            self.source,
            self.target,
            rank,
            self.tensor[rows],
            self.source_rank[rows],
            self.source_box[rows],
            self.target_rank[rows],
            self.target_box[rows],
            self.offsets[rows],
            self.sizes[rows],
        )

    def __repr__(self) -> str:
        whose = "" if self.rank is None else f" of rank {self.rank}"
        return f"<Plan{whose}: {len(self):,} copies, {self.bytes_moved:,} bytes between ranks, {self.bytes_kept:,} within>"

    def __str__(self) -> str:
        lines = [f"  {self[i]}" for i in range(min(len(self), _SHOWN))]
        more = [f"  and {len(self) - _SHOWN:,} more"] if len(self) > _SHOWN else []
        return "\n".join([repr(self), *lines, *more])
