"""Plans: any layout to any other is the same as slicing the full tensor, and what does not fit is said by name."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep.errors import LayoutError
from farstep.state import Box, Layout, Plan, Spread, plan
from farstep.state.arrays import Boxes
from farstep.state.cells import clash, meet_in_cells
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


# -- sizes


def sharded(shape, *cuts, dtype=F32) -> Spread:
    """A grid: each dimension cut at these places, one box for each rank in turn."""
    sides = [list(itertools.pairwise([0, *places, n])) for places, n in zip(cuts, shape, strict=True)]
    rows = np.array(list(itertools.product(*sides)), dtype=np.int64).reshape(-1, len(shape), 2)
    return Spread(shape, dtype, np.arange(len(rows)), rows[:, :, 0], rows[:, :, 1] - rows[:, :, 0])


def evenly(n, parts):
    return [n * i // parts for i in range(1, parts)]


@pytest.mark.parametrize(
    ("shape", "source", "target", "copies"),
    [
        ((9600,), (100,), (77,), 176),
        ((9600, 16), (100, 1), (77, 1), 176),
        ((16, 9600), (1, 100), (1, 77), 176),
        ((960, 960), (32, 32), (24, 48), 48 * 64),
        ((960, 960), (48, 1), (1, 48), 48 * 48),
        ((60, 60, 60), (6, 10, 1), (10, 4, 15), 14 * 12 * 15),
    ],
)
def test_grids_have_the_copies_their_cuts_give(shape, source, target, copies):
    """Along each dimension every cut of either begins one more piece, those at the same place once."""
    pieces = 1
    for n, a, b in zip(shape, source, target, strict=True):
        pieces *= 1 + len({*evenly(n, a), *evenly(n, b)})
    assert pieces == copies
    one, other = (
        Layout({f"t{i}": sharded(shape, *map(evenly, shape, parts)) for i in range(3)})
        for parts in (source, target)
    )
    whole = plan(one, other)
    assert len(whole) == 3 * copies
    assert int(whole.nbytes.sum()) == 3 * 4 * int(np.prod(shape))
    rank = 5
    assert rows(plan(one, other, rank)) == rows(whole.part(rank))


def test_tensors_cut_along_different_sides():
    shape = (90, 90)
    one = Layout(
        {
            "a": sharded(shape, evenly(90, 30), []),
            "b": sharded(shape, [], evenly(90, 30)),
            "c": sharded(shape, [], []),
        }
    )
    other = Layout(
        {"a": sharded(shape, evenly(90, 20), []), "b": sharded(shape, evenly(90, 9), []), "c": one["c"]}
    )
    whole = plan(one, other)
    assert [int((whole.tensor == i).sum()) for i in range(3)] == [40, 270, 1]
    for rank in (0, 7, 29):
        assert rows(plan(one, other, rank)) == rows(whole.part(rank))


def test_to_everyone_and_from_everyone():
    shape, ranks = (6, 5), range(64)
    parts = Layout({"w": sharded(shape, evenly(6, 6), [])})
    everywhere = Layout({"w": Spread.whole(shape, F32, ranks)})
    out = plan(parts, everywhere)
    assert len(out) == 64 * 6
    back = plan(everywhere, parts)
    assert back.bytes_moved == 0  # each takes from itself
    assert len(plan(everywhere, everywhere, 9)) == 1
    spare = Layout({"w": Spread.whole(shape, F32, range(60, 64))})
    assert {c.source_rank for c in plan(spare, parts)} == {60, 61, 62, 63}  # takers share out the givers


# -- boxes that no grid has


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 60), st.integers(1, 60))
def test_pairs_in_cells_are_those_of_comparing_all(seed, dims, count, others):
    """Without the sweep that comes first, on boxes that overlap as they like, in two groups."""
    rng = np.random.default_rng(seed)
    one, other = (any_boxes(rng, n, dims) for n in (count, others))
    i, j = meet_in_cells(one, other)
    found = list(zip(i.tolist(), j.tolist(), strict=True))
    assert len(found) == len(set(found))
    assert set(found) == set(zip(*(k.tolist() for k in np.nonzero(pairs(one, other))), strict=True))
    met = pairs(one, one)
    np.fill_diagonal(met, False)
    shown = clash(one)
    assert (shown is None) == (not met.any())
    assert shown is None or met[shown]


def any_boxes(rng, count, dims):
    start = rng.integers(0, 30, (dims, count))
    return Boxes(rng.integers(0, 2, count), list(start), list(start + rng.integers(1, 12, (dims, count))))


def pairs(one, other):
    met = one.group[:, None] == other.group
    for d in range(len(one.start)):
        met &= (one.start[d][:, None] < other.stop[d]) & (other.start[d] < one.stop[d][:, None])
    return met


def test_many_boxes_without_a_grid():
    """Ls within Ls, into stripes: along either side every box meets half of the others."""
    n = 3000
    across = [Box((k, k), (1, n - k)) for k in range(n)]
    ls = across + [Box((k + 1, k), (n - k - 1, 1)) for k in range(n - 1)]
    one = Layout({"w": Spread.of((n, n), F32, {rank: ls[rank::4] for rank in range(4)})})
    whole = plan(one, Layout({"w": sharded((n, n), evenly(n, 3), [])}))
    assert int(whole.sizes.prod(axis=1).sum()) == n * n
    assert len(plan(one, one)) == len(ls)
    turned = Layout({"w": Spread.of((n, n), F32, {rank: ls[rank::5] for rank in range(5)})})
    assert len(plan(one, turned)) == len(ls)
    assert rows(plan(one, turned, 2)) == rows(plan(one, turned).part(2))


def test_counts_are_exact_above_two_to_the_53():
    """A gap of one element in 2**60, and none."""
    side = 2**20
    cut = Spread.of(
        (side,) * 3,
        F32,
        {0: [Box((0, 0, 0), (side, side, side - 1))], 1: [Box((0, 0, side - 1), (side, side, 1))]},
    )
    whole = Layout({"w": Spread.whole((side,) * 3, F32, [2])})
    assert len(plan(Layout({"w": cut}), whole)) == 2
    short = [
        *cut.boxes(0),
        Box((1, 0, side - 1), (side - 1, side, 1)),
        Box((0, 1, side - 1), (1, side - 1, 1)),
    ]
    with pytest.raises(LayoutError, match=r"no rank of the source has \[0:1, 0:1, 1048575:1048576\] of 'w'"):
        plan(Layout({"w": Spread.of((side,) * 3, F32, {0: short})}), whole)


def test_sides_near_two_to_the_63():
    """All tensors on one line would be longer than int64 reaches."""
    n = 2**60
    one, other = (
        Layout(
            {
                name: Spread.of((2, n), torch.uint8, {0: [Box((0, 0), (2, k))], 1: [Box((0, k), (2, n - k))]})
                for name in "abc"
            }
        )
        for k in (n // 2, n // 4)
    )
    assert len(plan(one, other)) == 9
    empty = Layout({name: Spread.whole((0, 2**62), torch.uint8, [0]) for name in "abc"})
    assert len(plan(empty, empty)) == 0
    assert len(plan(one.merged(empty.renamed("{}0".format)), other.merged(empty.renamed("{}0".format)))) == 9
    grid = [Box((a, b), (1, n // 4)) for a in range(2) for b in range(0, n, n // 4)]
    quarters = Layout({name: Spread.of((2, n), torch.uint8, {0: grid}) for name in "abc"})
    assert len(plan(quarters, one)) == 3 * len(grid)


# -- what does not fit


def raises(source, target, match, ranks):
    """The whole plan and the parts of these ranks raise; the others know nothing of it."""
    with pytest.raises(LayoutError, match=match):
        plan(source, target)
    for rank in range(4):
        if rank in ranks:
            with pytest.raises(LayoutError, match=match):
                plan(source, target, rank)
        else:
            plan(source, target, rank)


def test_a_gap_is_named():
    boxes = {0: [Box((0, 0), (2, 6))], 1: [Box((2, 0), (1, 6))], 2: [Box((3, 3), (1, 3))]}
    source = Layout({"fine": Spread.whole((3,), F32, [0]), "w": Spread.of((4, 6), F32, boxes)})
    target = Layout(
        {
            "w": Spread.of((4, 6), F32, {0: [Box((0, 0), (2, 6))], 3: [Box((2, 0), (2, 6))]}),
            "fine": source["fine"],
        }
    )
    raises(source, target, r"no rank of the source has \[3:4, 0:3\] of 'w', .* \[2:4, 0:6\] of rank 3", {3})
    part = Layout({"w": Spread.of((4, 6), F32, {3: [Box((3, 4), (1, 1))]})})
    assert len(plan(source, part)) == 1  # the gap does not matter to it


def test_nothing_at_all_is_a_gap():
    source = Layout({"w": Spread.of((), F32, {})})
    raises(source, Layout({"w": Spread.whole((), F32, [2])}), r"has \[\] of 'w'", {2})


def test_an_overlap_is_named():
    boxes = {0: [Box((0, 0), (3, 6))], 1: [Box((2, 0), (2, 6))]}
    over = Layout({"w": Spread.of((4, 6), F32, boxes)})
    fine = Layout({"w": Spread.whole((4, 6), F32, [3])})
    raises(over, fine, r"two boxes of 'w' overlap: \[0:3, 0:6\] of rank 0 and \[2:4, 0:6\] of rank 1", {3})
    raises(fine, over, r"two boxes of 'w' overlap: \[0:3, 0:6\] of rank 0 and \[2:4, 0:6\] of rank 1", {0, 1})


def test_what_is_not_alike_is_named():
    def layout(shape=(4, 6), dtype=F32):
        return Layout({"w": Spread.whole(shape, dtype, [0])})

    everyone = {0, 1, 2, 3}
    raises(layout((6, 4)), layout(), r"'w' has the shape \(6, 4\) in the source and \(4, 6\)", everyone)
    raises(
        layout(dtype=torch.float16),
        layout(),
        r"'w' has the dtype torch.float16 in the source and torch.float32",
        everyone,
    )
    raises(Layout({"v": layout()["w"]}), layout(), "the source has no tensor 'w'", everyone)


# -- the plan itself


def test_a_plan_reads_well():
    one = Layout({"w": sharded((4, 6), [2], [])})
    whole = plan(one, Layout({"w": Spread.whole((4, 6), F32, [1])}))
    assert str(whole).splitlines() == [
        "<Plan: 2 copies, 48 bytes between ranks, 48 within>",
        "  w [0:2, 0:6]: rank 0 -> rank 1",
        "  w [2:4, 0:6]: rank 1 -> rank 1",
    ]
    assert whole.bytes_between() == {(0, 1): 48, (1, 1): 48}
    assert (whole.bytes_moved, whole.bytes_kept) == (48, 48)
    assert "of rank 0: 1 copies" in repr(plan(one, whole.target, 0))
    many = plan(Layout({"w": sharded((60,), evenly(60, 30))}), Layout({"w": Spread.whole((60,), F32, [0])}))
    assert str(many).endswith("and 10 more")
    assert plan(Layout({}), Layout({})).bytes_between() == {}


def test_the_source_may_have_more_and_in_another_order():
    one = Layout({"x": sharded((8,), [4]), "w": sharded((4, 6), [2], []), "v": sharded((3,), [])})
    other = Layout({"v": one["v"], "w": Spread.whole((4, 6), F32, [0])})
    assert [str(c) for c in plan(one, other)] == [
        "v [0:3]: rank 0 -> rank 0",
        "w [0:2, 0:6]: rank 0 -> rank 0",
        "w [2:4, 0:6]: rank 1 -> rank 0",
    ]
