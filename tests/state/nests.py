"""A nested model under each kind of data parallelism, and the same one that was never wrapped, trained alike."""

from __future__ import annotations

import copy
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "KINDS",
    "SHARDED",
    "Nested",
    "adam",
    "by_name",
    "grouped",
    "make",
    "reference",
    "same",
    "train",
    "wrap",
]

FSDP1 = {
    "flat": {"use_orig_params": False},
    "original": {"use_orig_params": True},
    "flat, gradients sharded": {
        "use_orig_params": False,
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
    },
    "original, whole": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD},
}
SHARDED = ["flat", "original", "fully_shard"]
KINDS = [*FSDP1, "fully_shard", "ddp", "plain"]


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.shift = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return torch.tanh(self.linear(x) + self.shift)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.block0 = Block(5, 7)
        self.block1 = nn.Sequential(Block(7, 6), Block(6, 7))
        self.block2 = Block(7, 3)

    def forward(self, x):
        return self.block2(self.block1(self.block0(x)))


def wrap(model, kind, *, at=("block1.0", "block1"), group=None, root=True):
    """The modules named `at`, innermost first, and the whole."""
    if kind == "plain":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=group)
    if kind == "fully_shard":
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        mesh = DeviceMesh.from_group(group, "cpu") if group is not None else DeviceMesh("cpu", ranks)
        for path in at:
            fully_shard(model.get_submodule(path), mesh=mesh)
        return fully_shard(model, mesh=mesh) if root else model
    fsdp = functools.partial(
        FullyShardedDataParallel, process_group=group, device_id=torch.device("cpu"), **FSDP1[kind]
    )
    for path in at:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, fsdp(model.get_submodule(path)))
    return fsdp(model) if root else model


def train(model, optimizer, steps=2, seed=0):
    """The same batches on every rank, so that an average of gradients is what one process has."""
    for step in range(steps):
        torch.manual_seed(100 * seed + step)
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


adam = functools.partial(torch.optim.Adam, lr=0.01)


def make(kind, steps=2, optimizer=adam, **options):
    """Wrapped and trained."""
    model = wrap(Nested(), kind, **options)
    optim = optimizer(model.parameters())
    train(model, optim, steps)
    return model, optim


def by_name(model, optimizer):
    """What an unwrapped optimizer has, as it would be saved."""
    saved = copy.deepcopy(optimizer.state_dict())
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    return {
        "state": {order[n]: state for n, state in saved["state"].items()},
        "param_groups": [{**g, "params": [order[n] for n in g["params"]]} for g in saved["param_groups"]],
    }


def reference(steps=2, optimizer=adam):
    model = Nested()
    optim = optimizer(model.parameters())
    train(model, optim, steps)
    return model, optim


def grouped(model, parts, optimizer=torch.optim.Adam):
    """An optimizer of an unwrapped model with a group for each part of its names, each with a rate of its own."""
    named = dict(model.named_parameters())
    return optimizer(
        [{"params": [named[n] for n in part], "lr": 0.01 * (i + 1)} for i, part in enumerate(parts)]
    )


def same(found, wanted, *, exactly=False, order=False):
    """Whether two state dicts by name hold the same. Sums over ranks come out a little different than in one process."""
    assert set(found["state"]) == set(wanted["state"])
    for name, state in wanted["state"].items():
        assert set(found["state"][name]) == set(state), name
        for key, value in state.items():
            other = found["state"][name][key]
            assert isinstance(other, torch.Tensor) == isinstance(value, torch.Tensor), (name, key)
            if isinstance(value, torch.Tensor):
                assert type(other) is torch.Tensor
                assert other.dtype == value.dtype
                limits = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-4, "atol": 1e-6}
                torch.testing.assert_close(other, value, **limits, msg=lambda m, at=(name, key): f"{at}: {m}")
            else:
                assert other == value, (name, key)
    assert len(found["param_groups"]) == len(wanted["param_groups"])
    for ours, theirs in zip(found["param_groups"], wanted["param_groups"], strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            if key == "params" and not order:
                assert sorted(ours[key]) == sorted(value)
            else:
                assert ours[key] == value, key
    return True
