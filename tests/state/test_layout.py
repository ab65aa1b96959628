"""Layouts: what they hold, what they refuse, and that they survive being saved."""

from __future__ import annotations

import copy
import io
import pickle
import random
import tracemalloc

import numpy as np
import pytest
import torch

from farstep.errors import LayoutError, StateError
from farstep.state import Box, Layout, Shards, Spread, plan
from state.spreads import cut, random_spread

F32 = torch.float32


def halves() -> Spread:
    return Spread.of((4, 6), F32, {0: [Box((0, 0), (2, 6))], 1: [Box((2, 0), (2, 6))]})


def test_boxes_by_rank_come_in_the_order_given():
    boxes = [Box((3,), (1,)), Box((0,), (2,))]
    spread = Spread.of((4,), F32, {1: boxes, 0: [Box((2,), (1,))]})
    assert spread.boxes(1) == boxes
    assert spread.boxes(0) == [Box((2,), (1,))]
    assert spread.boxes(7) == []


def test_a_box_outside_its_tensor():
    with pytest.raises(LayoutError, match=r"\[2:5, 0:6\] of rank 1 is not within .* \(4, 6\)"):
        Spread.of((4, 6), F32, {1: [Box((2, 0), (3, 6))]})
    with pytest.raises(ValueError, match=r"\[-1:1\] of rank 0"):
        Spread((4,), F32, np.array([0]), np.array([[-1]]), np.array([[2]]))


def test_a_box_of_other_dimensions():
    with pytest.raises(LayoutError, match=r"\[0:4\] of rank 2 has 1 dimensions, and the tensor 2"):
        Spread.of((4, 6), F32, {2: [Box((0,), (4,))]})
    with pytest.raises(LayoutError, match="offsets and sizes of shape"):
        Spread((4, 6), F32, np.array([0]), np.array([[0]]), np.array([[4]]))


def test_a_rank_below_zero():
    with pytest.raises(LayoutError, match="no rank is -1"):
        Spread.of((4,), F32, {-1: [Box((0,), (4,))]})


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (
            {0: [Box((0, 0), (3, 6))], 4: [Box((2, 0), (2, 6))]},
            r"\[0:3, 0:6\] of rank 0 and \[2:4, 0:6\] of rank 4",
        ),
        (
            {0: [Box((0, 0), (4, 6))], 1: [Box((0, 0), (2, 6))]},
            r"\[0:4, 0:6\] of rank 0 and \[0:2, 0:6\] of rank 1",
        ),
        (
            {3: [Box((0, 0), (4, 4)), Box((1, 3), (2, 2))]},
            r"\[0:4, 0:4\] of rank 3 and \[1:3, 3:5\] of rank 3",
        ),
    ],
)
def test_boxes_that_overlap_and_differ(boxes, message):
    layout = Layout({"fine": halves(), "w": Spread.of((4, 6), F32, boxes)})
    with pytest.raises(LayoutError, match=f"two boxes of 'w' overlap: {message}"):
        layout.check()


def test_replicas_and_empty_boxes_are_no_overlap():
    box = Box((0, 0), (4, 6))
    Layout({"w": Spread.of((4, 6), F32, {0: [box, Box((1, 1), (0, 3))], 1: [box], 2: [box]})}).check()


def test_any_spread_is_free_of_overlaps_and_one_more_box_is_found():
    for seed in range(200):
        rng = random.Random(seed)
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
        spread = random_spread(rng, shape, F32, 4)
        Layout({"a": halves(), "w": spread}).check()
        inner = rng.choice(cut(rng, Box.whole(shape), 8))
        boxes = {rank: spread.boxes(rank) for rank in range(4)}
        distinct = {box for each in boxes.values() for box in each}
        boxes[rng.randrange(4)].append(inner)
        clash = any(box != inner and box.intersect(inner) for box in distinct)
        layout = Layout({"a": halves(), "w": Spread.of(shape, F32, boxes)})
        if clash:
            with pytest.raises(LayoutError, match="'w' overlap"):
                layout.check()
        else:
            layout.check()


def test_bytes():
    layout = Layout(
        {"w": halves(), "b": Spread.whole((3,), torch.bfloat16, [1, 5]), "none": Spread.whole((0,), F32, [0])}
    )
    assert layout.nbytes == 4 * 24 + 2 * 3
    assert layout.bytes_per_rank() == {0: 48, 1: 48 + 6, 5: 6}
    assert layout["w"].bytes_on(1) == 48
    assert layout["w"].bytes_on(3) == 0
    assert layout["w"].nbytes == 96
    assert Layout({}).bytes_per_rank() == {}


def test_names():
    layout = Layout({"a": halves(), "b": Spread.whole((), F32, [0])})
    assert list(layout.renamed(lambda name: f"model.{name}")) == ["model.a", "model.b"]
    assert list(layout.only(["b"])) == ["b"]
    assert list(layout.merged({"c": halves()})) == ["a", "b", "c"]
    assert layout.boxes(1) == {"a": [Box((2, 0), (2, 6))], "b": []}
    with pytest.raises(LayoutError, match="two tensors would be called 'x'"):
        layout.renamed(lambda name: "x")
    with pytest.raises(LayoutError, match="both layouts have a tensor 'b'"):
        layout.merged({"b": halves()})
    with pytest.raises(KeyError):
        layout.only(["z"])


def test_equal_is_what_holds_the_same():
    parts = {0: [Box((0, 0), (2, 6))], 1: [Box((2, 0), (2, 6))]}
    assert halves() == Spread.of((4, 6), F32, dict(reversed(parts.items())))
    assert hash(halves()) == hash(Spread.of((4, 6), F32, parts))
    assert halves() != Spread.of((4, 6), torch.float64, parts)
    assert halves() != Spread.of((4, 6), F32, {1: parts[0], 0: parts[1]})
    assert halves() != Spread.whole((4, 6), F32, [0])
    assert halves() != "halves"
    assert Layout({"w": halves()}) == Layout({"w": halves()})
    assert Layout({"w": halves()}) != Layout({"v": halves()})


def test_they_read_well():
    layout = Layout({"w": halves()})
    assert repr(halves()) == "<float32[4, 6]: rank 0 [0:2, 0:6]; rank 1 [2:4, 0:6]>"
    assert str(layout) == "<Layout: 1 tensors, 96 bytes>\nw: " + repr(halves())
    assert repr(Spread.whole((2,), F32, range(9))) == "<float32[2]: 9 boxes on 9 ranks>"
    assert repr(Spread.of((2,), F32, {})) == "<float32[2]: on no rank>"
    assert str(Layout({f"t{i}": halves() for i in range(25)})).endswith("and 5 more")


def test_layouts_and_shards_are_saved_and_loaded():
    layout = Layout({"w": halves(), "s": Spread.whole((), torch.float8_e5m2, [0])})
    assert pickle.loads(pickle.dumps(layout)) == layout
    layout.check()
    assert copy.deepcopy(layout) == layout
    memory = torch.arange(1000.0)
    shards = Shards(halves(), [memory[12:24].view(2, 6)])
    file = io.BytesIO()
    torch.save({"w": shards}, file)
    assert len(file.getvalue()) < 4000, "a view is saved without the memory around it"
    file.seek(0)
    with torch.serialization.safe_globals([Shards, Spread]):
        (loaded,) = torch.load(file, weights_only=True).values()
    assert loaded.spread == halves()
    assert torch.equal(loaded.tensors[0], memory[12:24].view(2, 6))
    loaded.check("w", 1)


def test_shards_say_what_does_not_fit():
    spread = halves()
    fit = Shards.empty(spread, 1)
    fit.check("w", 1)
    assert (fit.shape, fit.dtype) == ((4, 6), F32)
    assert repr(fit).endswith("here: (2, 6))")
    for tensors, message in (
        ([], "rank 1 holds 1 boxes of 'w', and 0 tensors were given"),
        ([torch.zeros(6, 2)], r"'w' \[2:4, 0:6\] on rank 1 has the shape \(6, 2\), not \(2, 6\)"),
        ([torch.zeros(2, 6, dtype=torch.int32)], r"'w' \[2:4, 0:6\] on rank 1 has the dtype torch.int32"),
    ):
        with pytest.raises(StateError, match=message):
            Shards(spread, tensors).check("w", 1)


# -- numbers at the edge of what int64 holds


@pytest.mark.parametrize(
    ("shape", "ranks", "offsets", "sizes", "message"),
    [
        ((4,), [0], [[2**62]], [[2**62 + 2**61]], "is not within"),
        ((4,), [0], [[2**63 - 1]], [[2**63 - 1]], "is not within"),
        ((-4,), [0], [[0]], [[0]], r"no tensor has the shape \(-4,\)"),
        ((2**62,), [0], [[0]], [[1]], "more than 2\\*\\*63 - 1 bytes"),
        ((2**40, 2**40), [0], [[0, 0]], [[1, 1]], "more than 2\\*\\*63 - 1 bytes"),
        ((0, 2**63), [0], [[0, 0]], [[0, 1]], "more than 2\\*\\*63 - 1 bytes"),
        ((4,), [10**12], [[0]], [[4]], "no rank is 1000000000000: ranks are from 0 to"),
        ((4,), [2**64], [[0]], [[4]], "whole numbers below 2\\*\\*63"),
        ((4,), [0], [[0.5]], [[1.0]], "whole numbers below 2\\*\\*63, not float64"),
    ],
)
def test_numbers_that_cannot_be_are_refused(shape, ranks, offsets, sizes, message):
    with pytest.raises(LayoutError, match=message):
        Spread(shape, F32, np.array(ranks), np.array(offsets), np.array(sizes))


def test_numbers_that_are_too_large_for_a_box():
    with pytest.raises(LayoutError, match="below 2"):
        Spread.of((4,), F32, {0: [Box((2**64,), (1,))]})
    huge = Spread.whole((2**60,), F32, [0])
    with pytest.raises(LayoutError, match="elements together"):
        Layout({f"t{i}": huge for i in range(9)}).check()


def test_a_high_rank_costs_nothing():
    layout = Layout({"w": Spread.whole((4,), F32, [0, 2**31 - 1])})
    assert layout.bytes_per_rank() == {0: 16, 2**31 - 1: 16}


def test_sums_beyond_int64_are_right():
    shape = (2**59,)
    layout = Layout({f"t{i}": Spread.whole(shape, torch.float64, [1]) for i in range(3)})
    assert layout.bytes_per_rank() == {1: 3 * 2**62}
    assert layout["t0"].bytes_on(1) == 2**62
    there = Layout({f"t{i}": Spread.whole(shape, torch.float64, [0]) for i in range(3)})
    copies = plan(layout, there)
    assert copies.bytes_moved == 3 * 2**62
    assert copies.bytes_between() == {(1, 0): 3 * 2**62}


# -- boxes that no grid has


def nested(count, dims):
    """Each within the one before."""
    at = np.repeat(np.arange(count)[:, None], dims, 1)
    return Spread((2 * count + 2,) * dims, F32, np.arange(count) % 4, at, 2 * (count - at) + 2)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_one_overlap_of_very_many_is_found(dims):
    """50,000 boxes that all overlap have more than a billion pairs."""
    with pytest.raises(LayoutError, match=r"two boxes of 'w' overlap"):
        Layout({"a": halves(), "w": nested(50_000, dims)}).check()


def corners(count):
    """A square as one L within the other, each of two boxes."""
    across = [Box((k, k), (1, count - k)) for k in range(count)]
    return across + [Box((k + 1, k), (count - k - 1, 1)) for k in range(count - 1)]


def test_boxes_without_a_grid_and_one_too_many():
    shape, parts = (5000, 5000), corners(5000)
    boxes = {rank: parts[rank::3] for rank in range(3)}
    Layout({"w": Spread.of(shape, F32, boxes)}).check()
    boxes[1].append(Box((4990, 4000), (2, 2)))
    with pytest.raises(LayoutError, match=r"'w' overlap: .*\[4990:4992, 4000:4002\] of rank 1"):
        Layout({"w": Spread.of(shape, F32, boxes)}).check()


def test_many_boxes_of_many_dimensions_take_little_memory():
    """A tensor that is halved again and again, each time another box along another side. All of it is there, each element once."""
    rng, dims = random.Random(0), 30
    boxes = [Box.whole([2] * dims)]
    while len(boxes) < 2000:
        at = rng.randrange(len(boxes))
        side = rng.choice([d for d in range(dims) if boxes[at].sizes[d] == 2])
        sizes = tuple(1 if d == side else n for d, n in enumerate(boxes[at].sizes))
        offsets = boxes[at].offsets
        boxes.append(Box(tuple(o + (d == side) for d, o in enumerate(offsets)), sizes))
        boxes[at] = Box(offsets, sizes)
    layout = Layout({"w": Spread.of([2] * dims, torch.uint8, {0: boxes})})
    tracemalloc.start()
    try:
        layout.check()
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(LayoutError, match="overlap"):
        Layout(
            {"w": Spread.of([2] * dims, torch.uint8, {0: [*boxes, Box((1,) * dims, (1,) * dims)]})}
        ).check()
