"""The same as `transport`, for ranks on one host: each reads what it needs from the others' memory.

An owner reads the others' gradients of its range, and after all have updated theirs everyone reads the others' ranges into place. What is read is settled by
collectives before and after: [Note: nobody writes what others read].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.errors import ExchangeError, OptimError
from farstep.optim.partition import Piece
from farstep.optim.transport import BROKEN, Live, Rounds, Transport, pack, room_for
from farstep.state.neighbours import Neighbours, Span

__all__ = ["Direct"]


class Direct(Transport):
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        owned: list[list[Piece]],
        names: Sequence[str],
        neighbours: Neighbours,
    ) -> None:
        super().__init__(group, owned, names)
        self._neighbours = neighbours
        self._kept: list[Tensor | None] = []
        """What others may be reading, until the next collective."""

    def reduced(
        self, gradients: Sequence[Tensor | None], like: Sequence[Tensor], live: Live, *, reduce: bool = True
    ) -> Rounds:
        # [Note: nobody writes what others read]: gradients are read between this collective, by which all ranks have theirs, and the next one, which every
        # rank calls when it has read. Meanwhile a rank writes, if at all, only into the range of its own gradients that it owns, and no other reads that.
        addresses = self._announce(gradients, "gradients") if reduce else []
        for n, number in enumerate(live[self._rank]):
            piece = self._owned[self._rank][number]
            own = pack(gradients, like, piece)
            yield n, number, self._mean_of(own, piece, addresses) if reduce else own

    def _mean_of(self, own: Tensor, piece: Piece, addresses: list[list[int]]) -> Tensor:
        into, other = self._pair(own)
        for rank in range(self._ranks):
            term = own
            if rank != self._rank:
                term = into if rank == 0 else other
                self._read(rank, piece, addresses[rank], term)
            if own.dtype is torch.float16:  # their sum may be too large for it
                term = term / self._ranks
            if rank == 0:
                first = term
            elif rank == 1:
                torch.add(first, term, out=into)
            else:
                into.add_(term)
        return into if own.dtype is torch.float16 else into.div_(self._ranks)

    def _pair(self, own: Tensor) -> list[Tensor]:
        nbytes = own.numel() * own.element_size()
        if not self._scratch or self._scratch[0][0].numel() < nbytes:
            self._scratch = [[torch.empty(nbytes, dtype=torch.uint8) for _ in range(2)]]
        return [buffer[:nbytes].view(own.dtype) for buffer in self._scratch[0]]

    def gather(self, values: Sequence[Tensor], live: Live) -> _Reading:
        return _Reading(self, values, live)

    def read_values(self, values: Sequence[Tensor], live: Live, has_failed: bool) -> bool:
        # [Note: nobody writes what others read]: by this collective all have updated what they own; after the last nobody reads any more.
        addresses = self._announce(values, "values")
        for rank, _ in self._peers:
            for number in live[rank]:
                piece = self._owned[rank][number]
                into, unpack = room_for(values, piece)
                self._read(rank, piece, addresses[rank], into)
                unpack()
        has_any_failed = self.end(has_failed)
        self._kept = []
        return has_any_failed

    def _announce(self, tensors: Sequence[Tensor | None], what: str) -> list[list[int]]:
        """Every rank's addresses of these tensors; 0 where there is none."""
        kept = [None if t is None else t.contiguous() for t in tensors]
        own = [0 if t is None else t.data_ptr() for t in kept]
        addresses = [each.tolist() for each in self._collect(own, f"the {what} of a step")]
        self._kept = kept
        return addresses

    def _read(self, rank: int, piece: Piece, addresses: Sequence[int], into: Tensor) -> None:
        """A piece from a rank's memory. Zeros for tensors that it has not."""
        there: list[Span] = []
        here: list[Span] = []
        at, size = 0, into.element_size()
        for s in piece:
            if addresses[s.parameter]:
                there.append((addresses[s.parameter] + s.start * size, s.numel * size))
                here.append((into.data_ptr() + at * size, s.numel * size))
            else:
                into[at : at + s.numel].zero_()
            at += s.numel
        try:
            self._neighbours.read(rank, there, here)
        except ExchangeError as exc:
            raise OptimError(f"rank {dist.get_rank()}: {exc}. {BROKEN}") from exc


class _Reading:
    """Updated pieces are there to be read; those of the others are read when all are."""

    def __init__(self, direct: Direct, values: Sequence[Tensor], live: Live) -> None:
        self._direct, self._values, self._live = direct, values, live

    def publish(self, n: int) -> None:
        pass

    def finish(self, has_failed: bool) -> bool:
        return self._direct.read_values(self._values, self._live, has_failed)
