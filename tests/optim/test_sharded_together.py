"""What goes wrong on one rank of a ShardedOptimizer is known to all at once: nobody waits for a rank that has given up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn

from farstep.errors import OptimError
from farstep.optim import ShardedOptimizer
from optim.replicas import Scaled, assert_same, by, give, give_mean, pair


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True})


def boom(*_: Any) -> None:
    raise ValueError("boom")


def all_raise(function: Callable[[], Any]) -> None:
    """The second rank its own error, the first one that tells of it."""
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="boom"):
            function()
    else:
        with pytest.raises(OptimError, match="rank 1: ValueError: boom"):
            function()


def goes_on(model: nn.Module, optimizer: ShardedOptimizer) -> None:
    """The ranks understand each other as before, and have the same parameters."""
    give(model, 7, dist.get_rank())
    optimizer.step()
    for parameter in model.parameters():
        every = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(every, parameter.detach())
        assert torch.equal(every[0], every[1])


def in_the_update(elementwise: bool | None, calls_before: int) -> None:
    kind = type("Mine", (torch.optim.SGD,), {}) if elementwise is not None else torch.optim.SGD
    more = {} if elementwise is None else {"elementwise": elementwise}
    model = Scaled()
    optimizer = ShardedOptimizer(
        dict(model.named_parameters()), kind, **SGD[1], bucket_bytes=2048, same_host=SAME_HOST, **more
    )
    step, calls = optimizer._inner.step, []

    def fails_once() -> None:
        calls.append(1)
        boom() if len(calls) == calls_before + 1 else step()

    if dist.get_rank() == 1:
        optimizer._inner.step = fails_once  # type: ignore[method-assign]
    give(model, 0, dist.get_rank())
    all_raise(optimizer.step)
    goes_on(model, optimizer)


SAME_HOST: bool | None = None


def with_same_host(same_host: bool | None, body: Callable[..., None], *args: Any) -> None:
    global SAME_HOST
    SAME_HOST = same_host
    by(same_host, body, *args)


@pytest.mark.parametrize("same_host", [False, None], ids=["messages", "memory"])
@pytest.mark.parametrize(
    ("elementwise", "calls_before"), [(None, 0), (None, 3), (True, 0), (False, 0)], ids=str
)
def test_an_update_that_fails_on_one_rank_fails_on_all(two, elementwise, calls_before, same_host) -> None:
    two.run(with_same_host, same_host, in_the_update, elementwise, calls_before)


def in_the_update_of_local_shards() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = Scaled()
    spread = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    optimizer = ShardedOptimizer(
        {**dict(model.named_parameters()), "spread": spread}, *SGD[:1], **SGD[1], shard="state"
    )
    give(model, 0, dist.get_rank())
    spread.grad = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    step = optimizer._inner.step
    if dist.get_rank() == 1:
        optimizer._inner.step = boom  # type: ignore[method-assign]
    all_raise(optimizer.step)
    optimizer._inner.step = step  # type: ignore[method-assign]
    goes_on(model, optimizer)


def in_hooks_and_closures() -> None:
    model, optimizer, _, _ = pair(*SGD)
    before = [p.detach().clone() for p in model.parameters()]
    is_second = dist.get_rank() == 1

    def closure() -> float:
        boom() if is_second else None
        return 0.0

    give(model, 0, dist.get_rank())
    all_raise(lambda: optimizer.step(closure))
    empty = optimizer.state_dict()
    for register, call in (
        (optimizer.register_step_pre_hook, optimizer.step),
        (optimizer.register_state_dict_pre_hook, optimizer.state_dict),
        (optimizer.register_state_dict_post_hook, optimizer.state_dict),
        (
            optimizer.register_load_state_dict_pre_hook,
            lambda: optimizer.load_state_dict(empty),
        ),
    ):
        handle = register(boom) if is_second else None
        all_raise(call)
        if handle is not None:
            handle.remove()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert not optimizer.state
    # After the step, and after the load.
    handle = optimizer.register_step_post_hook(boom) if is_second else None
    all_raise(optimizer.step)
    if handle is not None:
        handle.remove()
    state = optimizer.state_dict()
    handle = optimizer.register_load_state_dict_post_hook(boom) if is_second else None
    all_raise(lambda: optimizer.load_state_dict(state))
    if handle is not None:
        handle.remove()
    goes_on(model, optimizer)


@pytest.mark.parametrize(
    "body", [in_the_update_of_local_shards, in_hooks_and_closures], ids=lambda body: body.__name__
)
def test_what_else_fails_on_one_rank_fails_on_all(two, body) -> None:
    two.run(body)


def hooks_that_change_the_closure() -> None:
    model, optimizer, _, _ = pair(*SGD)
    give(model, 0, dist.get_rank())
    optimizer.register_step_pre_hook(lambda self, args, kwargs: ((self, lambda: 7.0), {}))
    assert optimizer.step() == 7.0
    optimizer.register_step_pre_hook(lambda self, args, kwargs: 5)
    with pytest.raises(RuntimeError, match="returns None or"):
        optimizer.step()


def test_hooks_before_a_step_may_change_its_arguments(two) -> None:
    two.run(hooks_that_change_the_closure)


# -- GradScaler -------------------------------------------------------------------------------------------


def scaled(model: nn.Module, step: int, scale: float, is_bad: bool) -> None:
    """Gradients as the backward pass of a scaled loss leaves them."""
    give(model, step, dist.get_rank())
    for p in model.parameters():
        p.grad *= scale
    if is_bad:
        model.cube.grad[0, 0, 0] = math.inf


def an_inf_on_one_rank(shard: str, explicit: bool) -> tuple[float, float]:
    ranks, is_second = dist.get_world_size(), dist.get_rank() == 1
    model, optimizer, twin, plain = pair(*SGD, shard=shard)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.zeros(()))  # it has no scale before
    before = [p.detach().clone() for p in model.parameters()]
    scales = []
    for step in range(4):
        is_bad = step == 1
        if shard == "none":  # each steps with its own
            give_mean(model, step, ranks)
            for p in model.parameters():
                p.grad *= scaler.get_scale()
            if is_bad and is_second:
                model.cube.grad[0, 0, 0] = math.nan
        else:
            scaled(model, step, scaler.get_scale(), is_bad and is_second)
        if explicit:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(0.5)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if is_bad:
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            model.zero_grad()
            continue
        give_mean(twin, step, ranks)
        if explicit:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        plain.step()
    if explicit:
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    else:
        assert_same(model, twin)
    assert optimizer.state_dict(full=True)["state"].keys() == dict(model.named_parameters()).keys()
    return scales[0], scales[-1]


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_"])
@pytest.mark.parametrize("shard", ["state", "none"])
def test_an_inf_on_one_rank_keeps_all_from_stepping(two, shard, explicit) -> None:
    # Each scaler goes by what its own rank has seen.
    assert two.run(an_inf_on_one_rank, shard, explicit) == [(16.0, 16.0), (16.0, 8.0)]


def the_same_scale() -> float:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model, optimizer, _, _ = pair(*SGD)
    scaler = ShardedGradScaler("cpu", init_scale=16.0, process_group=dist.group.WORLD)
    scaler.scale(torch.zeros(()))
    scaled(model, 0, 16.0, dist.get_rank() == 1)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not optimizer.state
    return scaler.get_scale()


def test_a_scaler_of_all_ranks(two) -> None:
    assert two.run(the_same_scale) == [8.0, 8.0]


def an_inf_in_one_shard() -> float:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    spread = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    optimizer = ShardedOptimizer({"spread": spread}, torch.optim.SGD, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.zeros(()))
    gradient = torch.full((8, 4), 16.0)
    spread.grad = distribute_tensor(gradient, mesh, [Shard(0)])
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(spread.full_tensor(), torch.zeros(8, 4))
    gradient[7, 0] = math.inf  # the second rank's
    spread.grad = distribute_tensor(gradient, mesh, [Shard(0)])
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(spread.full_tensor(), torch.zeros(8, 4))
    return scaler.get_scale()


def test_an_inf_in_one_shard_of_a_dtensor(two) -> None:
    assert two.run(an_inf_in_one_shard) == [8.0, 8.0]


def no_gradient_on_one_rank() -> None:
    model, optimizer, twin, plain = pair(*SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.zeros(()))
    scaled(model, 0, 16.0, False)
    if dist.get_rank() == 1:
        model.zero_grad()
    with pytest.raises(OptimError, match="GradScaler has seen nothing"):
        scaler.step(optimizer)
    # It goes on as if that had not been.
    scaled(model, 0, 16.0, False)
    scaler.step(optimizer)
    give_mean(twin, 0, 2)
    plain.step()
    assert_same(model, twin)


def test_a_rank_without_gradients_under_a_scaler(two) -> None:
    two.run(no_gradient_on_one_rank)
