"""Replicated models for ShardedOptimizer, with gradients that every rank can work out for all ranks."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from farstep.optim import ShardedOptimizer


def by(same_host, body, *args):
    """Run a test's body with this as the optimizer's default."""
    ShardedOptimizer.__init__.__wrapped__.__kwdefaults__["same_host"] = same_host
    return body(*args)


class Scaled(nn.Module):
    """Parameters of all sorts: matrices, vectors, one number, none at all, and one that is transposed in memory."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(40, 50, dtype=dtype)
        self.scale = nn.Parameter(torch.randn((), dtype=dtype))
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=dtype))
        self.turned = nn.Parameter(torch.randn(30, 20, dtype=dtype).t())
        self.second = nn.Linear(50, 33, dtype=dtype)
        self.cube = nn.Parameter(torch.randn(3, 5, 70, dtype=dtype))


def gradient(name, shape, dtype, step, rank):
    """What a rank has for a parameter in a step."""
    seed = sum(map(ord, name)) * 1000 + step * 10 + rank
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mean_gradient(name, shape, dtype, step, ranks):
    terms = [gradient(name, shape, dtype, step, rank) for rank in range(ranks)]
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total / ranks


def give(model, step, rank, has=lambda name: True):
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.grad = (
                torch.empty_like(p).copy_(gradient(name, p.shape, p.dtype, step, rank)) if has(name) else None
            )


def give_mean(model, step, ranks, has=lambda name: True):
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.grad = (
                torch.empty_like(p).copy_(mean_gradient(name, p.shape, p.dtype, step, ranks))
                if has(name)
                else None
            )


def pair(kind, options=None, dtype=torch.float32, groups=None, **more):
    """A model with a ShardedOptimizer, and a twin with the ordinary optimizer. `groups(model)` splits its parameters."""
    options = options or {}
    model = Scaled(dtype)
    twin = copy.deepcopy(model)
    of = groups or (lambda m: dict(m.named_parameters()))
    sharded = ShardedOptimizer(of(model), kind, **options, **more)
    plain = kind(ordinary(of(twin)), **options)
    return model, sharded, twin, plain


def ordinary(params):
    if isinstance(params, dict):
        return list(params.values())
    return [{**group, "params": list(group["params"].values())} for group in params]


def assert_same(model, twin):
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other), (
            f"{name} differs on rank {dist.get_rank()} by {(one - other).abs().max().item()}"
        )


def assert_same_state(found, plain, model):
    """A full state against that of an ordinary optimizer over the same model."""
    names = [name for name, _ in model.named_parameters()]
    expected = plain.state_dict()["state"]
    assert found["state"].keys() == {names[i] for i in expected}
    for i, state in expected.items():
        assert found["state"][names[i]].keys() == state.keys(), names[i]
        for key, value in state.items():
            got = found["state"][names[i]][key]
            if isinstance(value, torch.Tensor):
                assert got.shape == value.shape
                assert torch.equal(got, value), (names[i], key)
            else:
                assert got == value, (names[i], key)
