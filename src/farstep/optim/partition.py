"""Who owns which elements of replicated parameters, and in which pieces they travel.

The parameters of one group and dtype, laid end to end, are cut into one range for each rank, as equal as can be. A range is cut again into pieces:
parts of large parameters, which travel straight from their memory, and many small ones packed together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Extent", "Piece", "Segment", "divide"]

SMALL_BYTES = 256 << 10
"""Shorter segments are packed with others: beyond that a copy costs more than a message."""
GRAIN = 64
"""Parameters are cut at multiples of this. Fused updates then give an element the same bits as in the whole parameter; elsewhere a few differ."""


@dataclass(frozen=True)
class Extent:
    """What is to be known of a parameter."""

    numel: int
    itemsize: int
    space: Hashable
    """Only parameters of one space share a piece."""
    whole: bool = False
    """It has one owner."""
    in_one_piece: bool = False
    """It is never cut, not even on its way."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements of one parameter, counted row by row."""

    parameter: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


Piece = tuple[Segment, ...]


def divide(extents: Sequence[Extent], ranks: int, piece_bytes: int) -> list[list[Piece]]:
    """The pieces of each rank. All ranks come to the same."""
    owned: list[list[Segment]] = [[] for _ in range(ranks)]
    spaces: dict[Hashable, list[int]] = defaultdict(list)
    for number, extent in enumerate(extents):
        if extent.numel == 0:
            owned[0].append(Segment(number, 0, 0))
        elif not (extent.whole or extent.in_one_piece):
            spaces[extent.space].append(number)
    for numbers in spaces.values():
        _share_out(numbers, extents, owned)
    _place_whole(extents, owned)
    return [list(_pieces(segments, extents, piece_bytes)) for segments in owned]


def _share_out(numbers: list[int], extents: Sequence[Extent], owned: list[list[Segment]]) -> None:
    """Equal ranges of the parameters of one space."""
    total = sum(extents[number].numel for number in numbers)
    ranks, rank, begin = len(owned), 0, 0
    for number in numbers:
        numel, start = extents[number].numel, 0
        while start < numel:
            left = total * (rank + 1) // ranks - begin - start
            stop = numel if rank == ranks - 1 else min(numel, -(-(start + left) // GRAIN) * GRAIN)
            if stop > start:
                owned[rank].append(Segment(number, start, stop))
                start = stop
            if rank < ranks - 1 and begin + start >= total * (rank + 1) // ranks:
                rank += 1
        begin += numel


def _place_whole(extents: Sequence[Extent], owned: list[list[Segment]]) -> None:
    """The largest first, each to the rank that has the fewest bytes by then."""
    load = [sum(s.numel * extents[s.parameter].itemsize for s in segments) for segments in owned]
    whole = [
        number
        for number, extent in enumerate(extents)
        if (extent.whole or extent.in_one_piece) and extent.numel
    ]
    for number in sorted(whole, key=lambda n: -extents[n].numel * extents[n].itemsize):
        rank = load.index(min(load))
        owned[rank].append(Segment(number, 0, extents[number].numel))
        load[rank] += extents[number].numel * extents[number].itemsize


def _pieces(segments: list[Segment], extents: Sequence[Extent], piece_bytes: int) -> Iterator[Piece]:
    packed: dict[Hashable, list[Segment]] = defaultdict(list)
    sizes: dict[Hashable, int] = defaultdict(int)
    for segment in segments:
        extent = extents[segment.parameter]
        nbytes = segment.numel * extent.itemsize
        if nbytes >= min(SMALL_BYTES, piece_bytes):
            yield from _cut(segment, 1 if extent.in_one_piece else -(-nbytes // piece_bytes))
            continue
        if sizes[extent.space] + nbytes > piece_bytes:
            yield tuple(packed.pop(extent.space))
            sizes[extent.space] = 0
        packed[extent.space].append(segment)
        sizes[extent.space] += nbytes
    for each in packed.values():
        yield tuple(each)


def _cut(segment: Segment, count: int) -> Iterator[Piece]:
    ends = [segment.start + segment.numel * n // count // GRAIN * GRAIN for n in range(1, count)]
    for start, stop in zip([segment.start, *ends], [*ends, segment.stop], strict=True):
        if start < stop:
            yield (Segment(segment.parameter, start, stop),)
