"""ShardedOptimizer where others know NamedOptimizer: state before the first step, and as one of several."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn

from farstep.errors import OptimError, StateMismatch
from farstep.optim import CombinedOptimizer, NamedOptimizer, ShardedOptimizer
from farstep.state import load_optim_state_dict, optim_state_dict
from optim.replicas import Scaled, assert_same, assert_same_state, give, give_mean, pair


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


class Averaged(torch.optim.Optimizer):
    """A user's own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                state["average"].mul_(0.9).add_(p.grad)
                p.sub_(state["average"], alpha=group["lr"])


CLASSES = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "foreach": False}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05, "foreach": False}),
    "Averaged": (Averaged, {"lr": 0.1}),
}


def init_state(name: str) -> None:
    kind, options = CLASSES[name]
    model, sharded, twin, plain = pair(kind, options, bucket_bytes=8192)
    frozen = model.second.bias.requires_grad_(False)
    twin.second.bias.requires_grad_(False)
    if kind is torch.optim.Adafactor:
        model.nothing.requires_grad_(False)
        twin.nothing.requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    groups = sharded.state_dict(full=True)["param_groups"]
    sharded.init_state()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    saved = sharded.state_dict(full=True)
    assert saved["param_groups"] == groups
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert saved["state"].keys() == trained
    assert all(not each.get("step", 0) for each in saved["state"].values())
    assert frozen.grad is None
    for step in range(3):
        give(model, step, dist.get_rank())
        give_mean(twin, step, dist.get_world_size())
        sharded.step()
        plain.step()
    assert_same(model, twin)
    assert_same_state(sharded.state_dict(full=True), plain, twin)
    kept = sharded.state_dict(full=True)
    sharded.init_state()  # state that is there stays
    now = sharded.state_dict(full=True)["state"]
    for each, state in kept["state"].items():
        assert all(torch.equal(torch.as_tensor(now[each][k]), torch.as_tensor(v)) for k, v in state.items())


@pytest.mark.parametrize("name", CLASSES)
def test_init_state(two: Ranks, name: str) -> None:
    two.run(init_state, name)


def read_in_place(folder: str) -> None:
    """A checkpoint of torch's, read into the state of an optimizer over DTensors that has not stepped."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

    def made() -> ShardedOptimizer:
        p = nn.Parameter(distribute_tensor(torch.arange(20.0).reshape(5, 4), mesh, [Shard(0)]))
        return ShardedOptimizer({"p": p}, torch.optim.Adam, lr=0.1)

    first, second = made(), made()
    p = first.named_params["p"]
    p.grad = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])
    first.step()
    state = first.state_dict()
    del state["rank"]
    dcp.save(state, checkpoint_id=folder)
    second.init_state()
    state = second.state_dict()
    del state["rank"]
    dcp.load(state, checkpoint_id=folder)
    second.load_state_dict(state)
    one, other = (each.state_dict(full=True)["state"]["p"] for each in (first, second))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert one["step"] == 1


def test_a_checkpoint_is_read_into_it(two: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        two.run(read_in_place, folder)


# -- among others -----------------------------------------------------------------------------------------


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Scaled()
        torch.manual_seed(1)
        self.head = nn.Linear(9, 3)


def combined(model: Both) -> CombinedOptimizer:
    body = ShardedOptimizer(
        dict(model.body.named_parameters()), torch.optim.AdamW, lr=0.01, fused=True, bucket_bytes=8192
    )
    head = NamedOptimizer(model.head.named_parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    return CombinedOptimizer([("head", head), ("body", body)])


def gradients(model: Both, step: int) -> None:
    give(model.body, step, dist.get_rank())
    give_mean(model.head, step, dist.get_world_size())


def with_others() -> None:
    model, twin = Both(), Both()
    optimizer = combined(model)
    optimizer.init_state()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    plain = [
        torch.optim.AdamW(twin.body.parameters(), lr=0.01, fused=True),
        torch.optim.SGD(twin.head.parameters(), lr=0.1, momentum=0.9),
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in plain]

    def closure() -> float:
        gradients(model, 5)
        return 2.5

    for step in range(4):
        gradients(model, step)
        if step == 3:
            assert optimizer.step(closure) == 2.5
        else:
            optimizer.step()
        give_mean(twin, 0, 1)
        number = 5 if step == 3 else step
        give_mean(twin.body, number, dist.get_world_size())
        give_mean(twin.head, number, dist.get_world_size())
        for each in (schedule, *schedules):
            each.optimizer.step() if each is not schedule else None
            each.step()
    assert_same(model, twin)

    # Its own parts, and whole, into another.
    state = optimizer.state_dict()
    assert next(iter(state["state"])) == "head.weight"
    full = optim_state_dict(model, optimizer, full=True)
    for given in (state, full, {key: full[key] for key in ("state", "param_groups")}):
        other = combined(Both())
        other.load_state_dict(given)
        found = optim_state_dict_of(other)
        for name, each in full["state"].items():
            assert all(torch.equal(found[name][key], value) for key, value in each.items()), name
        assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in optimizer.param_groups]
    another = Both()
    other = combined(another)
    load_optim_state_dict(another, other, full)
    assert torch.equal(
        optim_state_dict_of(other)["body.cube"]["exp_avg"], full["state"]["body.cube"]["exp_avg"]
    )


def optim_state_dict_of(optimizer: CombinedOptimizer) -> Any:
    (_, head), (_, body) = optimizer.optimizers
    return {
        **{f"head.{name}": each for name, each in head.state_dict()["state"].items()},
        **{f"body.{name}": each for name, each in body.state_dict(full=True)["state"].items()},
    }


def boom(*_: Any) -> None:
    raise ValueError("boom")


def fails_together() -> None:
    """What fails on one rank in a part that knows nothing of ranks."""
    model = Both()
    optimizer = combined(model)
    gradients(model, 0)
    optimizer.step()
    state = optimizer.state_dict()
    head = optimizer.optimizers[0][1]
    is_second = dist.get_rank() == 1
    error, words = (ValueError, "boom") if is_second else (OptimError, "rank 1: ValueError: boom")
    for register, call in (
        (head.register_step_pre_hook, optimizer.step),
        (head.register_state_dict_pre_hook, optimizer.state_dict),
        (head.register_load_state_dict_pre_hook, lambda: optimizer.load_state_dict(state)),
        (head.register_load_state_dict_post_hook, lambda: optimizer.load_state_dict(state)),
        (optimizer.register_load_state_dict_pre_hook, lambda: optimizer.load_state_dict(state)),
        (optimizer.register_load_state_dict_post_hook, lambda: optimizer.load_state_dict(state)),
    ):
        handle = register(boom) if is_second else None
        with pytest.raises(error, match=words):
            call()
        if handle is not None:
            handle.remove()
    # A part of the state that fits one part only changes none.
    before = optim_state_dict_of(optimizer)
    before = {name: {k: v.clone() for k, v in each.items()} for name, each in before.items()}
    wrong = {**state, "state": {**state["state"], "head.bias": {"momentum_buffer": torch.ones(4)}}}
    with pytest.raises(StateMismatch, match="'momentum_buffer' of parameter 'bias'"):
        optimizer.load_state_dict(wrong if is_second else state)
    after = optim_state_dict_of(optimizer)
    for name, each in before.items():
        assert all(torch.equal(after[name][key], value) for key, value in each.items())


@pytest.mark.parametrize("body", [with_others, fails_together], ids=lambda body: body.__name__)
def test_combined_with_others(two: Ranks, body: Any) -> None:
    two.run(body)


def test_several_groups_of_processes_are_not_combined(two: Ranks) -> None:
    two.run(several_groups)


def several_groups() -> None:
    others = dist.new_group([0, 1])
    one, two = Scaled(), Scaled()
    parts = [
        ("one", ShardedOptimizer(dict(one.named_parameters()), torch.optim.SGD, lr=0.1)),
        (
            "two",
            ShardedOptimizer(dict(two.named_parameters()), torch.optim.SGD, lr=0.1, process_group=others),
        ),
    ]
    with pytest.raises(ValueError, match="several process groups"):
        CombinedOptimizer(parts)
