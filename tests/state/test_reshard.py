"""Plans: any layout to any other is the same as slicing the full tensor, and what does not fit is said by name."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep.state import Plan, plan
from state.spreads import carried_out, expected, fresh, held, random_layout

F32 = torch.float32
SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=4).map(tuple)


def rows(plan: Plan) -> list[tuple]:
    return sorted(
        (c.name, c.source_rank, c.source_box, c.target_rank, c.target_box, str(c.box)) for c in plan
    )


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(SHAPES, min_size=0, max_size=4),
    st.integers(1, 5),
    st.sampled_from([F32, torch.bfloat16, torch.bool, torch.int64]),
)
def test_any_layout_to_any_other_and_back(seed, shapes, ranks, dtype):
    rng = random.Random(seed)
    named = {f"t{i}": shape for i, shape in enumerate(shapes)}
    one, other = (random_layout(rng, named, dtype, ranks) for _ in range(2))
    full = {name: fresh(shape, dtype, i) for i, (name, shape) in enumerate(named.items())}
    start = {rank: held(one, full, rank) for rank in range(ranks)}
    there = carried_out(plan(one, other), start, ranks)
    same(there, {rank: held(other, full, rank) for rank in range(ranks)})
    same(carried_out(plan(other, one), there, ranks), start)


def same(got, wanted):
    for rank, tensors in wanted.items():
        for name, each in tensors.items():
            for a, b in zip(got[rank][name], each, strict=True):
                assert torch.equal(a, b), (rank, name)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.lists(SHAPES, min_size=0, max_size=4), st.integers(1, 5))
def test_a_plan_has_the_copies_that_comparing_all_boxes_gives(seed, shapes, ranks):
    rng = random.Random(seed)
    named = {f"t{i}": shape for i, shape in enumerate(shapes)}
    one, other = (random_layout(rng, named, F32, ranks) for _ in range(2))
    whole = plan(one, other)
    assert {(c.name, c.target_rank, c.box) for c in whole} == expected(one, other)
    assert len(whole) == len({(c.name, c.target_rank, c.target_box, c.box) for c in whole})
    for rank in range(ranks):
        part = plan(one, other, rank)
        assert rows(part) == rows(whole.part(rank))
        for peer in range(ranks):  # both ends of every pair see their copies in one order
            theirs = plan(one, other, peer)
            assert between(part, rank, peer) == between(theirs, rank, peer)


def between(plan: Plan, source: int, target: int) -> list:
    return [c for c in plan if (c.source_rank, c.target_rank) == (source, target)]
