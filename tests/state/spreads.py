"""Layouts for tests: drawn at random, and what they ought to lead to, found by comparing every box with every other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from farstep.state import Box, Layout, Plan, Shards, Spread, exchange, flat_boxes, respread

__all__ = [
    "carried_out",
    "columns_of",
    "cut",
    "expected",
    "filled",
    "fresh",
    "held",
    "random_layout",
    "random_spread",
    "rows_of",
    "set_same_host",
]


F32 = torch.float32


def set_same_host(default: bool | None) -> None:
    """What exchanges do in this process unless they are told."""
    for function in (exchange, respread):
        function.__wrapped__.__kwdefaults__["same_host"] = default  # within torch.no_grad


def rows_of(shape, ranks, dtype=F32) -> Spread:
    """Split along the first dimension, as evenly as it goes."""
    n, k = shape[0], len(ranks)
    cuts = [n * i // k for i in range(k + 1)]
    return Spread.of(
        shape,
        dtype,
        {
            rank: [Box((a, *(0 for _ in shape[1:])), (b - a, *shape[1:]))]
            for rank, a, b in zip(ranks, cuts, cuts[1:], strict=False)
        },
    )


def columns_of(shape, ranks, dtype=F32) -> Spread:
    flipped = rows_of((shape[1], shape[0]), ranks, dtype)
    return Spread(shape, dtype, flipped.ranks, flipped.offsets[:, ::-1], flipped.sizes[:, ::-1])


def filled(spread, full, rank) -> Shards:
    return Shards(spread, [full[box.slices].clone() for box in spread.boxes(rank)])


def random_spread(rng: random.Random, shape: Sequence[int], dtype: torch.dtype, ranks: int) -> Spread:
    """Any: whole, a grid, flat ranges or cut here and there; uneven, with empty boxes and replicas."""
    kind = rng.choice(["whole", "grid", "flat", "cut", "cut"])
    whole = Box.whole(shape)
    if kind == "whole":
        parts = [whole]
    elif kind == "grid":
        parts = _grid(rng, shape)
    elif kind == "flat":
        cuts = sorted(rng.randint(0, whole.numel) for _ in range(rng.randint(0, 5)))
        parts = [
            box
            for a, b in zip([0, *cuts], [*cuts, whole.numel], strict=True)
            for box in flat_boxes(shape, a, b)
        ]
    else:
        parts = cut(rng, whole, rng.randint(0, 6))
    boxes: dict[int, list[Box]] = {rank: [] for rank in rng.sample(range(ranks), ranks)}
    for part in parts:
        for rank in rng.sample(range(ranks), rng.choice([1, 1, 1, 2, ranks]) if ranks > 1 else 1):
            boxes[rank].append(part)
    for each in boxes.values():
        rng.shuffle(each)
        if shape and rng.random() < 0.2:  # a box without elements
            at = tuple(rng.randint(0, n) for n in shape)
            each.insert(rng.randint(0, len(each)), Box(at, (0,) * len(shape)))
    return Spread.of(shape, dtype, boxes)


def random_layout(
    rng: random.Random, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, ranks: int
) -> Layout:
    return Layout({name: random_spread(rng, shape, dtype, ranks) for name, shape in shapes.items()})


def cut(rng: random.Random, box: Box, times: int) -> list[Box]:
    """A box cut in two again and again, each time at any place along any side."""
    parts = [box]
    for _ in range(times):
        part = parts.pop(rng.randrange(len(parts)))
        sides = [d for d, n in enumerate(part.sizes) if n > 1]
        if not sides:
            parts.append(part)
            continue
        d = rng.choice(sides)
        n = rng.randint(1, part.sizes[d] - 1)
        parts.append(Box(part.offsets, (*part.sizes[:d], n, *part.sizes[d + 1 :])))
        parts.append(
            Box(
                (*part.offsets[:d], part.offsets[d] + n, *part.offsets[d + 1 :]),
                (*part.sizes[:d], part.sizes[d] - n, *part.sizes[d + 1 :]),
            )
        )
    return parts


def _grid(rng: random.Random, shape: Sequence[int]) -> list[Box]:
    parts = [Box((), ())]
    for n in shape:
        cuts = [0, *sorted(rng.randint(0, n) for _ in range(rng.randint(0, 3))), n]
        parts = [
            Box((*part.offsets, a), (*part.sizes, b - a))
            for part in parts
            for a, b in itertools.pairwise(cuts)
        ]
    return parts


def fresh(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A tensor all of whose bytes are different from its neighbours'."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).to(dtype)
    return torch.randint(0, 120, tuple(shape), generator=generator).to(dtype)


def held(layout: Layout, full: Mapping[str, Tensor], rank: int) -> dict[str, list[Tensor]]:
    """What a rank holds, sliced from the full tensors."""
    return {
        name: [full[name][box.slices].clone() for box in spread.boxes(rank)]
        for name, spread in layout.items()
    }


def expected(source: Layout, target: Layout) -> set[tuple[str, int, Box]]:
    """(tensor, target rank, box) of every copy there has to be."""
    return {
        (name, rank, common)
        for name, there in target.items()
        for rank in set(there.ranks.tolist())
        for box in there.boxes(rank)
        for giver in set(source[name].ranks.tolist())
        for held in source[name].boxes(giver)
        if (common := held.intersect(box)) is not None
    }


def carried_out(
    plan: Plan, source: Mapping[int, Mapping[str, Sequence[Tensor]]], ranks: int
) -> dict[int, dict[str, list[Tensor]]]:
    """What each rank has after a plan, with all ranks in this process."""
    target = {
        rank: {
            name: [torch.full(box.sizes, 77).to(spread.dtype) for box in spread.boxes(rank)]
            for name, spread in plan.target.items()
        }
        for rank in range(ranks)
    }
    for copy in plan:
        here = plan.source[copy.name].boxes(copy.source_rank)[copy.source_box]
        there = plan.target[copy.name].boxes(copy.target_rank)[copy.target_box]
        target[copy.target_rank][copy.name][copy.target_box][copy.box.within(there).slices] = source[
            copy.source_rank
        ][copy.name][copy.source_box][copy.box.within(here).slices]
    return target
