"""A box of a tensor: where it begins and how far it reaches, in every dimension."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

__all__ = ["Box", "flat_boxes", "missing"]


@dataclass(frozen=True, slots=True)
class Box:
    """`offsets` is its first element, `sizes` its extent. A box of no dimensions is the one element of a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"a box has one size for each offset, not {self.offsets} and {self.sizes}")
        if self.sizes and (min(self.offsets) < 0 or min(self.sizes) < 0):
            raise ValueError(f"a box has no negative offsets or sizes: {self.offsets} and {self.sizes}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offsets, self.sizes, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """`tensor[box.slices]` is the box of the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """What both have; None where that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self.ends, other.ends))
        if any(a >= b for a, b in zip(offsets, ends, strict=True)):
            return None
        return Box(offsets, tuple(b - a for a, b in zip(offsets, ends, strict=True)))

    def contains(self, other: Box) -> bool:
        """Whether all of the other lies within this one. Of a box without elements only the place counts."""
        return all(
            a <= c and d <= b
            for a, b, c, d in zip(self.offsets, self.ends, other.offsets, other.ends, strict=True)
        )

    def minus(self, other: Box) -> list[Box]:
        """What this one has beyond the other, as at most 2d boxes that do not overlap."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.numel else []
        rest = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for d, (begin, end) in enumerate(zip(common.offsets, common.ends, strict=True)):
            stop = offsets[d] + sizes[d]
            for a, b in ((offsets[d], begin), (end, stop)):
                if a < b:
                    rest.append(
                        Box((*offsets[:d], a, *offsets[d + 1 :]), (*sizes[:d], b - a, *sizes[d + 1 :]))
                    )
            offsets[d], sizes[d] = (
                begin,
                end - begin,
            )  # further slabs are cut from what is left between those two
        return rest

    def within(self, outer: Box) -> Box:
        """The same box as seen from the beginning of another that contains it."""
        if not outer.contains(self):
            raise ValueError(f"{self} is not within {outer}")
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offsets, self.ends, strict=True)) + "]"


def missing(box: Box, boxes: Iterable[Box]) -> list[Box]:
    """What `boxes` leave uncovered of `box`: nothing, if together they cover it."""
    rest = [box] if box.numel else []
    for each in boxes:
        rest = [part for piece in rest for part in piece.minus(each)]
    return rest


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements from `start` to `stop` of a tensor that is laid out row by row, as boxes in that order: at most 2d - 1 of them."""
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"a tensor of shape {tuple(shape)} has no elements from {start} to {stop}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = numel // shape[0]
    first, last = -(-start // row), stop // row  # the rows that are taken whole
    if first > last:  # within one row
        return _at(last, flat_boxes(shape[1:], start - last * row, stop - last * row))
    boxes = []
    if start < first * row:
        boxes += _at(first - 1, flat_boxes(shape[1:], start - (first - 1) * row, row))
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if last * row < stop:
        boxes += _at(last, flat_boxes(shape[1:], 0, stop - last * row))
    return boxes


def _at(row: int, boxes: list[Box]) -> list[Box]:
    """Boxes of one row, as boxes of the tensor."""
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]
