"""ShardedOptimizer where ranks differ, memory changes under it, and states do not fit: an error on every rank, or the right numbers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn

from farstep.errors import ExchangeError, OptimError, StateMismatch
from farstep.optim import ShardedOptimizer
from farstep.state import on_rank, respread, shards_of


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def raised(function: Callable[[], Any]) -> str:
    try:
        function()
    except (OptimError, ExchangeError, StateMismatch) as exc:
        return str(exc)
    return "nothing"


def stepped(optimizer: ShardedOptimizer) -> str:
    for parameter in optimizer.named_params.values():
        parameter.grad = torch.ones_like(parameter)
    return raised(optimizer.step)


def seeded(*shape: int) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(shape))


def other_learning_rates() -> str:
    optimizer = ShardedOptimizer({"p": seeded(300)}, torch.optim.SGD, lr=0.1 * (1 + dist.get_rank()))
    return stepped(optimizer)


def other_arguments() -> str:
    return raised(
        lambda: ShardedOptimizer(
            {"p": seeded(300)}, torch.optim.SGD, lr=0.1, reduce_gradients=dist.get_rank() == 0
        )
    )


def other_strides() -> str:
    p = seeded(4, 8, 3, 3)
    if dist.get_rank() == 1:
        p = nn.Parameter(p.detach().to(memory_format=torch.channels_last))
    return raised(lambda: ShardedOptimizer({"p": p}, torch.optim.SGD, lr=0.1))


def permuted_values() -> str:
    p = seeded(4, 4)
    if dist.get_rank() == 1:
        p = nn.Parameter(p.detach().flip(0).clone())
    return raised(lambda: ShardedOptimizer({"p": p}, torch.optim.SGD, lr=0.1))


def another_dtype_later() -> str:
    p = seeded(300)
    optimizer = ShardedOptimizer({"p": p}, torch.optim.SGD, lr=0.1)
    if dist.get_rank() == 1:
        p.data = p.data.double()
    return stepped(optimizer)


def parts_of_two_saves() -> str:
    optimizer = ShardedOptimizer({"p": seeded(300)}, torch.optim.Adam, lr=0.1)
    stepped(optimizer)
    own = optimizer.state_dict()
    if dist.get_rank() == 1:
        own["state"]["p"]["step"] = torch.tensor(50.0)
    return raised(lambda: optimizer.load_state_dict(own))


def clipped_twice() -> str:
    p = seeded(300)
    optimizer = ShardedOptimizer({"p": p}, torch.optim.SGD, lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.clip_grad_norm_(1.0)
    if dist.get_rank() == 0:
        p.grad.add_(1)
    return raised(lambda: optimizer.clip_grad_norm_(1.0))


def target_on_one_rank_only() -> str:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    source = dist.tensor.distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [dist.tensor.Shard(0)])
    target = {"w": on_rank(torch.empty(8, 4), 0)} if dist.get_rank() == 0 else {}
    said = raised(lambda: respread({"w": shards_of(source)}, target))
    whole = torch.empty(8, 4, device="cpu" if dist.get_rank() == 0 else "meta")
    respread({"w": shards_of(source)}, {"w": on_rank(whole, 0)})  # the group still works
    assert dist.get_rank() or torch.equal(whole, torch.arange(32.0).reshape(8, 4))
    return said


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (other_learning_rates, r"\['lr'\].* is 0.1 on rank 0; 0.2 on rank 1"),
        (other_arguments, "'reduce_gradients' is True on rank 0; False on rank 1"),
        (other_strides, "strides"),
        (permuted_values, "not replicas"),
        (another_dtype_later, "'p' has another shape, dtype or other strides"),
        (parts_of_two_saves, r"'step' of parameter 'p' is 1.0 .* on rank 0; 50.0 .* on rank 1"),
        (clipped_twice, "'p' has changed since clip_grad_norm_"),
        (target_on_one_rank_only, "on_rank"),
    ],
)
def test_ranks_that_differ_are_told_all_of_them(two: Ranks, mistake: Any, words: str) -> None:
    for said in two.run(mistake):
        assert re.search(words, said), said


def conjugated(same_host: bool) -> float:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(8, dtype=torch.complex64))
    q, c = nn.Parameter(p.detach().clone()), torch.randn(8, dtype=torch.complex64)
    ours = ShardedOptimizer({"p": p}, torch.optim.SGD, lr=0.1, same_host=same_host)
    theirs = torch.optim.SGD([q], lr=0.1)
    for x in (p, q):
        (x.conj() * c).real.sum().backward()
    assert p.grad is not None
    assert p.grad.is_conj()
    ours.step()
    theirs.step()
    return (p - q).abs().max().item()


@pytest.mark.parametrize("same_host", [True, False])
def test_a_gradient_whose_memory_is_conjugated(two: Ranks, same_host: bool) -> None:
    assert max(two.run(conjugated, same_host)) < 1e-6


def norms() -> tuple[torch.dtype, float, float, float]:
    a, b = nn.Parameter(torch.zeros(10, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(4096))
    optimizer = ShardedOptimizer({"a": a, "b": b}, torch.optim.SGD, lr=1.0)
    a.grad, b.grad = torch.full_like(a, 0.5), torch.full_like(b, 0.01234)
    norm = optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    return norm.dtype, norm.item(), b[0].item(), b[-1].item()


def test_all_ranks_clip_alike(two: Ranks) -> None:
    one, other = two.run(norms)
    assert one == other
    assert one[2] == one[3]


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def counted() -> int:
    named = {f"p{i}": seeded(200, 200) for i in range(5)}
    optimizer = ShardedOptimizer(named, Counting, lr=0.1, elementwise=True, bucket_bytes=1 << 16)
    for _ in range(3):
        stepped(optimizer)
    return optimizer.param_groups[0]["count"]


def test_a_users_class_steps_once_for_a_step(two: Ranks) -> None:
    assert two.run(counted) == [3, 3]


def messages_of_the_programs_own() -> tuple[list[float], list[float]]:
    p, buffer = nn.Parameter(torch.zeros(256)), torch.full((128,), 7.0)
    optimizer = ShardedOptimizer({"p": p}, torch.optim.SGD, lr=1.0, same_host=False)
    work = dist.isend(torch.full((128,), 7.0), 1) if dist.get_rank() == 0 else None
    stepped(optimizer)
    work.wait() if work is not None else dist.recv(buffer, 0)
    return p[[0, -1]].tolist(), buffer[:2].tolist()


def test_messages_of_the_programs_own_are_kept_apart(two: Ranks) -> None:
    assert two.run(messages_of_the_programs_own) == [([-1.0, -1.0], [7.0, 7.0])] * 2


def owns_nothing() -> list[str]:
    optimizer = ShardedOptimizer({"p": nn.Parameter(torch.ones(1))}, torch.optim.Adagrad, lr=0.1)
    stepped(optimizer)
    return sorted(optimizer.state_dict(full=True)["state"]["p"])


def test_a_rank_that_owns_nothing_has_the_state_all_the_same(two: Ranks) -> None:
    assert two.run(owns_nothing) == [["step", "sum"]] * 2


def test_a_state_of_one_number_for_a_parameter_of_many() -> None:
    optimizer = ShardedOptimizer({"p": seeded(3000)}, torch.optim.AdamW, lr=0.1)
    stepped(optimizer)
    saved = optimizer.state_dict(full=True)
    saved["state"]["p"]["exp_avg"] = torch.tensor(3.0)
    with pytest.raises(StateMismatch, match="'exp_avg' of parameter 'p'"):
        optimizer.load_state_dict(saved)


def test_memory_laid_out_anew_between_steps() -> None:
    p, q = (nn.Parameter(torch.arange(4608.0).reshape(64, 8, 3, 3) / 100) for _ in range(2))
    ours, theirs = ShardedOptimizer({"p": p}, torch.optim.AdamW, lr=0.1), torch.optim.AdamW([q], lr=0.1)
    for number in range(2):
        torch.manual_seed(number)
        gradient = torch.randn(64, 8, 3, 3)
        for x in (p, q):
            x.grad = None
            if number:
                x.data = x.data.to(memory_format=torch.channels_last)
            x.grad = torch.empty_like(x).copy_(gradient)
        ours.step()
        theirs.step()
    torch.testing.assert_close(p, q)


def test_what_a_user_mistakes() -> None:
    p = seeded(4)
    optimizer = ShardedOptimizer({"p": p}, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="goes with full=True"):
        optimizer.state_dict(rank0_only=True)
    with pytest.raises(TypeError, match="takes no parameters"):
        optimizer.clip_grad_norm_([p], 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(TypeError, match="then a class"):
        ShardedOptimizer({"p": p}, torch.optim.SGD([p]), lr=0.1)  # type: ignore[arg-type]
