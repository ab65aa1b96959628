"""Flatten and unflatten: inverses of each other, and what torch's own flat parameters hold."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from farstep.errors import LayoutError
from farstep.state import FlatLayout, flatten, flatten_shard, flatten_state, unflatten, unflatten_state
from farstep.state.adapters.fsdp1 import flat_parameters

SHAPE = st.lists(st.integers(0, 5), max_size=4).map(tuple)
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64]


@st.composite
def layouts(draw):
    shapes = draw(st.lists(SHAPE, min_size=1, max_size=5))
    names = [f"t{i}" for i in range(len(shapes))]
    layout = FlatLayout.of(
        dict(zip(names, shapes, strict=True)),
        draw(st.integers(1, 6)),
        aligned_numel=draw(st.sampled_from([1, 4])),
        aliases={f"{name}.tied": name for name in names if draw(st.booleans())},
        frozen=[name for name in names if draw(st.integers(0, 3)) == 0],
    )
    orders = {name: tuple(draw(st.permutations(range(len(layout.shape(name)))))) for name in names}
    return FlatLayout(
        layout.names,
        layout.shapes,
        layout.starts,
        layout.shard_numel,
        layout.shard_count,
        orders,
        layout.aliases,
        layout.frozen,
    )


def numbered(layout, dtype=torch.float32, first=1):
    found = {}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        found[name] = torch.arange(first, first + torch.Size(shape).numel()).view(shape).to(dtype)
        first += found[name].numel()
    return found


@settings(deadline=None, max_examples=150)
@given(layouts(), st.sampled_from(DTYPES), st.data())
def test_unflatten_is_the_inverse_of_flatten(layout, dtype, data):
    tensors = numbered(layout, dtype)
    other_names = {name: alias for alias, name in layout.aliases.items() if data.draw(st.booleans())}
    shards = flatten(layout, {other_names.get(name, name): t for name, t in tensors.items()})
    assert [tuple(shard.shape) for shard in shards] == [(layout.shard_numel,)] * layout.shard_count
    for i, shard in enumerate(shards):
        assert torch.equal(flatten_shard(layout, tensors, i), shard)
    found = unflatten(layout, shards, aliases=True)
    assert set(found) == {*layout.names, *layout.aliases}
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == dtype
    for alias, name in layout.aliases.items():
        assert found[alias] is found[name]
    # The other way round, and padding is zero and where the layout says.
    again = flatten(layout, found)
    assert all(torch.equal(a, b) for a, b in zip(again, shards, strict=True))
    whole = torch.cat(shards)
    for start, numel in layout.padding:
        assert not whole[start : start + numel].any()
    assert sum(numel for _, numel in layout.padding) + sum(layout.numels) == whole.numel()


@settings(deadline=None, max_examples=150)
@given(layouts(), st.sampled_from([3, 2.5, torch.tensor(3.0)]))
def test_the_same_for_the_state_of_an_optimizer(layout, step):
    parameters = numbered(layout)
    trained = [name for name in layout.names if name not in layout.frozen]
    # Of scalars alone nobody can tell a step from a mean; torch flattens none.
    assume(not trained or any(layout.shape(name) for name in trained))
    states = {
        name: {"step": step, "exp_avg": parameters[name] * 2, "max": parameters[name].double() + 1}
        for name in trained
    }
    flat = flatten_state(layout, states)
    assert len(flat) == layout.shard_count
    found = unflatten_state(layout, flat)
    assert set(found) == set(states)
    for name, state in states.items():
        assert list(found[name]) == list(state)
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found[name][key]), torch.as_tensor(value))
            assert type(found[name][key]) is type(value)
    again = flatten_state(layout, found)
    for a, b in zip(again, flat, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)
    if states:
        assert all(tuple(state["exp_avg"].shape) == (layout.shard_numel,) for state in flat)


def build(shapes, tied, frozen):
    model = nn.Module()
    torch.manual_seed(1)
    for i, shape in enumerate(shapes):
        parameter = nn.Parameter(torch.randn(shape), requires_grad=i not in frozen)
        model.register_parameter(f"p{i}", parameter)
    if tied:
        model.inner = nn.Module()
        model.inner.other = model.p0
    return model


def as_torch_lays_it_out(shapes, tied, frozen, use_orig_params):
    model = build(shapes, tied, frozen)
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    whole = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    (flat,) = flat_parameters(whole)
    layout = flat.layout
    shards = flatten(layout, tensors)
    # torch fills its padding with whatever it likes.
    real = flatten(layout, {name: torch.ones_like(t) for name, t in tensors.items()})[flat.shard] == 1
    assert torch.equal(shards[flat.shard][real], flat.local_shard[real])
    found = unflatten(layout, shards)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert layout.aliases == ({"inner.other": "p0"} if tied else {})
    assert layout.frozen == {f"p{i}" for i in frozen}


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_shards_are_those_of_torchs_flat_parameter(three, shapes, tied, data):
    use_orig_params = data.draw(st.booleans())
    all_of_them = list(range(len(shapes)))
    # Without use_orig_params torch wants all parameters of a flat one frozen or none.
    frozen = (
        data.draw(st.lists(st.sampled_from(all_of_them), unique=True))
        if use_orig_params
        else data.draw(st.sampled_from([[], all_of_them]))
    )
    three.run(as_torch_lays_it_out, shapes, tied, frozen, use_orig_params)


LAYOUT = FlatLayout.of({"a": (2, 3), "b": (5,)}, 2, aliases={"c": "a"}, frozen=["b"])


def test_what_is_missing_is_not_made_up():
    a, b = torch.ones(2, 3), torch.ones(5)
    with pytest.raises(LayoutError, match=r"'b' of this flat tensor was not given"):
        flatten(LAYOUT, {"a": a})
    assert flatten_shard(LAYOUT, {"a": a}, 0).tolist() == [1] * 6
    with pytest.raises(LayoutError, match=r"'b' of this flat tensor was not given"):
        flatten_shard(LAYOUT, {"a": a}, 1)
    with pytest.raises(LayoutError, match=r"no 'd' in this flat tensor; it has a, b"):
        flatten(LAYOUT, {"a": a, "b": b, "d": b})
    with pytest.raises(LayoutError, match=r"2 shards, and 1 were given"):
        unflatten(LAYOUT, [torch.zeros(6)])
    with pytest.raises(LayoutError, match=r"2 shards, and none is number 2"):
        flatten_shard(LAYOUT, {"a": a}, 2)


def test_what_does_not_fit_is_named():
    a, b = torch.ones(2, 3), torch.ones(5)
    with pytest.raises(LayoutError, match=r"'a' has the shape \(2, 3\).*\(3, 2\) was given"):
        flatten(LAYOUT, {"a": a.T, "b": b})
    with pytest.raises(LayoutError, match=r"'a' is torch.float32 and 'b' torch.float64"):
        flatten(LAYOUT, {"a": a, "b": b.double()})
    with pytest.raises(LayoutError, match=r"'a' and 'c' are names of one tensor.*not the same"):
        flatten(LAYOUT, {"a": a, "c": a + 1, "b": b})
    assert torch.equal(flatten(LAYOUT, {"a": a, "c": a.clone(), "b": b})[0], torch.ones(6))
    with pytest.raises(LayoutError, match=r"aliases has 'x', which is no tensor of this layout"):
        FlatLayout.of({"a": (2,)}, 1, aliases={"y": "x"})


def test_state_that_cannot_be_one_is_refused():
    layout = FlatLayout.of({"a": (2, 3), "b": (5,)}, 2)
    a, b = torch.ones(2, 3), torch.ones(5)
    with pytest.raises(
        LayoutError, match=r"'step' of 'a' is 3.0 and of 'b' 4.0: a flat parameter has it once"
    ):
        flatten_state(layout, {"a": {"step": torch.tensor(3.0)}, "b": {"step": torch.tensor(4.0)}})
    with pytest.raises(LayoutError, match=r"'b' has no state 'm', and 'a'"):
        flatten_state(layout, {"a": {"m": a}})
    with pytest.raises(LayoutError, match=r"'b' has the state 'v', and 'a'"):
        flatten_state(layout, {"a": {"m": a}, "b": {"m": b, "v": b}})
    with pytest.raises(LayoutError, match=r"'m' of 'b' is of shape \(3,\).*\(5,\)"):
        flatten_state(layout, {"a": {"m": a}, "b": {"m": torch.ones(3)}})
    with pytest.raises(LayoutError, match=r"state 'm': 'a' is torch.float32 and 'b' torch.int8"):
        flatten_state(layout, {"a": {"m": a}, "b": {"m": b.to(torch.int8)}})
    with pytest.raises(LayoutError, match=r"'m' is missing on shard 1"):
        unflatten_state(layout, [{"m": torch.ones(6)}, {}])
    with pytest.raises(LayoutError, match=r"'step' of 'shard 0' is 1 and of 'shard 1' 2"):
        unflatten_state(layout, [{"step": 1}, {"step": 2}])


def test_frozen_tensors_have_no_state_and_zeros_in_its_place():
    flat = flatten_state(LAYOUT, {"c": {"m": torch.ones(2, 3), "step": 1}})
    assert [state["m"].tolist() for state in flat] == [[1] * 6, [0] * 6]
    found = unflatten_state(LAYOUT, flat)
    assert list(found) == ["a"]
    assert torch.equal(found["a"]["m"], torch.ones(2, 3))
    assert found["a"]["step"] == 1
