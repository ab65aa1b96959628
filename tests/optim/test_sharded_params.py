"""ShardedOptimizer on parameters that are spread already: DTensors, ShardedTensors, and plain tensors beside them."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from farstep.errors import OptimError
from farstep.optim import ShardedOptimizer, named_params_with_sharded_tensor
from farstep.state import Shards

# Not fused: where a tensor is cut is seen in the last bit of a few elements, also without farstep.
CLASSES = {
    "Adadelta": {"lr": 0.5, "foreach": False},
    "Adagrad": {"lr": 0.1, "foreach": False},
    "Adam": {"lr": 0.01, "amsgrad": True, "foreach": False},
    "AdamW": {"lr": 0.01, "foreach": False},
    "Adamax": {"lr": 0.01, "foreach": False},
    "ASGD": {"lr": 0.01, "t0": 5, "foreach": False},
    "NAdam": {"lr": 0.01, "foreach": False},
    "RAdam": {"lr": 0.01, "foreach": False},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "foreach": False},
    "Rprop": {"lr": 0.01, "foreach": False},
    "SGD": {"lr": 0.01, "momentum": 0.9, "foreach": False},
}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 37), nn.Tanh(), nn.Linear(37, 5, bias=False), nn.LayerNorm(5))


def spread_net(mesh, placements):
    """A model and a twin whose parameters are DTensors."""
    from torch.distributed.tensor import distribute_tensor

    plain = net()
    named = {
        name: nn.Parameter(distribute_tensor(p.detach().clone(), mesh, placements(name, p)))
        for name, p in plain.named_parameters()
    }
    return plain, named


def give_all(plain, named, step):
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, p in plain.named_parameters():
        generator = torch.Generator().manual_seed(step * 100 + sum(map(ord, name)))
        p.grad = torch.randn(p.shape, generator=generator)
        other = named[name]
        other.grad = (
            distribute_tensor(p.grad.clone(), other.device_mesh, other.placements)
            if isinstance(other, DTensor)
            else p.grad.clone()
        )


def full(value):
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_equal(plain, named):
    for name, p in plain.named_parameters():
        assert torch.equal(full(named[name].detach()), p), name


def shard_rows(name, p):
    from torch.distributed.tensor import Shard

    return [Shard(0)]


def dtensors(kind):
    from torch.distributed.device_mesh import init_device_mesh

    plain, named = spread_net(init_device_mesh("cpu", (dist.get_world_size(),)), shard_rows)
    options = CLASSES[kind]
    sharded = ShardedOptimizer(named, getattr(torch.optim, kind), **options)
    ordinary = getattr(torch.optim, kind)(plain.parameters(), **options)
    for step in range(20):
        give_all(plain, named, step)
        sharded.step()
        ordinary.step()
    assert_equal(plain, named)


@pytest.mark.parametrize("kind", CLASSES)
def test_dtensors_step_as_in_one_process(on_ranks, kind):
    on_ranks(3, dtensors, kind)


def meshes():
    """Two dimensions: sharded and replicated, both sharded, and plain tensors beside them. And the norm counts all once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2))

    def placements(name, p):
        if p.dim() == 2:
            return [Shard(0), Shard(1)] if name.startswith("0") else [Replicate(), Shard(0)]
        return [Replicate(), Replicate()] if name.startswith("3") else [Shard(0), Replicate()]

    plain, named = spread_net(mesh, placements)
    named["3.bias"] = nn.Parameter(dict(plain.named_parameters())["3.bias"].detach().clone())
    sharded = ShardedOptimizer(named, torch.optim.AdamW, lr=0.01)
    ordinary = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(3):
        give_all(plain, named, step)
        for norm_type in (2.0, 1.0, math.inf):
            norm = sharded.clip_grad_norm_(1e9, norm_type)
            assert torch.isclose(norm, clip_grad_norm_(plain.parameters(), 1e9, norm_type), rtol=1e-5), (
                norm_type
            )
        sharded.clip_grad_norm_(0.5)
        clip_grad_norm_(plain.parameters(), 0.5)
        for name, p in plain.named_parameters():
            assert torch.allclose(full(named[name].grad), p.grad, rtol=1e-5)
        sharded.step()
        ordinary.step()
    for name, p in plain.named_parameters():
        assert torch.allclose(full(named[name].detach()), p, rtol=1e-5, atol=1e-6), name
    found = sharded.state_dict(full=True)
    for i, name in enumerate(named):
        expected = ordinary.state_dict()["state"][i]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(found["state"][name][key], expected[key], rtol=1e-4, atol=1e-7), (name, key)


def test_two_dimensional_meshes(on_ranks):
    on_ranks(4, meshes)


def fsdp2():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    models = [net(), net()]
    for model in models:
        fully_shard(model[0])
        fully_shard(model)
    alone = net()
    sharded = ShardedOptimizer(dict(models[0].named_parameters()), torch.optim.AdamW, lr=0.01)
    torchs = torch.optim.AdamW(models[1].parameters(), lr=0.01)
    for step in range(4):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(dist.get_world_size())[dist.get_rank()]
        for model, optimizer in zip(models, (sharded, torchs), strict=True):
            optimizer.zero_grad()
            model(mine).square().mean().backward()
            optimizer.step()
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(one.full_tensor(), two.full_tensor(), rtol=1e-4, atol=1e-6)
    state = sharded.state_dict()
    assert isinstance(state["state"]["0.weight"]["exp_avg"], DTensor)
    assert state["state"]["0.weight"]["exp_avg"].placements == models[0][0].weight.placements
    fresh = ShardedOptimizer(dict(models[0].named_parameters()), torch.optim.AdamW, lr=0.5)
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["lr"] == 0.01
    one, two = fresh.state_dict(full=True)["state"], sharded.state_dict(full=True)["state"]
    assert all(torch.equal(one[n][k], two[n][k]) for n in two for k in two[n])
    # What torch gathers is the same.
    for i, name in enumerate(two):
        theirs = torchs.state_dict()["state"][i]["exp_avg"].full_tensor()
        assert torch.allclose(two[name]["exp_avg"], theirs, rtol=1e-3, atol=1e-6), name
    # And it goes into an optimizer of one process.
    ordinary = ShardedOptimizer(dict(alone.named_parameters()), torch.optim.AdamW, shard="none")
    ordinary.load_state_dict(sharded.state_dict(full=True))
    assert torch.equal(ordinary.state[alone[0].weight]["exp_avg"], two["0.weight"]["exp_avg"])


def test_fsdp2(on_ranks):
    on_ranks(2, fsdp2)


def sharded_tensors(kind):
    """torch's own contract: the local shards of ShardedTensors, and plain tensors."""
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = torch.randn(7, 4)
    rows = list(range(7))[rank * 7 // ranks : (rank + 1) * 7 // ranks]
    local = whole[rows].clone().requires_grad_(True)
    table = init_from_local_shards([Shard.from_tensor_and_offsets(local, [rows[0], 0], rank)], 7, 4)
    bias = nn.Parameter(torch.zeros(4))
    sharded = ShardedOptimizer({"table": table, "bias": bias}, getattr(torch.optim, kind), **CLASSES[kind])
    twin, twin_bias = nn.Parameter(whole.clone()), nn.Parameter(torch.zeros(4))
    ordinary = getattr(torch.optim, kind)([twin, twin_bias], **CLASSES[kind])
    assert not any(isinstance(p, nn.Parameter) for p in [table])
    for step in range(20):
        sharded.zero_grad()
        ordinary.zero_grad()
        twin.grad = torch.randn(7, 4, generator=torch.Generator().manual_seed(step))
        twin_bias.grad = twin.grad.sum(0)
        local.grad, bias.grad = twin.grad[rows].clone(), twin_bias.grad.clone()
        sharded.step()
        ordinary.step()
    assert torch.equal(local, twin[rows])
    assert torch.equal(bias, twin_bias)
    key = "momentum_buffer" if kind == "SGD" else "exp_avg"
    state = sharded.state_dict()["state"]
    assert isinstance(state["table"][key], ShardedTensor)
    found = sharded.state_dict(full=True)["state"]
    assert torch.equal(found["table"][key], ordinary.state[twin][key])
    fresh = ShardedOptimizer({"table": table, "bias": bias}, getattr(torch.optim, kind), **CLASSES[kind])
    fresh.load_state_dict(sharded.state_dict())
    assert torch.equal(fresh.state_dict(full=True)["state"]["table"][key], found["table"][key])
    norm = sharded.clip_grad_norm_(0.1)
    assert torch.isclose(norm, clip_grad_norm_([twin, twin_bias], 0.1))
    assert torch.allclose(local.grad, twin.grad[rows])
    sharded.zero_grad()
    assert local.grad is None
    assert bias.grad is None


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_sharded_tensors(on_ranks, kind):
    on_ranks(2, sharded_tensors, kind)


def names_of_a_module():
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    def table():
        shard = Shard.from_tensor_and_offsets(torch.ones(2, 3), [2 * dist.get_rank(), 0], dist.get_rank())
        return init_from_local_shards([shard], 2 * dist.get_world_size(), 3)

    module = nn.Module()
    module.table = table()
    module.weight = nn.Parameter(torch.ones(1))
    module.inner = nn.Linear(2, 2)
    module.inner.rows = table()
    module.inner.same = module.inner.rows
    assert [n for n, _ in named_params_with_sharded_tensor(module)] == [
        "table",
        "inner.rows",
        "weight",
        "inner.weight",
        "inner.bias",
    ]
    found = dict(named_params_with_sharded_tensor(module, prefix="net", recurse=False))
    assert list(found) == ["net.table", "net.weight"]
    assert found["net.table"] is module.table
    assert "net.inner.rows" in dict(named_params_with_sharded_tensor(module, "net"))


def test_names_of_a_module(on_ranks):
    on_ranks(2, names_of_a_module)


def what_needs_whole_parameters():
    from torch.distributed.device_mesh import init_device_mesh

    _, named = spread_net(init_device_mesh("cpu", (2,)), shard_rows)
    with pytest.raises(TypeError, match=r"Adafactor needs whole parameters, and '0.weight' is spread"):
        ShardedOptimizer(named, torch.optim.Adafactor)
    with pytest.raises(TypeError, match="LBFGS"):
        ShardedOptimizer(named, torch.optim.LBFGS)


def test_what_needs_whole_parameters(on_ranks):
    on_ranks(2, what_needs_whole_parameters)


class TestWithoutAnyGroup:
    """One process: an ordinary optimizer, with names."""

    def test_steps(self):
        model = net()
        twin = copy.deepcopy(model)
        sharded = ShardedOptimizer(dict(model.named_parameters()), torch.optim.LBFGS, lr=0.1)
        assert isinstance(sharded, torch.optim.Optimizer)
        sharded = ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, 0.01, fused=True)
        ordinary = torch.optim.AdamW(twin.parameters(), 0.01, fused=True)
        x = torch.randn(3, 16)
        for _ in range(3):

            def closure():
                sharded.zero_grad()
                loss = model(x).square().sum()
                loss.backward()
                return loss

            ordinary.zero_grad()
            expected = twin(x).square().sum()
            expected.backward()
            ordinary.step()
            assert torch.equal(sharded.step(closure), expected)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        state = sharded.state_dict()
        assert torch.equal(state["state"]["0.weight"]["exp_avg"], ordinary.state[twin[0].weight]["exp_avg"])
        assert not any(isinstance(v, Shards) for each in state["state"].values() for v in each.values())

    @pytest.mark.parametrize(
        ("given", "error", "text"),
        [
            ([], ValueError, "empty parameter list"),
            ({"a": 3}, TypeError, "a parameter is a Tensor, DTensor or ShardedTensor, not int"),
            ([torch.zeros(2)], TypeError, "parameters have names here"),
            (nn.Linear(1, 1), TypeError, "named_parameters"),
            ([("a", torch.zeros(1)), ("a", torch.zeros(1))], ValueError, "two parameters have the name 'a'"),
            ([{"lr": 1}], ValueError, 'needs "params"'),
        ],
    )
    def test_what_is_no_named_parameters(self, given, error, text):
        with pytest.raises(error, match=text):
            ShardedOptimizer(given, torch.optim.SGD, lr=0.1)

    def test_tied_parameters(self):
        p = nn.Parameter(torch.zeros(2))
        with pytest.raises(ValueError, match="'a' and 'b' are the same parameter"):
            ShardedOptimizer({"a": p, "b": p}, torch.optim.SGD, lr=0.1)

    def test_unknown_ways(self):
        p = {"a": nn.Parameter(torch.zeros(2))}
        with pytest.raises(ValueError, match="shard is one of auto, state, none"):
            ShardedOptimizer(p, torch.optim.SGD, lr=0.1, shard="params")
        with pytest.raises(OptimError, match="groups of its own"):
            ShardedOptimizer(p, lambda params: torch.optim.SGD([{"params": params}, {"params": []}], lr=0.1))
