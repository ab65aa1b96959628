"""Where a DTensor's parts lie, for all ranks of meshes far larger than the number of processes: a group that only pretends to have them."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from farstep.errors import LayoutError
from farstep.state import layout_of, like, local_tensors, shards_of

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64]


@pytest.fixture(scope="module", autouse=True)
def pretended_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    yield
    mesh_of.cache_clear()
    dist.destroy_process_group()


@functools.cache
def mesh_of(shape, shift=0):
    """A mesh whose ranks are turned by `shift`, so that this process, rank 0, is anywhere in it."""
    ranks = torch.arange(math.prod(shape)).roll(shift).view(shape)
    return DeviceMesh("cpu", ranks)


def parts(whole, mesh_shape, placements, order):
    """What each coordinate has of a tensor: cut by torch's own placements, one mesh dimension after the other, in this order."""
    held = {(): whole}
    for coordinate in (
        torch.cartesian_prod(*[torch.arange(n) for n in mesh_shape]).reshape(-1, len(mesh_shape)).tolist()
    ):
        part = whole
        for mesh_dim in order:
            if not isinstance(placements[mesh_dim], Replicate):
                pieces, _ = placements[mesh_dim]._split_tensor(part, mesh_shape[mesh_dim], with_padding=False)
                part = pieces[coordinate[mesh_dim]]
        held[tuple(coordinate)] = part
    del held[()]
    return held


def check(shape, mesh_shape, shift, placements, held, dtype=torch.int64):
    """The layout of a DTensor with these placements against what every coordinate holds."""
    whole = torch.arange(math.prod(shape)).view(shape)
    mesh = mesh_of(mesh_shape, shift)
    ranks = mesh.mesh.reshape(-1).tolist()
    mine = list(held.values())[ranks.index(0)]
    stride = whole.stride()
    value = DTensor.from_local(
        mine.to(dtype).contiguous(), mesh, placements, run_check=False, shape=whole.shape, stride=stride
    )
    found = shards_of(value)
    assert found.shape == shape
    assert found.dtype == dtype
    for rank, part in zip(ranks, held.values(), strict=True):
        boxes = found.spread.boxes(rank)
        assert all(box.numel for box in boxes)
        elements = [n for box in boxes for n in whole[box.slices].reshape(-1).tolist()]
        assert sorted(elements) == sorted(part.reshape(-1).tolist())
    assert not set(found.spread.ranks.tolist()) - set(ranks)
    boxes = found.spread.boxes(0)
    assert len(boxes) == len(found.tensors)
    for box, tensor in zip(boxes, found.tensors, strict=True):
        assert torch.equal(tensor, whole[box.slices].to(dtype))
        tensor.zero_()
    assert not value.to_local().to(torch.complex64).any()  # the views are of its memory, and reach all of it
    return found


MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def sharded(draw):
    mesh_shape = draw(MESHES)
    shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
    choices = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    placements = [draw(st.sampled_from(choices)) for _ in mesh_shape]
    return shape, mesh_shape, draw(st.integers(0, math.prod(mesh_shape) - 1)), placements


@settings(deadline=None, max_examples=150)
@given(sharded(), st.sampled_from(DTYPES))
def test_shards_and_replicas_on_any_mesh(case, dtype):
    shape, mesh_shape, shift, placements = case
    whole = torch.arange(math.prod(shape)).view(shape)
    held = parts(whole, mesh_shape, placements, range(len(mesh_shape)))
    found = check(shape, mesh_shape, shift, placements, held, dtype)
    for rank, coordinate in zip(mesh_of(mesh_shape, shift).mesh.reshape(-1).tolist(), held, strict=True):
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, mesh_shape, list(coordinate), placements
        )
        boxes = found.spread.boxes(rank)
        assert [(b.offsets, b.sizes) for b in boxes] == ([(offsets, sizes)] if math.prod(sizes) else [])


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_mesh_dimensions_that_cut_in_another_order_than_they_stand(data):
    """What FSDP2 makes of tensor parallel parameters, also where the sizes do not divide."""
    mesh_shape = data.draw(st.lists(st.integers(2, 4), min_size=2, max_size=3).map(tuple))
    size = data.draw(st.integers(0, 40))
    order = data.draw(st.permutations(range(len(mesh_shape))))
    placements = []
    for mesh_dim in range(len(mesh_shape)):
        earlier = order[: order.index(mesh_dim)]
        factor = math.prod(mesh_shape[d] for d in earlier if d > mesh_dim)
        placements.append(_StridedShard(0, split_factor=factor) if factor > 1 else Shard(0))
    whole = torch.arange(size * 2).view(size, 2)
    held = parts(whole, mesh_shape, [Shard(0)] * len(mesh_shape), order)
    check((size, 2), mesh_shape, data.draw(st.integers(0, 3)), placements, held)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 4), st.integers(0, 30), st.integers(2, 7), st.integers(0, 1), st.data())
def test_a_strided_shard_alone_is_several_boxes(ranks, size, factor, dim, data):
    shape = (3, size) if dim else (size, 3)
    placements = [
        _StridedShard(dim, split_factor=factor),
        data.draw(st.sampled_from([Replicate(), Shard(1 - dim)])),
    ]
    held = parts(torch.arange(3 * size).view(shape), (ranks, 2), placements, (0, 1))
    check(shape, (ranks, 2), data.draw(st.integers(0, 2 * ranks - 1)), placements, held)


def test_several_boxes_are_views_of_one_local_tensor():
    mesh = mesh_of((2,))
    whole = torch.arange(24).view(8, 3)
    local = torch.cat([whole[0:2], whole[4:6]])  # of two halves, each cut in two
    placements = [_StridedShard(0, split_factor=2)]
    value = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    found = shards_of(value)
    assert [str(box) for box in found.spread.boxes(0)] == ["[0:2, 0:3]", "[4:6, 0:3]"]
    assert [str(box) for box in found.spread.boxes(1)] == ["[2:4, 0:3]", "[6:8, 0:3]"]
    assert [t.data_ptr() for t in found.tensors] == [local.data_ptr(), local[2:].data_ptr()]


def test_a_thousand_parameters_over_64_ranks_share_what_is_computed():
    mesh = mesh_of((8, 8))
    spec = {"run_check": False, "shape": torch.Size((4096, 64)), "stride": (64, 1)}
    value = DTensor.from_local(
        torch.zeros(64, 64), mesh, [_StridedShard(0, split_factor=8), Shard(0)], **spec
    )
    layout, tensors = layout_of({f"p{i}": value for i in range(1000)})
    assert len(layout["p999"].ranks) == 64
    assert layout["p0"].offsets is layout["p999"].offsets
    assert tensors["p7"][0].shape == (64, 64)


def test_like_has_the_spread_of_another_and_its_own_data():
    mesh = mesh_of((2, 4), shift=3)
    placements = [_StridedShard(0, split_factor=4), Shard(0)]
    for shape in [(9, 2), (0, 2)]:
        held = parts(torch.arange(math.prod(shape)).view(shape), (2, 4), [Shard(0)] * 2, (1, 0))
        local = list(held.values())[mesh.mesh.reshape(-1).tolist().index(0)].bfloat16().contiguous()
        value = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(2, 1)
        )
        state = local.float() + 1
        made = like(value, [state])
        assert isinstance(made, DTensor)
        assert (made.shape, made.placements, made.dtype) == (value.shape, value.placements, torch.float32)
        assert shards_of(made).spread.offsets.tolist() == shards_of(value).spread.offsets.tolist()
        made.to_local().fill_(7)
        assert (state == 7).all()  # its memory is what was given
    scalar = DTensor.from_local(torch.tensor(1.0), mesh, [Replicate()] * 2, run_check=False)
    assert like(scalar, [torch.tensor(2.0)]).shape == ()
    with pytest.raises(LayoutError, match=r"\[\(3,\)\].*in place of \[\(\)\]"):
        like(scalar, [torch.zeros(3)])


def test_ranks_are_those_within_the_group():
    group = dist.new_group([0, 5, 9, 11])
    mesh = DeviceMesh("cpu", [11, 0])
    value = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False)
    assert shards_of(value).spread.ranks.tolist() == [11, 0]
    assert shards_of(value, group).spread.ranks.tolist() == [3, 0]
    outside = DTensor.from_local(torch.zeros(2), mesh_of((4,)), [Shard(0)], run_check=False)
    with pytest.raises(
        LayoutError, match=r"'w' is also held by rank 1, 2, 3 of its device mesh.*give a group with all ranks"
    ):
        shards_of(outside, group, name="w")
    elsewhere = dist.new_group([5, 9])
    with pytest.raises(LayoutError, match=r"rank 0.*not in the group"):
        shards_of(torch.zeros(2), elsewhere)


def test_a_slice_of_a_mesh_has_siblings_that_hold_the_same():
    """As FSDP2 keeps what is not tensor parallel in a model that is: rank 1 has it on ranks 1 and 3, and both must say the same."""
    mesh = DeviceMesh("cpu", torch.arange(12).view(2, 3, 2), mesh_dim_names=("pp", "dp", "tp"))
    value = DTensor.from_local(torch.zeros(2), mesh["dp"], [Shard(0)], run_check=False)
    spread = shards_of(value).spread
    for rank in range(12):
        assert [str(box) for box in spread.boxes(rank)] == [f"[{rank // 2 % 3 * 2}:{rank // 2 % 3 * 2 + 2}]"]
    stage = dist.new_group([0, 1, 2, 3, 4, 5])  # the others of its pipeline are not asked
    assert sorted(shards_of(value, stage).spread.ranks.tolist()) == [0, 1, 2, 3, 4, 5]
    alone = dist.new_group([0, 2, 4])
    assert shards_of(value, alone).spread.ranks.tolist() == [0, 1, 2]
    both = DTensor.from_local(torch.zeros(2), mesh["dp", "tp"], [Replicate(), Shard(0)], run_check=False)
    for rank in range(12):
        assert [str(box) for box in shards_of(both).spread.boxes(rank)] == [
            f"[{rank % 2 * 2}:{rank % 2 * 2 + 2}]"
        ]


def test_what_is_no_part_of_a_tensor_is_refused_by_name():
    mesh = mesh_of((4,))
    with pytest.raises(LayoutError, match=r"'grad' is .*over mesh dimension 0.*redistribute"):
        shards_of(DTensor.from_local(torch.zeros(3), mesh, [Partial()], run_check=False), name="grad")
    odd = DTensor.from_local(
        torch.zeros(5, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 2)), stride=(2, 1)
    )
    with pytest.raises(
        LayoutError, match=r"local tensor of 'w' has the shape \(5, 2\).*\(2, 2\).*from_local"
    ):
        shards_of(odd, name="w")


def test_a_parameter_is_taken_without_its_graph():
    value = torch.nn.Parameter(
        DTensor.from_local(torch.zeros(2, 3), mesh_of((4,)), [Shard(0)], run_check=False)
    )
    assert value.requires_grad
    assert not any(t.requires_grad for t in [*shards_of(value).tensors, *local_tensors(value)])
