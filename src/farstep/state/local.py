"""One rank's part of a plan, with the tensors it is about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from farstep.errors import LayoutError, StateError
from farstep.state.box import Box
from farstep.state.layout import Layout
from farstep.state.plans import Plan
from farstep.state.shards import check_tensors
from farstep.state.sweep import Ints

__all__ = ["Local"]


class Local:
    """What this rank sends to whom, receives from whom and keeps, as rows of its plan; and the memory of each box."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        ranks: int,
        source: Mapping[str, Sequence[Tensor]],
        target: Mapping[str, Sequence[Tensor]],
    ) -> None:
        """Raises StateError if the tensors are not those of the layouts, or a target shares memory with a source."""
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
        self.bytes_total = int(plan.nbytes.sum())
        self.bytes_kept = int(plan.nbytes[self.kept].sum())
        self._source = _Held(plan.source, rank, source, plan, gives)
        self._target = _Held(plan.target, rank, target, plan, takes)
        if self._shared() is not None:
            self.kept = np.array([row for row in self.kept.tolist() if not self._stays(row)], dtype=np.int64)
            self._check_memory()

    def copies(self, rows: Ints, sending: bool) -> Iterator[tuple[str, int, Box, int]]:
        """Name, number of the local tensor, box and itemsize of each."""
        plan = self.plan
        numbers = plan.source_box if sending else plan.target_box
        layout, names = plan.target, plan.names
        columns = (plan.tensor[rows], numbers[rows], plan.offsets[rows], plan.sizes[rows])
        for tensor, number, offsets, sizes in zip(*(column.tolist() for column in columns), strict=True):
            spread = layout[names[tensor]]
            dims = len(spread.shape)
            yield (
                names[tensor],
                number,
                Box(tuple(offsets[:dims]), tuple(sizes[:dims])),
                spread.dtype.itemsize,
            )

    def source(self, name: str, number: int, box: Box) -> Tensor:
        """The memory of a box that this rank gives."""
        return self._source.view(name, number, box)

    def target(self, name: str, number: int, box: Box) -> Tensor:
        """The memory of a box that this rank takes."""
        return self._target.view(name, number, box)

    def _stays(self, row: int) -> bool:
        """Whether source and target of a copy are the same memory, which then has nothing to do."""
        copy = self.plan[row]
        here = self.source(copy.name, copy.source_box, copy.box)
        there = self.target(copy.name, copy.target_box, copy.box)
        if (
            here.data_ptr() != there.data_ptr()
            or here.stride() != there.stride()
            or here.device != there.device
        ):
            return False
        whole = self._target.tensors[copy.name, copy.target_box]
        if whole.shape == there.shape:  # all of it is in place, so nothing is written into it
            del self._target.tensors[copy.name, copy.target_box]
        return True

    def _check_memory(self) -> None:
        """Nothing may be written where something is still to be read."""
        shared = self._shared()
        if shared is not None:
            raise StateError(
                f"the target {shared[1]} shares memory with the source {shared[0]}, and may be written before that is read. "
                "Copy one of them first"
            )

    def _shared(self) -> tuple[str, str] | None:
        """A source and a target, if there are any, of which one begins before the other ends."""
        ends: list[tuple[int, str] | None] = [None, None]
        for begin, end, side, what in sorted([*self._source.spans(0), *self._target.spans(1)]):
            other, mine = ends[1 - side], ends[side]
            if other is not None and begin < other[0]:
                return (other[1], what) if side else (what, other[1])
            if mine is None or end > mine[0]:
                ends[side] = end, what
        return None


class _Held:
    """The tensors of one side that the plan is about, by name and number."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        given: Mapping[str, Sequence[Tensor]],
        plan: Plan,
        which: npt.NDArray[np.bool_],
    ) -> None:
        self.tensors: dict[tuple[str, int], Tensor] = {}
        self._boxes: dict[tuple[str, int], Box] = {}
        for index in np.unique(plan.tensor[which]).tolist():
            name = plan.names[index]
            if name not in given:
                raise LayoutError(f"rank {rank} was given no tensors of {name!r}, and has boxes of it")
            boxes = check_tensors(name, layout[name], rank, given[name])
            for number, box in enumerate(boxes):
                self.tensors[name, number] = given[name][number].detach()
                self._boxes[name, number] = box

    def view(self, name: str, number: int, box: Box) -> Tensor:
        tensor, held = self.tensors[name, number], self._boxes[name, number]
        return tensor if box == held else tensor[box.within(held).slices]

    def spans(self, side: int) -> Iterator[tuple[int, int, int, str]]:
        """Where in memory each begins and ends. Only addresses of one device tell anything, but those of others seldom clash."""
        for (name, number), tensor in self.tensors.items():
            if tensor.numel():
                last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
                begin = tensor.data_ptr()
                yield (
                    begin,
                    begin + (last + 1) * tensor.itemsize,
                    side,
                    f"{name!r} {self._boxes[name, number]}",
                )


def _by_peer(rows: Ints, peers: Ints) -> dict[int, Ints]:
    mine = peers[rows]
    return {int(peer): rows[mine == peer] for peer in np.unique(mine)}
