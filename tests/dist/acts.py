"""Every operation that the ranks of a process group call together, prepared on all ranks and then run.

`prepare(act, ...)` runs on all ranks and makes a process group for one case; `run(act)` runs what was prepared, on the ranks that
do not stay away, and gives what it raised.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farstep import checkpoint, fsdp
from farstep.checkpoint import CheckpointManager, LocalDisk
from farstep.dist.options import VARIABLE
from farstep.dist.watcher import Job, watcher
from farstep.optim import CombinedOptimizer, NamedOptimizer, ShardedOptimizer
from farstep.state import (
    Layout,
    Shards,
    exchange,
    load_optim_state_dict,
    optim_state_dict,
    plan,
    respread,
)

from state.spreads import columns_of, filled, fresh, rows_of

prepared: dict[str, Callable[[], Any]] = {}
groups: dict[str, dist.ProcessGroup] = {}
go_on = threading.Event()
has_begun = threading.Event()


def set_deadline(seconds: float) -> None:
    os.environ[VARIABLE] = str(seconds)


def model_of(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(6, 6)


def with_gradients(model: nn.Module) -> nn.Module:
    model(torch.ones(2, 6)).sum().backward()
    return model


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = with_gradients(model_of())
    optim = torch.optim.Adam(model.parameters())
    optim.step()
    return model, optim


def sharded(group: dist.ProcessGroup, same_host: bool | None = None) -> ShardedOptimizer:
    params = dict(with_gradients(model_of()).named_parameters())
    return ShardedOptimizer(params, torch.optim.Adam, process_group=group, same_host=same_host)


def act_save(group, path):
    return lambda: checkpoint.save({"w": torch.ones(3)}, path, group=group)


def act_load(group, path):
    if dist.get_rank() == 0:
        checkpoint.save({"w": torch.ones(3)}, path, no_dist=True)
    return lambda: checkpoint.load({"w": torch.zeros(3)}, path, group=group)


def act_load_optimizer(group, path):
    model, optim = stepped()
    checkpoint.save({"model": model, "optim": optim}, path, group=group)
    return lambda: checkpoint.load_optimizer(model, optim, path, group=group)


def act_async_save(group, path):
    return lambda: checkpoint.async_save({"w": torch.ones(3)}, path, group=group).wait()


def act_manager_save(group, path):
    return lambda: CheckpointManager(path, group=group).save({"w": torch.ones(3)}, 1)


def act_manager_async_save(group, path):
    return lambda: CheckpointManager(path, group=group).async_save({"w": torch.ones(3)}, 1).wait()


def act_manager_resume(group, path):
    return lambda: CheckpointManager(path, group=group).resume({"w": torch.ones(3)})


def act_optim_state_dict(group, path):
    model, optim = stepped()
    return lambda: optim_state_dict(model, optim, full=True, group=group)


def act_load_optim_state_dict(group, path):
    model, optim = stepped()
    state = optim_state_dict(model, optim, full=True, group=group)
    return lambda: load_optim_state_dict(model, optim, state, group=group)


def act_fsdp_full(group, path):
    return lambda: fsdp.full_optim_state_dict(*stepped(), group=group)


def act_fsdp_scatter(group, path):
    model, optim = stepped()
    state = fsdp.full_optim_state_dict(model, optim, group=group)
    return lambda: fsdp.scatter_full_optim_state_dict(
        state if dist.get_rank() == 0 else None, model, optim=optim, group=group
    )


def act_fsdp_to_load(group, path):
    model, optim = stepped()
    state = fsdp.full_optim_state_dict(model, optim, rank0_only=False, group=group)
    return lambda: fsdp.optim_state_dict_to_load(model, optim, state, group=group)


def act_sharded_optimizer(group, path):
    return lambda: sharded(group)


def act_step(group, path):
    return sharded(group).step


def act_step_by_messages(group, path):
    return sharded(group, same_host=False).step


def act_clip(group, path):
    optimizer = sharded(group)
    return lambda: optimizer.clip_grad_norm_(1.0)


def act_state_dict(group, path):
    optimizer = sharded(group)
    optimizer.step()
    return lambda: optimizer.state_dict(full=True)


def act_load_state_dict(group, path):
    optimizer = sharded(group)
    optimizer.step()
    state = optimizer.state_dict(full=True)
    return lambda: optimizer.load_state_dict(state)


def combined(group: dist.ProcessGroup) -> CombinedOptimizer:
    plain = NamedOptimizer(with_gradients(model_of()).named_parameters(), torch.optim.SGD, lr=0.1)
    return CombinedOptimizer([("plain", plain), ("sharded", sharded(group))])


def act_combined_step(group, path):
    return combined(group).step


def act_combined_load(group, path):
    optimizer = combined(group)
    optimizer.step()
    state = optimizer.state_dict()
    return lambda: optimizer.load_state_dict(state)


def sides(group: dist.ProcessGroup) -> tuple[dict[str, Shards], dict[str, Shards]]:
    full = fresh((12, 12), torch.float32)
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    source = filled(rows_of(full.shape, ranks), full, rank)
    return {"w": source}, {"w": Shards.empty(columns_of(full.shape, ranks), rank)}


def act_respread(group, path):
    source, target = sides(group)
    return lambda: respread(source, target, group)


def act_respread_unchecked(group, path):
    source, target = sides(group)
    return lambda: respread(source, target, group, check=False, same_host=False)


def act_exchange(group, path):
    source, target = sides(group)
    part = plan(
        Layout({"w": source["w"].spread}), Layout({"w": target["w"].spread}), dist.get_rank(group)
    )
    return lambda: exchange(part, {"w": source["w"].tensors}, {"w": target["w"].tensors}, group)


ACTS = {name.removeprefix("act_"): each for name, each in list(globals().items()) if name.startswith("act_")}


def prepare(act: str, members: list[int], path: str) -> None:
    """On all ranks of the job: a group of some of them, and what its ranks are going to call."""
    group = dist.new_group(members)
    if dist.get_rank() in members:
        groups[act] = group
        prepared[act] = ACTS[act](group, path)
        dist.barrier(group)


def prepare_in_the_group_of(act: str, other: str) -> None:
    """Another act for the ranks of a group that was made for `other`."""
    if other in groups:
        prepared[act] = ACTS[act](groups[other], "")


def run(act: str) -> tuple[type | None, str, tuple[int, ...], str]:
    """What was raised: its class, its text, the ranks it names and the operation."""
    try:
        prepared[act]()
    except Exception as exc:
        return type(exc), str(exc), getattr(exc, "ranks", ()), getattr(exc, "operation", "")
    return None, "", (), ""


class SlowDisk(LocalDisk):
    """On rank 2 a file is not begun until it may go on."""

    def create(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 2:
            has_begun.set()
            assert go_on.wait(50)
        return super().create(*args, **kwargs)


def save_on_a_slow_disk(path: str, how: str) -> tuple[Any, ...]:
    state = {"own": checkpoint.PerRank(torch.full((3,), float(dist.get_rank())))}
    try:
        if how == "save":
            checkpoint.save(state, SlowDisk(Path(path)))
        else:
            checkpoint.async_save(state, SlowDisk(Path(path))).wait(50)
    except Exception as exc:
        return type(exc), str(exc)
    return None, ""


def await_begun() -> bool:
    return has_begun.wait(30)


def waited_s() -> float:
    """For how long this rank's longest wait has lasted."""
    waits = [each.wait for each in [*watcher()._operations]]
    return max((time.monotonic() - wait.began for wait in waits if wait is not None), default=0.0)


def notes(rank: int) -> int:
    """How many operations a rank has noted."""
    job = Job.current()
    note = None if job is None else job.board.read(rank)
    return 0 if note is None else len(note.activities)


def let_go() -> None:
    go_on.set()


def leave() -> str:
    """The last thing of a rank: nothing holds it up."""
    dist.destroy_process_group()
    return "left"

