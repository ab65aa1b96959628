"""How the copies of a plan become messages between two ranks, and the bounded memory in which they are packed.

Both ranks divide the same copies by the same rules, from the plan alone, so nothing about it has to be sent. A large region is a message
by itself, or several, which can go from the giver's memory straight into the taker's where both are contiguous; small ones are packed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from farstep.state.box import Box

__all__ = ["Arena", "Message", "Piece", "aligned", "messages", "pieces"]

ALIGNMENT = 16  # of a region in a packed message: no dtype needs more
PACKED_BYTES = 64 << 10  # below this a copy costs less than a message


class Piece(NamedTuple):
    """A part of a copy: `box` of the tensor `name`, in the local tensor of that number. `at` is its place in the message."""

    name: str
    number: int
    box: Box
    at: int


@dataclass(frozen=True, slots=True)
class Message:
    pieces: list[Piece]
    nbytes: int


def messages(copies: Iterable[tuple[str, int, Box, int]], limit_bytes: int) -> Iterator[Message]:
    """Copies, each as name, number of the local tensor, box and itemsize, as messages of at most `limit_bytes`.

    Small ones wait for others to be packed with while large ones go ahead.
    """
    packed: list[Piece] = []
    end = 0
    for name, number, box, itemsize in copies:
        nbytes = box.numel * itemsize
        if nbytes > PACKED_BYTES or nbytes > limit_bytes:
            for part in pieces(box, itemsize, limit_bytes):
                yield Message([Piece(name, number, part, 0)], part.numel * itemsize)
            continue
        at = aligned(end)
        if packed and at + nbytes > limit_bytes:
            yield Message(packed, end)
            packed, at = [], 0
        packed.append(Piece(name, number, box, at))
        end = at + nbytes
    if packed:
        yield Message(packed, end)


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


def aligned(nbytes: int) -> int:
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
