"""ShardedOptimizer where gradients are not what they mostly are: of another dtype, of replicas, or of local parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_

from farstep.errors import OptimError
from farstep.optim import ShardedOptimizer
from farstep.state import load_optim_state_dict, optim_state_dict
from optim.replicas import Scaled, assert_same, by, give_mean, pair


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def other_dtype(parameters: torch.dtype, gradients: torch.dtype, clips: bool) -> None:
    """As one process has it with the mean of the gradients, each in the parameter's dtype."""
    ranks = dist.get_world_size()
    model, sharded, twin, plain = pair(
        torch.optim.AdamW, {"lr": 0.01, "fused": True}, parameters, bucket_bytes=8192
    )
    for p in model.parameters():
        p.grad_dtype = gradients
    for step in range(3):
        for number, (p, q) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
            each = [
                torch.randn(p.shape, generator=torch.Generator().manual_seed(step * 100 + number * 10 + r))
                for r in range(ranks)
            ]
            has = not clips or number % 2 == 0 or dist.get_rank() == 0  # some have none
            p.grad = torch.empty_like(p, dtype=gradients).copy_(each[dist.get_rank()]) if has else None
            terms = [g.to(gradients).to(parameters) for g in each]
            if clips and number % 2:
                terms[1].zero_()
            mean = (terms[0] + terms[1]) / ranks
            q.grad = torch.empty_like(q).copy_(mean.to(gradients) if clips else mean)
        if clips:
            norm = sharded.clip_grad_norm_(0.7)
            expected = clip_grad_norm_(twin.parameters(), 0.7)
            torch.testing.assert_close(norm, expected, rtol=1e-2, atol=0)
            assert all(p.grad.dtype == gradients for p in model.parameters())
        sharded.step()
        plain.step()
    if clips:  # scaled in the gradients' dtype
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-2)
    else:
        assert_same(model, twin)


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("same_host", [False, None], ids=["messages", "memory"])
@pytest.mark.parametrize(
    ("parameters", "gradients"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)],
    ids=str,
)
def test_gradients_of_another_dtype(two: Ranks, parameters, gradients, same_host, clips) -> None:
    two.run(by, same_host, other_dtype, parameters, gradients, clips)


def other_dtype_of_a_dtensor() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    q = nn.Parameter(torch.ones(8, 4))
    p.grad_dtype = torch.bfloat16
    ours, theirs = ShardedOptimizer({"p": p}, torch.optim.Adam, lr=0.1), torch.optim.Adam([q], lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        gradient = torch.randn(8, 4).bfloat16()
        p.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        q.grad = gradient.float()
        ours.step()
        theirs.step()
    torch.testing.assert_close(p.full_tensor(), q)


def test_gradients_of_another_dtype_of_dtensors(two: Ranks) -> None:
    two.run(other_dtype_of_a_dtensor)


def test_gradients_of_another_dtype_in_one_process() -> None:
    """As torch's class has it."""
    p, q = (nn.Parameter(torch.ones(8)) for _ in range(2))
    ours, theirs = ShardedOptimizer({"p": p}, torch.optim.SGD, lr=0.1), torch.optim.SGD([q], lr=0.1)
    for each in (p, q):
        each.grad_dtype = torch.bfloat16
        each.grad = torch.full((8,), 0.3, dtype=torch.bfloat16)
    ours.step()
    theirs.step()
    assert torch.equal(p, q)


def replicas() -> None:
    """Each rank steps all of them by itself, with the same gradients: as under DDP."""
    model, sharded, twin, plain = pair(torch.optim.AdamW, {"lr": 0.01, "fused": True}, shard="none")
    for step in range(3):
        give_mean(model, step, 2)
        give_mean(twin, step, 2)
        norm = sharded.clip_grad_norm_(0.7)
        torch.testing.assert_close(norm, clip_grad_norm_(twin.parameters(), 0.7))
        sharded.step()
        plain.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_clipping_replicas_counts_each_element_once(two: Ranks) -> None:
    two.run(replicas)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def local_parts() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    options = {"lr": 0.01, "foreach": False}
    twin = Small()
    plain = torch.optim.AdamW(twin.parameters(), **options)
    model = FullyShardedDataParallel(Small(), use_orig_params=True, device_id=torch.device("cpu"))
    named = dict(model.named_parameters())
    assert len({p.numel() for p in named.values()} | {p.numel() for p in twin.parameters()}) > 3
    sharded = ShardedOptimizer(named, torch.optim.AdamW, **options, shard="local")

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(6, 5)).square().sum().backward()
        if isinstance(optimizer, ShardedOptimizer):
            norm = optimizer.clip_grad_norm_(0.5)
        else:
            norm = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return norm

    for step in range(3):
        torch.testing.assert_close(train(model, sharded, step), train(twin, plain, step))
    for call in (sharded.state_dict, lambda: sharded.load_state_dict({"state": {}, "param_groups": []})):
        with pytest.raises(OptimError, match=r"farstep.state.optim_state_dict\(model, optimizer\)"):
            call()
    found = optim_state_dict(model, sharded, full=True)
    for number, (name, _) in enumerate(twin.named_parameters()):
        for key, value in plain.state_dict()["state"][number].items():
            torch.testing.assert_close(found["state"][name][key], value)
    with FullyShardedDataParallel.summon_full_params(model):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.view(q.shape), q)
    # And back, into one that has not stepped.
    again = ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, **options, shard="local")
    load_optim_state_dict(model, again, found)
    torch.testing.assert_close(train(model, again, 3), train(twin, plain, 3))
    later = optim_state_dict(model, again, full=True)
    torch.testing.assert_close(
        later["state"]["first.weight"]["exp_avg"], plain.state_dict()["state"][0]["exp_avg"]
    )


def test_local_parts_are_clipped_as_the_whole(two: Ranks) -> None:
    two.run(local_parts)


def test_a_class_that_needs_whole_parameters_is_refused_for_parts(two: Ranks) -> None:
    two.run(refused_for_parts)


def refused_for_parts() -> None:
    named = dict(Scaled().named_parameters())
    with pytest.raises(TypeError, match="needs whole parameters"):
        ShardedOptimizer(named, torch.optim.Adafactor, shard="local")
