"""Optimizer state of sharded models by parameter name: gathered, loaded, scattered, renamed; beside torch's own functions for it.

Each way has a model of its own, all of them alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.sharded import Acts, Case

LAYERS, WIDTH = 24, 1620
PARAMETERS = LAYERS * WIDTH * (WIDTH + 1)
REKEYED = 10_000
Act = Callable[[], Any]


@dataclass(frozen=True)
class Subject:
    """`make(way)` gives what is timed. The targets are times faster than torch, by the number of ranks."""

    key: str
    title: str
    make: Callable[[str], Act]
    targets: dict[int, float]

    @property
    def case(self) -> Case:
        @contextmanager
        def case(ways: Sequence[str]) -> Iterator[Acts]:
            warnings.simplefilter("ignore")
            yield {way: self.make(way) for way in ways}

        return case


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """An AdamW with state, without the time that a backward pass takes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def fsdp1() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Flat parameters. With the original ones torch's full state is not the optimizer's on CPU: all keys are views of one buffer."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = stack()
    for i, layer in enumerate(model):
        model[i] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
    whole = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    return whole, stepped(whole)


def fsdp2() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = stack()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, stepped(model)


def full_of_fsdp2(side: str) -> Act:
    model, optimizer = fsdp2()
    if side == "torch":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return lambda: get_optimizer_state_dict(model, optimizer, options=options)
    from farstep.state import optim_state_dict

    return lambda: optim_state_dict(model, optimizer, full=True, rank0_only=True, cpu_offload=True)


def full_of_fsdp1(side: str) -> Act:
    model, optimizer = fsdp1()
    if side == "torch":
        from torch.distributed.fsdp import (
            FullOptimStateDictConfig,
            FullStateDictConfig,
            FullyShardedDataParallel,
            StateDictType,
        )

        FullyShardedDataParallel.set_state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
            FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True),
        )
        return lambda: FullyShardedDataParallel.optim_state_dict(model, optimizer)
    from farstep.fsdp import full_optim_state_dict

    return lambda: full_optim_state_dict(model, optimizer)


def loaded(
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], from_rank0: bool
) -> Callable[[str], Act]:
    """A full state, on every rank or on the first alone, into the shards of an optimizer."""

    def case(side: str) -> Act:
        from farstep.state import load_optim_state_dict, optim_state_dict

        model, optimizer = make()
        whole = optim_state_dict(model, optimizer, full=True, rank0_only=from_rank0, cpu_offload=True)
        if side == "farstep":
            return lambda: load_optim_state_dict(model, optimizer, whole, broadcast_from_rank0=from_rank0)
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
        return lambda: set_optimizer_state_dict(model, optimizer, _as_torchs(whole), options=options)

    return case


def _as_torchs(state: dict[str, Any]) -> dict[str, Any]:
    """torch's setter changes the dict it is given, so it gets one of its own; the tensors are the same."""
    return (
        {
            "state": {name: dict(each) for name, each in state.get("state", {}).items()},
            "param_groups": [dict(each) for each in state.get("param_groups", [])],
        }
        if state
        else {}
    )


def scattered(side: str) -> Act:
    """FSDP1's own way to the same: a dict for load_state_dict."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from farstep.fsdp import full_optim_state_dict, scatter_full_optim_state_dict

    model, optimizer = fsdp1()
    whole = full_optim_state_dict(model, optimizer)
    if side == "farstep":
        return lambda: scatter_full_optim_state_dict(whole or None, model, optim=optimizer)
    return lambda: FullyShardedDataParallel.scatter_full_optim_state_dict(
        whole or None, model, optim=optimizer
    )


def rekeyed(side: str) -> Act:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from farstep.fsdp import OptimStateKeyType, rekey_optim_state_dict

    model = nn.Module()
    for i in range(REKEYED // 100):
        model.add_module(f"block{i}", nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(100)]))
    optimizer = stepped(model)
    state = optimizer.state_dict()
    rekey = rekey_optim_state_dict if side == "farstep" else FullyShardedDataParallel.rekey_optim_state_dict

    def both_ways() -> None:
        by_name = rekey(state, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)
        rekey(by_name, OptimStateKeyType.PARAM_ID, model, optim=optimizer)

    return both_ways


SUBJECTS = [
    Subject("full-fsdp2", "full state to rank 0, `fully_shard`", full_of_fsdp2, {2: 5.0, 4: 8.0}),
    Subject("full-fsdp1", "full state to rank 0, FSDP1", full_of_fsdp1, {2: 5.0, 4: 8.0}),
    Subject(
        "load-fsdp2",
        "load from a full state on all ranks, `fully_shard`",
        loaded(fsdp2, False),
        {2: 2.0, 4: 2.0},
    ),
    Subject("scatter-fsdp2", "load from rank 0 alone, `fully_shard`", loaded(fsdp2, True), {2: 2.0, 4: 2.0}),
    Subject("scatter-fsdp1", "scatter from rank 0, FSDP1", scattered, {2: 2.0, 4: 2.0}),
    Subject("rekey", f"names for numbers and back, {REKEYED:,} parameters", rekeyed, {1: 2.0}),
]
CASES: dict[str, Case] = {subject.key: subject.case for subject in SUBJECTS}
