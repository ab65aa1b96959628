"""DistributedDataParallel: every rank of its group has the whole model."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from farstep.state.adapters.ranks import Group, numbers_within

__all__ = ["replicas"]


def replicas(module: nn.Module, group: Group) -> dict[int, list[int]]:
    """id of a tensor within some DDP module -> the ranks of the group that have it too: those of DDP's own group, not always all."""
    found: dict[int, list[int]] = {}
    for path, each in module.named_modules():
        if isinstance(each, DistributedDataParallel):
            members = np.array(dist.get_process_group_ranks(each.process_group), dtype=np.int64)
            ranks = numbers_within(group, members, path or type(each).__name__)
            here = ranks[ranks >= 0].tolist()  # a rank beyond the group has the same, and is not asked
            found.update((id(t), here) for t in [*each.parameters(), *each.buffers()])
    return found
