"""How much memory conversions take, measured: the most that a process had resident. And what they tell: progress, and a profile."""

import pickle

import pytest
import torch
import torch.distributed as dist
from support.memory import begin_of_peak, peak_bytes
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from farstep.state import load_optim_state_dict, optim_state_dict

BUDGET = 1 << 20
SLACK = 12 << 20  # Python, plans and gloo's own buffers
LAYERS, WIDTH = 8, 1024
PARAMETER_BYTES = LAYERS * WIDTH * WIDTH * 4
STATE_BYTES = 2 * PARAMETER_BYTES  # 64 MiB


def peak(run):
    """The most memory that was resident during `run`, beyond what was before. The process must have been at ease."""
    before = begin_of_peak()
    result = run()
    return peak_bytes() - before, result


def model_of(wrap):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    if wrap == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer


def stepped(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


def measured(wrap):
    rank = dist.get_rank()
    model, optimizer = model_of(wrap)
    stepped(optimizer)
    for warm in (True, False):
        used, state = peak(
            lambda: optim_state_dict(model, optimizer, full=True, rank0_only=True, budget_bytes=BUDGET)
        )
        if not warm:
            assert used < BUDGET + SLACK + (STATE_BYTES if rank == 0 else 0), f"gathering took {used:,} bytes"
    for warm in (True, False):
        fresh = torch.optim.Adam(model.parameters())
        used, _ = peak(
            lambda o=fresh: load_optim_state_dict(
                model, o, state, broadcast_from_rank0=True, budget_bytes=BUDGET
            )
        )
        if not warm:
            assert used < STATE_BYTES // 2 + BUDGET + SLACK, f"loading took {used:,} bytes"
    used, _ = peak(lambda: optim_state_dict(model, optimizer))
    assert used < SLACK, f"reading in shards took {used:,} bytes"


@pytest.mark.parametrize("wrap", ["fsdp1", "fsdp2"])
def test_no_rank_holds_more_than_it_asked_for(two, wrap):
    two.run(measured, wrap)


def told():
    rank = dist.get_rank()
    model, optimizer = model_of("fsdp2")
    stepped(optimizer)
    seen, profile = [], {}
    optim_state_dict(
        model, optimizer, full=True, rank0_only=True, progress=lambda *at: seen.append(at), profile=profile
    )
    half = STATE_BYTES // 2
    if rank == 0:  # the other's memory may be read without it
        assert seen[-1] == (STATE_BYTES, STATE_BYTES)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert list(profile) == ["plan", "gather", "copy", "offload"]
    assert profile["gather"]["bytes"] == half
    assert profile["copy"]["bytes"] == (half if rank == 0 else 0)
    assert all(type(phase["time_s"]) is float for phase in profile.values())
    assert profile["plan"]["time_s"] > 0
    assert pickle.loads(pickle.dumps(profile)) == profile


def test_progress_and_profile(two):
    two.run(told)
