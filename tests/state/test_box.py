"""Boxes, against a mask of every element."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep.state import Box, flat_boxes, missing


@st.composite
def boxes(draw, shape):
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)))


@st.composite
def shapes_and_boxes(draw, count):
    shape = draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
    return shape, [draw(boxes(shape)) for _ in range(count)]


def mask(shape, *boxes):
    found = np.zeros(shape, dtype=int)
    for box in boxes:
        found[box.slices] += 1
    return found


@settings(deadline=None)
@given(shapes_and_boxes(2))
def test_two_boxes_against_masks(drawn):
    shape, (a, b) = drawn
    both = mask(shape, a) * mask(shape, b)
    common = a.intersect(b)
    assert (common is None) == (not both.any())
    if common is not None:
        assert np.array_equal(mask(shape, common), both)
        assert np.array_equal(mask(a.sizes, common.within(a)), both[a.slices])
    assert a.numel == mask(shape, a).sum()
    if b.numel:
        assert a.contains(b) == (mask(shape, a)[b.slices].all())
    rest = a.minus(b)
    assert len(rest) <= 2 * len(shape) + (common is None)
    assert np.array_equal(mask(shape, *rest), mask(shape, a) * (1 - mask(shape, b)))  # none twice


@settings(deadline=None)
@given(shapes_and_boxes(5))
def test_what_is_missing_against_masks(drawn):
    shape, (box, *others) = drawn
    wanted = mask(shape, box) * (mask(shape, *others) == 0)
    assert np.array_equal(mask(shape, *missing(box, others)), wanted)


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 5), max_size=4).map(tuple))
def test_a_flat_range_is_at_most_2d_minus_1_boxes_in_its_order(data, shape):
    numel = int(np.prod(shape))
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    found = flat_boxes(shape, start, stop)
    elements = np.arange(numel).reshape(shape)
    flat = [n for box in found for n in elements[box.slices].reshape(-1).tolist()]
    assert flat == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_flat_range_of_nothing():
    assert flat_boxes((0, 4), 0, 0) == []
    assert flat_boxes((), 0, 1) == [Box((), ())]
    with pytest.raises(ValueError, match="no elements from 3 to 9"):
        flat_boxes((2, 4), 3, 9)


def test_what_is_not_a_box():
    with pytest.raises(ValueError, match="one size for each offset"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="negative"):
        Box((0, -1), (1, 2))
    with pytest.raises(ValueError, match=r"\[0:3\] is not within \[1:4\]"):
        Box((0,), (3,)).within(Box((1,), (3,)))


def test_a_box_reads_well_and_pickles():
    box = Box((1, 0), (2, 5))
    assert str(box) == "[1:3, 0:5]"
    assert pickle.loads(pickle.dumps(box)) == box
    assert {box: 1}[Box((1, 0), (2, 5))] == 1
