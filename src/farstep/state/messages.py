"""How the copies of a plan become messages between two ranks, and the bounded memory in which they are packed.

Both ranks divide the same copies by the same rules, from the plan alone, so nothing about it has to be sent. A large region is a message
by itself, or several, which can go from the giver's memory straight into the taker's where both are contiguous; small ones are packed. Messages
are made when their turn comes, and a packed one is only a range of rows, so that millions of small regions need no more than their columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from farstep.state.arrays import Ints, total
from farstep.state.box import Box

__all__ = ["Arena", "Copies", "Message", "aligned", "messages", "pieces", "places"]

ALIGNMENT = 16  # of a region in a packed message: no dtype needs more
PACKED_BYTES = 64 << 10  # below this a copy costs less than a message
_N = TypeVar("_N", int, Ints)


@dataclass(frozen=True, slots=True)
class Message:
    """Copies, as rows of a plan, or a `part` of one: a box within that copy. `payload_bytes` is without the gaps between regions."""

    rows: Ints
    part: Box | None
    nbytes: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Copies:
    """Those of a plan that go from one rank to another: rows, and for each its bytes, sizes, and the bytes of an element."""

    rows: Ints
    nbytes: Ints
    sizes: Ints
    itemsize: Ints


def messages(copies: Copies, limit_bytes: int) -> Iterator[Message]:
    """As messages of at most `limit_bytes`: large ones first, alone or in parts, then the small ones together."""
    room = limit_bytes - limit_bytes % ALIGNMENT
    is_large = copies.nbytes > min(PACKED_BYTES, room)
    for at in np.flatnonzero(is_large).tolist():
        row, nbytes, itemsize = copies.rows[at : at + 1], int(copies.nbytes[at]), int(copies.itemsize[at])
        if nbytes <= limit_bytes:
            yield Message(row, None, nbytes, nbytes)
            continue
        for part in pieces(Box.whole(copies.sizes[at].tolist()), itemsize, limit_bytes):
            yield Message(row, part, part.numel * itemsize, part.numel * itemsize)
    rows, small = copies.rows[~is_large], copies.nbytes[~is_large]
    ends = np.cumsum(aligned(small))
    first, begin = 0, 0
    while first < len(rows):
        last = int(np.searchsorted(ends, begin + room, side="right"))
        end, gap = int(ends[last - 1]), int(-small[last - 1] % ALIGNMENT)
        yield Message(rows[first:last], None, end - gap - begin, total(small[first:last]))
        first, begin = last, end


def places(nbytes: Sequence[int]) -> Iterator[int]:
    """Where each region of a packed message begins."""
    at = 0
    for each in nbytes:
        yield at
        at += aligned(each)


def pieces(box: Box, itemsize: int, limit_bytes: int) -> Iterator[Box]:
    """A box as boxes of at most `limit_bytes`, each a run of whole rows, or of parts of one row where a row is larger."""
    row_bytes = itemsize
    for d in reversed(range(len(box.sizes))):
        if row_bytes * box.sizes[d] > limit_bytes:
            break
        row_bytes *= box.sizes[d]
    else:
        yield box
        return
    step = max(1, limit_bytes // row_bytes)
    for outer in _rows(box.offsets[:d], box.sizes[:d]):
        for start in range(0, box.sizes[d], step):
            yield Box(
                (*outer, box.offsets[d] + start, *box.offsets[d + 1 :]),
                (*(1 for _ in outer), min(step, box.sizes[d] - start), *box.sizes[d + 1 :]),
            )


def _rows(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not sizes:
        yield ()
        return
    for first in range(offsets[0], offsets[0] + sizes[0]):
        for rest in _rows(offsets[1:], sizes[1:]):
            yield first, *rest


def aligned(nbytes: _N) -> _N:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """Memory for packed messages, never more than it was made with. What is taken first is given back first."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._taken: deque[int] = deque()  # where each begins
        self._next = 0

    def take(self, nbytes: int) -> torch.Tensor | None:
        """So many bytes; None if they are not free now."""
        size, at = self._memory.numel(), self._next
        if self._taken:
            oldest = self._taken[0]
            if at > oldest and at + nbytes > size:
                at = 0  # what is left at the end is too short
                free = oldest
            else:
                free = size if at > oldest else oldest
        else:
            at, free = 0, size
        if at + nbytes > free:
            return None
        self._taken.append(at)
        self._next = at + aligned(nbytes)
        return self._memory[at : at + nbytes]

    def give_back(self) -> None:
        self._taken.popleft()
