"""A flat tensor in shards: what the layout says, against cutting the flat tensor itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep.errors import LayoutError
from farstep.state import Box
from farstep.state.flat import FlatLayout

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=4)


def laid_out(shapes, aligned_numel):
    """The tensors, numbered throughout, and the flat tensor they lie in, with -1 in the gaps."""
    flat, tensors, count = [], {}, 0
    for i, shape in enumerate(shapes):
        flat += [-1] * (-len(flat) % aligned_numel)
        numel = torch.Size(shape).numel()
        tensors[f"t{i}"] = torch.arange(count, count + numel).view(shape)
        flat += range(count, count + numel)
        count += numel
    return tensors, flat


@settings(deadline=None, max_examples=150)
@given(SHAPES, st.integers(1, 7), st.sampled_from([1, 4]))
def test_every_shard_has_the_elements_that_lie_in_it(shapes, shard_count, aligned_numel):
    tensors, flat = laid_out(shapes, aligned_numel)
    layout = FlatLayout.of(
        {name: t.shape for name, t in tensors.items()}, shard_count, aligned_numel=aligned_numel
    )
    assert layout.shard_numel * shard_count >= len(flat)
    flat += [-1] * (layout.shard_numel * shard_count - len(flat))
    for shard, tensor in enumerate(torch.tensor(flat, dtype=torch.int64).split(layout.shard_numel or 1)):
        for name, whole in tensors.items():
            boxes = layout.boxes(name, shard)
            views = layout.views(name, tensor, shard)
            assert len(boxes) <= max(2 * whole.dim() - 1, 1)
            assert [v.tolist() for v in views] == [whole[b.slices].tolist() for b in boxes]
            held = set(tensor.tolist()) & set(whole.reshape(-1).tolist())
            assert {n for v in views for n in v.reshape(-1).tolist()} == held


@settings(deadline=None, max_examples=50)
@given(SHAPES, st.integers(1, 5), st.integers(1, 3))
def test_its_spread_holds_each_element_once_for_each_copy(shapes, shard_count, copies):
    tensors, _ = laid_out(shapes, 1)
    layout = FlatLayout.of({name: t.shape for name, t in tensors.items()}, shard_count)
    holders = [[shard + shard_count * copy for copy in range(copies)] for shard in range(shard_count)]
    for name, whole in tensors.items():
        spread = layout.spread(name, torch.float32, holders)
        times = torch.zeros(whole.shape, dtype=torch.int64)
        for shard, ranks in enumerate(holders):
            for rank in ranks:
                assert spread.boxes(rank) == layout.boxes(name, shard)
                for box in spread.boxes(rank):
                    times[box.slices] += 1
        assert (times == copies).all()


def test_a_tensor_that_lies_in_another_order_than_its_dimensions():
    whole = torch.arange(2 * 3 * 4).view(2, 3, 4)
    in_memory = whole.permute(0, 2, 1).contiguous().view(-1)  # channels last
    layout = FlatLayout(("w",), ((2, 3, 4),), (0,), 8, 3, {"w": (0, 2, 1)})
    for shard, tensor in enumerate(in_memory.split(8)):
        for box, view in zip(layout.boxes("w", shard), layout.views("w", tensor, shard), strict=True):
            assert torch.equal(view, whole[box.slices])
            view.fill_(-1)
    assert (in_memory == -1).all()


def test_what_is_written_into_views_is_in_the_shard():
    layout = FlatLayout.of({"a": (2, 3), "b": (5,)}, 2)
    shard = torch.zeros(6)
    (view,) = layout.views("b", shard, 1)
    view += 1
    assert shard.tolist() == [1, 1, 1, 1, 1, 0]  # and the padding is left alone
    assert layout.boxes("b", 1) == [Box((0,), (5,))]


def test_mistakes_are_named():
    layout = FlatLayout.of({"a": (2, 3), "b": (5,)}, 2)
    with pytest.raises(LayoutError, match=r"'a'.*shards of 6 elements.*\(4,\).*shaped like"):
        layout.views("a", torch.zeros(4), 0)
    with pytest.raises(LayoutError, match=r"shard 0 has 6 elements of 'a'.*\(5,\)"):
        layout.piece_views("a", torch.zeros(5), 0)
    with pytest.raises(KeyError, match="no 'c' in this flat tensor; it has a, b"):
        layout.boxes("c", 0)
    with pytest.raises(ValueError, match=r"2 shards.*given for 1"):
        layout.spread("a", torch.float32, [[0]])
