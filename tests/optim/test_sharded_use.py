"""What surrounds the steps of a ShardedOptimizer: clipping, schedules, hooks, closures, groups, and ranks that die."""

import math

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import register_optimizer_step_post_hook

import farstep.optim
from farstep.errors import OptimError
from farstep.optim import CombinedOptimizer, KeyedOptimizerWrapper, ShardedOptimizer
from optim.replicas import Scaled, assert_same, by, give, give_mean, pair

ADAMW = (torch.optim.AdamW, {"lr": 0.01, "fused": True})


def clipping(reduce_gradients):
    ranks = dist.get_world_size()
    model, sharded, twin, plain = pair(*ADAMW, bucket_bytes=8192, reduce_gradients=reduce_gradients)
    model.nothing.requires_grad_(False)
    twin.nothing.requires_grad_(False)
    for step in range(3):
        for norm_type in (2, 1.0, 3.0, math.inf):
            give(model, step, dist.get_rank()) if reduce_gradients else give_mean(model, step, ranks)
            give_mean(twin, step, ranks)
            norm = sharded.clip_grad_norm_(0.7, norm_type)
            expected = clip_grad_norm_(twin.parameters(), 0.7, norm_type)
            assert torch.isclose(norm, expected, rtol=1e-5), norm_type
        sharded.step()
        plain.step()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), name
    model.cube.grad.fill_(math.inf)
    sharded.zero_grad()
    give(model, 0, dist.get_rank())
    if dist.get_rank() == 0:
        model.cube.grad[0, 0, 0] = math.nan
    with pytest.raises(RuntimeError, match="non-finite"):
        sharded.clip_grad_norm_(1.0, error_if_nonfinite=True)


def clipping_together():
    """Several ShardedOptimizers, and an ordinary one, by one norm; alone and as parts of one."""
    ranks = dist.get_world_size()
    model, _, twin, plain = pair(*ADAMW)
    named = dict(model.named_parameters())
    names = list(named)
    first = ShardedOptimizer({n: named[n] for n in names[::3]}, ADAMW[0], **ADAMW[1])
    second = ShardedOptimizer({n: named[n] for n in names[1::3]}, ADAMW[0], **ADAMW[1])
    third = KeyedOptimizerWrapper({n: named[n] for n in names[2::3]}, lambda ps: ADAMW[0](ps, **ADAMW[1]))
    third.save_param_groups(True)
    both = CombinedOptimizer([first, second, third])
    for step in range(4):
        give(model, step, dist.get_rank())
        give_mean(twin, step, ranks)
        for name, parameter in twin.named_parameters():
            if name in names[2::3]:
                named[name].grad = None if parameter.grad is None else parameter.grad.clone()
        if step % 2:
            norm = both.clip_grad_norm_(0.7)
        else:
            norm = farstep.optim.clip_grad_norm_([first, second, third], 0.7)
        expected = clip_grad_norm_(twin.parameters(), 0.7)
        assert torch.isclose(norm, expected, rtol=1e-5)
        both.step()
        plain.step()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), name


def clipping_too_early():
    """Whether gradients that came after it are means nobody knows."""
    model, sharded, _, _ = pair(*ADAMW)
    give(model, 0, dist.get_rank())
    sharded.clip_grad_norm_(1.0)
    before = [p.detach().clone() for p in model.parameters()]
    if dist.get_rank() == 0:
        model.cube.grad.add_(1)
    with pytest.raises(OptimError, match="'cube' has changed since clip_grad_norm_"):
        sharded.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    # A step that was left out, as a scaler does, is none of that.
    give(model, 1, dist.get_rank())
    sharded.clip_grad_norm_(1.0)
    give(model, 2, dist.get_rank())
    sharded.clip_grad_norm_(1.0)
    sharded.step()


def schedules():
    model, sharded, twin, plain = pair(*ADAMW)
    optimizers = (sharded, plain)
    schedulers = [
        [
            torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.1, total_steps=12),
            torch.optim.lr_scheduler.ReduceLROnPlateau(each, patience=1),
        ]
        for each in optimizers
    ]
    for step in range(8):
        give(model, step, dist.get_rank())
        give_mean(twin, step, dist.get_world_size())
        for optimizer, (cycle, plateau) in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            cycle.step()
            plateau.step(1.0)
        assert sharded.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert_same(model, twin)


def hooks_and_closures():
    model, sharded, _, _ = pair(*ADAMW)
    seen = []
    sharded.register_step_pre_hook(lambda *_: seen.append("before"))
    sharded.register_step_post_hook(lambda *_: seen.append("after"))
    sharded.register_state_dict_pre_hook(lambda o: seen.append("saving"))
    sharded.register_state_dict_post_hook(lambda o, state: {**state, "more": 1})
    sharded.register_load_state_dict_pre_hook(lambda o, state: seen.append("loading"))
    sharded.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))

    def closure():
        assert torch.is_grad_enabled()
        sharded.zero_grad()
        loss = sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    loss = sharded.step(closure)
    assert loss.requires_grad
    state = sharded.state_dict()
    assert state["more"] == 1
    sharded.load_state_dict(state)
    assert seen == ["before", "after", "saving", "loading", "loaded"]
    sharded.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    # Those of all optimizers see this one once.
    calls = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(type(optimizer)))
    sharded.step()
    handle.remove()
    assert calls.count(ShardedOptimizer) == 1


def more_groups():
    ranks = dist.get_world_size()
    model, twin = Scaled(), Scaled()
    named = dict(model.named_parameters())
    late = {name: named.pop(name) for name in ("cube", "second.bias")}
    sharded = ShardedOptimizer(named, *ADAMW[:1], **ADAMW[1], bucket_bytes=8192)
    others = dict(twin.named_parameters())
    others_late = [others.pop(name) for name in late]
    plain = ADAMW[0](others.values(), **ADAMW[1])
    for step in range(6):
        if step == 3:
            sharded.add_param_group({"params": late, "lr": 0.3})
            plain.add_param_group({"params": others_late, "lr": 0.3})
        give(model, step, dist.get_rank())
        give_mean(twin, step, ranks)
        sharded.step()
        plain.step()
    assert_same(model, twin)
    assert sharded.param_groups[1]["param_names"] == ["cube", "second.bias"]
    assert sharded.param_groups[1]["params"][0] is model.cube
    assert list(sharded.named_params) == [*named, *late]
    with pytest.raises(ValueError, match="two parameters have the name 'cube'"):
        sharded.add_param_group({"params": {"cube": nn.Parameter(torch.zeros(1))}})
    with pytest.raises(ValueError, match="are the same parameter"):
        sharded.add_param_group({"params": {"other": model.cube}})
    with pytest.raises(OptimError, match="'new' is a Tensor of shape"):
        sharded.add_param_group({"params": {"new": nn.Parameter(torch.zeros(1 + dist.get_rank()))}})
    assert len(sharded.param_groups) == 2


@pytest.mark.parametrize("reduce_gradients", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_clipping(on_ranks, ranks, reduce_gradients):
    on_ranks(ranks, by, None if ranks == 2 else False, clipping, reduce_gradients)


@pytest.mark.parametrize("same_host", [False, None], ids=["messages", "memory"])
@pytest.mark.parametrize(
    "body",
    [clipping_together, clipping_too_early, schedules, hooks_and_closures, more_groups],
    ids=lambda body: body.__name__,
)
def test_use(on_ranks, body, same_host):
    on_ranks(2, by, same_host, body)


def step_once(has_peer):
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    sharded = kept.setdefault(
        "optimizer",
        ShardedOptimizer(dict(model.named_parameters()), torch.optim.SGD, lr=0.1) if has_peer else None,
    )
    for p in sharded.named_params.values():
        p.grad = torch.ones_like(p)
    sharded.step()


kept = {}


@pytest.mark.parametrize("same_host", [False, None], ids=["messages", "memory"])
def test_a_rank_that_dies_is_noticed(same_host):
    with Ranks(3, timeout_s=5.0) as ranks:
        ranks.run(by, same_host, step_once, True)
        ranks.workers[1].kill()
        for pending in ranks.start(step_once, False):
            with pytest.raises(OptimError, match=r"rank [02] waited.*rank 1 died or ended"):
                pending.result(20.0)
