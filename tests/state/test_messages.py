"""How copies are divided into messages, and that packed ones never share memory."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep.state import Box
from farstep.state.messages import Arena, Copies, messages, pieces, places


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
    sent = list(messages(columns(copies), limit))
    got = [0] * len(copies)
    for message in sent:
        assert message.nbytes <= limit
        rows = message.rows.tolist()
        if message.part is not None:
            (row,) = rows
            assert message.nbytes == message.payload_bytes == message.part.numel * copies[row][1]
            got[row] += message.nbytes
            continue
        nbytes = [n * itemsize for n, itemsize in (copies[row] for row in rows)]
        end = 0
        for row, at, n in zip(rows, places(nbytes), nbytes, strict=True):
            assert at % 16 == 0
            assert at >= end
            end = at + n
            got[row] += n
        assert end == message.nbytes
        assert message.payload_bytes == sum(nbytes)
    assert got == [n * itemsize for n, itemsize in copies]


def columns(copies):
    """Copies of one dimension, each of so many elements of so many bytes."""
    sizes = np.array([n for n, _ in copies], dtype=np.int64)
    itemsize = np.array([size for _, size in copies], dtype=np.int64)
    return Copies(np.arange(len(copies)), sizes * itemsize, sizes[:, None], itemsize)


def test_small_regions_go_together_and_large_ones_alone():
    sizes = [100] * 1000 + [200_000] + [100] * 1000
    sent = list(messages(columns([(n, 1) for n in sizes]), 1 << 20))
    assert sorted(len(message.rows) for message in sent) == [1, 2000]


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
