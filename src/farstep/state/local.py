"""One rank's part of a plan, with the tensors it is about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from farstep.errors import LayoutError, StateError
from farstep.state.arrays import Ints, total
from farstep.state.box import Box
from farstep.state.layout import Layout
from farstep.state.memory import sharing
from farstep.state.messages import Copies
from farstep.state.plans import Plan
from farstep.state.shards import check_tensors

__all__ = ["Local"]

_AT_ONCE = 1024
"""So many rows are made Python's at a time, which need more memory then."""


class Local:
    """What this rank sends to whom, receives from whom and keeps, as rows of its plan; and the memory of each copy."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        ranks: int,
        source: Mapping[str, Sequence[Tensor]],
        target: Mapping[str, Sequence[Tensor]],
    ) -> None:
        """Raises StateError if the tensors are not those of the layouts, or a target shares memory with a source or another target."""
        for column in (plan.source_rank, plan.target_rank):
            if len(column) and int(column.max()) >= ranks:
                raise LayoutError(
                    f"the plan has a rank {int(column.max())}, and the group only {ranks} ranks"
                )
        self.plan = plan
        gives, takes = plan.source_rank == rank, plan.target_rank == rank
        self.kept = np.flatnonzero(gives & takes)
        self.sent = _by_peer(np.flatnonzero(gives & ~takes), plan.target_rank)
        self.received = _by_peer(np.flatnonzero(takes & ~gives), plan.source_rank)
        self.bytes_total = total(plan.nbytes)
        self.bytes_kept = total(plan.nbytes[self.kept])
        self.source = _Side(plan, plan.source, rank, source, np.flatnonzero(gives), plan.source_box, False)
        self.target = _Side(plan, plan.target, rank, target, np.flatnonzero(takes), plan.target_box, True)
        self._itemsize = np.array([each.dtype.itemsize for each in plan.target.values()], dtype=np.int64)
        self._check_memory()

    def copies(self, rows: Ints) -> Copies:
        """These, as messages are made of them."""
        plan = self.plan
        return Copies(rows, plan.nbytes[rows], plan.sizes[rows], self._itemsize[plan.tensor[rows]])

    def _check_memory(self) -> None:
        """Nothing may be written where something is still to be read, or something else is written. What is in place is not written."""
        read, written = list(self.source.held()), list(self.target.held())
        found = list(sharing([t for _, t in written], [t for _, t in read]))
        if not found:
            return
        in_place = self._leave_in_place()
        for one, another, source in found:
            if written[one][0] in in_place or (another is not None and written[another][0] in in_place):
                continue
            target = self.target.name(*written[one][0])
            if another is not None:
                raise StateError(
                    f"the targets {target} and {self.target.name(*written[another][0])} share memory, so they cannot both be filled. "
                    "Give each its own, or only one of them"
                )
            assert source is not None
            raise StateError(
                f"the target {target} shares memory with the source {self.source.name(*read[source][0])}, and may be written before that "
                "is read. Copy one of them first"
            )

    def _leave_in_place(self) -> set[tuple[int, int]]:
        """Take out the copies whose source and target are the same memory. The targets of which nothing else is written."""
        stays = np.zeros(len(self.kept), dtype=np.bool_)
        pairs = zip(self.source.views(self.kept), self.target.views(self.kept), strict=True)
        for at, (here, there) in enumerate(pairs):
            stays[at] = _same(here, there)
        rows, self.kept = self.kept[stays], self.kept[~stays]
        left: dict[tuple[int, int], int] = {key: tensor.nbytes for key, tensor in self.target.held()}
        keys = zip(self.plan.tensor[rows].tolist(), self.plan.target_box[rows].tolist(), strict=True)
        for key, nbytes in zip(keys, self.plan.nbytes[rows].tolist(), strict=True):
            left[key] -= nbytes
        return {key for key, nbytes in left.items() if not nbytes}


class _Side:
    """The tensors that the rank gives, or those that it takes into."""

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        rank: int,
        given: Mapping[str, Sequence[Tensor]],
        rows: Ints,
        numbers: Ints,
        written: bool,
    ) -> None:
        self._plan, self._layout, self._rank = plan, layout, rank
        self._numbers = numbers
        self._tensors: dict[int, Sequence[Tensor]] = {}
        """By the tensor's place among the names."""
        for index in np.unique(plan.tensor[rows]).tolist():
            name = plan.names[index]
            if name not in given:
                raise LayoutError(f"rank {rank} was given no tensors of {name!r}, and has boxes of it")
            check_tensors(name, layout[name], rank, given[name], written)
            self._tensors[index] = given[name]
        self._at = np.zeros_like(plan.offsets)
        """Where each copy begins in its local tensor."""
        columns = layout.columns
        mine = np.flatnonzero(columns.rank == rank)
        own = columns.number(mine)
        most = int(own.max(initial=0)) + 1
        boxes = mine[
            np.searchsorted(columns.tensor[mine] * most + own, plan.tensor[rows] * most + numbers[rows])
        ]
        self._at[rows] = plan.offsets[rows] - columns.start[:, boxes].T

    def held(self) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """The tensors, by the tensor's place among the names and their number."""
        for index, tensors in self._tensors.items():
            for number, tensor in enumerate(tensors):
                yield (index, number), tensor

    def name(self, index: int, number: int) -> str:
        name = self._plan.names[index]
        return f"{name!r} {self._layout[name].boxes(self._rank)[number]}"

    def view(self, row: int, part: Box | None) -> Tensor:
        """The memory of a copy, or of a box within it."""
        (view,) = self.views(np.array([row]))
        return view if part is None else view[part.slices[: view.dim()]]

    def views(self, rows: Ints) -> Iterator[Tensor]:
        """The memory of each of these copies."""
        plan, tensors = self._plan, self._tensors
        for first in range(0, len(rows), _AT_ONCE):
            some = rows[first : first + _AT_ONCE]
            columns = (plan.tensor[some], self._numbers[some], self._at[some], plan.sizes[some])
            for index, number, at, sizes in zip(*(column.tolist() for column in columns), strict=True):
                view = tensors[index][number]
                for d, n in enumerate(view.shape):
                    if n != sizes[d]:
                        view = view.narrow(d, at[d], sizes[d])
                yield view


def _same(here: Tensor, there: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same elements with the same values."""
    return (
        here.data_ptr() == there.data_ptr()
        and here.stride() == there.stride()
        and here.device == there.device
        and here.is_conj() == there.is_conj()
        and here.is_neg() == there.is_neg()
    )


def _by_peer(rows: Ints, peers: Ints) -> dict[int, Ints]:
    mine = peers[rows]
    return {int(peer): rows[mine == peer] for peer in np.unique(mine)}
