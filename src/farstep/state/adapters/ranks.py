"""Ranks of a job, as ranks within a process group."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from farstep.errors import LayoutError
from farstep.state.sweep import Ints

__all__ = ["Group", "numbers_within", "own_rank", "ranks_within", "size_of"]

Group = dist.ProcessGroup | None


def own_rank(group: Group) -> int:
    """This process's rank in the group; 0 where there are no groups at all."""
    if not _is_initialized():
        return 0
    rank = dist.get_rank(group)
    if rank < 0:
        raise LayoutError(
            f"this process (rank {dist.get_rank()}) is not in the group that was given: call this only on the group's ranks, "
            f"or give a group that has them all"
        )
    return rank


def size_of(group: Group) -> int:
    return dist.get_world_size(group) if _is_initialized() else 1


def ranks_within(group: Group, ranks: Ints, name: str, holder: str) -> Ints:
    """Ranks of the whole job as ranks of the group. `holder` says in an error whose ranks they are, such as its device mesh's."""
    within = numbers_within(group, ranks, name)
    if (within < 0).any():
        outside = ", ".join(map(str, np.unique(ranks[within < 0]).tolist()))
        raise LayoutError(
            f"{name!r} is also held by rank {outside} of its {holder}, which the group that was given ({size_of(group)} ranks) does not "
            f"have: give a group with all ranks of the {holder}, or none for all ranks of the job"
        )
    return within


def numbers_within(group: Group, ranks: Ints, name: str) -> Ints:
    """The same, with -1 for those who are not in the group."""
    if not _is_initialized():
        raise LayoutError(
            f"{name!r} is spread over processes, and there is no process group here: call torch.distributed.init_process_group first"
        )
    if group is None and ranks.max(initial=0) < dist.get_world_size():
        return ranks
    members = np.asarray(dist.get_process_group_ranks(group or dist.group.WORLD), dtype=np.int64)
    table = np.full(max(int(members.max()), int(ranks.max(initial=0))) + 1, -1, dtype=np.int64)
    table[members] = np.arange(len(members))
    within: Ints = table[ranks]
    return within


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
