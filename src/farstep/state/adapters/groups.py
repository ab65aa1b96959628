"""The process group that a model is spread over."""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch import nn

from farstep.state.adapters.ranks import Group

__all__ = ["has_mesh", "own_group"]


def has_mesh(model: nn.Module) -> bool:
    """Whether FullyShardedDataParallel was given a device mesh for some of the model."""
    return any(getattr(each, "_device_mesh", None) is not None for each in model.modules())


def own_group(model: nn.Module) -> Group:
    """Where all of a model is sharded over one group that has not all ranks, that group; else None, which is all ranks."""
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for each in model.modules():
        if isinstance(each, fsdp):
            if getattr(each, "_inter_node_pg", None) is not None:
                return None
            _add(found, each.process_group)
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            if mesh.ndim > 1:
                return None
            _add(found, mesh.get_group())
    if len(found) != 1:
        return None
    ((ranks, group),) = found.items()
    return None if len(ranks) == dist.get_world_size() else group


def _add(found: dict[tuple[int, ...], dist.ProcessGroup], group: dist.ProcessGroup) -> None:
    found.setdefault(tuple(dist.get_process_group_ranks(group)), group)
