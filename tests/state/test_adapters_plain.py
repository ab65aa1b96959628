"""Tensors and models of a single process, without any process group."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from farstep.errors import LayoutError
from farstep.state import (
    Box,
    Layout,
    Shards,
    layout_of,
    like,
    named_shards,
    on_rank,
    plan,
    respread,
    shards_of,
)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool])
def test_a_plain_tensor_is_one_box(shape, dtype):
    value = torch.zeros(shape, dtype=dtype)
    found = shards_of(value)
    assert (found.shape, found.dtype) == (shape, dtype)
    assert found.spread.boxes(0) == [Box.whole(shape)]
    assert found.tensors[0].data_ptr() == value.data_ptr()
    assert shards_of(found) is found


def test_many_tensors_are_a_layout_and_the_tensors_for_it():
    layout, tensors = layout_of({"a": torch.arange(3), "b": shards_of(torch.ones(2))})
    assert isinstance(layout, Layout)
    assert list(layout) == list(tensors) == ["a", "b"]
    assert len(plan(layout, layout)) == 2
    assert tensors["a"][0].tolist() == [0, 1, 2]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 3)
        self.again = nn.ModuleList([self.module, nn.BatchNorm1d(3)])
        self.other = nn.Linear(3, 2, bias=False)
        self.other.weight = nn.Parameter(self.module.weight.detach().T.contiguous())


@pytest.mark.parametrize("wrapper", [checkpoint_wrapper, torch.compile, lambda model: model])
def test_a_model_has_the_names_it_has_without_its_wrapper(wrapper):
    bare = Twice()
    names = [name for name, _ in bare.named_parameters()]
    with_all = list(bare.state_dict())
    model = Twice()
    model.other = wrapper(model.other)
    model = wrapper(model)
    assert list(named_shards(model)) == names
    assert sorted(named_shards(model, buffers=True, remove_duplicate=False)) == sorted(with_all)


def test_what_is_copied_arrives_in_the_parameters():
    here, there = Twice(), Twice()
    respread(named_shards(here, buffers=True), named_shards(there, buffers=True))
    for name, tensor in here.state_dict().items():
        assert torch.equal(there.state_dict()[name], tensor)


def test_like_keeps_the_spread_of_shards():
    value = shards_of(torch.zeros(2, 3))
    made = like(value, [torch.ones(2, 3, dtype=torch.bfloat16)])
    assert isinstance(made, Shards)
    assert made.dtype == torch.bfloat16
    assert made.spread.boxes(0) == value.spread.boxes(0)
    assert like(torch.zeros(2), [torch.ones(2)]).tolist() == [1, 1]
    with pytest.raises(LayoutError, match=r"dtypes.*cannot be one tensor of torch\.float32"):
        like(value, [torch.ones(2, 3, dtype=torch.bfloat16)], dtype=torch.float32)
    with pytest.raises(LayoutError, match=r"\(3, 2\).*in place of.*\(2, 3\)"):
        like(value, [torch.ones(3, 2)])


def test_what_has_no_boxes_is_refused_by_name():
    with pytest.raises(LayoutError, match=r"'s' is a sparse_coo tensor.*to_dense"):
        shards_of(torch.eye(3).to_sparse(), name="s")
    with pytest.raises(LayoutError, match=r"'n' is a builtins\.list, which is no tensor"):
        shards_of([1, 2], name="n")
    with pytest.raises(LayoutError, match=r"'m' is on the meta device"):
        shards_of(torch.zeros(2, device="meta"), name="m")
    with pytest.raises(LayoutError, match=r"'0.weight' has no shape yet: run the model once"):
        named_shards(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(LayoutError, match=r"'w' was to be on rank 1 of a group that has 1"):
        on_rank(torch.zeros(2), 1, name="w")
    wrong = Shards(shards_of(torch.zeros(2)).spread, [])
    with pytest.raises(LayoutError, match=r"1 boxes of 'w', and 0 tensors"):
        shards_of(wrong, name="w")
