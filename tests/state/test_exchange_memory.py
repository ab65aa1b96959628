"""Which memory an exchange may write to, and how it is told that tensors share it."""

from __future__ import annotations

import itertools
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep.errors import LayoutError, StateError
from farstep.state import Box, Shards, Spread, respread
from farstep.state.memory import repeats, share
from state.spreads import F32, fresh


def test_memory_that_is_read_and_written():
    memory = torch.arange(24.0).reshape(6, 4)
    whole = Spread.whole((6, 4), F32, [0])
    turned = Spread.of((6, 4), F32, {0: [Box((3, 0), (3, 4)), Box((0, 0), (3, 4))]})
    with pytest.raises(StateError, match=r"'w' \[3:6, 0:4\] shares memory with the source 'w'"):
        respread({"w": Shards(whole, [memory])}, {"w": Shards(turned, [memory[:3], memory[3:]])})
    # onto itself is no copy at all
    before = memory.clone()
    parts = Spread.of((6, 4), F32, {0: [Box((0, 0), (3, 4)), Box((3, 0), (3, 4))]})
    respread({"w": Shards(whole, [memory])}, {"w": Shards(parts, [memory[:3], memory[3:]])})
    assert torch.equal(memory, before)


def fill(*targets, source=None):
    """Fill these, which are all that there is of as many tensors."""
    spreads = {f"t{i}": Spread.whole(t.shape, t.dtype, [0]) for i, t in enumerate(targets)}
    full = {name: fresh(spread.shape, spread.dtype) for name, spread in spreads.items()}
    respread(
        {
            name: Shards(spread, [full[name] if source is None else source])
            for name, spread in spreads.items()
        },
        {name: Shards(spreads[name], [t]) for name, t in zip(spreads, targets, strict=True)},
    )
    assert all(torch.equal(t, full[name]) for name, t in zip(spreads, targets, strict=True))


def test_targets_that_share_memory():
    memory = torch.zeros(6, 8)
    words = r"targets 't0' \[0:6, 0:4\] and 't1' \[0:6, 0:4\] share memory"
    for other in (memory[:, :4], memory[:, 3:7], memory.view(-1)[:24].view(6, 4)):
        with pytest.raises(StateError, match=words):
            fill(memory[:, :4], other)
    fill(memory[:, :4], memory[:, 4:])  # of one storage, and apart
    fill(memory[::2], memory[1::2], torch.zeros(0, 3), memory[:0])
    fill(*torch.zeros(4, 3).unbind(1))


def test_a_target_beside_its_source_in_one_storage():
    memory = torch.arange(12.0).view(3, 4)
    respread({"w": memory[:, :2]}, {"w": memory[:, 2:]})
    assert memory.tolist() == [[0, 1, 0, 1], [4, 5, 4, 5], [8, 9, 8, 9]]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (torch.zeros(1, 4).expand(3, 4), r"'t0' \[0:3, 0:4\] on rank 0 has elements that share memory"),
        (torch.zeros(8).unfold(0, 4, 2), "'t0' .* has elements that share memory"),
        (torch.zeros(3, 4, device="meta"), "'t0' .* is on the meta device"),
        (torch.zeros(3, 4).to_sparse(), "'t0' .* is sparse_coo"),
    ],
    ids=["expanded", "windows", "meta", "sparse"],
)
def test_targets_that_cannot_be_filled(target, words):
    with pytest.raises(LayoutError, match=words):
        fill(target)


def test_a_source_may_be_expanded_and_not_sparse():
    target = torch.empty(3, 4)
    respread({"w": torch.arange(4.0).expand(3, 4)}, {"w": target})
    assert target.tolist() == [[0, 1, 2, 3]] * 3
    for source in (torch.eye(4).to_sparse(), torch.empty(4, 4, device="meta")):
        with pytest.raises(LayoutError, match=r"'t0' \[0:4, 0:4\] on rank 0 is (sparse_coo|on the meta)"):
            fill(torch.zeros(4, 4), source=source)


def test_a_view_of_the_source_with_other_values_is_not_in_place():
    for source, view in (
        (torch.complex(torch.ones(3), torch.ones(3)), torch.Tensor.conj),
        (torch.ones(3), torch._neg_view),
    ):
        with pytest.raises(StateError, match=r"'t0' .* shares memory with the source 't0'"):
            fill(view(source), source=source)
        respread({"w": source}, {"w": source})  # and this one is


@st.composite
def views(draw):
    """Any view of one storage, of one of two dtypes."""
    dims = draw(st.integers(0, 3))
    shape = [draw(st.integers(0, 4)) for _ in range(dims)]
    strides = [draw(st.integers(0, 12)) for _ in range(dims)]
    memory = STORAGE if draw(st.booleans()) else STORAGE.view(torch.int16)
    return memory.as_strided(shape, strides, draw(st.integers(0, 100)))


STORAGE = torch.zeros(200)


def bytes_of(tensor):
    """The address of every byte, one by one."""
    return [
        tensor.data_ptr() + tensor.itemsize * sum(map(operator.mul, at, tensor.stride())) + byte
        for at in itertools.product(*map(range, tensor.shape))
        for byte in range(tensor.itemsize)
    ]


@settings(deadline=None, max_examples=400)
@given(views(), views())
def test_shared_memory_against_every_byte(one, other):
    mine, theirs = bytes_of(one), bytes_of(other)
    assert share(one, other) == bool(set(mine) & set(theirs))
    assert repeats(one) == (len(set(mine)) < len(mine))
