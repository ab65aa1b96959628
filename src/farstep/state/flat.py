"""Tensors laid end to end in one flat tensor that is cut into equal shards: which elements lie where."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from farstep.errors import LayoutError
from farstep.state.box import Box, flat_boxes
from farstep.state.layout import Spread

__all__ = ["FlatLayout"]


@dataclass(frozen=True)
class FlatLayout:
    """The tensor `names[i]`, of shape `shapes[i]`, begins at element `starts[i]` of the flat tensor; between two there may be a gap.

    The flat tensor is cut into `shard_count` shards of `shard_numel` elements, the last of them filled up. `orders[i]` lists the tensor's
    dimensions from the slowest in memory to the fastest, where that is not their own order. `aliases` are other names of tensors that have
    several, and the one by which each is listed. Tensors that are `frozen` are there like all others, and no optimizer has state for them.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    shard_numel: int
    shard_count: int
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Sequence[int] | Tensor],
        shard_count: int,
        *,
        aligned_numel: int = 1,
        aliases: Mapping[str, str] | None = None,
        frozen: Iterable[str] = (),
    ) -> Self:
        """One after the other, each beginning at a multiple of `aligned_numel`. Tensors may stand for their shapes."""
        if not isinstance(shapes, Mapping):
            raise TypeError(
                f"shapes by name are wanted, such as dict(model.named_parameters()), not a {type(shapes).__name__}"
            )
        if aligned_numel < 1:
            raise LayoutError(
                f"aligned_numel is the number of elements in a unit, at least 1, not {aligned_numel}"
            )
        sizes = {name: _shape_of(name, each) for name, each in shapes.items()}
        starts, end = [], 0
        for shape in sizes.values():
            starts.append(-(-end // aligned_numel) * aligned_numel)
            end = starts[-1] + math.prod(shape)
        return cls(
            tuple(sizes),
            tuple(sizes.values()),
            tuple(starts),
            -(-end // shard_count) if shard_count > 0 else 0,
            shard_count,
            aliases=dict(aliases or {}),
            frozen=frozenset(frozen),
        )

    def __post_init__(self) -> None:
        if self.shard_count < 1:
            raise LayoutError(f"a flat tensor is cut into 1 shard or more, not {self.shard_count}")
        for what, names in (("aliases", self.aliases.values()), ("frozen", self.frozen)):
            for name in names:
                if name not in self._index:
                    raise LayoutError(
                        f"{what} has {name!r}, which is no tensor of this layout: it has {', '.join(self.names)}"
                    )

    @cached_property
    def numels(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """The stretches of the flat tensor in which no tensor lies: where each begins, and how many elements it has."""
        ends = itertools.accumulate(
            (start + numel for start, numel in zip(self.starts, self.numels, strict=True)), max, initial=0
        )
        gaps = zip(ends, [*self.starts, self.shard_numel * self.shard_count], strict=True)
        return tuple((end, start - end) for end, start in gaps if start > end)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[self._number(name)]

    def order(self, name: str) -> tuple[int, ...]:
        """Its dimensions from the slowest in memory to the fastest."""
        return self.orders.get(self.aliases.get(name, name)) or tuple(range(len(self.shape(name))))

    def range(self, name: str, shard: int) -> tuple[int, int]:
        """The elements of a tensor that lie in a shard, counted from its own beginning; (0, 0) where there are none."""
        i = self._number(name)
        first = max(shard * self.shard_numel - self.starts[i], 0)
        last = min((shard + 1) * self.shard_numel - self.starts[i], self.numels[i])
        return (first, last) if first < last else (0, 0)

    def place(self, name: str, shard: int) -> int:
        """Where in the shard that range begins."""
        return max(self.starts[self._number(name)] - shard * self.shard_numel, 0)

    def boxes(self, name: str, shard: int) -> list[Box]:
        """The same range as boxes of the tensor, in the order of memory: at most 2d - 1."""
        order = self.order(name)
        shape = self.shape(name)
        boxes = flat_boxes([shape[d] for d in order], *self.range(name, shard))
        inverse = _inverse(order)
        return [Box(_permuted(box.offsets, inverse), _permuted(box.sizes, inverse)) for box in boxes]

    def spread(self, name: str, dtype: torch.dtype, holders: Sequence[Sequence[int]]) -> Spread:
        """How a tensor is spread where the ranks `holders[shard]` have each shard."""
        if len(holders) != self.shard_count:
            raise ValueError(
                f"there are {self.shard_count} shards, and holders were given for {len(holders)}"
            )
        i = self._number(name)
        step = max(self.shard_numel, 1)
        first, last = self.starts[i] // step, (self.starts[i] + self.numels[i] - 1) // step
        boxes: dict[int, list[Box]] = {}
        for shard in range(first, min(last + 1, self.shard_count)):
            here = self.boxes(name, shard)
            boxes.update((rank, here) for rank in holders[shard])
        return Spread.of(self.shapes[i], dtype, boxes)

    def views(self, name: str, tensor: Tensor, shard: int) -> list[Tensor]:
        """A tensor's boxes, as views of the shard `tensor`."""
        if tensor.dim() != 1 or tensor.numel() != self.shard_numel:
            raise LayoutError(
                f"{name!r} lies in a flat tensor with shards of {self.shard_numel} elements, and a tensor of shape "
                f"{tuple(tensor.shape)} was given for one: give one that is shaped like the flat parameter's local shard"
            )
        first, last = self.range(name, shard)
        place = self.place(name, shard)
        return self.piece_views(
            name, tensor[place : place + last - first] if first < last else tensor[:0], shard
        )

    def piece_views(self, name: str, piece: Tensor, shard: int) -> list[Tensor]:
        """A tensor's boxes, as views of a 1-D tensor that has only its own elements of this shard."""
        first, last = self.range(name, shard)
        if piece.dim() != 1 or piece.numel() != last - first:
            raise LayoutError(
                f"shard {shard} has {last - first} elements of {name!r}, and a tensor of shape {tuple(piece.shape)} was given for them"
            )
        order = self.order(name)
        boxes = self.boxes(name, shard)
        ends = itertools.accumulate((box.numel for box in boxes), initial=0)
        return [
            piece[end : end + box.numel].view(_permuted(box.sizes, order)).permute(_inverse(order))
            for end, box in zip(ends, boxes, strict=False)
        ]

    def _number(self, name: str) -> int:
        try:
            return self._index[self.aliases.get(name, name)]
        except KeyError:
            raise KeyError(
                f"there is no {name!r} in this flat tensor; it has {', '.join(self.names)}"
            ) from None


def _shape_of(name: str, given: Any) -> tuple[int, ...]:
    shape = tuple(given.shape if isinstance(given, Tensor) else given)
    if not all(isinstance(each, int) and each >= 0 for each in shape):
        raise LayoutError(
            f"the shape of {name!r} is {shape}, and a shape has numbers of elements, none below 0"
        )
    return shape


def _permuted(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[d] for d in order)


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))
