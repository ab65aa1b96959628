"""How copies are divided into messages, and that packed ones never share memory."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep.state import Box
from farstep.state.messages import Arena, messages, pieces


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), max_size=4).map(tuple), st.integers(1, 200), st.sampled_from([1, 2, 8]))
def test_pieces_are_the_box_once_each_within_the_limit(sizes, limit, itemsize):
    box = Box((2,) * len(sizes), sizes)
    found = np.zeros([n + 2 for n in sizes], dtype=int)
    parts = list(pieces(box, itemsize, max(limit, itemsize)))
    for part in parts:
        assert part.numel * itemsize <= max(limit, itemsize)
        found[part.slices] += 1
    assert found.sum() == math.prod(sizes)
    assert (found[box.slices] == 1).all()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300_000), st.sampled_from([1, 4, 16]))), st.integers(1 << 14, 1 << 18)
)
def test_messages_hold_every_byte_once(copies, limit):
    sent = list(messages((("t", i, Box((0,), (n,)), size) for i, (n, size) in enumerate(copies)), limit))
    total = [0] * len(copies)
    for message in sent:
        assert message.nbytes <= limit
        end = 0
        for piece in message.pieces:
            assert piece.at % 16 == 0
            assert piece.at >= end
            end = piece.at + piece.box.numel * copies[piece.number][1]
            total[piece.number] += piece.box.numel
        assert end == message.nbytes
    assert total == [n for n, _ in copies]


def test_small_regions_go_together_and_large_ones_alone():
    sizes = [100] * 1000 + [200_000] + [100] * 1000
    sent = list(messages((("t", i, Box((0,), (n,)), 1) for i, n in enumerate(sizes)), 1 << 20))
    assert sorted(len(message.pieces) for message in sent) == [1, 2000]


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(1, 250)), max_size=60))
def test_memory_of_packed_messages_is_not_shared(steps):
    """None gives the oldest back; a number takes so many bytes. A quarter of it is always free for two."""
    arena, taken = Arena(1000, torch.device("cpu")), deque()
    for step in steps:
        if step is None:
            if taken:
                taken.popleft()
                arena.give_back()
            continue
        part = arena.take(step)
        if part is None:
            assert len(taken) >= 2
            continue
        assert part.numel() == step
        begin = part.storage_offset()
        assert all(begin + step <= other or begin >= end for other, end in taken)
        taken.append((begin, begin + step))
