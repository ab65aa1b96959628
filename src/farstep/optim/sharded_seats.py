"""ShardedOptimizer's parameters, as farstep.state reads and loads their state by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.errors import OptimError
from farstep.optim.members import Member
from farstep.state.optim_seats import Seat

__all__ = ["check_group", "seat_of"]


def check_group(own: dist.ProcessGroup | None, given: dist.ProcessGroup | None) -> None:
    """Its ranks are those of its own process group."""
    if own is given or not dist.is_initialized():
        return
    ours, theirs = (dist.get_process_group_ranks(group or dist.group.WORLD) for group in (own, given))
    if ours != theirs:
        raise OptimError(
            "this ShardedOptimizer spreads its state over a process group of its own, and another was given: say "
            "group=optimizer.process_group, on the ranks of that group"
        )


def seat_of(member: Member) -> Seat:
    def views(values: Sequence[Tensor]) -> list[Tensor]:
        return member.shards(values, values[0].dtype).tensors if values else []

    def fresh(number: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty_like(member.shadows[number], dtype=dtype, device=device, requires_grad=False)

    def form(values: Sequence[Tensor]) -> Any:
        made = member.form(values, values[0].dtype)
        return made if hasattr(made, "placements") else member.shards(values, values[0].dtype)

    parameter = member.parameter
    spread = member.shards([shadow.detach() for shadow in member.shadows], parameter.dtype).spread
    return Seat(
        member.name,
        member.shadows,
        spread,
        [shadow.shape for shadow in member.shadows],
        views,
        requires_grad=bool(parameter.requires_grad),
        form=form,
        fresh=fresh,
    )
