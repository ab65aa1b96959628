"""What finding absent ranks costs while none is: nothing that is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.ranks import Ranks

from dist import acts
from farstep import checkpoint
from farstep.dist.notes import Board
from farstep.optim import ShardedOptimizer
from farstep.state import load_optim_state_dict, optim_state_dict, respread

COLLECTIVES = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
)
EXPECTED = {
    "save": {"all_gather": 6, "gather_object": 1},
    "load": {"all_gather": 4},
    "async_save": {"all_gather": 7, "gather_object": 1},
    "manager.save": {"all_gather": 8, "gather_object": 1},
    "manager.resume": {"all_gather": 7, "broadcast_object_list": 1},
    "optim_state_dict": {"all_gather": 3, "all_gather_object": 2},
    "load_optim_state_dict": {"all_gather": 4},  # one of them: which parameters other ranks step
    "ShardedOptimizer, memory": {"all_gather": 2, "all_gather_object": 2},
    "step, memory": {"all_gather": 3, "all_reduce": 1},
    "clip_grad_norm_, memory": {"all_gather": 1, "all_reduce": 2},
    "state_dict, memory": {"all_gather": 6, "all_gather_object": 1},
    "load_state_dict, memory": {"all_gather": 5},
    "ShardedOptimizer, messages": {"all_gather": 2},
    "step, messages": {"all_gather": 1, "all_reduce": 1, "batch_isend_irecv": 2},
    "clip_grad_norm_, messages": {"all_reduce": 2, "batch_isend_irecv": 1},
    "state_dict, messages": {"all_gather": 6, "all_gather_object": 1},
    "load_state_dict, messages": {"all_gather": 5},
    "respread": {"all_reduce": 1, "all_to_all_single": 2},
}


def counted(folder: str) -> dict[str, dict[str, int]]:
    """The collectives of each operation, on this rank."""
    counts: Counter[str] = Counter()
    found: dict[str, dict[str, int]] = {}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    def case(name: str, act: Callable[[], Any]) -> Any:
        counts.clear()
        result = act()
        found[name] = dict(sorted(counts.items()))
        return result

    model, optim = acts.stepped()
    state = {"model": model, "optim": optim}
    manager = checkpoint.CheckpointManager(folder + "/manager")
    source, target = acts.sides(dist.group.WORLD)
    counters = {name: counting(name, getattr(dist, name)) for name in COLLECTIVES}
    with mock.patch.multiple(dist, **counters):
        case("save", lambda: checkpoint.save(state, folder + "/saved"))
        case("load", lambda: checkpoint.load(state, folder + "/saved"))
        case("async_save", lambda: checkpoint.async_save(state, folder + "/saved").wait())
        case("manager.save", lambda: manager.save(state, 1))
        case("manager.resume", lambda: manager.resume(state))
        full = case("optim_state_dict", lambda: optim_state_dict(model, optim, full=True))
        case("load_optim_state_dict", lambda: load_optim_state_dict(model, optim, full))
        for how, same_host in (("memory", None), ("messages", False)):
            params = dict(model.named_parameters())
            make = lambda: ShardedOptimizer(params, torch.optim.Adam, same_host=same_host)  # noqa: B023, E731
            optimizer = case(f"ShardedOptimizer, {how}", make)
            case(f"step, {how}", optimizer.step)
            case(f"clip_grad_norm_, {how}", lambda: optimizer.clip_grad_norm_(1.0))  # noqa: B023
            own = case(f"state_dict, {how}", lambda: optimizer.state_dict(full=True))  # noqa: B023
            case(f"load_state_dict, {how}", lambda: optimizer.load_state_dict(own))  # noqa: B023
        case("respread", lambda: respread(source, target))
    return found


def stepped_without_the_store() -> int:
    """How often many steps look at the store or write into it."""
    optimizer = acts.sharded(dist.group.WORLD)
    with mock.patch.object(Board, "write") as write, mock.patch.object(Board, "read") as read:
        for _ in range(50):
            optimizer.step()
    return write.call_count + read.call_count


def test_operations_have_no_more_collectives(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        assert ranks.run(counted, str(tmp_path), timeout_s=50)[0] == EXPECTED
        assert ranks.run(stepped_without_the_store, timeout_s=50) == [0, 0]
