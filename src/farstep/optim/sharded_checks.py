"""What a ShardedOptimizer refuses when it is made: classes that cannot work on parts, and ranks that were not given the same."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from farstep.optim.agreement import check_same, values_of
from farstep.optim.elementwise import NOT_ELEMENTWISE
from farstep.optim.groups import Group
from farstep.optim.members import kind_of
from farstep.optim.state_dicts import name_of_class

__all__ = ["check_replicas", "refuse_class"]


def check_replicas(
    process_group: dist.ProcessGroup | None,
    arguments: Mapping[str, str],
    groups: Sequence[Group],
    spreads_state: bool,
    is_local: bool,
) -> None:
    """Raise OptimError on all ranks unless they have the same arguments and parameters; and the same values, where one's are to be all ranks'."""
    facts = dict(arguments)
    values = {}
    for number, group in enumerate(groups):
        for name, p in zip(group.names, group.params, strict=True):
            kind = kind_of(p)
            if is_local and kind == "Tensor":
                facts[name] = f"a local part, {p.dtype}, in group {number}"
                continue
            lies = "" if p.is_contiguous() else f" with strides {p.stride()}"
            facts[name] = f"a {kind} of shape {tuple(p.shape)}{lies}, {p.dtype}, in group {number}"
            if spreads_state and kind == "Tensor":
                values[name] = values_of(p)
    check_same(
        process_group,
        "the ranks were not given the same parameters",
        facts,
        "All ranks of process_group give the same arguments, and parameters of the same names, shapes, strides and dtypes in the same order",
    )
    check_same(
        process_group,
        "the ranks' parameters are not replicas",
        values,
        "Their values must be the same, bit by bit: wrap the model in DistributedDataParallel, which sees to it, or torch.distributed.broadcast every "
        "parameter first",
    )


def refuse_class(
    kind: Any, elementwise: bool | None, groups: Sequence[Group], spreads_state: bool, is_local: bool
) -> None:
    """Raise TypeError where a class cannot work on a part of these parameters."""
    name = name_of_class(kind)
    closure = inspect.signature(kind.step).parameters.get("closure") if hasattr(kind, "step") else None
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{name} computes the loss several times in one step and needs all gradients together, so it cannot work on a part of the parameters. Use "
            f"another class, such as torch.optim.AdamW"
        )
    if spreads_state and kind is torch.optim.SparseAdam:
        raise TypeError(
            f'{name} wants sparse gradients, and the state of replicated parameters is spread by dense ranges. shard="none" steps them on every rank'
        )
    parts = [
        name
        for group in groups
        for name, p in zip(group.names, group.params, strict=True)
        if is_local or kind_of(p) != "Tensor"
    ]
    if parts and kind in NOT_ELEMENTWISE and not elementwise:
        raise TypeError(
            f"{name} needs whole parameters, and {parts[0]!r} is spread over ranks: on local shards its result would be another one. Use an "
            f"elementwise class such as torch.optim.AdamW, or keep these parameters replicated"
        )
