"""The cases of planning: which copies lead from one layout to another. Nothing is sent, and torch has nothing like it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch

from bench.cases import Act, Case

if TYPE_CHECKING:
    from farstep.state import Layout, Spread

TENSORS, SHARDS, NEW_SHARDS = 1000, 1000, 768
GRIDS = 250
FEW_TENSORS, FEW_SHARDS = 100, 100
MORE_TENSORS = (100, 1000, 10_000)
MORE_SHARDS = (100, 1000, 10_000)
RANK = 5

Pair = tuple[dict[str, "Spread"], dict[str, "Spread"]]


def grid(shape: tuple[int, ...], *parts: int) -> Spread:
    """Cut evenly along each side, one box for each rank."""
    from farstep.state import Spread

    cuts = [np.arange(k + 1) * n // k for n, k in zip(shape, parts, strict=True)]
    offsets = np.stack(np.meshgrid(*(c[:-1] for c in cuts), indexing="ij"), -1).reshape(-1, len(shape))
    sizes = np.stack(np.meshgrid(*(np.diff(c) for c in cuts), indexing="ij"), -1).reshape(-1, len(shape))
    return Spread(shape, torch.float32, np.arange(len(offsets)), offsets, sizes)


def rows(tensors: int, shards: int, new_shards: int) -> Pair:
    names, shape = [f"layer{i}.weight" for i in range(tensors)], (98_304, 64)
    return {n: grid(shape, shards, 1) for n in names}, {n: grid(shape, new_shards, 1) for n in names}


def grids() -> Pair:
    names, shape = [f"layer{i}.weight" for i in range(GRIDS)], (9600, 9600)
    return {n: grid(shape, 32, 32) for n in names}, {n: grid(shape, 24, 48) for n in names}


def planned(build: Callable[[], Pair], rank: int | None, *, known: bool) -> Case:
    """`known`: the layouts have been planned with before, for another rank."""

    @contextmanager
    def case(rpc: ModuleType, me: str, peers: list[str]) -> Iterator[Act]:
        from farstep.state import Layout, plan

        source, target = build()
        here, there = Layout(source), Layout(target)
        check(here, there)

        def act() -> None:
            if known:
                plan(here, there, rank)
            else:
                plan(Layout(source), Layout(target), rank)

        yield act

    return case


def check(source: Layout, target: Layout) -> None:
    """Every byte is copied once, and one rank's part is what the whole plan has of it."""
    from farstep.state import plan

    whole, part = plan(source, target), plan(source, target, RANK)
    assert int(whole.nbytes.sum()) == target.nbytes
    assert part.bytes_between() == whole.part(RANK).bytes_between()


_FULL = partial(rows, TENSORS, SHARDS, NEW_SHARDS)

CASES: dict[str, Case] = {
    "plan": planned(_FULL, None, known=False),
    "plan-rank": planned(_FULL, RANK, known=True),
    "plan-first": planned(_FULL, RANK, known=False),
    "plan-grids": planned(grids, None, known=False),
    **{
        f"plan-tensors{count}": planned(partial(rows, count, FEW_SHARDS, 77), None, known=False)
        for count in MORE_TENSORS
    },
    **{
        f"plan-shards{count}": planned(
            partial(rows, FEW_TENSORS, count, count * 77 // 100), None, known=False
        )
        for count in MORE_SHARDS
    },
}
