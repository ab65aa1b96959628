"""Runs a plan over a process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.errors import ExchangeError
from farstep.state.layout import Layout
from farstep.state.reshard import Copy, Plan, plan
from farstep.state.shards import Shards

__all__ = ["exchange", "respread"]

Progress = Callable[[int, int], None]
DEFAULT_BUDGET_BYTES = 64 << 20


@torch.no_grad()
def exchange(
    plan: Plan,
    source: Mapping[str, Sequence[Tensor]],
    target: Mapping[str, Sequence[Tensor]],
    group: dist.ProcessGroup | None = None,
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    progress: Progress | None = None,
) -> None:
    """Fill `target` from `source`, on all ranks of the group at once."""
    alone = not dist.is_initialized()
    rank = 0 if alone else dist.get_rank(group)
    works: list[tuple[Copy, Any, Tensor | None, Tensor]] = []
    for copy in plan:
        if rank not in (copy.source_rank, copy.target_rank):
            continue
        here = there = None
        if copy.source_rank == rank:
            held = plan.source[copy.name].boxes(rank)[copy.source_box]
            here = source[copy.name][copy.source_box].detach()[copy.box.within(held).slices]
        if copy.target_rank == rank:
            held = plan.target[copy.name].boxes(rank)[copy.target_box]
            there = target[copy.name][copy.target_box].detach()[copy.box.within(held).slices]
        if here is not None and there is not None:
            there.copy_(here)
        elif here is not None:
            flat = here.contiguous().reshape(-1).view(torch.uint8)
            works.append((copy, dist.isend(flat, group=group, group_dst=copy.target_rank), None, flat))
        elif there is not None:
            flat = torch.empty(there.shape, dtype=there.dtype).reshape(-1).view(torch.uint8)
            works.append((copy, dist.irecv(flat, group=group, group_src=copy.source_rank), there, flat))
    for copy, work, there, flat in works:
        try:
            work.wait()
        except RuntimeError as exc:
            raise ExchangeError(
                f"{copy.name!r} {copy.box} from {copy.source_rank} to {copy.target_rank}: {exc}"
            ) from exc
        if there is not None:
            there.copy_(flat.view(there.dtype).reshape(there.shape))


def respread(
    source: Mapping[str, Shards],
    target: Mapping[str, Shards],
    group: dist.ProcessGroup | None = None,
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    progress: Progress | None = None,
) -> None:
    """Fill the target's tensors from the source's: plan this rank's part and run it, on all ranks of the group at once."""
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    part = plan(
        Layout({name: each.spread for name, each in source.items()}),
        Layout({name: each.spread for name, each in target.items()}),
        rank,
    )
    exchange(
        part,
        {name: each.tensors for name, each in source.items()},
        {name: each.tensors for name, each in target.items()},
        group,
        budget_bytes=budget_bytes,
        progress=progress,
    )
