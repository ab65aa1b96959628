"""ShardedOptimizer on a replicated model: the state is spread, and everything comes out as without."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farstep.errors import OptimError
from farstep.optim import ShardedOptimizer
from optim.replicas import (
    Scaled,
    assert_same,
    assert_same_state,
    by,
    give,
    give_mean,
    gradient,
    pair,
)

CLASSES = {
    "Adadelta": {"lr": 0.5, "foreach": False},
    "Adafactor": {"lr": 0.1, "foreach": False},
    "Adagrad": {"lr": 0.1, "fused": True},
    "Adam": {"lr": 0.01, "amsgrad": True, "fused": True},
    "AdamW": {"lr": 0.01, "fused": True},
    "Adamax": {"lr": 0.01, "foreach": False},
    "ASGD": {"lr": 0.01, "t0": 5, "foreach": False},
    "NAdam": {"lr": 0.01, "foreach": False},
    "RAdam": {"lr": 0.01, "foreach": False},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True, "foreach": False},
    "Rprop": {"lr": 0.01, "foreach": False},
    "SGD": {"lr": 0.01, "momentum": 0.9, "nesterov": True, "fused": True},
}


def small(**more):
    """Pieces so small that even these parameters travel in many."""
    return {"bucket_bytes": 8192, **more}


def twenty_steps(name, dtype):
    ranks = dist.get_world_size()
    model, sharded, twin, plain = pair(getattr(torch.optim, name), CLASSES[name], dtype, **small())

    def has(parameter):
        return name != "Adafactor" or parameter != "nothing"  # which divides by its size

    for step in range(20):
        give(model, step, dist.get_rank(), has)
        give_mean(twin, step, ranks, has)
        sharded.step()
        plain.step()
        assert_same(model, twin)
    assert_same_state(sharded.state_dict(full=True), plain, twin)


WAYS = pytest.mark.parametrize("same_host", [False, None], ids=["messages", "memory"])
"""Here the ranks are on one host: by default they read each other's memory."""


@WAYS
@pytest.mark.parametrize("name", CLASSES)
def test_twenty_steps_are_those_of_one_process(on_ranks, name, same_host):
    on_ranks(3 if same_host is None else 2, by, same_host, twenty_steps, name, torch.float32)


@WAYS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_twenty_steps_in_half_precision(on_ranks, dtype, same_host):
    on_ranks(2 if same_host is None else 4, by, same_host, twenty_steps, "AdamW", dtype)


def defaults_are_fused_where_that_is_fast():
    model, sharded, twin, _ = pair(torch.optim.AdamW, {"lr": 0.01}, **small())
    plain = torch.optim.AdamW(twin.parameters(), lr=0.01, fused=True)
    for step in range(3):
        give(model, step, dist.get_rank())
        give_mean(twin, step, dist.get_world_size())
        sharded.step()
        plain.step()
    assert_same(model, twin)
    assert sharded.param_groups[0]["fused"] is None


def groups_and_dtypes():
    def groups(model):
        named = dict(model.named_parameters())
        second = {name: named.pop(name) for name in ("second.weight", "cube")}
        return [{"params": named}, {"params": second, "lr": 0.5, "momentum": 0.0}]

    ranks = dist.get_world_size()
    model, sharded, twin, plain = pair(
        torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}, groups=groups, **small()
    )
    mixed, other = Scaled(), Scaled()
    for m in (mixed, other):
        m.second.double()
        m.cube.data = m.cube.data.bfloat16()
    sharded_mixed = ShardedOptimizer(
        dict(mixed.named_parameters()), torch.optim.Adamax, foreach=False, **small()
    )
    plain_mixed = torch.optim.Adamax(other.parameters(), foreach=False)
    for step in range(5):
        for one, two in ((model, twin), (mixed, other)):
            give(one, step, dist.get_rank())
            give_mean(two, step, ranks)
        for optimizer in (sharded, plain, sharded_mixed, plain_mixed):
            optimizer.step()
    assert_same(model, twin)
    assert_same(mixed, other)


def gradients_that_are_not_there():
    """None everywhere: left alone. None on some ranks: zero there."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, sharded, twin, plain = pair(torch.optim.AdamW, {"lr": 0.01, "fused": True}, **small())
    for m in (model, twin):
        m.first.bias.requires_grad_(False)
    for step in range(4):
        give(model, step, rank, lambda name: name != "cube" and (name != "second.weight" or rank == 0))
        give_mean(twin, step, ranks, lambda name: name != "cube")
        twin.second.weight.grad = (
            gradient("second.weight", twin.second.weight.shape, torch.float32, step, 0)
        ) / ranks
        sharded.step()
        plain.step()
    assert_same(model, twin)
    found = sharded.state_dict(full=True)
    assert_same_state(found, plain, twin)
    assert "cube" not in found["state"]
    sharded.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    sharded.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def averaged_already():
    ranks = dist.get_world_size()
    model, sharded, twin, plain = pair(
        torch.optim.AdamW, {"lr": 0.01, "fused": True}, **small(reduce_gradients=False)
    )
    for step in range(4):
        give_mean(model, step, ranks)
        give_mean(twin, step, ranks)
        sharded.step()
        plain.step()
    assert_same(model, twin)
    model.cube.grad = None if dist.get_rank() else model.cube.grad
    with pytest.raises(OptimError, match="only some have one for 'cube'"):
        sharded.step()


def under_ddp():
    """Its gradients are the same on all ranks, so their mean is what they are."""
    torch.manual_seed(1)
    models = [nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 5)) for _ in range(3)]
    wrapped = []
    for each in models:
        each.load_state_dict(models[0].state_dict())
        wrapped.append(nn.parallel.DistributedDataParallel(each))
    optimizers = [
        torch.optim.AdamW(wrapped[0].parameters(), lr=0.01, fused=True),
        ShardedOptimizer(dict(wrapped[1].named_parameters()), torch.optim.AdamW, lr=0.01, **small()),
        ShardedOptimizer(
            dict(wrapped[2].named_parameters()), torch.optim.AdamW, lr=0.01, **small(reduce_gradients=False)
        ),
    ]
    for step in range(5):
        x = torch.randn(6, 30, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for model, optimizer in zip(wrapped, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert_same(models[2], models[0])
    assert_same(models[1], models[0])


def fewer_elements_than_ranks():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    sharded = ShardedOptimizer(dict(model.named_parameters()), torch.optim.SGD, lr=1.0)
    model.weight.grad = torch.full((1, 1), float(dist.get_rank()))
    sharded.step()
    assert model.weight.item() == 1 - (dist.get_world_size() - 1) / 2
    found = sharded.state_dict(full=True)
    sharded.load_state_dict(found)


def gradients_stay_the_users():
    model = Scaled()
    sharded = ShardedOptimizer(dict(model.named_parameters()), torch.optim.Adam, **small())
    give(model, 0, dist.get_rank())
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    sharded.step()
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())
    sharded.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def memory_is_replaced():
    """A parameter whose .data is set anew is followed."""
    model, sharded, twin, plain = pair(torch.optim.SGD, {"lr": 0.1, "fused": True}, **small())
    for step in range(2):
        for p in model.parameters():
            p.data = p.data.clone(memory_format=torch.preserve_format)
        give(model, step, dist.get_rank())
        give_mean(twin, step, dist.get_world_size())
        sharded.step()
        plain.step()
    assert_same(model, twin)


def autograd_notices():
    """A backward pass through values that a step has replaced raises."""
    model = nn.Linear(100, 100)
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    sharded = ShardedOptimizer(dict(model.named_parameters()), torch.optim.SGD, lr=0.1)
    x = torch.randn(3, 100, requires_grad=True)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    sharded.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def state_is_spread_evenly():
    model = nn.ModuleList([nn.Linear(1000, 100), nn.Linear(7, 3), nn.Linear(100, 300)])
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    sharded = ShardedOptimizer(dict(model.named_parameters()), torch.optim.Adam)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    sharded.step()
    total = sum(p.numel() for p in model.parameters())
    mine = sum(state["exp_avg"].numel() for state in sharded.state.values())
    assert abs(mine - total / dist.get_world_size()) <= 128


class Trust(torch.optim.Optimizer):
    """Like LAMB: a step as long as the parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["norm"] = p.norm() / (p.grad.norm() + 1)
                    p.add_(p.grad * self.state[p]["norm"], alpha=-group["lr"])


def classes_that_need_whole_parameters():
    ranks = dist.get_world_size()
    muon = [(torch.optim.Muon, {"lr": 0.01})] if hasattr(torch.optim, "Muon") else []
    for kind, options in [(Trust, {}), *muon]:

        def only(model, kind=kind):
            return {
                name: p
                for name, p in model.named_parameters()
                if kind is Trust or (p.dim() == 2 and p.numel())
            }

        model, sharded, twin, plain = pair(kind, options, groups=only, **small())
        for step in range(5):
            give(model, step, dist.get_rank())
            give_mean(twin, step, ranks)
            sharded.step()
            plain.step()
        assert_same(model, twin)


def what_cannot_work():
    named = dict(Scaled().named_parameters())
    with pytest.raises(TypeError, match="LBFGS computes the loss several times"):
        ShardedOptimizer(named, torch.optim.LBFGS)
    with pytest.raises(TypeError, match="SparseAdam wants sparse gradients"):
        ShardedOptimizer(named, torch.optim.SparseAdam)
    table = nn.Embedding(100, 10, sparse=True)
    dist.broadcast(table.weight.data, 0)
    sharded = ShardedOptimizer(dict(table.named_parameters()), torch.optim.SGD, lr=0.1)
    before = table.weight.detach().clone()
    table(torch.tensor([1, 2])).sum().backward()
    if dist.get_rank() == 0:
        table.weight.grad = table.weight.grad.to_dense()
    with pytest.raises(OptimError, match="the gradient of 'weight' is sparse"):
        sharded.step()
    assert torch.equal(table.weight, before)


def ranks_that_disagree():
    rank = dist.get_rank()

    def made(named, kind=torch.optim.SGD):
        return ShardedOptimizer(named, kind, lr=0.1)

    def tensor(*shape, dtype=torch.float32):
        return nn.Parameter(torch.zeros(shape, dtype=dtype))

    with pytest.raises(
        OptimError, match=r"'b' is a Tensor of shape \(3,\).* on rank 0; a Tensor of shape \(4,\)"
    ):
        made({"a": tensor(2), "b": tensor(3 + rank)})
    with pytest.raises(OptimError, match=r"'b' is .* on rank 0; absent on rank"):
        made({"a": tensor(2), ("c" if rank else "b"): tensor(2)})
    with pytest.raises(OptimError, match=r"torch.float64"):
        made({"a": tensor(2, dtype=torch.float64 if rank else torch.float32)})
    pairs = [("a", tensor(2)), ("b", tensor(2))]
    with pytest.raises(OptimError, match="in another order on rank"):
        made(pairs[::-1] if rank else pairs)
    with pytest.raises(OptimError, match="'the optimizer class' is SGD on rank 0; Adagrad on rank"):
        made({"a": tensor(2)}, torch.optim.Adagrad if rank else torch.optim.SGD)
    with pytest.raises(OptimError, match=r"not replicas: 'a' is .*broadcast every parameter"):
        made({"a": nn.Parameter(torch.full((2,), float(rank)))})
    made({"a": tensor(2)})


def stepped_by_each_rank_alone():
    """shard="none": what torch's class does."""
    model = nn.Linear(3, 3)
    sharded = ShardedOptimizer(dict(model.named_parameters()), torch.optim.SGD, lr=1.0, shard="none")
    before = model.weight.detach().clone()
    model.weight.grad = torch.full((3, 3), float(dist.get_rank()))
    sharded.step()
    assert torch.equal(model.weight, before - dist.get_rank())


def a_group_within_the_job():
    """Ranks 1 and 2 share a model; rank 0 has nothing to do with it."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    model, sharded, twin, plain = pair(
        torch.optim.AdamW, {"lr": 0.01, "fused": True}, **small(process_group=group)
    )
    for step in range(3):
        give(model, step, dist.get_rank(group))
        give_mean(twin, step, 2)
        sharded.step()
        plain.step()
    assert_same(model, twin)
    assert_same_state(sharded.state_dict(full=True), plain, twin)
    norm = sharded.clip_grad_norm_(math.inf)
    assert torch.isclose(norm, torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()]))


@pytest.mark.parametrize(
    "body",
    [
        defaults_are_fused_where_that_is_fast,
        groups_and_dtypes,
        gradients_that_are_not_there,
        averaged_already,
        under_ddp,
        fewer_elements_than_ranks,
        gradients_stay_the_users,
        memory_is_replaced,
        autograd_notices,
        state_is_spread_evenly,
        classes_that_need_whole_parameters,
        what_cannot_work,
        ranks_that_disagree,
        stepped_by_each_rank_alone,
    ],
    ids=lambda body: body.__name__,
)
@WAYS
def test_on_two_ranks(on_ranks, body, same_host):
    on_ranks(2, by, same_host, body)


@pytest.mark.parametrize(
    "body",
    [groups_and_dtypes, gradients_that_are_not_there, fewer_elements_than_ranks, a_group_within_the_job],
    ids=lambda body: body.__name__,
)
@WAYS
def test_on_three_ranks(on_ranks, body, same_host):
    on_ranks(3, by, same_host, body)
